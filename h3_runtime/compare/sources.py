"""One side of a comparison: frames one by one, its sound, and what is known of its making.

clip.mp4 ─┬─ clip.kept.mkv beside it (and newer)?  ─yes─▶ its frames and sound: "before encoding"
          │                                         no ─▶ the mp4's own: "after H.264/AAC"
          ├─ clip.report.json  ─▶ label, seconds, memory, machine
          └─ clip.json, or the mp4's own tag ─▶ request, checkpoints
frames and sound in memory (nodes) ─▶ "before encoding"
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import H3Error
from ..fidelity import REMOTE
from ..geometry import FPS
from ..manifest import load_manifest
from ..media import count_frames, kept_path, kind_of, read_audio, read_kept_tag, stream_frames, to_uint8, track_facts
from .measured import Measured, not_measured

BEFORE = "before encoding"
WHOLE_PICTURE = ("ffv1", "rawvideo", "huffyuv", "ffvhuff", "png", "bmp")  # in RGB: nothing of a pixel is lost
WHOLE_SOUND = ("flac", "alac", "wavpack", "tta")
CODEC_NAMES = {"h264": "H.264", "hevc": "H.265", "aac": "AAC", "mp3": "MP3", "opus": "Opus", "vp9": "VP9", "av1": "AV1"}
NO_SOUND = not_measured("it has no sound")
STALE_SECONDS = 2.0  # a kept file this much older than its mp4 is of an earlier render


@dataclass(frozen=True)
class Side:
    """One clip. ``frames()`` gives uint8 [H, W, 3] at 24 a second, anew at each call; ``sound`` [2, L] at 32 kHz."""

    name: str
    frames: Callable[[], Iterator[np.ndarray]]
    sound: Tensor | None = None
    sound_told: dict = field(default_factory=dict)
    picture_codec: str | None = None  # the lossy codec that its frames went through, or None
    sound_codec: str | None = None
    playable: Path | None = None  # an mp4 of exactly these frames that a browser shows
    num_frames: int | None = None  # as far as it is known before reading
    report: dict = field(default_factory=dict)
    manifest: dict = field(default_factory=dict)
    sync_seconds: Measured = NO_SOUND  # start of its sound after that of its picture
    kept: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The render's label in words."""
        known = self.report.get("label") or (self.manifest.get("fidelity") or {}).get("title")
        return str(known) if known else "no label: its report is not known"

    @property
    def parts(self) -> dict[str, str]:
        """{registered path: its label} of the render; {} when they are not known."""
        fidelity = self.report.get("fidelity") or self.manifest.get("fidelity") or {}
        parts = fidelity.get("parts") if isinstance(fidelity, dict) else None
        return {str(part["name"]): str(part["label"]) for part in parts or () if {"name", "label"} <= set(part)}

    @property
    def said(self) -> list[str]:
        """What its frames are: before or after which codec."""
        lost = [CODEC_NAMES.get(codec, codec) for codec in (self.picture_codec, self.sound_codec) if codec]
        return lost


def basis_of(a: Side, b: Side) -> str:
    """``before encoding``, or ``after H.264/AAC`` with the codecs that either side went through."""
    lost = list(dict.fromkeys([*a.said, *b.said]))
    return f"after {'/'.join(lost)}" if lost else BEFORE


def open_pair(paths: tuple[str | os.PathLike, str | os.PathLike], reports: tuple = (None, None)) -> tuple[Side, Side]:
    """Both files. The kept frames are used where both sides have them: a measured difference must not be one
    encoder's. H3Error for a file that is no clip."""
    paths = tuple(Path(path) for path in paths)
    kept = [_kept_beside(path) for path in paths]
    both = all(found is not None and stale is None for found, stale in kept)
    sides = []
    for path, report, (found, stale) in zip(paths, reports, kept):
        side = open_side(path, report, found if both else None)
        if stale is not None:
            side = replace(side, notes=(*side.notes, stale))
        elif found is not None and not both:
            words = f"{found.name} is not used: the other side has no frames from before encoding"
            side = replace(side, notes=(*side.notes, words))
        sides.append(side)
    if sides[0].name == sides[1].name:
        sides = [replace(side, name=f"{path.parent.name}/{side.name}") for side, path in zip(sides, paths)]
    return sides[0], sides[1]


def _kept_beside(path: Path) -> tuple[Path | None, str | None]:
    """(the kept frames of an mp4 or None, why they cannot be used or None)."""
    found = kept_path(path)
    if not (path.exists() and found.exists()):
        return None, None
    if path.stat().st_mtime > found.stat().st_mtime + STALE_SECONDS:
        return found, f"{found.name} is older than {path.name}: it is of an earlier render and was not used"
    try:
        frames, clip = count_frames(found), count_frames(path)
    except H3Error as error:
        return found, f"{found.name} cannot be read and was not used ({error})"
    if frames != clip:
        return found, f"{found.name} holds {frames} frames and {path.name} {clip}: it is damaged and was not used"
    return found, None


