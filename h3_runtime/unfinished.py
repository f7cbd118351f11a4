"""Files while they are written: a temporary name that says who writes, and what a killed writer left.

    clip.mp4 ─part_path─▶ .clip.mp4.MACHINE-PROCESS-START-DRAW.part.mp4 ─rename─▶ clip.mp4
    the next write to clip.mp4, or ``recover`` ─sweep─▶ its writer lives: left alone
                                                        its writer is gone: removed
                                                        of another machine: named, because nobody here can tell
    clip.mp4 ─claimed─▶ .h3-DIGEST.MACHINE-PROCESS-START-DRAW.part.claim while a run makes it: a second run is refused

A process is known by its number and by when it started, so a number that is in use again is no life sign.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import psutil

from .errors import H3Error

NAME_LENGTH = 40  # characters of the target's name that its temporary name keeps: names have a limit
OWNER = r"([0-9a-f]{8})-([0-9]+)-([0-9]+)-[0-9a-f]{8}\.part(?:\.\w+)?"
UNFINISHED = re.compile(r"\..+\." + OWNER)


def part_path(path: Path, suffix: str = "") -> Path:
    """A free temporary name beside ``path``, ending in ``.part`` and ``suffix``; what dead writers left is removed."""
    sweep(path)
    process = os.getpid()
    owner = f"{_machine()}-{process}-{_start(process) or 0}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name[:NAME_LENGTH]}.{owner}.part{suffix}")


def drop(part: Path) -> None:
    """Remove what was not finished. A place that refuses this as well hides no error that is on its way."""
    with suppress(OSError):
        part.unlink(missing_ok=True)


def write_whole(path: Path, data: str | bytes) -> None:
    """A small file in one step: half of it never stands there. OSError as the system gives it; text as UTF-8."""
    part = part_path(path)
    try:
        if isinstance(data, str):
            part.write_text(data, encoding="utf-8")
        else:
            part.write_bytes(data)
        os.replace(part, path)
    finally:
        drop(part)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Alone with ``path`` and what stands beside it under its name. H3Error while another run of this machine makes
    it; of two that begin together the earlier one goes on. A folder that takes no claim is left to its writers."""
    digest = hashlib.sha256(os.path.normcase(path.with_suffix("").name).encode("utf-8", "surrogateescape")).hexdigest()
    stem = path.with_name(f"h3-{digest[:16]}")
    mine = part_path(stem, ".claim")
    try:
        with suppress(OSError):
            open(mine, "x").close()
        if other := _older_claim(mine, stem):
            raise H3Error(f"{path} is being made by another run (process {other}): wait for it, or choose another name")
        yield
    finally:
        drop(mine)


def _older_claim(mine: Path, stem: Path) -> int | None:
    """The process that claimed the same name before ``mine`` did; dead ones were swept when ``mine`` was named."""
    names, claims = re.compile(r"\." + stem.name + r"\." + OWNER), {}
    with suppress(OSError):
        for name in os.listdir(mine.parent):
            found = names.fullmatch(name)
            if found and found[1] == _machine() and name.endswith(".claim"):
                with suppress(OSError):
                    claims[mine.with_name(name)] = (mine.with_name(name).stat().st_mtime_ns, name)
    oldest = min(claims, key=claims.get, default=mine)
    return None if oldest == mine or mine not in claims else int(names.fullmatch(oldest.name)[2])


def sweep(path: Path) -> list[str]:
    """Remove what dead writers of ``path`` left beside it; sentences about that and about what cannot be judged."""
    return _swept(path.parent, re.compile(r"\." + re.escape(path.name[:NAME_LENGTH]) + r"\." + OWNER))


def sweep_folder(folder: Path) -> list[str]:
    """The same for every target in ``folder``."""
    return _swept(folder, UNFINISHED)


def _swept(folder: Path, names: re.Pattern) -> list[str]:
    said = []
    try:
        found = [name for name in os.listdir(folder) if names.fullmatch(name)]
    except OSError:
        return []
    for name in sorted(found):
        machine, process, start = UNFINISHED.fullmatch(name).groups()
        path = folder / name
        if machine != _machine():
            said.append(f"{path} was left unfinished, or is being written, on another machine: delete it by hand")
        elif not _lives(int(process), int(start)):
            said += _removed(path)
    return said


def _removed(path: Path) -> list[str]:
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:  # another process swept it first
        return []
    except OSError as error:
        return [f"{path} was left by a run that was killed and cannot be removed ({error.strerror}): delete it by hand"]
    return [f"removed {path.name} ({size:,} bytes), left by a run that was killed"]


@lru_cache(maxsize=1)
def _machine() -> str:
    """A mark of the place where process numbers mean anything: this machine, and on Linux its process namespace."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return hashlib.sha256(f"{platform.node()} {namespace}".encode()).hexdigest()[:8]


def _lives(process: int, start: int) -> bool:
    """Whether this very process runs; True where nobody can tell."""
    if not _exists(process):
        return False
    now = _start(process)
    return now is None or start == 0 or now == start


def _exists(process: int) -> bool:
    if sys.platform == "win32":  # os.kill ends a process there
        return psutil.pid_exists(process)
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _start(process: int) -> int | None:
    """When a process began, in a count that does not follow the clock; -1: ended, not yet taken note of by its parent;
    None: it may not be seen."""
    if sys.platform == "linux":  # psutil's time would move with the clock
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            return -1 if fields[0] in "ZX" else int(fields[19])
        except (OSError, ValueError, IndexError):
            return None
    try:
        seen = psutil.Process(process)
        return -1 if seen.status() == psutil.STATUS_ZOMBIE else int(seen.create_time() * 1000)
    except psutil.Error:
        return None
