"""One render on a server: post, wait, fetch, check; whatever happens in between, the job can be picked up again.

render_remote(request, server, out)
    refuse, place, check ─▶ record of the same request?  yes ─▶ its jobs     no ─▶ POST ─▶ record
    ─▶ look at each job: percent, time waited; a server that is away is waited for
    ─▶ content ─▶ .clip.mp4.xxxx.part.mp4 ─look_at─▶ clip.mp4, clip.report.json      record removed
Cancel, Ctrl-C: the job is ended where the engine can, else it stays and its record too
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import H3Error
from ..fidelity import REMOTE, Fidelity, compose
from ..geometry import FPS
from ..media import check_output_path, copy_tracks, kept_path
from ..media.files import publish
from ..request import RenderRequest
from ..soundness import WARNING
from ..unfinished import drop, part_path, write_whole
from . import ENGINES
from .base import DONE, FAILED, Engine, Told
from .jobs import JobFolder, JobRecord, fingerprint
from .packing import load_shipment, refuse
from .returned import Expected, Returned, differences, look_at
from .settings import Server
from .shipment import Shipment
from .wire import Client, Limits, Lost

PATH = "remote/engine"
TRIES = 3
LIMITS = Limits()


@dataclass(frozen=True)
class RemoteOptions:
    """How a request is rendered on a server: the engine's ``quality``; ``outputs`` clips with seeds in a row; ``fresh``
    leaves a running job of the same request alone and posts anew; ``tags``: metadata put into the files, whose picture
    and sound stay bit for bit; ``limits`` of time and bytes."""

    quality: str = "lossless"
    outputs: int = 1
    fresh: bool = False
    tags: dict[str, str] = field(default_factory=dict)
    limits: Limits = LIMITS


@dataclass(frozen=True)
class Waiting:
    """How a wait stands: the job's status in words, 0..100, seconds since the beginning."""

    words: str
    percent: int
    seconds: float


@dataclass(frozen=True)
class RemoteClip:
    """One clip that came back."""

    path: Path
    facts: Returned
    report: Path
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RemoteResult:
    """All clips of one request."""

    clips: tuple[RemoteClip, ...]
    jobs: tuple[str, ...]
    fidelity: Fidelity
    notes: tuple[str, ...]
    seconds: float


def label_of_engine(engine: str, quality: str = "") -> Fidelity:
    """The label of a clip from this engine: its own quality, and that nobody here has verified it."""
    words = f"{ENGINES[engine].title} quality {quality}" if quality else ENGINES[engine].title
    return compose([PATH], compute=f"{words}, {REMOTE}")


def render_remote(
    request: RenderRequest,
    server: Server,
    out: str | Path,
    options: RemoteOptions = RemoteOptions(),
    tell: Callable[[str], None] = lambda sentence: None,
    watch: Callable[[Waiting], None] = lambda waiting: None,
    poll: Callable[[], None] = lambda: None,
) -> RemoteResult:
    """Render ``request`` on ``server`` to ``out`` (mp4; further outputs beside it, clip_2.mp4 ...).

    ``tell`` is given sentences as they come, ``watch`` how the wait stands, ``poll`` may raise to stop. H3Error for
    what cannot be rendered there, before anything is sent; and for whatever fails, with the id of the job.
    """
    out, engine = check_output_path(out), ENGINES[server.engine]
    refuse(request, options.quality, options.outputs)
    shipment = load_shipment(request, options.quality, options.outputs)
    client = Client(server, poll, options.limits)
    told = engine.describe(client)
    engine.check(shipment, told)
    submissions = engine.submissions(shipment, told)
    mark, folder = fingerprint(server, submissions), JobFolder()
    notes = [*shipment.notes, *engine.notes(shipment, told)]
    for note in notes:  # while it can still be stopped
        tell(note)
    record = None if options.fresh else folder.find(mark)
    if record is not None:
        tell(f"job {_names(record)} of the same request is taken up (--fresh posts it anew)")
    else:
        record = JobRecord(server.name, server.engine, str(server.origin), (), expected_of(shipment), mark, time.time())
    run = _Run(engine, client, folder, record, options.tags, tell, watch)
    with run.stoppable():
        for submission in submissions[len(record.jobs) :]:  # a process may have ended between two posts
            run.post(submission)
    return run.finish(out, told, notes, options.quality)


