"""What is plainly wrong with a clip, whatever its figures say: one sentence each.

tracks of the picture, facts of the sound, both sides' labels ─▶ [{side, kind, text}]
"""

from __future__ import annotations

from ..geometry import FPS
from .measured import IDENTICAL, Measured, is_number
from .pictures import BLACK, PictureTracks, frame_jumps, still_runs
from .sounds import CHANNELS, SoundFacts
from .sources import Side

SOFT, HARSH = 0.85, 1.18  # sharpness of B over A
LAG_SAMPLES = 2  # one sample is within what noise moves the peak of a low tone
SYNC_SECONDS = 0.02  # half a frame


def flag(side: str, kind: str, text: str) -> dict[str, str]:
    return {"side": side, "kind": kind, "text": text}


def picture_flags(tracks: PictureTracks, figures: dict[str, Measured]) -> list[dict[str, str]]:
    made = []
    for side, bright, changes in (
        ("A", tracks.bright_a, tracks.change_a),
        ("B", tracks.bright_b, tracks.change_b),
    ):
        if max(bright) < BLACK:
            made.append(flag(side, "black picture", f"every frame is black (brightest value {max(bright):.0f} of 255)"))
            continue
        dark = sum(value < BLACK for value in bright)
        if dark:
            made.append(flag(side, "black frames", f"{dark} of {len(bright)} frames are black, first {_first(bright)}"))
        for began, length in still_runs(changes):
            whole = length == len(changes)
            text = "nothing moves in the whole clip" if whole else f"nothing moves in {length} frames from {began} on"
            made.append(flag(side, "frozen picture", text))
    sharp, lag = figures["sharpness"], figures["frame_lag"]
    if is_number(sharp) and sharp < SOFT and max(tracks.bright_b) >= BLACK:
        made.append(flag("B", "softer", f"B is softer than A: its gradients are {sharp:.2f} times A's"))
    if is_number(sharp) and sharp > HARSH:
        made.append(flag("B", "harsher", f"B has more fine detail or noise than A: gradients {sharp:.2f} times A's"))
    jumps = frame_jumps(tracks.costs)
    if not jumps and lag:
        when = "later" if lag > 0 else "earlier"
        made.append(flag("B", "frame shift", f"B shows A's picture {frames(abs(lag))} {when}"))
    for jump in jumps:
        count = jump["dropped"]
        kind, verb = ("dropped frames", "lacks") if count > 0 else ("repeated frames", "has more by")
        made.append(flag("B", kind, f"B {verb} {frames(abs(count))} near A's frame {jump['frame']}"))
    return made


def _first(bright: list[float]) -> int:
    return next(index for index, value in enumerate(bright) if value < BLACK)


def sound_flags(
    facts: dict[str, SoundFacts | None], figures: list[dict[str, Measured]], gaps: list[tuple[float, float]]
) -> list[dict[str, str]]:
    made = []
    for side, fact in facts.items():
        if fact is None:
            made.append(flag(side, "no sound", "the clip has no sound track"))
            continue
        if fact.not_finite:
            made.append(flag(side, "non-finite sound", f"{fact.not_finite} samples are NaN or infinite"))
        if fact.silent:
            made.append(flag(side, "silent", "the sound is silent from beginning to end"))
        elif fact.silent_channels:
            names = " and ".join(CHANNELS[index] for index in fact.silent_channels)
            made.append(flag(side, "silent channel", f"the {names} channel is silent"))
        if fact.clipped or fact.peak > 1.0005:
            peak = f", peak {fact.peak:.2f}" if fact.peak > 1.0005 else ""
            made.append(flag(side, "clipping", f"the sound is clipped: {fact.clipped} peaks cut flat{peak}"))
    silent = facts["B"] is not None and facts["B"].silent
    for began, ended in [] if silent else gaps:
        made.append(flag("B", "silent stretch", f"B is silent from {began:.2f} to {ended:.2f} s, where A is not"))
    lags = sorted({c["lag"] for c in figures if is_number(c["lag"]) and abs(c["lag"]) >= LAG_SAMPLES})
    if lags:
        words = " and ".join(f"{abs(lag)} samples {'late' if lag > 0 else 'early'}" for lag in lags)
        made.append(flag("B", "sound lag", f"B's sound is {words}"))
    return made


def sync_flags(shift_seconds: Measured) -> list[dict[str, str]]:
    if is_number(shift_seconds) and abs(shift_seconds) > SYNC_SECONDS:
        late = "late" if shift_seconds > 0 else "early"
        text = f"against its own picture B's sound is {abs(shift_seconds) * 1000:.0f} ms {late}, measured by A"
        return [flag("B", "sound off the picture", text)]
    return []


def frames(count: int) -> str:
    return "1 frame" if count == 1 else f"{count} frames"


def label_flags(a: Side, b: Side, same: bool, missing: int) -> list[dict[str, str]]:
    """``same``: every pixel and sample is equal. ``missing``: frames of A that B lacks (negative: has more)."""
    made = []
    for side, mine, other in (("A", a, b), ("B", b, a)):
        claimed = [n for n, label in mine.parts.items() if label == "APPROXIMATE" and n not in other.parts]
        if same and claimed and other.parts:
            text = f"{', '.join(claimed)} is said to have run, and not one bit of the output changed: it did not engage"
            made.append(flag(side, "unchanged output", text))
    if missing:
        words = "fewer" if missing > 0 else "more"
        seconds = f"{abs(missing) / FPS:.2f} s"
        text = f"B has {frames(abs(missing))} ({seconds}) {words} than A: only those in common were measured"
        made.append(flag("B", "length", text))
    return made


def all_same(picture: dict[str, Measured], sound: list[dict[str, Measured]]) -> bool:
    """Every pixel and every sample equal."""
    return picture["psnr"] == IDENTICAL and all(channel["snr"] == IDENTICAL for channel in sound)
