"""One comparison from two sides to its figures and files.

Side A, Side B ─measure─▶ figures, flags, verdict ─▶ report.json
               └ frames pass once ─▶ side_by_side.mp4, difference.mp4, a.mp4, b.mp4 ─▶ report.html, plots

Rules. Frames: both on 24 a second; those in common are measured, from the first on. Sound: likewise, from the first
sample on. Sizes: one size, or ``resize`` puts B on A's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import H3Error
from ..geometry import FPS, SAMPLE_RATE
from ..media import resize_stretch
from . import costs, flags, sounds, verdict
from .clips import DIFFERENCE, SIDE_BY_SIDE, Clips
from .measured import Measured, is_number, not_measured, shown
from .pictures import PictureMeter, PictureTracks, frame_jumps, summarise
from .sources import BEFORE, Side, basis_of, open_pair

VERSION = 1
SAYS = (
    "Figures of two renders with one seed measure how far B lies from A. They do not measure beauty: a clip may differ "
    "much and be as good."
)
LENGTH_SLACK = 0.042  # seconds by which two sounds may differ in length without a word: one frame

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Comparison:
    """``data``: all of report.json. The paths are None where no folder was given. ``tracks`` per frame."""

    data: dict[str, Any]
    tracks: PictureTracks
    sides: tuple[Side, Side]
    folder: Path | None = None
    proxies: tuple[Path, ...] = ()

    @property
    def passed(self) -> bool | None:
        return self.data["verdict"]["passed"]

    @property
    def page(self) -> Path | None:
        return None if self.folder is None else self.folder / "report.html"

    @property
    def side_by_side(self) -> Path | None:
        return None if self.folder is None else self.folder / SIDE_BY_SIDE

    def lines(self) -> list[str]:
        """The comparison as sentences for a terminal or a node."""
        data = self.data
        made = [f"{letter}: {side['name']}  {side['label']}" for letter, side in data["sides"].items()]
        made += [f"measured {data['basis']}, {data['frames']} frames"]
        for metric in (verdict.METRICS[name] for name in ("psnr", "psnr_min", "ssim", "ms_ssim", "flicker")):
            made.append(f"{metric.title}: {shown(data['picture'][metric.name], metric.unit)}")
        for channel, figures in data["sound"]["channels"].items():
            names = {"snr": "SNR", "mr_stft": "multi-resolution STFT distance", "lag": "lag"}
            parts = (f"{title} {shown(figures[name], verdict.METRICS[name].unit)}" for name, title in names.items())
            made.append(f"sound, {channel}: {', '.join(parts)}")
        if data["sound"]["why"]:
            made.append(f"sound: {data['sound']['why']}")
        made += [f"FLAG {flag['side']} {flag['kind']}: {flag['text']}" for flag in data["flags"]]
        made += [
            f"{check['result']}: {check['demand']} ({shown(check['value'])})" for check in data["verdict"]["checks"]
        ]
        return made + [f"note: {note}" for note in data["notes"]]


@dataclass
class _Measuring:
    """What passes by while the frames are read once."""

    meter: PictureMeter = field(default_factory=PictureMeter)
    counts: dict[str, int] = field(default_factory=lambda: {"A": 0, "B": 0})
    notes: list[str] = field(default_factory=list)
    resized: bool = False


def compare_sides(
    a: Side,
    b: Side,
    out: str | os.PathLike | None = None,
    thresholds: dict[str, float] | None = None,
    progress: Progress | None = None,
    resize: bool = False,
) -> Comparison:
    """Measure B against A; with ``out`` write the report and its videos into that folder.

    H3Error for clips that cannot be compared, before anything is written.
    """
    first = _first_frames(a, b, resize)
    if out is None:
        return _compared(a, b, None, first, thresholds or {}, progress)
    folder = _folder(out)
    with _whole_or_gone(folder):
        return _compared(a, b, folder, first, thresholds or {}, progress)


@contextmanager
def _whole_or_gone(folder: Path) -> Iterator[None]:
    """A new folder in which a comparison does not end is removed again; what stood in an older one stays."""
    new = not any(folder.iterdir())
    try:
        yield
    except BaseException:  # Cancel as well
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _compared(a: Side, b: Side, folder: Path | None, first, thresholds: dict[str, float], progress) -> Comparison:
    """Read both sides once and, with ``folder``, write what is shown of them. ``first``: the first frame of each."""
    height, width = first[0].shape[:2]
    seen = _Measuring()
    if first[1].shape != first[0].shape:
        seen.resized = True
        seen.notes.append(f"B was resized from {first[1].shape[1]}x{first[1].shape[0]} to {width}x{height} (Lanczos)")
    clips = nullcontext() if folder is None else Clips(folder, a, b, width, height)
    with clips as recorder:
        seen.notes += [] if recorder is None else recorder.notes
        _measure_frames(a, b, (width, height), recorder, seen, progress or (lambda stage, done, total: None))
    data = _data(a, b, seen, thresholds, (width, height))
    made = Comparison(data, seen.meter.tracks, (a, b), folder, () if folder is None else tuple(recorder.proxies))
    if folder is not None:
        from .page import write_files

        write_files(made)
    return made


def compare_files(
    a: str | os.PathLike, b: str | os.PathLike, out: str | os.PathLike | None = None, reports=(None, None), **options
) -> Comparison:
    """``compare_sides`` of two files, their kept frames, reports and manifests found beside them."""
    return compare_sides(*open_pair((a, b), tuple(reports)), out, **options)


def compare_saved(a, b, out: str | os.PathLike, drop_kept: bool = True, **options) -> Comparison:
    """The report of two renders that ``save_clip(..., keep_frames=True)`` saved (two ``Saved``), from their frames as
    they were before encoding; afterwards these go, unless ``drop_kept`` is False."""
    for saved in (a, b):
        if saved.video is None:
            raise H3Error("a run that stopped early has no clip to compare: let it finish first")
    made = compare_files(a.video, b.video, out, (a.report, b.report), **options)
    if drop_kept:
        forget_kept(made)
    return made


def forget_kept(made: Comparison) -> list[str]:
    """Remove the kept frames of a comparison that is done; sentences about it."""
    gone = []
    for side in made.sides:
        if side.kept is not None and side.kept.exists():
            gone.append(f"removed {side.kept.name} ({side.kept.stat().st_size / 2**20:.1f} MiB)")
            side.kept.unlink()
    return gone


def _first_frames(a: Side, b: Side, resize: bool) -> list[np.ndarray]:
    """The first frame of each; H3Error for sizes that cannot be compared."""
    first = [next(islice(side.frames(), 1), None) for side in (a, b)]
    for side, frame in zip((a, b), first):
        if frame is None:
            raise H3Error(f"{side.name} has no frame: give a clip that has some")
    sizes = [f"{frame.shape[1]}x{frame.shape[0]}" for frame in first]
    if sizes[0] != sizes[1] and not resize:
        raise H3Error(
            f"A is {sizes[0]} and B is {sizes[1]}: clips of one size can be compared; render both at one, or have B "
            "resized to A's (--resize), which then is measured too"
        )
    if min(first[0].shape[:2]) < 2:
        raise H3Error(f"the clips are {sizes[0]}: give pictures of at least 2x2 pixels")
    return first


def _folder(out: str | os.PathLike) -> Path:
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        return out
    except FileExistsError:
        raise H3Error(f"--out {out} is a file: give a folder") from None
    except OSError as error:
        raise H3Error(f"--out {out} cannot be made ({error.strerror}): choose another folder") from None


def _measure_frames(a: Side, b: Side, size: tuple[int, int], clips: Clips | None, seen: _Measuring, report) -> None:
    """Read both clips once, in step; frames past the shorter one's end are counted only."""
    expected = min((side.num_frames for side in (a, b) if side.num_frames), default=0)
    one, two = iter(a.frames()), iter(b.frames())
    while True:
        pair = next(one, None), next(two, None)
        for letter, frame in zip("AB", pair):
            seen.counts[letter] += frame is not None
        if pair[0] is None or pair[1] is None:
            break
        number, puts_right = seen.counts["A"] - 1, (False, seen.resized)
        frames = [_sized(frame, size, f"{s} frame {number}", r) for frame, s, r in zip(pair, "AB", puts_right)]
        seen.meter.add(*frames)
        done = seen.counts["A"]
        if clips is not None:
            value = seen.meter.tracks.psnr[-1]
            clips.write(*frames, f"frame {done - 1}   " + ("identical" if value == float("inf") else f"{value:.1f} dB"))
        report("compare", done, max(expected, done))
    for letter, rest in (("A", one), ("B", two)):
        seen.counts[letter] += sum(1 for _ in rest)
    total = min(seen.counts.values())
    if total != max(expected, total):  # the header promised more
        report("compare", total, total)