def resume_remote(
    jobs: list[str],
    server: Server,
    out: str | Path,
    options: RemoteOptions = RemoteOptions(),
    tell: Callable[[str], None] = lambda sentence: None,
    watch: Callable[[Waiting], None] = lambda waiting: None,
    poll: Callable[[], None] = lambda: None,
) -> RemoteResult:
    """Wait for jobs that were posted before, by their ids, and fetch their clips to ``out``."""
    out, engine, folder = check_output_path(out), ENGINES[server.engine], JobFolder()
    record = folder.with_job(server, jobs)
    client = Client(server, poll, options.limits)
    notes = [] if record.expected else ["nothing is known here of what was asked for: size, length are not compared"]
    quality = record.expected.quality if record.expected else ""
    return _Run(engine, client, folder, record, options.tags, tell, watch).finish(out, Told(), notes, quality)


def output_path(out: Path, number: int) -> Path:
    """Where the clip of this number goes, from 0: clip.mp4, clip_2.mp4, clip_3.mp4 ..."""
    return out if number == 0 else out.with_name(f"{out.stem}_{number + 1}{out.suffix}")


def expected_of(shipment: Shipment) -> Expected:
    canvas, request = shipment.canvas, shipment.request
    return Expected(
        canvas.width, canvas.height, canvas.num_frames, int(request.seed), shipment.task, request.num_forwards,
        shipment.quality,
    )  # fmt: skip


def _names(record: JobRecord) -> str:
    return ", ".join(job for job, _ in record.jobs)


@dataclass
class _Run:
    """One request at one server, from its first job to its last clip."""

    engine: Engine
    client: Client
    folder: JobFolder
    record: JobRecord
    tags: dict[str, str]
    tell: Callable[[str], None]
    watch: Callable[[Waiting], None]

    def __post_init__(self):
        self.began = time.monotonic()
        self.waited, self.posting = 0.0, False

    # --- posting ------------------------------------------------------------------------------------------------

    def post(self, submission) -> None:
        """Post one job and write its id down."""
        client, name = self.client, self.client.server.name
        self.posting = True
        try:
            answer = client.post("/v1/videos", submission.kind, submission.body)
        except Lost as error:
            raise H3Error(
                f"{error}; whether the request reached it is not known, and it is not sent twice by itself: look at "
                "the server, then render again"
            ) from None
        if answer.status != 200:
            raise H3Error(f"server {name} refused the request (status {answer.status}): {client.says(answer)}")
        job = client.object(answer).get("id")
        self.engine.content(job, 0)  # H3Error for what is no id
        self.posting = False
        self.record = replace(self.record, jobs=(*self.record.jobs, (job, submission.outputs)))
        self.folder.write(self.record)
        self.tell(f"job {self._shown(job)} was posted to server {name}")

    def stoppable(self):
        return _Stoppable(self)

    # --- waiting ------------------------------------------------------------------------------------------------

    def finish(self, out: Path, told: Told, notes: list[str], quality: str) -> RemoteResult:
        """Wait for all jobs and fetch their clips."""
        clips = []
        with self.stoppable():
            for index, (job, _) in enumerate(self.record.jobs):
                self._wait(job, index)
            self.waited = time.monotonic() - self.began
            label = label_of_engine(self.engine.name, quality)
            about = {
                "server": self.client.server.name,
                "engine": self.engine.title,
                "version": told.version,
                "model": told.model,
                "quality": quality,
            }
            number = 0
            for job, outputs in self.record.jobs:
                for output in range(outputs):
                    path = output_path(out, number)
                    clips.append(self._fetch(job, output, path, notes, (label, about, number)))
                    number += 1
        self.folder.forget(self.record)
        return RemoteResult(
            tuple(clips), tuple(job for job, _ in self.record.jobs), label, tuple(notes), time.monotonic() - self.began
        )

    def _wait(self, job: str, index: int) -> None:
        limits, name, shown = self.client.limits, self.client.server.name, self._shown(job)
        pace, away = limits.pace[0], None
        while True:
            seconds = time.monotonic() - self.began
            try:
                state = self.engine.state(self.client, job)
                away = None
            except Lost as error:
                away = away or time.monotonic()
                if time.monotonic() - away > limits.patience:
                    raise H3Error(f"{error}; {self._again(job)}") from None
                self.watch(Waiting("the server is away, waiting for it", 0, seconds))
                self.client.sleep(pace)
                continue
            if state.status == DONE:
                return
            if state.status == FAILED:
                self.folder.forget(self.record)
                raise H3Error(f"job {shown} failed at server {name}: {state.reason}")
            if seconds > limits.job:
                raise H3Error(f"job {shown} is not done after {seconds / 3600:.1f} h; {self._again(job)}")
            share = (100 * index + state.percent) // len(self.record.jobs)
            self.watch(Waiting(state.status.replace("_", " "), share, seconds))
            self.client.sleep(pace)
            pace = min(pace * 1.3, limits.pace[1])

    # --- fetching -----------------------------------------------------------------------------------------------

    def _fetch(self, job: str, output: int, path: Path, notes: list[str], about: tuple) -> RemoteClip:
        part = part_path(path, path.suffix)
        whose = f"the clip of job {self._shown(job)}"
        try:
            facts = self._whole(job, output, part, whose)
            said = [f"DIFFERS: {line}" for line in differences(facts, self.record.expected)]
            said += [f"{WARNING}{line}" for line in facts.warnings]
            _forget_older(path)
            target = copy_tracks(part, path, self.tags) if self.tags else publish(part, path)
        except OSError as error:
            raise H3Error(
                f"{path} could not be written ({error.strerror}): free some space; {self._again(job)}"
            ) from None
        finally:
            drop(part)
        if target != path:
            said.append(f"{path.name} is open in another program: saved as {target.name}")
        label, told, number = about
        report = target.with_suffix(".report.json")
        _write(report, report_of(facts, self.record, (label, told, number), [*notes, *said], self.waited))
        return RemoteClip(target, facts, report, tuple(said))

    def _whole(self, job: str, output: int, part: Path, whose: str) -> Returned:
        """Download until the clip is whole, a few times; H3Error with the way to go on."""
        for attempt in range(1, TRIES + 1):
            try:
                with open(part, "wb") as sink:
                    answer = self.client.download(self.engine.content(job, output), sink)
                if answer.status != 200:
                    raise H3Error(
                        f"server {self.client.server.name} does not give {whose} (status {answer.status}): "
                        f"{self.client.says(answer)}"
                    )
                return look_at(part, whose)
            except Lost as error:
                if attempt == TRIES:
                    raise H3Error(f"{error}, {TRIES} times; {self._again(job)}") from None
                self.tell(f"{error}: it is fetched again")
                self.client.sleep(self.client.limits.pace[0])
            except H3Error as error:
                raise H3Error(f"{error}; {self._again(job)}") from None
        raise AssertionError

    def _again(self, job: str) -> str:
        name = self.client.server.name
        return (
            f"the job's id is kept: the same render goes on with it, or render --engine {name} --job {self._shown(job)}"
        )

    def _shown(self, job: str) -> str:
        return self.client.server.clean(job, 80)


