"""A render's latent to files: mp4 with sound, manifest and report beside it, or the latent itself.

    RenderResult ─decode─▶ clip.mp4 (manifest in its metadata) ─▶ clip.json (manifest) ─▶ clip.report.json (measured)
                  keep_frames ─▶ clip.kept.mkv (frames and sound before encoding, until they were compared)
    stopped early ───────▶ clip.latent.safetensors (state and source, to go on from)

The latent is written first and removed last: a failed decode costs no finished sampling, and says where it stands.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from .decode import Decoder, decode_audio, decode_video
from .errors import H3Error, NonFiniteError
from .latents import PartialLatent, save_latent
from .manifest import METADATA_KEY, dump, make_manifest
from .media import KeptWriter, Mp4Writer, Tee, check_output_path, kept_path, put_back
from .memory.probe import driver_version
from .model import Models
from .render import Progress, RenderResult, run_fingerprint
from .soundness import WARNING, judge_latent
from .unfinished import write_whole


@dataclass(frozen=True)
class Saved:
    """Where a render went. ``video`` is None for a run that stopped early."""

    video: Path | None
    latent: Path | None
    manifest: Path | None
    report: Path
    notes: tuple[str, ...]
    kept: Path | None = None


def check_output(path: str | Path) -> Path:
    """The mp4's path, checked before any long work: the longest name that will stand beside it can be made there."""
    try:
        out = check_output_path(path)
        for beside in files_of(out):
            if beside.is_dir():
                raise H3Error(f"{beside} is a folder, and a file of that name is written beside {out.name}: rename it")
        probe = latent_path(out).with_name(latent_path(out).name + ".partial")
        with contextlib.suppress(FileExistsError):
            open(probe, "x").close()
            probe.unlink()
    except H3Error:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise H3Error(f"{path} cannot be written ({reason}): choose a shorter name or another folder") from None
    return out


def latent_path(out: Path) -> Path:
    return out.with_suffix(".latent.safetensors")


def files_of(out: Path) -> list[Path]:
    """All that a render to ``out`` may write or remove."""
    return [out, latent_path(out), out.with_suffix(".json"), out.with_suffix(".report.json"), kept_path(out)]


def keep_inputs(out: Path, inputs: Iterable[str | Path]) -> None:
    """H3Error when a file that this render reads would be replaced or removed by what it writes to ``out``."""
    if not out.name:
        raise H3Error(f"--out {str(out)!r} is no file name: give one")
    for read in map(Path, inputs):
        for path in files_of(out):
            if path.exists() and read.exists() and os.path.samefile(path, read):
                raise H3Error(f"--out {out} would replace {path.name}, which this render reads: choose another name")


def save_clip(
    result: RenderResult,
    models: Models,
    out: str | Path,
    metadata: bool = True,
    keep_latent: bool = False,
    progress: Progress | None = None,
    keep_frames: bool = False,
) -> Saved:
    """Decode ``result`` to ``out`` (mp4), or save its state where the run stopped early.

    ``keep_frames``: keep its frames and sound as they were before encoding beside it, for ``compare``. Frames that an
    earlier render of that name left are removed: they are not this clip's.
    """
    out = check_output(out)
    manifest = make_manifest(result)
    job, done = result.job, result.job.schedule.stop
    latent = save_latent(
        latent_path(out),
        job.canvas,
        result.latent,
        None if result.finished else job.source,
        finished=result.finished,
        stop=done,
        sigma_video=job.schedule.video[done],
        sigma_audio=job.schedule.audio[done],
        task=job.task,
        source_sound=result.source_sound is not None,
        run=run_fingerprint(job, result.infos["dit"], result.dtype),
    )
    notes: list[str] = list(result.notes)
    video = None
    if result.finished:
        began = time.perf_counter()

        def told(stage: str, done: int, total: int) -> None:
            if done == 1:  # the first chunk: from here on there is a picture to look at
                result.stats["first_frame_seconds"] = sum(result.seconds.values()) + time.perf_counter() - began
            if progress is not None:
                progress(stage, done, total)

        try:
            with result.spent.stage("decode"):
                tags = {METADATA_KEY: dump(manifest)} if metadata else None
                kept = kept_path(out)
                kept.unlink(missing_ok=True)
                ways = models.decoders(result.request.tile_batch)
                files = out, kept if keep_frames else None
                video = _decode_to(files, result, models, tags, told, notes, ways)
                if keep_frames and video != out:
                    kept.replace(kept_path(video))
                decoders = {
                    f"{part}: {note}" for part in ("audio_vae", "video_vae") for note in models.infos[part].notes
                }
                notes += sorted(decoders - set(notes))
        except (H3Error, KeyboardInterrupt) as error:
            said = str(error) or "stopped while it was decoded"
            raise type(error)(f"{said}; the finished latent is kept in {latent}") from error
        if not keep_latent:
            latent.unlink(missing_ok=True)
            latent = None
    if result.recovery is not None:
        result.recovery.discard()
    manifest_file = out.with_suffix(".json") if metadata else None
    if manifest_file is not None:
        _write_text(manifest_file, dump(manifest))
    else:
        out.with_suffix(".json").unlink(missing_ok=True)  # that of an earlier clip of this name speaks of another
    report = out.with_suffix(".report.json")
    _write_text(report, json.dumps(make_report(result, notes), indent=1, ensure_ascii=False))
    kept = kept_path(video) if keep_frames and video is not None else None
    return Saved(video, latent, manifest_file, report, tuple(notes), kept)