def _sized(frame: np.ndarray, size: tuple[int, int], name: str, resize: bool) -> np.ndarray:
    if frame.shape[:2] == (size[1], size[0]):
        return frame
    if not resize:
        found = f"{frame.shape[1]}x{frame.shape[0]}"
        raise H3Error(f"{name} is {found} and those before are {size[0]}x{size[1]}: re-encode the clip at one size")
    return resize_stretch(np.ascontiguousarray(frame), *size)


def _data(a: Side, b: Side, seen: _Measuring, thresholds: dict[str, float], size: tuple[int, int]) -> dict[str, Any]:
    """All of report.json, but the files."""
    tracks = seen.meter.tracks
    picture = summarise(tracks)
    sound, facts, gaps = _measure_sound(a, b, seen.notes)
    basis = basis_of(a, b)
    if basis != BEFORE:
        seen.notes.append(
            f"measured {basis}: the figures hold what the encoders changed too; keep the frames of both renders "
            "(--keep-frames) to leave that out"
        )
    sync = _sync_shift(tracks, picture, sound["channels"])
    channels = list(sound["channels"].values())
    missing = seen.counts["A"] - seen.counts["B"]
    same = flags.all_same(picture, channels) and missing == 0
    found = flags.label_flags(a, b, same, missing) + flags.picture_flags(tracks, picture)
    found += flags.sound_flags(facts, channels, gaps) + flags.sync_flags(sync)
    sides = {}
    for letter, side in (("A", a), ("B", b)):
        sides[letter] = {
            "name": side.name,
            "label": side.label,
            "frames": seen.counts[letter],
            "costs": costs.costs(side),
            "context": costs.context(side),
            "sound_start_after_picture_seconds": side.sync_seconds,
        }
    return {
        "h3_comparison": VERSION,
        "basis": basis,
        "size": list(size),
        "fps": FPS,
        "frames": len(tracks.psnr),
        "identical": same,
        "picture": picture,
        "sound": {**sound, "sync_shift_seconds": sync},
        "flags": found,
        "verdict": verdict.judge(picture, channels, thresholds),
        "sides": sides,
        "differs": costs.what_differs(a, b),
        "notes": list(dict.fromkeys([*(f"A: {n}" for n in a.notes), *(f"B: {n}" for n in b.notes), *seen.notes])),
        "says": SAYS,
        "per_frame": {
            name: [round(value, 6) if is_number(value) else None for value in getattr(tracks, name)]
            for name in ("psnr", "ssim", "ms_ssim", "flicker", "change_a", "change_b")
        },
    }