@dataclass
class _Stoppable:
    """Around a wait: what stops it from outside ends the jobs where the engine can. An H3Error leaves them."""

    run: _Run

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if error is None or isinstance(error, H3Error):
            return
        run, quick = self.run, Limits(connect=2.0, idle=3.0, answer=3.0)
        client = Client(run.client.server, limits=quick)
        said = [run.engine.stop(client, job) for job, _ in run.record.jobs]
        if run.posting:
            said.append(f"whether the request has reached server {client.server.name} is not known")
        if run.engine.stops:
            run.folder.forget(run.record)
        for sentence in said:
            with suppress(Exception):
                run.tell(client.server.clean(sentence))


def _forget_older(path: Path) -> None:
    """Remove what an earlier render of this name left beside it: kept frames and a manifest are not this clip's."""
    for old in (kept_path(path), path.with_suffix(".json")):
        old.unlink(missing_ok=True)


def report_of(facts: Returned, record: JobRecord, about: tuple, notes: list[str], waited: float) -> dict[str, Any]:
    """Measurements and sentences about one clip, in the form that ``compare`` reads."""
    label, told, number = about
    expected = record.expected
    made: dict[str, Any] = {
        "label": label.title,
        "fidelity": label.to_dict(),
        "notes": notes,
        "size": f"{facts.width}x{facts.height}",
        "frames": facts.frames,
        "seconds_of_video": facts.frames / (facts.fps or FPS),
        "stage_seconds": {"remote": waited},
        "remote": {key: value for key, value in told.items() if value},
    }
    if expected is not None:
        made["remote"] |= {"task": expected.task, "forwards": expected.forwards, "seed": expected.seed + number}
    return made


def _write(path: Path, content: dict) -> None:
    try:
        write_whole(path, json.dumps(content, indent=1, ensure_ascii=False))
    except OSError as error:
        raise H3Error(f"{path.name} could not be written ({error.strerror}): choose another folder") from None
