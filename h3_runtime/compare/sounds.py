"""How two sounds differ, channel by channel; spectra are taken block by block, so that length costs no memory.

a, b [2, L] at 32 kHz ─┬─ samples: SNR, RMS ratio, clipping, silence
                       ├─ |STFT|: log-spectral distance, multi-resolution distance, cosine
                       └─ cross-correlation over half a second either way: best lag
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import SAMPLE_RATE
from .measured import IDENTICAL, Measured, decibels, not_measured

CHANNELS = ("left", "right")
FFT, HOP = 2048, 512  # of the log-spectral distance and the cosine
FLOOR = 1e-10  # power, -100 dB: below it two spectra are equally silent
RESOLUTIONS = ((1024, 120, 600), (2048, 240, 1200), (512, 50, 240))  # FFT, hop, window
MAGNITUDE_FLOOR = 1e-8  # of the squared magnitude in the multi-resolution distance
REACH = SAMPLE_RATE // 2  # samples either way in which a lag is looked for
ALIKE = 0.3  # correlation below which two sounds have no lag: those of two seeds reach about 0.1
TIE = 1e-4  # a lag must beat no lag by this share
BLOCK = 1 << 18  # samples of a spectral block; 8 seconds
FULL = 0.999  # of full scale
FLAT_TOP = 3  # samples in a row at full scale are a clipped peak
SILENT = 1e-4  # RMS, -80 dB
WINDOW = SAMPLE_RATE // 20  # 50 ms, in which a stretch is silent or not
GAP_SECONDS = 0.25


@dataclass(frozen=True)
class SoundFacts:
    """What one sound is by itself. ``peak`` and ``not_finite`` are those before encoding, where they were kept."""

    seconds: float
    rms: tuple[float, ...]
    peak: float
    clipped: int  # peaks cut flat
    not_finite: int
    silent_channels: tuple[int, ...]

    @property
    def silent(self) -> bool:
        return len(self.silent_channels) == len(self.rms)


def describe(sound: Tensor, told: dict | None = None) -> SoundFacts:
    """``sound`` float [C, L]; ``told`` what ``media.describe_sound`` said of it before it was encoded."""
    told = told or {}
    broken = int((~torch.isfinite(sound)).sum()) + int(told.get("not_finite", 0))
    sound = torch.nan_to_num(sound, 0.0, 0.0, 0.0)
    rms = tuple(sound.double().pow(2).mean(dim=1).sqrt().tolist()) if sound.shape[1] else (0.0,) * sound.shape[0]
    peak = sound.abs().max().item() if sound.numel() else 0.0
    return SoundFacts(
        seconds=sound.shape[1] / SAMPLE_RATE,
        rms=rms,
        peak=max(peak, float(told.get("peak", 0.0))),
        clipped=sum(_flat_tops(channel) for channel in sound),
        not_finite=broken,
        silent_channels=tuple(index for index, value in enumerate(rms) if value < SILENT),
    )


def _flat_tops(channel: Tensor) -> int:
    """Runs of at least FLAT_TOP samples at full scale."""
    full = (channel.abs() >= FULL).float()
    if len(full) < FLAT_TOP:
        return 0
    inside = full.unfold(0, FLAT_TOP, 1).min(dim=1).values  # [L - 2]: 1 where a run of three begins
    return int((inside - torch.cat([inside.new_zeros(1), inside[:-1]]) > 0).sum())


def measure(a: Tensor, b: Tensor) -> list[dict[str, Measured]]:
    """One dictionary per channel; a, b float [C, L] of one shape."""
    return [_measure_channel(x, y) for x, y in zip(torch.nan_to_num(a, 0, 0, 0), torch.nan_to_num(b, 0, 0, 0))]


def _measure_channel(a: Tensor, b: Tensor) -> dict[str, Measured]:
    if len(a) == 0:
        empty = not_measured("there is no sound in common")
        names = ("snr", "log_spectral_distance", "mr_stft", "spectral_cosine", "rms_ratio", "lag", "correlation")
        return dict.fromkeys(names, empty)
    same = torch.equal(a, b)
    power, noise = (x.double().pow(2).sum().item() for x in (a, a.double() - b))
    other = b.double().pow(2).sum().item()
    silent = [name for name, value in (("A", power), ("B", other)) if math.sqrt(value / len(a)) < SILENT]
    nothing = not_measured(f"{' and '.join(silent)} is silent" if len(silent) < 2 else "both are silent")
    if same:
        snr: Measured = IDENTICAL
    elif "A" in silent:
        snr = nothing
    else:
        snr = decibels(10 * math.log10(power / noise))
    lag, likeness = (0, 1.0) if same and not silent else (nothing, nothing) if silent else best_lag(a, b)
    return {
        "snr": snr,
        "log_spectral_distance": log_spectral_distance(a, b),
        "mr_stft": mr_stft(a, b),
        "spectral_cosine": nothing if silent else spectral_cosine(a, b),
        "rms_ratio": nothing if "A" in silent else math.sqrt(other / power),
        "lag": lag,
        "correlation": likeness,
    }


def _power_blocks(sounds: Tensor, fft: int, hop: int, window: int) -> Iterator[Tensor]:
    """|STFT|^2 of [n, L] in blocks of frames [n, fft / 2 + 1, t]: the frames of one centred STFT, in order.

    The ends are mirrored (or, in a sound shorter than half a window, filled with zeros), as torch.stft does.
    """
    half, length = fft // 2, sounds.shape[1]
    mode = "reflect" if length > half else "constant"
    padded = torch.nn.functional.pad(sounds[None], (half, half), mode=mode)[0]
    taps = torch.hann_window(window)
    frames = 1 + length // hop
    step = max(1, BLOCK // hop)
    for first in range(0, frames, step):
        last = min(first + step, frames)
        piece = padded[:, first * hop : (last - 1) * hop + fft]
        yield torch.stft(piece, fft, hop, window, taps, center=False, return_complex=True).abs().square()


def log_spectral_distance(a: Tensor, b: Tensor) -> float:
    """Mean over frames of the root mean square over frequencies of the difference of log powers, in dB [L], [L].

    Gray and Markel 1976. Powers below -100 dB of full scale count as -100 dB.
    """
    total, frames, scale = 0.0, 0, 16 / FFT**2  # a full-scale sine is 0 dB: FFT / 2 of it, halved by the window
    for power in _power_blocks(torch.stack([a, b]), FFT, HOP, FFT):
        levels = 10 * torch.log10((power * scale).clamp(min=FLOOR))  # [2, bins, t]
        total += (levels[0] - levels[1]).square().mean(dim=0).sqrt().sum().item()
        frames += levels.shape[2]
    return total / frames


def mr_stft(a: Tensor, b: Tensor) -> float:
    """Multi-resolution STFT distance of b from a, [L] each: mean over three resolutions of spectral convergence
    ||A - B|| / ||A|| plus the mean |ln A - ln B| of the magnitudes.

    Yamamoto et al. 2020 (Parallel WaveGAN), with auraloss's resolutions and its floor of 1e-8 under the power.
    """
    total = 0.0
    for fft, hop, window in RESOLUTIONS:
        apart = whole = logs = count = 0.0
        for power in _power_blocks(torch.stack([a, b]), fft, hop, window):
            one, two = power.clamp(min=MAGNITUDE_FLOOR).sqrt()
            apart += (one - two).double().square().sum().item()
            whole += one.double().square().sum().item()
            logs += (one.log() - two.log()).abs().double().sum().item()
            count += one.numel()
        total += math.sqrt(apart / whole) + logs / count
    return total / len(RESOLUTIONS)


def spectral_cosine(a: Tensor, b: Tensor) -> float:
    """Cosine between the magnitude spectra of a and b, [L] each: mean over frames in which either is heard."""
    total, frames = 0.0, 0
    for power in _power_blocks(torch.stack([a, b]), FFT, HOP, FFT):
        one, two = power.sqrt()  # [bins, t]
        norms = one.norm(dim=0), two.norm(dim=0)
        heard = torch.maximum(*norms) > SILENT * FFT / 2
        cosine = (one * two).sum(dim=0) / (norms[0] * norms[1]).clamp(min=1e-12)
        total += cosine[heard].sum().item()
        frames += int(heard.sum())
    return total / frames if frames else 1.0


def best_lag(a: Tensor, b: Tensor) -> tuple[Measured, Measured]:
    """(samples by which b comes after a, normalised correlation there): the highest within half a second either way;
    no lag where even that is low."""
    length = len(a)
    reach = min(REACH, length - 1)
    size = 1 << (min(BLOCK, length) + 2 * reach).bit_length()
    padded = torch.nn.functional.pad(b.double(), (reach, reach + BLOCK))
    total = torch.zeros(2 * reach + 1, dtype=torch.float64)
    for start in range(0, length, BLOCK):
        block = a[start : start + BLOCK].double()
        other = padded[start : start + len(block) + 2 * reach]
        spectrum = torch.fft.rfft(block, size).conj() * torch.fft.rfft(other, size)
        total += torch.fft.irfft(spectrum, size)[: 2 * reach + 1]
    scale = a.double().norm().item() * b.double().norm().item()
    at = int(total.argmax())
    if total[at] <= total[reach] * (1 + TIE):
        at = reach
    likeness = min(1.0, total[at].item() / scale)
    if likeness < ALIKE:
        return not_measured(f"the sounds are too unlike (highest correlation {likeness:.2f})"), likeness
    return at - reach, likeness


def quiet_spans(a: Tensor, b: Tensor) -> list[tuple[float, float]]:
    """(from, to) in seconds where b is silent and a is not, for at least a quarter of a second; [C, L] each."""
    count = min(a.shape[1], b.shape[1]) // WINDOW
    if count == 0:
        return []
    cut = (x[:, : count * WINDOW].reshape(x.shape[0], count, WINDOW) for x in (a, b))
    levels = [x.square().mean(dim=(0, 2)).sqrt() for x in cut]
    gone = ((levels[1] < SILENT) & (levels[0] > 10 * SILENT)).tolist()
    spans, began = [], None
    for index, silent in enumerate([*gone, False]):
        if silent and began is None:
            began = index
        elif not silent and began is not None:
            span = began * WINDOW / SAMPLE_RATE, index * WINDOW / SAMPLE_RATE
            if span[1] - span[0] >= GAP_SECONDS:
                spans.append(span)
            began = None
    return spans


def spectrogram(sound: Tensor, columns: int = 600, rows: int = 160) -> Tensor:
    """uint8 [rows, columns'], low frequencies at the bottom: -100 dB is 0, 0 dB is 255; the channels' mean power."""
    length = sound.shape[1]
    hop = max(256, math.ceil(length / columns))
    levels = []
    for power in _power_blocks(torch.nan_to_num(sound, 0, 0, 0), 1024, hop, 1024):
        mean = power.mean(dim=0) * 16 / 1024**2  # [513, t]
        mean = torch.nn.functional.adaptive_max_pool1d(mean.T[None], rows)[0].T  # [rows, t]
        levels.append(10 * torch.log10(mean.clamp(min=FLOOR)))
    whole = torch.cat(levels, dim=1)
    return ((whole + 100) / 100 * 255).clamp(0, 255).to(torch.uint8).flip(0)
