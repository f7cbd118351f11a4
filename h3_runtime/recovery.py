"""A run's state on disk after every forward, so that a killed process goes on bit for bit.

    forward k done ─▶ FOLDER/<fingerprint>.safetensors   (atomic rename over the state of forward k - 1)
                        video, audio            both streams, float32
                        accelerator/NAME/KEY    what each accelerator's state() gave
                        metadata                forwards done, finished, size, fingerprint, label
                     FOLDER/<fingerprint>.NAME@J.h3-held.safetensors   what one kept at forward J, written once
    same job again ─▶ found by its fingerprint ─▶ forwards k ..

Accelerators keep hidden states: at the release's sizes 0.4 GiB for each computed forward (1344x768, 124 frames), three
of them in forecasting's window. Written anew after every forward that would be 55 GB a render; so what they name
``key@J`` is written when it is new and only named from then on, by its file and SHA-256.

The fingerprint covers everything that decides the output, so a state can only ever be taken up by the run it belongs
to. The folder is bounded: the oldest states leave when it grows past its limits, never the one just written. A
finished latent stays until its clip is saved.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from .accelerators import Accelerator
from .accelerators.base import AT_FORWARD
from .checkpoint.kept import cache_folder
from .checkpoint.reader import SafetensorsFile
from .errors import CheckpointError, H3Error
from .geometry import Canvas, is_whole
from .job import AVLatent
from .latents import PartialLatent, load_latent, save_latent
from .unfinished import part_path, write_whole

MAX_STATES = 16
MAX_BYTES = 8 << 30
SUFFIX = ".h3-state.safetensors"
HELD_SUFFIX = ".h3-held.safetensors"
PREFIX = "accelerator/"
ORPHANED = 3600  # seconds after which a held file without its state is nobody's


def default_folder() -> Path:
    """Where states go when nobody says otherwise: the user's cache folder, or H3_RECOVERY."""
    return cache_folder("recovery", "H3_RECOVERY")


@dataclass(frozen=True)
class RunState:
    """A run after ``done`` forwards of its grid: both streams and what each accelerator holds."""

    done: int
    finished: bool
    latent: AVLatent
    accelerators: dict[str, dict[str, Tensor]]


class RecoveryFolder:
    """States of runs, one file each, bounded in count and bytes."""

    def __init__(self, folder: str | Path | None = None, max_states: int = MAX_STATES, max_bytes: int = MAX_BYTES):
        self.folder = default_folder() if folder is None else Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise H3Error(f"{self.folder} is a file: states of runs need a folder, give another one")
        self.max_states, self.max_bytes = max_states, max_bytes

    def check_writable(self) -> None:
        """H3Error, before the work, where no state can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = part_path(self.folder / "probe")
            open(probe, "x").close()
            probe.unlink()
        except OSError as error:
            raise H3Error(
                f"no state can be saved in {self.folder} ({error.strerror}): choose another folder, or switch recovery "
                "off"
            ) from None

    def run(self, fingerprint: str, canvas: Canvas, **info) -> RunRecovery:
        """The place of one run's states; ``info`` is kept with them for ``recover``."""
        return RunRecovery(self, fingerprint, canvas, info)

    def path(self, fingerprint: str) -> Path:
        assert re.fullmatch(r"[0-9a-f]{16,64}", fingerprint), fingerprint
        return self.folder / (fingerprint[:32] + SUFFIX)

    def states(self) -> list[Path]:
        """Files of all states, newest first."""
        return [path for _, path, _ in self._aged()]

    def _aged(self) -> list[tuple[float, Path, int]]:
        """(time, file, bytes) of all states, newest first. Another run may remove its own at any time."""
        aged = []
        for path in self.folder.glob("*" + SUFFIX) if self.folder.is_dir() else ():
            with suppress(OSError):
                status = path.stat()
                held = sum(other.stat().st_size for other in self.held_by(path))
                aged.append((status.st_mtime, path, status.st_size + held))
        return sorted(aged, reverse=True)

    def held_by(self, state: Path) -> list[Path]:
        """The files that belong to a state."""
        return sorted(self.folder.glob(f"{state.name.removesuffix(SUFFIX)}.*{HELD_SUFFIX}"))

    def remove(self, state: Path) -> None:
        """Let a state go, with what belongs to it. What another program has open stays; it is trimmed in time."""
        for path in (state, *self.held_by(state)):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def read(self) -> list[tuple[Path, PartialLatent]]:
        """All states that can be read, newest first; a damaged file is skipped (it is an older run's)."""
        found = []
        for path in self.states():
            try:
                found.append((path, load_latent(path)))
            except (CheckpointError, H3Error):
                continue
        return found

    def trim(self, keep: Path) -> None:
        """Let the oldest states go until the folder is within its limits; ``keep`` stays."""
        aged = self._aged()
        total, others = sum(size for _, path, size in aged if path == keep), [e for e in aged if e[1] != keep]
        for count, (_, path, size) in enumerate(others, start=2):
            total += size
            if count > self.max_states or total > self.max_bytes:
                self.remove(path)
        known = {path.name.removesuffix(SUFFIX) for _, path, _ in aged}
        for path in self.folder.glob("*" + HELD_SUFFIX):
            with suppress(OSError):
                if path.name.partition(".")[0] not in known and path.stat().st_mtime < time.time() - ORPHANED:
                    path.unlink(missing_ok=True)