def _measure_sound(a: Side, b: Side, notes: list[str]) -> tuple[dict[str, Any], dict, list]:
    facts = {
        letter: None if side.sound is None else sounds.describe(side.sound, side.sound_told)
        for letter, side in (("A", a), ("B", b))
    }
    lacking = [letter for letter, fact in facts.items() if fact is None]
    made: dict[str, Any] = {"channels": {}, "why": "", "facts": {}}
    for letter, fact in facts.items():
        if fact is not None:
            made["facts"][letter] = {"seconds": fact.seconds, "rms": list(fact.rms), "peak": fact.peak,
                                     "clipped_peaks": fact.clipped, "not_finite": fact.not_finite}  # fmt: skip
    if lacking:
        made["why"] = not_measured(f"{' and '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no sound")
        return made, facts, []
    length = min(a.sound.shape[1], b.sound.shape[1])
    apart = (a.sound.shape[1] - b.sound.shape[1]) / SAMPLE_RATE
    if abs(apart) > LENGTH_SLACK:
        notes.append(
            f"B's sound is {abs(apart):.3f} s {'shorter' if apart > 0 else 'longer'}: the part in common counts"
        )
    one, two = a.sound[:, :length], b.sound[:, :length]
    made["channels"] = dict(zip(sounds.CHANNELS, sounds.measure(one, two)))
    return made, facts, sounds.quiet_spans(one, two)


def _sync_shift(tracks: PictureTracks, picture: dict[str, Measured], channels: dict[str, dict]) -> Measured:
    """How much later B's sound comes after its own picture than A's does, in seconds."""
    if frame_jumps(tracks.costs):
        return not_measured("frames are dropped or repeated, so there is no one shift")
    lags = [channel["lag"] for channel in channels.values() if is_number(channel["lag"])]
    if not lags or not is_number(picture["frame_lag"]):
        return not_measured("no lag of the sound was found")
    return sum(lags) / len(lags) / SAMPLE_RATE - picture["frame_lag"] / FPS


def results(made: Comparison) -> list[dict[str, Any]]:
    """The results block of the command line: one row per figure, each with its basis."""
    data = made.data
    rows = [{"name": "basis", "value": data["basis"], "unit": ""}]
    for name, value in data["picture"].items():
        rows.append(
            {"name": f"picture/{name}", "value": value, "unit": verdict.METRICS[name].unit, "basis": data["basis"]}
        )
    for channel, figures in data["sound"]["channels"].items():
        for name, value in figures.items():
            unit = verdict.METRICS[name].unit
            rows.append({"name": f"sound/{channel}/{name}", "value": value, "unit": unit, "basis": data["basis"]})
    if data["sound"]["why"]:
        rows.append({"name": "sound", "value": data["sound"]["why"], "unit": "", "basis": data["basis"]})
    for letter, side in data["sides"].items():
        rows.append({"name": f"label/{letter}", "value": side["label"], "unit": ""})
    rows += [
        {"name": f"flag/{flag['side']}", "value": flag["kind"], "unit": "", "text": flag["text"]}
        for flag in data["flags"]
    ]
    rows += [{"name": "check", "value": check["result"], "unit": "", **check} for check in data["verdict"]["checks"]]
    rows.append({"name": "passed", "value": data["verdict"]["passed"], "unit": ""})
    rows += [{"name": "note", "value": note, "unit": ""} for note in data["notes"]]
    if made.folder is not None:
        for name in ("report.html", "report.json", SIDE_BY_SIDE, DIFFERENCE):
            rows.append({"name": name, "value": str(made.folder / name), "unit": "path"})
    return rows


def dump(data: dict[str, Any]) -> str:
    """JSON text; a value that is no number (NaN, infinity) is a fault here and raises."""
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
