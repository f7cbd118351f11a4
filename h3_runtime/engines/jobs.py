"""Jobs that run on servers, written down until their clips are here, so that another process can pick them up.

    posted ─▶ FOLDER/<fingerprint>.job.json   {server, engine, origin, jobs, expected}     no key, no prompt
    the same request again, or ``--job ID`` ─▶ found ─▶ polled on        clips here, or the job lost ─▶ removed

The fingerprint covers the engine, the origin and every byte that was sent.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.kept import cache_folder
from ..errors import H3Error
from ..unfinished import write_whole
from .base import Submission
from .returned import Expected
from .settings import Server

SUFFIX = ".job.json"
MAX_RECORDS = 200
OLDEST_SECONDS = 30 * 24 * 3600.0


def default_folder() -> Path:
    """Where records go: the user's cache folder, or H3_REMOTE_JOBS."""
    return cache_folder("remote_jobs", "H3_REMOTE_JOBS")


@dataclass(frozen=True)
class JobRecord:
    """Jobs that were posted for one request: ``jobs`` are (id, number of clips), in the order of their seeds."""

    server: str
    engine: str
    origin: str
    jobs: tuple[tuple[str, int], ...]
    expected: Expected | None = None
    fingerprint: str = ""
    since: float = 0.0


def fingerprint(server: Server, submissions: Sequence[Submission]) -> str:
    """What the same request to the same engine at the same origin has in common."""
    digest = hashlib.sha256(f"{server.engine} {server.origin} {len(submissions)}".encode())
    for submission in submissions:
        digest.update(hashlib.sha256(submission.body).digest())
    return digest.hexdigest()


class JobFolder:
    """Records, one file each."""

    def __init__(self, folder: str | Path | None = None):
        self.folder = default_folder() if folder is None else Path(folder)

    def path(self, mark: str) -> Path:
        return self.folder / (mark[:32] + SUFFIX)

    def write(self, record: JobRecord) -> None:
        """Keep a record, whole at once; nothing where the folder refuses: the ids are told as well."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._trim()
            write_whole(self.path(record.fingerprint), json.dumps(asdict(record), indent=1))

    def find(self, mark: str) -> JobRecord | None:
        """The record of this fingerprint."""
        return self._read(self.path(mark))

    def with_job(self, server: Server, jobs: Sequence[str]) -> JobRecord:
        """The record that holds these ids at this server; one that knows nothing else where there is none.

        H3Error for an id that belongs to another server: its clip is not there.
        """
        for path in sorted(self.folder.glob("*" + SUFFIX)) if self.folder.is_dir() else ():
            record = self._read(path)
            if record is None or not set(jobs) & {job for job, _ in record.jobs}:
                continue
            if (record.engine, record.origin) != (server.engine, str(server.origin)):
                where = f"server {record.server} at {record.origin}"
                raise H3Error(f"job {jobs[0]} was sent to {where}: give --engine {record.server}")
            return record
        return JobRecord(server.name, server.engine, str(server.origin), tuple((job, 1) for job in jobs))

    def forget(self, record: JobRecord) -> None:
        """The clips are here, or will never be."""
        if record.fingerprint:
            with suppress(OSError):
                self.path(record.fingerprint).unlink(missing_ok=True)

    def _read(self, path: Path) -> JobRecord | None:
        try:
            made: Any = json.loads(path.read_text(encoding="utf-8"))
            expected = None if made["expected"] is None else Expected(**made["expected"])
            jobs = tuple((str(job), int(count)) for job, count in made["jobs"])
            return JobRecord(**{**made, "jobs": jobs, "expected": expected})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _trim(self) -> None:
        """Let records go that no server remembers any more."""
        found = sorted((path.stat().st_mtime, path) for path in self.folder.glob("*" + SUFFIX))
        for index, (written, path) in enumerate(reversed(found)):
            if index >= MAX_RECORDS or time.time() - written > OLDEST_SECONDS:
                path.unlink(missing_ok=True)