def open_side(path: Path, report: str | os.PathLike | None = None, kept: Path | None = None) -> Side:
    """One file, its frames and sound taken from ``kept`` where that is given."""
    if kind_of(path) != "video":
        raise H3Error(f"{path} holds no moving picture: give two video files")
    source = kept or path
    facts = track_facts(source)
    notes = []
    if facts.fps != FPS:
        notes.append(f"{path.name} has {facts.fps:.5g} frames a second: it was put on {FPS}")
    sound = None
    if facts.sound_codec is not None:
        sound = read_audio(source)
        if facts.sound_rate != 32000:
            notes.append(f"{path.name}: sound resampled from {facts.sound_rate} to 32000 Hz")
    whole = facts.rgb and (facts.picture_codec in WHOLE_PICTURE or facts.lossless_h264)
    exact_sound = facts.sound_codec is None or facts.sound_codec in WHOLE_SOUND or facts.sound_codec.startswith("pcm_")
    outer = facts if kept is None else track_facts(path)
    plays = outer.picture_codec == "h264" and outer.pixels == "yuv420p" and outer.sound_codec in (None, "aac")
    return Side(
        name=path.name,
        frames=lambda: stream_frames(source),
        sound=sound,
        sound_told=read_kept_tag(source) if kept is not None else {},
        picture_codec=None if whole else facts.picture_codec,
        sound_codec=None if exact_sound else facts.sound_codec,
        playable=path if plays and outer.fps == FPS and path.suffix.lower() == ".mp4" else None,
        num_frames=facts.num_frames,
        report=shaped(
            _read_json(report or path.with_suffix(".report.json"), asked=report is not None), "report", notes
        ),
        manifest=shaped(_manifest_of(path), "manifest", notes),
        sync_seconds=NO_SOUND if outer.sound_start is None else outer.sound_start,
        kept=kept,
        notes=tuple(notes),
    )


def side_of_frames(
    frames: np.ndarray | Tensor,
    sound: Tensor | None,
    name: str,
    report: dict | None = None,
    manifest: dict | None = None,
    notes: Sequence[str] = (),
) -> Side:
    """Frames in memory: uint8 or float 0..1 [F, H, W, 3]; converted one by one, so that no second copy is held. Those
    whose label says that a server rendered them have gone through its encoder."""
    coded = REMOTE in str((report or {}).get("label", ""))
    return Side(
        name=name,
        frames=lambda: (to_uint8(frame) for frame in frames),
        sound=None if sound is None else torch.as_tensor(sound).float(),
        picture_codec="h264" if coded else None,
        sound_codec="aac" if coded and sound is not None else None,
        num_frames=len(frames),
        report=report or {},
        manifest=manifest or {},
        sync_seconds=NO_SOUND if sound is None else 0.0,
        notes=tuple(notes),
    )


OBJECTS = ("machine", "fidelity", "request", "environment", "models", "stats", "resolved", "conditioning")


def shaped(read: dict, what: str, notes: list[str]) -> dict:
    """A report or manifest without the entries that no render writes so (somebody edited it), each told in ``notes``.
    Their values inside are looked at where they are used."""
    wrong = [key for key in OBJECTS if read.get(key) is not None and not isinstance(read[key], dict)]
    fidelity, request = read.get("fidelity"), read.get("request")
    if isinstance(fidelity, dict):
        parts = fidelity.get("parts") or []
        if not (isinstance(parts, list) and all(isinstance(part, dict) for part in parts)):
            wrong.append("fidelity")
    if isinstance(request, dict) and not isinstance(request.get("size") or [], list):
        wrong.append("request")
    for key in wrong:
        notes.append(f"{key} of the {what} is not what a render writes, and was left out")
    return {key: value for key, value in read.items() if key not in wrong}


def _manifest_of(path: Path) -> dict:
    for source in (path.with_suffix(".json"), path):
        try:
            if source.exists():
                return load_manifest(source)
        except H3Error:
            continue
    return {}


def _read_json(path: str | os.PathLike, asked: bool) -> dict:
    """A report; {} for one that was not asked for and is not there. H3Error for one that cannot be read."""
    path = Path(path)
    if not path.exists():
        if asked:
            raise H3Error(f"the report {path} does not exist: give the .report.json that stands beside a render's mp4")
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise H3Error(f"the report {path} cannot be read ({error}): give the .report.json of a render") from None
    if not isinstance(read, dict):
        raise H3Error(f"the report {path} holds no object: give the .report.json of a render")
    return read