def decode_latent(
    saved: PartialLatent, models: Models, out: str | Path, progress: Progress | None = None
) -> tuple[Path, tuple[str, ...]]:
    """Decode a saved finished latent to ``out``; returns the path and sentences.

    Manifest and report of an earlier clip of that name are removed: they speak of another.
    """
    notes: list[str] = []
    if saved.info.get("source_sound"):
        notes.append("the kept sound is decoded from the latent: only its own render can put the source's samples back")
    video = _decode_to((check_output(out), None), saved, models, None, progress, notes)
    for earlier in (video.with_suffix(".json"), video.with_suffix(".report.json")):
        earlier.unlink(missing_ok=True)  # of another clip of this name
    return video, tuple(notes)


def _decode_to(
    files: tuple[Path, Path | None],
    made: RenderResult | PartialLatent,
    models: Models,
    tags: dict[str, str] | None,
    progress: Progress | None,
    notes: list[str],
    ways: list[Decoder] | None = None,
) -> Path:
    out, kept = files  # kept: where frames and sound before encoding go, or None
    canvas, latent = made.canvas, made.latent
    report = progress or (lambda stage, done, total: None)
    notes += [f"{WARNING}{sentence}" for sentence in judge_latent(latent)]
    try:
        sound, _ = decode_audio(models.audio_vae(), latent, canvas)
        if isinstance(made, RenderResult) and made.source_sound is not None:
            sound, note = put_back(sound, made.source_sound, made.job.masks.audio == 0)
            notes.append(note)
    except NonFiniteError as error:
        notes.append(f"the sound could not be decoded and the video was saved without it: {error}")
        sound = None
    models.done("audio_vae")
    with contextlib.ExitStack() as opened:
        sinks = []
        if kept is not None:  # closed last, so that it is never older than its mp4
            sinks.append(opened.enter_context(KeptWriter(kept, canvas.width, canvas.height, sound)))
        writer = opened.enter_context(Mp4Writer(out, canvas.width, canvas.height, canvas.num_frames, sound, tags))
        sink = Tee(writer, *sinks)
        notes += decode_video(
            ways or models.decoders(), latent, sink, lambda done, total: report("decode", done, total)
        )
    if kept is not None:
        notes.append(f"{kept.name} keeps frames and sound as before encoding ({kept.stat().st_size / 2**20:.1f} MiB)")
    models.done("video_vae")
    notes += writer.notes
    return writer.path


def make_report(result: RenderResult, notes: list[str]) -> dict:
    """Measurements and sentences about one render; nothing here decides its output."""
    process = psutil.Process()
    memory = process.memory_info()
    return {
        "label": result.fidelity.title,
        "fidelity": result.fidelity.to_dict(),
        "notes": notes,
        "size": f"{result.canvas.width}x{result.canvas.height}",
        "frames": result.canvas.num_frames,
        "seconds_of_video": result.canvas.seconds,
        **result.spent.to_dict(),
        "step_seconds": list(result.step_seconds),
        "dit_calls": result.dit_calls,
        "device_bytes_peak": device_peak(),
        "oom_retries": sum("ran out of memory" in note for note in notes),
        "host_bytes_peak": getattr(memory, "peak_wset", None) or _peak_rss(),
        "machine": machine(),
        "stats": result.stats,
    }


def device_peak() -> int | None:
    """Peak bytes that torch has held on the card since the process began; None without a card."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def _peak_rss() -> int | None:
    try:
        import resource
    except ImportError:  # Windows reports its peak through psutil
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes, Linux in KiB


def machine() -> dict:
    """The machine that measured: processor, cores, memory, versions. No host or user name."""
    import torch

    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": driver_version(torch.cuda) if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _write_text(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise H3Error(f"{path.name} could not be written: {error.strerror}; choose another folder") from None
