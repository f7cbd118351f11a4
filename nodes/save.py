"""Video files: frames and sound, or a latent decoded straight into the file, or finished files joined.

IMAGE + AUDIO ─▶ H3 Save Video ────────────────┐
LATENT + VAEs ─▶ H3 Decode and Save Video ─────┼─▶ mp4 with the workflow (dropping it on the canvas restores it)
VIDEO, VIDEO, ... ─▶ H3 Join Video Files ──────┘   and the manifest of the render
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from . import host
from .av_latent import take_latent
from .media import FPS, take_frames, take_sound, video_file
from .references import numbered
from .render import (
    decoded_by,
    judged,
    label_of,
    looks_sound,
    original_input,
    settled_batch,
    taken_for_decoding,
    tile_batch_input,
    tile_paths,
    with_original,
)
from .sockets import CATEGORY, Node, io, video_of_file
from .stand_ins import PictureAsVae, part_of

FOLDER = f"{CATEGORY}/video"
MANIFEST = "h3_manifest"
PREFIX_TOOLTIP = (
    "Name below the output folder; a number is added. %width%, %height%, %year% and the like are filled in."
)


def prefix_input():
    return io.String.Input("filename_prefix", optional=True, default="h3/clip", tooltip=PREFIX_TOOLTIP)


def crf_input():
    return io.Int.Input(
        "crf",
        optional=True,
        default=16,
        min=0,
        max=51,
        tooltip="Quality of H.264: lower is better and larger; 16 is hard to tell from the original.",
    )


def lossless_input():
    return io.Boolean.Input(
        "lossless",
        optional=True,
        default=False,
        tooltip="Keep every pixel and sample value, for comparing clips; few players show such a file.",
    )


def keep_frames_input():
    return io.Boolean.Input(
        "keep_frames",
        optional=True,
        default=False,
        tooltip="Keep frames and sound as before encoding beside the file, with its report, for H3 Compare Videos.",
    )


def file_outputs():
    return [
        io.Video.Output("video", display_name="video", tooltip="The saved file."),
        io.String.Output("report", display_name="report", tooltip="Label and notes, as text."),
    ]


def tags_for(node, result, parts=(), tile_batch: int = 1, paths=()) -> tuple[dict[str, str], Any]:
    """(metadata of the file, the render's Fidelity or None): workflow, prompt and, for a render of ours, manifest."""
    from ..h3_runtime import dump, make_manifest, with_parts

    tags, label = host.workflow_tags(node.hidden), None
    if result is not None:
        whole = with_parts(result, parts, tile_batch, paths)
        label = whole.fidelity
        if host.metadata_allowed():
            tags[MANIFEST] = dump(make_manifest(whole))
    return tags, label


def done(node, path: Path, shown: dict, notes: list[str], label, sound: bool = True):
    """The node's outputs for a written file; the page plays it."""
    shown = {**shown, "filename": path.name}
    report = "\n".join(([label.title] if label else []) + notes)
    ui = {"images": [shown], "animated": (True,)}
    return node.report(notes, video_of_file(path), report, ui=ui, label=label, sound=sound)


def forget(result) -> None:
    """The clip is saved: the state that would have taken the run up again may go."""
    if result is not None and result.recovery is not None:
        result.recovery.discard()


class SaveVideo(Node):
    """Frames and sound to an mp4."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeSaveVideo",
            display_name="H3 Save Video",
            category=FOLDER,
            description="Saves frames and sound as mp4 (H.264, AAC) at 24 fps. The file carries the workflow; "
            "dropped on "
            "the canvas it restores it. With the latent connected it carries the manifest of the render too.",
            search_aliases=["save mp4", "export video"],
            inputs=[
                io.Image.Input("images", tooltip="The frames."),
                prefix_input(),
                io.Audio.Input("audio", optional=True, tooltip="The sound; cut or filled with silence to the frames."),
                io.Latent.Input("latent", optional=True, tooltip="The latent they come from, for label and manifest."),
                crf_input(),
                lossless_input(),
                io.Float.Input(
                    "fps",
                    optional=True,
                    default=24.0,
                    min=1.0,
                    max=240.0,
                    step=0.001,
                    tooltip="24 only: the model makes 24 frames a second, and at another rate the sound no "
                    "longer fits.",
                ),
            ],
            outputs=file_outputs(),
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, images, filename_prefix="h3/clip", audio=None, latent=None, **options):
        from ..h3_runtime import Encoding, Mp4Writer

        notes: list[str] = []
        taken = None if latent is None else take_latent({**latent, "noise_mask": None})
        result = None if taken is None or taken.carried is None else taken.carried.result
        parts, batch, tile = decoded_by(images)
        tags, _ = tags_for(cls, result, parts, batch, tile_paths(tile))
        label = None if taken is None else label_of(taken, parts, batch, tile_paths(tile))
        height, width = images.shape[1:3]
        path, shown = host.output_file(filename_prefix, ".mp4", width, height)
        encoding = Encoding(crf=options.get("crf", 16), lossless=options.get("lossless", False))
        sound = take_sound(audio, "sound", notes)
        with Mp4Writer(path, width, height, len(images), sound, tags, options.get("fps", FPS), encoding) as writer:
            teller = host.Teller(cls, len(images), "saving")
            for start in range(0, len(images), 24):
                host.poll()
                writer.write(take_frames(images[start : start + 24], "frames", notes))
                teller.steps(min(start + 24, len(images)), len(images))
        forget(result)
        notes += [*writer.notes, f"saved {writer.path.name}: {len(images)} frames ({len(images) / FPS:.3f} s)"]
        return done(cls, writer.path, shown, notes, label)


class DecodeAndSave(Node):
    """A latent straight to an mp4."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeDecodeAndSave",
            display_name="H3 Decode and Save Video",
            category=FOLDER,
            description="Decodes a latent chunk by chunk straight into an mp4 with its sound: memory stays "
            "small however "
            "long the clip. The file carries workflow and manifest. Sound that cannot be decoded costs the "
            "sound, not the "
            "picture.",
            search_aliases=["stream decode", "save mp4"],
            inputs=[
                io.Latent.Input("latent", tooltip="The sampler's latent."),
                io.Vae.Input("video_vae", tooltip="The video VAE."),
                io.Vae.Input("audio_vae", tooltip="The audio VAE."),
                prefix_input(),
                crf_input(),
                lossless_input(),
                keep_frames_input(),
                original_input(),
                tile_batch_input(),
            ],
            outputs=file_outputs(),
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, latent, video_vae, audio_vae, filename_prefix="h3/clip", **options):
        from ..h3_runtime import (
            Encoding,
            KeptWriter,
            Mp4Writer,
            NonFiniteError,
            Tee,
            decode_audio,
            decode_video,
            fit_audio,
            kept_path,
        )

        taken, notes, _ = taken_for_decoding(latent)
        canvas, clip = taken.canvas, taken.clip
        result = None if taken.carried is None else taken.carried.result
        picture, ears = part_of(video_vae, "video_vae"), part_of(audio_vae, "audio_vae")
        batch = settled_batch(options.get("tile_batch", 1), picture, notes)
        path, shown = host.output_file(filename_prefix, ".mp4", canvas.width, canvas.height)
        wave = None
        try:
            if hasattr(ears, "part"):
                wave, _ = decode_audio(ears.load(), clip, canvas)
            else:
                wave, _ = fit_audio(audio_vae.decode(clip.audio).movedim(-1, 1)[0].float().cpu(), canvas.audio_samples)
        except NonFiniteError as error:
            notes.append(f"WARNING: the sound could not be decoded and the video was saved without it: {error}")
        if wave is not None:
            wave = with_original(wave, options.get("original"), taken, notes)
        encoding = Encoding(crf=options.get("crf", 16), lossless=options.get("lossless", False))
        keep = options.get("keep_frames", False)
        with contextlib.ExitStack() as files:
            sinks = (
                [files.enter_context(KeptWriter(kept_path(path), canvas.width, canvas.height, wave))] if keep else []
            )
            writer = files.enter_context(
                Mp4Writer(path, canvas.width, canvas.height, canvas.num_frames, wave, encoding=encoding)
            )
            sink = PolledWriter(Tee(writer, *sinks))
            teller = host.Teller(cls, 1, "decoding the picture")
            if isinstance(picture, PictureAsVae):
                picture.prepare()
                notes += decode_video(picture.models.decoders(batch), clip, sink, teller.steps)
            else:
                frames = video_vae.decode(clip.video)[0]
                notes += judged(frames)
                sink.write(take_frames(frames, "frames", notes))
            tags, _ = tags_for(cls, result, [picture, ears], batch)  # the VAEs are loaded by now: they belong to it
            writer.set_metadata(tags)
        if keep:
            notes += keep_report(writer.path, result, ([picture, ears], batch), notes)
        forget(result)
        notes += [*writer.notes, f"saved {writer.path.name}: {canvas.num_frames} frames ({canvas.seconds:.3f} s)"]
        return done(cls, writer.path, shown, notes, label_of(taken, [picture, ears], batch), looks_sound(notes))


