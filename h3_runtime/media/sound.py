"""Sound: any file's samples as stereo at 32 kHz.

    decoded [c, l] at its own rate --stereo, cut to its time span--> [2, l] --resample_sound--> [2, L] at 32 kHz

The resampler is the reference's (a sinc under a Hann window, torchaudio's defaults), computed here tap by tap, so
that no rate needs a large kernel and torchaudio is not needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from fractions import Fraction

import av
import torch
import torch.nn.functional as F

from ..errors import H3Error
from ..geometry import AUDIO_CHANNELS, AUDIO_HOP, SAMPLE_RATE
from .files import open_media, video_stream

SINC_ZEROS = 6
SINC_ROLLOFF = 0.99
TAPS_AT_ONCE = 1 << 20
SEEK_AFTER = 10  # seconds; decoding so much is cheap
TOLD_SHIFT = 0.05  # seconds; less is how containers round
JOINT = SAMPLE_RATE // 200  # samples, 5 ms: from the original to the sound that was made anew, without a click
SEEK_PREROLL = 1  # seconds decoded and thrown away after a jump, so that the coder has settled


def read_audio(
    path: str | os.PathLike,
    start_seconds: float = 0.0,
    max_seconds: float | None = None,
    notes: list[str] | None = None,
) -> torch.Tensor:
    """The sound of a sound or video file as float32 [2, L] at 32 kHz; what was changed on the way goes to ``notes``.

    Mono is repeated, stereo kept, more channels are mixed down by the library (and lowered as a whole when the mix
    passes 1). Sample 0 is the first sample of a sound file, but the first FRAME of a video file: earlier sound is
    cut, a later start becomes silence. ``max_seconds`` cuts at the file's own rate, before resampling (the
    reference's order).

    AAC is stored in blocks of 1024 samples, so its last block reaches past the end that was meant. Rule: when a file
    has a picture and its AAC sound reaches past the picture's end by less than one block, it is cut there; a file of
    ours with N frames gives round(N / 24 * 32000) samples. Sound that reaches further is kept, it was meant.
    """
    _check_span(start_seconds, max_seconds)
    start = Fraction(start_seconds).limit_denominator(1_000_000)
    sound, changes = decode_sound(path, None, start, max_seconds)
    if notes is not None:
        notes += changes
    if sound.shape[1] == 0:
        raise H3Error(f"{path} holds no sound from {start_seconds:g} seconds on: start earlier")
    with open_media(path) as container:
        picture, stream = video_stream(container), container.streams.audio[0]
        if picture is None or not picture.duration or stream.codec_context.name != "aac":
            return sound
        end = round((picture.duration * picture.time_base - start) * SAMPLE_RATE)
        block = Fraction(stream.codec_context.frame_size * SAMPLE_RATE, stream.codec_context.sample_rate)
    return sound[:, :end] if 0 < sound.shape[1] - end < block and end > 0 else sound


def sound_seconds(path: str | os.PathLike) -> float | None:
    """Length of a file's sound by its stream's header, 0 when that does not tell; None when it holds no sound."""
    with open_media(path) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        return float((stream.duration or 0) * stream.time_base)


def fit_audio(audio: torch.Tensor, samples: int) -> tuple[torch.Tensor, str | None]:
    """[2, L] cut or padded with silence at its end to ``samples``, and a sentence about it (None: it fitted)."""
    extra = audio.shape[1] - samples
    if extra == 0:
        return audio, None
    what = f"sound of {audio.shape[1]} samples"
    if extra > 0:
        return audio[:, :samples], f"{what} cut to {samples}: {extra} samples ({extra / SAMPLE_RATE:.3f} s) dropped"
    silence = f"{-extra} samples ({-extra / SAMPLE_RATE:.3f} s) of silence added"
    return F.pad(audio, (0, -extra)), f"{what} padded to {samples}: {silence}"


def put_back(decoded: torch.Tensor, original: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """``decoded`` [2, L] with the samples of ``original`` [2, >= 0] where ``kept`` [2, A] (1/40 s each) is true, and a
    sentence about it (None: nothing was kept).

    Inside what was kept every sample is the original's; beside it the original fades out over 5 ms.
    """
    share = kept.repeat_interleave(AUDIO_HOP, dim=1)[:, : decoded.shape[1]].float()
    if not bool(share.any()):
        return decoded, None
    fade = torch.linspace(1, 0, JOINT + 2)[1:-1]
    for ear in range(AUDIO_CHANNELS):
        steps = kept[ear].int().diff()
        ends, begins = ((steps == step).nonzero().flatten() for step in (-1, 1))
        for end in ((ends + 1) * AUDIO_HOP).tolist():
            after = share[ear, end : end + JOINT]
            torch.maximum(after, fade[: len(after)], out=after)
        for begin in ((begins + 1) * AUDIO_HOP).tolist():
            before = share[ear, begin - JOINT : begin]
            torch.maximum(before, fade.flip(0)[: len(before)], out=before)
    original, _ = fit_audio(original, decoded.shape[1])
    seconds = kept.any(dim=0).sum().item() * AUDIO_HOP / SAMPLE_RATE
    whole = "all of it" if bool(kept.all()) else f"{seconds:.3f} s of it"
    return torch.where(share == 1, original, torch.lerp(decoded, original, share)), (
        f"where the sound was kept ({whole}) the source's own samples stand, not a decoded copy"
    )


def resample_sound(sound: torch.Tensor, rate: int, new_rate: int = SAMPLE_RATE) -> torch.Tensor:
    """float32 [c, l] at ``rate`` -> float32 [c, ceil(l new / rate)] at ``new_rate``.

    Output m lies at input position m rate / new; every input sample within 6 zero crossings of the low-pass sinc
    (cut-off 0.99 of the lower Nyquist rate) adds to it, weighted by sinc and a Hann window. Source: torchaudio's
    ``Resample`` with its defaults, which the reference uses.
    """
    common = math.gcd(rate, new_rate)
    old, new = rate // common, new_rate // common
    length = sound.shape[1]
    if old == new or length == 0:
        return sound
    cutoff = min(old, new) * SINC_ROLLOFF  # zero crossings per ``old`` input samples
    reach = math.ceil(SINC_ZEROS * old / cutoff)
    taps = torch.arange(-reach, reach + 2)
    padded = F.pad(sound, (reach, reach + 2))
    pieces, total = [], -(-length * new // old)
    step = max(1, TAPS_AT_ONCE // len(taps))
    for begin in range(0, total, step):
        place = torch.arange(begin, min(begin + step, total))
        period, phase = place // new, place % new
        first = phase * old // new  # the input sample before the output, counted within its period
        # The reference divides the phase in float32: at 44.1 kHz that alone moves the result by 1e-5.
        ahead = (first[:, None] + taps).double() / old - (phase / new).double()[:, None]  # [m, taps]
        distance = (ahead * cutoff).clamp(-SINC_ZEROS, SINC_ZEROS)
        weight = torch.sinc(distance) * torch.cos(distance * (math.pi / SINC_ZEROS / 2)) ** 2 * (cutoff / old)
        near = padded[:, (period * old + first)[:, None] + taps + reach]  # [c, m, taps]
        pieces.append((near * weight.to(sound.dtype)).sum(-1))
    return torch.cat(pieces, dim=1)  # [c, L]


def decode_sound(
    path: str | os.PathLike, origin: Fraction | None, start: Fraction, seconds: float | Fraction | None
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """(float32 [2, L] at 32 kHz, notes) of the span from ``start`` on, counted from ``origin`` on the file's clock.

    ``origin`` None: where the picture starts, or without one where the sound starts. L is 0 past the sound's end.
    """
    notes = []
    with open_media(path) as container:
        if not container.streams.audio:
            raise H3Error(f"{path} holds no sound: give a sound file, or a video with a sound track")
        stream, picture = container.streams.audio[0], video_stream(container)
        if origin is None and picture is not None and picture.start_time is not None:
            origin = picture.start_time * picture.time_base
        if start > SEEK_AFTER and origin is not None:  # not in bare sound files: an mp3 seeks by guess
            before = origin + start - SEEK_PREROLL
            container.seek(int(before / stream.time_base), stream=stream, backward=True)
        sound, rate, late = _decode_span(container.decode(stream), origin, start, seconds)
        channels, tracks = stream.codec_context.layout.nb_channels, len(container.streams.audio)
    if tracks > 1:
        notes.append(f"the first of its {tracks} sound tracks is used")
    if sound.shape[1] and channels == 1:
        notes.append("mono sound repeated on both channels")
    if channels > 2:
        peak = sound.abs().max().item() if sound.numel() else 0.0
        sound = sound / max(1.0, peak)
        lowered = f", lowered by a factor of {peak:.2f} so that the mix stays within 1" if peak > 1 else ""
        notes.append(f"{channels} channels of sound mixed down to stereo{lowered}")
    if sound.shape[1] and start == 0 and abs(late) > TOLD_SHIFT * rate:
        away = abs(late) / rate
        notes.append(
            f"its sound begins {away:.3f} s after its picture: silence stands before it"
            if late > 0
            else f"its sound begins {away:.3f} s before its picture: that part is left out"
        )
    sound = F.pad(sound, (late, 0)) if late > 0 else sound[:, -late:]
    if seconds is not None:
        sound = sound[:, : int(seconds * rate)]
    if rate != SAMPLE_RATE:
        sound = resample_sound(sound, rate)
        notes.append(f"sound resampled from {rate} to {SAMPLE_RATE} Hz")
    return sound.contiguous(), tuple(notes)


def _decode_span(
    frames: Iterator[av.AudioFrame], origin: Fraction | None, start: Fraction, seconds: float | Fraction | None
) -> tuple[torch.Tensor, int, int]:
    """(float32 [2, l] at the file's rate, the rate, how many samples after ``start`` it begins; negative: before)."""
    resampler, pieces, count, rate, late = None, [], 0, SAMPLE_RATE, 0
    for frame in frames:
        if resampler is None:
            rate = frame.sample_rate
            # Mono stays mono here: the library would lower it by 3 dB on its way to stereo.
            layout = frame.layout if frame.layout.nb_channels <= AUDIO_CHANNELS else "stereo"
            resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
            if origin is None:
                origin = Fraction(0) if frame.pts is None else frame.pts * frame.time_base
            begin = origin if frame.pts is None else frame.pts * frame.time_base
            late = round((begin - origin - start) * rate)
        for part in resampler.resample(frame):
            pieces.append(torch.from_numpy(part.to_ndarray()))
            count += pieces[-1].shape[1]
        if seconds is not None and count + late >= seconds * rate:
            break
    if resampler is not None:
        pieces += [torch.from_numpy(part.to_ndarray()) for part in resampler.resample(None)]
    sound = torch.cat(pieces, dim=1).float() if pieces else torch.zeros(1, 0)  # [1 or 2, l]
    return sound.expand(AUDIO_CHANNELS, -1), rate, late


def _check_span(start_seconds: float, max_seconds: float | None) -> None:
    if not (math.isfinite(start_seconds) and start_seconds >= 0):
        raise H3Error(f"start_seconds is {start_seconds}: give 0 or more")
    if max_seconds is not None and not (math.isfinite(max_seconds) and max_seconds > 0):
        raise H3Error(f"max_seconds is {max_seconds}: give more than 0, or nothing for all")
