"""Finished clips one after another into one mp4, frame by frame: memory stays at a few frames, however many clips.

a.mp4  124 frames ─┐
b.mp4   90 frames ─┼─▶ Mp4Writer: 214 frames, sound cut at the frames' own boundaries
...                ┘        (0, 165333, 285333 samples: rounded once from the whole length, so nothing adds up)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import torch

from ..errors import H3Error
from ..geometry import AUDIO_CHANNELS, SAMPLE_RATE, audio_samples
from ..soundness import FrameLevels, judge_clips
from ..unfinished import drop, part_path
from .clips import stream_frames
from .files import check_output_path, open_media, publish
from .sound import fit_audio, read_audio
from .write import Encoding, Mp4Writer


@dataclass(frozen=True)
class Take:
    """A clip to join: a file, from ``start_seconds`` on, at most ``max_frames`` frames of it (None: to its end)."""

    path: str | os.PathLike
    start_seconds: float = 0.0
    max_frames: int | None = None

    @property
    def name(self) -> str:
        return Path(self.path).name


def join_files(
    takes: Sequence[Take],
    out: str | os.PathLike,
    metadata: dict[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    encoding: Encoding | None = None,
) -> tuple[Path, int, tuple[str, ...]]:
    """Write ``takes`` into one mp4 with their sound: (its path, its frames, sentences). ``progress(done, clips)``.

    Clips of other rates are put on 24 fps; a clip without sound is silent. H3Error for clips of several sizes.
    """
    out = check_output_path(out)
    if not takes:
        raise H3Error("no clip to join was given: give at least one")
    notes, sounds, total, contrasts = [], [], 0, []
    height, width = next(stream_frames(takes[0].path, 1, takes[0].start_seconds)).shape[:2]
    with Mp4Writer(out, width, height, metadata=metadata, encoding=encoding or Encoding()) as writer:
        for done, take in enumerate(takes, start=1):
            before, levels = total, FrameLevels()
            for picture in stream_frames(take.path, take.max_frames, take.start_seconds):
                if picture.shape[:2] != (height, width):
                    raise H3Error(
                        f"{take.name} is {picture.shape[1]}x{picture.shape[0]} and {takes[0].name} {width}x{height}: "
                        "only clips of one size can be joined; resize one first"
                    )
                writer.write(picture[None])
                levels.add(torch.from_numpy(picture).permute(2, 0, 1)[None, :, None].float() / 255)
                total += 1
            contrasts += [levels.contrast] if levels.spread else []
            samples = audio_samples(total) - audio_samples(before)
            sounds.append(_sound_of(take, samples, notes))
            if progress is not None:
                progress(done, len(takes))
        writer.set_audio(torch.cat(sounds, dim=1))
    return writer.path, total, (*notes, *judge_clips(contrasts), *writer.notes)


def copy_tracks(source: str | os.PathLike, target: str | os.PathLike, metadata: dict[str, str] | None = None) -> Path:
    """Copy the coded picture and sound of an mp4 to another, bit for bit, with ``metadata`` in place of its own tags
    (workflow, prompt)."""
    target = check_output_path(target)
    part = part_path(target, target.suffix)
    try:
        with (
            open_media(source) as given,
            av.open(str(part), "w", format="mp4", options={"movflags": "use_metadata_tags+faststart"}) as made,
        ):
            made.metadata.update(metadata or {})
            wanted = [*given.streams.video[:1], *given.streams.audio[:1]]
            copies = {stream.index: made.add_stream_from_template(stream) for stream in wanted}
            for packet in given.demux(wanted):
                if packet.dts is not None:
                    packet.stream = copies[packet.stream.index]
                    made.mux(packet)
        return publish(part, target)
    except av.FFmpegError as error:
        raise H3Error(f"{target} could not be written ({error}): choose another folder") from error
    finally:
        drop(part)


def _sound_of(take: Take, samples: int, notes: list[str]) -> torch.Tensor:
    """The clip's sound [2, samples], filled up with silence."""
    try:
        sound = read_audio(take.path, take.start_seconds, samples / SAMPLE_RATE + 1)
    except H3Error as error:
        if "holds no sound" not in str(error):
            raise
        notes.append(f"{take.name} has no sound: it is silent in the joined clip")
        return torch.zeros(AUDIO_CHANNELS, samples)
    sound, note = fit_audio(sound[:, :samples], samples)
    if note is not None:
        notes.append(f"{take.name}: {note}")
    return sound
