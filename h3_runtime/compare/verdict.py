"""The figures by name, and what a person demands of them.

METRICS  name ─▶ title, unit, which way is better          psnr=30 ssim=0.95 lag=8 ─▶ met | not met | not measured
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import H3Error
from .measured import IDENTICAL, Measured, is_number
from .sounds import CHANNELS

HIGHER, LOWER, NEAR_ZERO, NEAR_ONE, NONE = "higher", "lower", "near 0", "near 1", ""


@dataclass(frozen=True)
class Metric:
    """One figure. ``better``: which way is closer to A; none for a figure that only describes."""

    name: str
    title: str
    unit: str
    better: str
    meaning: str


def _family(name: str, title: str, unit: str, meaning: str) -> tuple[Metric, ...]:
    return (
        Metric(name, title, unit, HIGHER, meaning),
        Metric(f"{name}_rest", f"{title}, first frame left out", unit, HIGHER, "all frames but the first"),
        Metric(f"{name}_first", f"{title}, first frame", unit, HIGHER, "the first frame, which a keyframe may give"),
        Metric(f"{name}_min", f"{title}, worst frame", unit, HIGHER, "the lowest of all frames"),
    )


PICTURE = (
    *_family("psnr", "PSNR", "dB", "from the mean squared error of all frames"),
    *_family("ssim", "SSIM", "", "mean over frames, 1 is equal"),
    *_family("ms_ssim", "MS-SSIM", "", "mean over frames, five scales, 1 is equal"),
    Metric("worst_frame", "frame with the lowest PSNR", "", NONE, "counted from 0"),
    Metric("flicker", "temporal flicker difference", "/255", LOWER, "mean |change of B - change of A| between frames"),
    Metric("change_a", "change between frames, A", "/255", NONE, "mean |frame t - frame t - 1|"),
    Metric("change_b", "change between frames, B", "/255", NONE, "mean |frame t - frame t - 1|"),
    Metric("sharpness", "sharpness of B over A", "x", NEAR_ONE, "mean gradients of B over those of A; below 1: softer"),
    Metric("frame_lag", "frames by which B is late", "frames", NEAR_ZERO, "which frame of B is most like each of A"),
)
SOUND = (
    Metric("snr", "signal to noise", "dB", HIGHER, "power of A over that of B - A"),
    Metric("log_spectral_distance", "log-spectral distance", "dB", LOWER, "mean over time; silence counts as -100 dB"),
    Metric("mr_stft", "multi-resolution STFT distance", "", LOWER, "spectral convergence and log magnitude, 3 windows"),
    Metric("spectral_cosine", "spectral cosine", "", HIGHER, "mean over time, 1 is the same spectrum"),
    Metric("rms_ratio", "RMS of B over A", "x", NEAR_ONE, "loudness"),
    Metric("lag", "samples by which B is late", "samples", NEAR_ZERO, "highest cross-correlation within half a second"),
    Metric("correlation", "correlation at that lag", "", HIGHER, "1 is the same wave"),
)
METRICS = {metric.name: metric for metric in (*PICTURE, *SOUND)}


def parse_thresholds(texts: Iterable[str]) -> dict[str, float]:
    """``psnr=30`` and the like, several in a text allowed; H3Error names what cannot be read."""
    made: dict[str, float] = {}
    allowed = ", ".join(name for name, metric in METRICS.items() if metric.better)
    for text in (word for given in texts for word in re.split(r"[\s,;]+", given) if word):
        name, equals, number = text.partition("=")
        if name not in METRICS or not METRICS[name].better:
            raise H3Error(f"threshold {text[:40]!r}: {name[:40]!r} is no figure that has one; give one of {allowed}")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (equals and math.isfinite(value)):
            raise H3Error(f"threshold {text[:40]!r} cannot be read: give a name and a number, e.g. psnr=30")
        made[name] = value
    return made


def demand(metric: Metric, threshold: float) -> str:
    """The threshold in words: PSNR at least 30 dB."""
    limit = f"{threshold:g} {metric.unit}".rstrip()
    words = {HIGHER: f"at least {limit}", LOWER: f"at most {limit}", NEAR_ZERO: f"at most {limit} either way"}
    return words.get(metric.better, f"at most a factor of {threshold:g} either way")


def judge(picture: dict[str, Measured], sound: list[dict[str, Measured]], thresholds: dict[str, float]) -> dict:
    """``{"passed": True | False | None, "checks": [...]}``; a sound's figure counts with its worst channel.

    passed None: no threshold was set. What was not measured does not pass.
    """
    checks = []
    for name, threshold in thresholds.items():
        metric = METRICS[name]
        values = {"": picture[name]} if name in picture else {f" {CHANNELS[i]}": c[name] for i, c in enumerate(sound)}
        results = [(_met(metric, value, threshold), where, value) for where, value in values.items()]
        worst = min(results, key=lambda result: _ORDER.index(result[0]), default=("not measured", "", None))
        checks.append(
            {
                "metric": name,
                "demand": f"{metric.title}{worst[1]} {demand(metric, threshold)}",
                "threshold": threshold,
                "value": worst[2] if worst[2] is not None else "not measured: there is no sound in common",
                "result": worst[0],
            }
        )
    return {"passed": all(check["result"] == "met" for check in checks) if checks else None, "checks": checks}


_ORDER = ("not met", "not measured", "met")


def _met(metric: Metric, value: Measured, threshold: float) -> str:
    if value == IDENTICAL:
        return "met"
    if not is_number(value):
        return "not measured"
    if metric.better == HIGHER:
        good = value >= threshold
    elif metric.better == LOWER:
        good = value <= threshold
    elif metric.better == NEAR_ZERO:
        good = abs(value) <= threshold
    else:
        good = 1 / max(threshold, 1e-9) <= value <= threshold if value > 0 else False
    return "met" if good else "not met"