class RunRecovery:
    """One run's state file: saved after each forward, found again by the same job."""

    def __init__(self, folder: RecoveryFolder, fingerprint: str, canvas: Canvas, info: dict):
        self.folder, self.fingerprint, self.canvas, self.info = folder, fingerprint, canvas, info
        self.path = folder.path(fingerprint)
        self.written: dict[str, str] = {}  # held file -> its SHA-256

    def save(self, done: int, finished: bool, latent: AVLatent, accelerators: Sequence[Accelerator] = ()) -> None:
        """Replace the run's state by this one, atomically. H3Error when the disk refuses."""
        tensors, held = {}, {}
        for accelerator in accelerators:
            for key, tensor in accelerator.state().items():
                forward = key.partition(AT_FORWARD)[2]
                file = self._held_file(accelerator.name, forward)
                (held.setdefault(file, {}) if forward else tensors)[f"{PREFIX}{accelerator.name}/{key}"] = tensor
        try:
            self.folder.folder.mkdir(parents=True, exist_ok=True)
            for file in held:
                if file in self.written and (self.folder.folder / file).exists():  # or another run has let it go
                    continue
                self.written[file] = self._write(file, held[file])
            self.written = {file: self.written[file] for file in sorted(held)}
            save_latent(
                self.path,
                self.canvas,
                latent,
                extra=tensors,
                stop=done,
                finished=finished,
                fingerprint=self.fingerprint,
                held=self.written,
                **self.info,
            )
            for path in self.folder.held_by(self.path):  # the state above names them no more
                if path.name not in self.written:
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
            self.folder.trim(self.path)
        except (OSError, H3Error) as error:
            raise H3Error(
                f"the run's state could not be saved in {self.folder.folder} ({error}): free some space, choose "
                "another folder, or switch recovery off"
            ) from error

    def _held_file(self, accelerator: str, forward: str) -> str:
        return f"{self.fingerprint[:32]}.{accelerator}{AT_FORWARD}{forward}{HELD_SUFFIX}"

    def _write(self, file: str, tensors: dict[str, Tensor]) -> str:
        """A held file in one step; returns its SHA-256."""
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        write_whole(self.folder.folder / file, data)
        return hashlib.sha256(data).hexdigest()

    def load(self) -> RunState | None:
        """The saved state of exactly this run, or None. A damaged file, or one that it names, counts as none."""
        if not self.path.is_file():
            return None
        try:
            saved = load_latent(self.path)
            file = SafetensorsFile(self.path)
        except H3Error:
            return None
        if saved.info.get("fingerprint") != self.fingerprint:
            return None
        held, files, done = saved.info.get("held", {}), [file], saved.info.get("stop")
        if not (isinstance(held, dict) and is_whole(done) and done >= 0):
            return None
        try:
            for name, digest in held.items():
                path = self.folder.folder / name
                if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                    return None
                files.append(SafetensorsFile(path))
        except (OSError, H3Error):
            return None
        self.written = dict(held)
        states: dict[str, dict[str, Tensor]] = {}
        for source in files:
            for name in source.shapes:
                if name.startswith(PREFIX):
                    accelerator, _, key = name[len(PREFIX) :].partition("/")
                    states.setdefault(accelerator, {})[key] = source.read(name)
        return RunState(done, saved.finished, saved.latent, states)

    def discard(self) -> None:
        """The clip is saved: its state may go."""
        self.written = {}
        self.folder.remove(self.path)


class KeptState:
    """The interface of ``RunRecovery`` in memory: for a run without a folder that may have to step down."""

    def __init__(self):
        self.state: RunState | None = None

    def save(self, done: int, finished: bool, latent: AVLatent, accelerators: Sequence[Accelerator] = ()) -> None:
        before = {} if self.state is None else self.state.accelerators
        states = {}
        for accelerator in accelerators:
            kept = {k: t for k, t in before.get(accelerator.name, {}).items() if AT_FORWARD in k}  # still the same
            state = accelerator.state()
            states[accelerator.name] = {k: kept[k] if k in kept else t.to("cpu", copy=True) for k, t in state.items()}
        self.state = RunState(done, finished, latent, states)

    def load(self) -> RunState | None:
        return self.state

    def discard(self) -> None:
        self.state = None