def keep_report(path: Path, result, decoded: tuple, notes: list[str]) -> list[str]:
    """Beside a file whose frames are kept: the report of its render, from which a comparison takes label and costs.
    ``decoded``: (VAEs, tiles at once) that made the frames."""
    from ..h3_runtime import kept_path, make_report, with_parts

    size = kept_path(path).stat().st_size / 2**20
    if result is not None:
        report = json.dumps(make_report(with_parts(result, *decoded), notes), indent=1, ensure_ascii=False)
        path.with_suffix(".report.json").write_text(report, encoding="utf-8")
    return [f"{kept_path(path).name} keeps the frames as before encoding ({size:.1f} MiB)"]


class PolledWriter:
    """A sink that looks for Cancel before each chunk."""

    def __init__(self, writer):
        self.writer = writer

    def write(self, frames) -> None:
        host.poll()
        self.writer.write(frames)


class JoinVideoFiles(Node):
    """Finished clips into one."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeJoinVideoFiles",
            display_name="H3 Join Video Files",
            category=FOLDER,
            description="Puts finished clips one after another into one mp4 with their sound, frame by frame: "
            "memory stays "
            "small however many there are. Picture and sound are cut at the same moments, so nothing drifts.",
            search_aliases=["concat video", "stitch"],
            inputs=[
                io.Autogrow.Input(
                    "videos",
                    template=io.Autogrow.TemplatePrefix(
                        input=io.Video.Input("video", tooltip="A clip; all of one size."),
                        prefix="video_",
                        min=1,
                        max=50,
                    ),
                    tooltip="The clips in their order.",
                ),
                prefix_input(),
                crf_input(),
                lossless_input(),
            ],
            outputs=file_outputs(),
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, videos, filename_prefix="h3/joined", **options):
        from ..h3_runtime import Encoding, join_files

        clips = [video for _, video in numbered(videos)]
        takes = [as_take(video, number) for number, video in enumerate(clips, start=1)]
        path, shown = host.output_file(filename_prefix, ".mp4")
        tags, _ = tags_for(cls, None)
        encoding = Encoding(crf=options.get("crf", 16), lossless=options.get("lossless", False))
        teller = host.Teller(cls, len(takes), "joining")
        path, frames, notes = join_files(takes, path, tags, Polled(teller), encoding)
        notes = [*notes, f"saved {path.name}: {len(takes)} clips, {frames} frames ({frames / FPS:.3f} s)"]
        return done(cls, path, shown, notes, None)


class Polled:
    """Progress that looks for Cancel."""

    def __init__(self, teller):
        self.teller = teller

    def __call__(self, finished: int, total: int) -> None:
        host.poll()
        self.teller.steps(finished, total)


def as_take(video, number: int):
    """A VIDEO as a file to join: the file behind it, or one written for it in the host's temporary folder."""
    from ..h3_runtime import Take

    path = video_file(video)
    if path is not None:
        return Take(path)
    source = getattr(video, "get_stream_source", lambda: None)()
    start, seconds = getattr(video, "get_active_trim_window", lambda: (0.0, 0.0))()
    if isinstance(source, (str, Path)):
        return Take(source, start, round(seconds * FPS) if seconds else None)
    folder = host.temp_folder()
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"h3_join_{number:03}.mp4"
    video.save_to(str(written))
    return Take(written)


NODES = [SaveVideo, DecodeAndSave, JoinVideoFiles]
