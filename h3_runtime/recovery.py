"""A run's state on disk after every forward, so that a killed process goes on bit for bit.

    forward k done ─▶ FOLDER/<fingerprint>.safetensors   (atomic rename over the state of forward k - 1)
                        video, audio            both streams, float32
                        accelerator/NAME/KEY    what each accelerator's state() gave
                        metadata                forwards done, finished, size, fingerprint, label
    same job again ─▶ found by its fingerprint ─▶ forwards k ..

The fingerprint covers everything that decides the output, so a state can only ever be taken up by the run it belongs
to. The folder is bounded: the oldest states leave when it grows past its limits, never the one just written. A
finished latent stays until its clip is saved.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .accelerators import Accelerator
from .checkpoint.kept import cache_folder
from .checkpoint.reader import SafetensorsFile
from .errors import CheckpointError, H3Error
from .geometry import Canvas
from .job import AVLatent
from .latents import PartialLatent, load_latent, save_latent

MAX_STATES = 16
MAX_BYTES = 8 << 30
SUFFIX = ".h3-state.safetensors"
PREFIX = "accelerator/"


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
                aged.append((status.st_mtime, path, status.st_size))
        return sorted(aged, reverse=True)

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
        total, others = keep.stat().st_size, [entry for entry in self._aged() if entry[1] != keep]
        for count, (_, path, size) in enumerate(others, start=2):
            total += size
            if count > self.max_states or total > self.max_bytes:
                with suppress(OSError):  # open in another program
                    path.unlink(missing_ok=True)


class RunRecovery:
    """One run's state file: saved after each forward, found again by the same job."""

    def __init__(self, folder: RecoveryFolder, fingerprint: str, canvas: Canvas, info: dict):
        self.folder, self.fingerprint, self.canvas, self.info = folder, fingerprint, canvas, info
        self.path = folder.path(fingerprint)

    def save(self, done: int, finished: bool, latent: AVLatent, accelerators: Sequence[Accelerator] = ()) -> None:
        """Replace the run's state by this one, atomically. H3Error when the disk refuses."""
        tensors = {
            f"{PREFIX}{accelerator.name}/{key}": tensor
            for accelerator in accelerators
            for key, tensor in accelerator.state().items()
        }
        try:
            self.folder.folder.mkdir(parents=True, exist_ok=True)
            save_latent(
                self.path,
                self.canvas,
                latent,
                extra=tensors,
                stop=done,
                finished=finished,
                fingerprint=self.fingerprint,
                **self.info,
            )
            self.folder.trim(self.path)
        except (OSError, H3Error) as error:
            raise H3Error(
                f"the run's state could not be saved in {self.folder.folder} ({error}): free some space, choose "
                "another folder, or switch recovery off"
            ) from error

    def load(self) -> RunState | None:
        """The saved state of exactly this run, or None. A damaged file counts as none."""
        if not self.path.is_file():
            return None
        try:
            saved = load_latent(self.path)
            file = SafetensorsFile(self.path)
        except H3Error:
            return None
        if saved.info.get("fingerprint") != self.fingerprint:
            return None
        states: dict[str, dict[str, Tensor]] = {}
        for name in file.shapes:
            if name.startswith(PREFIX):
                accelerator, _, key = name[len(PREFIX) :].partition("/")
                states.setdefault(accelerator, {})[key] = file.read(name)
        return RunState(saved.info["stop"], saved.finished, saved.latent, states)

    def discard(self) -> None:
        """The clip is saved: its state may go. One that another program has open stays; it is trimmed in time."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


class KeptState:
    """The interface of ``RunRecovery`` in memory: for a run without a folder that may have to step down."""

    def __init__(self):
        self.state: RunState | None = None

    def save(self, done: int, finished: bool, latent: AVLatent, accelerators: Sequence[Accelerator] = ()) -> None:
        states = {a.name: {key: tensor.to("cpu", copy=True) for key, tensor in a.state().items()} for a in accelerators}
        self.state = RunState(done, finished, latent, states)

    def load(self) -> RunState | None:
        return self.state

    def discard(self) -> None:
        self.state = None
