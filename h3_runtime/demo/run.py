"""python -m h3_runtime demo: the small carried model rendering one prompt exactly and by two shortcuts, compared.

carried model ─▶ lossless ──────────────────▶ OUT/1_lossless.mp4 ─┐ frames and sound before encoding
              ├▶ INT8, quantised on loading ▶ OUT/2_int8.mp4 ─────┼─▶ OUT/int8/report.html ─────┐
              ├▶ half the calls foretold ───▶ OUT/3_forecast.mp4 ─┴─▶ OUT/forecast/report.html ─┴▶ OUT/report.html
              └▶ first frame + guide in the middle + sound guide ──▶ OUT/4_guided.mp4

The same code as real renders and real comparisons; only the model is small.
"""

from __future__ import annotations

import tempfile
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..checkpoint.parts import find_parts
from ..compare.measured import shown
from ..compare.report import Comparison, compare_saved, forget_kept
from ..compare.table import Link, Shown, TablePage
from ..errors import H3Error
from ..geometry import FPS, SAMPLE_RATE
from ..media import write_image
from ..model import Caches
from ..request import GuideRequest, Media, RenderRequest
from ..save import check_output, machine
from ..schedule import check_forwards
from ..ways import FIGURES, LOSSLESS, Bed, Taken, Way, figures_of
from .carried import CARRIED_MODEL
from .world import Scene

SIZE = (128, 128)  # what the carried model was trained at
FRAMES = 22
MIDDLE = 11
SOUND_SECONDS = 0.5


@dataclass(frozen=True)
class Clip:
    """One clip of the demo: its file, the way it goes, and what that is in plain words."""

    file: str
    way: str
    title: str

    @property
    def folder(self) -> str:
        """Where its comparison goes: the file's name without its number."""
        return self.file.partition("_")[2]


EXACT = Clip("1_lossless", LOSSLESS, "lossless")
SHORTCUTS = (
    Clip("2_int8", "int8_convrot", "INT8 (int8_convrot online)"),
    Clip("3_forecast", "forecast:calls=0.5", "step forecasting (half the calls)"),
)
GUIDED = Clip("4_guided", LOSSLESS, "first frame, guide in the middle and sound guide")
CLIPS = (EXACT, *SHORTCUTS, GUIDED)

UNITS = {name: unit for name, _, unit in FIGURES}

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]


def demo(out: Path, num_forwards: int, say: Say, progress: Progress) -> list:
    """Render, compare and write the page into ``out``; returns the results block of the command. The last sentence is
    the page's path."""
    prepare_folder(out, num_forwards)
    began = time.perf_counter()
    say(f"the small carried model, of the release's architecture: {CARRIED_MODEL}")
    say("it knows one coloured shape on grey and its tones, nothing else: what it can do stands in its CARD.md")
    bed = Bed(find_parts(CARRIED_MODEL), torch.float32, caches=Caches())
    warm_up(ways=tuple(dict.fromkeys(clip.way for clip in CLIPS)))
    plain = text_to_video(num_forwards)
    taken, made = {}, {}
    for clip in CLIPS:
        request = guided(out, num_forwards) if clip is GUIDED else plain
        say(f"{clip.file}: {clip.title}: {request.prompt}")
        taken[clip] = render(bed, clip, request, out, say, progress)
    for clip in SHORTCUTS:
        folder = out / clip.folder
        made[clip] = compare_saved(taken[EXACT].saved, taken[clip].saved, folder, drop_kept=False, progress=progress)
    for comparison in made.values():
        forget_kept(comparison)
    lines = conclusions(taken, made)
    page = page_of(taken, made, lines, plain).write(out / "report.html")
    seconds = time.perf_counter() - began
    say(f"done in {seconds:.1f} s")
    for line in lines:
        say(line)
    say(str(page.resolve()))
    return results(taken, made, lines, page, seconds)


def prepare_folder(out: Path, num_forwards: int) -> None:
    """H3Error for what cannot be written or rendered, before any work."""
    check_forwards(num_forwards)
    if out.exists() and not out.is_dir():
        raise H3Error(f"--out {out} is a file: give a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise H3Error(f"--out {out} cannot be made ({error.strerror}): choose another folder") from None
    for clip in CLIPS:
        check_output(out / f"{clip.file}.mp4")


def warm_up(
    device: str | torch.device = "cpu", dtype: torch.dtype | None = torch.float32, ways: Sequence[str] = (LOSSLESS,)
) -> None:
    """Two forwards of the carried model that nobody sees: what a process does once (imports, threads, buffers) must not
    be charged to the first clip that is timed."""
    bed = Bed(find_parts(CARRIED_MODEL), dtype, device)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for way in ways:
            bed.take(Way.read(way), text_to_video(2), Path(folder) / "warm.mp4")


def render(bed: Bed, clip: Clip, request: RenderRequest, out: Path, say: Say, progress: Progress) -> Taken:
    """One clip with what is to be said about it."""
    taken = bed.take(Way.read(clip.way), request, out / f"{clip.file}.mp4", progress, keep_frames=clip is not GUIDED)
    kept = taken.saved.kept
    for note in taken.saved.notes:
        if kept is None or not note.startswith(f"{kept.name} keeps"):  # until the comparison only
            say(f"  note: {note}")
    result = taken.result
    say(f"  label: {result.fidelity.title}")
    say(
        f"  wrote {taken.saved.video} ({result.canvas.num_frames} frames, {result.canvas.seconds:.3f} s, "
        f"{result.dit_calls} forwards)"
    )
    return taken


# --- what came of it -------------------------------------------------------------------------------------------------


def conclusions(taken: dict[Clip, Taken], made: dict[Clip, Comparison]) -> list[str]:
    """One sentence per clip that was compared: exact or not, calls, time, distance from the first."""
    exact = taken[EXACT].result
    claim = "exact" if taken[EXACT].exact else "not the release's schedule, the others are measured against it"
    lines = [f"{EXACT.title}: {claim}; {exact.dit_calls} DiT calls, {exact.seconds['denoise']:.2f} s of denoising"]
    for clip, comparison in made.items():
        result, figures = taken[clip].result, figures_of(comparison)
        saved = exact.dit_calls - result.dit_calls
        calls = f"{saved} of {exact.dit_calls} DiT calls saved" if saved else f"all {result.dit_calls} DiT calls made"
        ratio = exact.seconds["denoise"] / result.seconds["denoise"]
        lines.append(
            f"{clip.title}: {'exact' if taken[clip].exact else 'not exact'} ({result.fidelity.label}); {calls}, "
            f"{result.seconds['denoise']:.2f} s of denoising ({ratio:.2f} times as fast); picture PSNR "
            f"{shown(figures['psnr'], 'dB')}, SSIM {shown(figures['ssim'])}; sound distance "
            f"{shown(figures['mr_stft'])} (multi-resolution STFT, 0 is equal)"
        )
    return lines


def page_of(
    taken: dict[Clip, Taken], made: dict[Clip, Comparison], lines: Sequence[str], request: RenderRequest
) -> TablePage:
    """Clips, figures, and the way to each full comparison."""
    rows = []
    for clip in (EXACT, *made):
        result = taken[clip].result
        seconds = (f"{result.seconds[stage]:.2f}" for stage in ("encode", "denoise", "decode"))
        figures = {} if clip is EXACT else figures_of(made[clip])
        rows.append(
            [
                clip.title,
                str(result.fidelity.label),
                str(result.dit_calls),
                *seconds,
                *(shown(figures[n]) if figures else "-" for n in ("psnr", "ssim", "mr_stft")),
                Link("full comparison", f"{clip.folder}/report.html") if figures else "",
            ]
        )
    here = machine()
    basis = next(iter(made.values())).data["basis"]
    return TablePage(
        title="Lossless and two shortcuts",
        said=[
            f"One prompt and one seed, three renders with the small carried model: \u201c{request.prompt}\u201d, "
            f"{SIZE[0]}x{SIZE[1]}, {FRAMES} frames, seed {request.seed}. Figures are measured {basis}.",
            *lines,
        ],
        head=[
            "",
            "label",
            "DiT calls",
            "encode s",
            "denoise s",
            "decode s",
            "PSNR dB",
            "SSIM",
            "sound: STFT distance",
            "",
        ],
        rows=rows,
        clips=[Shown(f"{c.file}.mp4", c.title, one.result.fidelity.title) for c, one in taken.items()],
        after=[
            "The last clip stands beside them: its first frame, a picture in the middle and a sound are given.",
            f"Measured on this machine: {here['processor']}, threads: {here['threads']}, {here['device']}, torch "
            f"{here['torch']}. A model as small as this shows what the paths do, not what they save on a real one.",
            next(iter(made.values())).data["says"],
        ],
    )


def results(
    taken: dict[Clip, Taken], made: dict[Clip, Comparison], lines: Sequence[str], page: Path, seconds: float
) -> list:
    rows = []
    for clip, one in taken.items():
        result = one.result
        rows.append({"name": f"{clip.file}/video", "value": str(one.saved.video), "unit": "path"})
        rows.append({"name": f"{clip.file}/label", "value": result.fidelity.title, "unit": ""})
        rows.append({"name": f"{clip.file}/exact", "value": one.exact, "unit": ""})
        rows.append({"name": f"{clip.file}/frames", "value": result.canvas.num_frames, "unit": "frames"})
        rows.append({"name": f"{clip.file}/dit_calls", "value": result.dit_calls, "unit": "forwards"})
        rows.append({"name": f"{clip.file}/seconds", "value": sum(result.seconds.values()), "unit": "s"})
        for stage, value in result.seconds.items():
            rows.append({"name": f"{clip.file}/seconds/{stage}", "value": value, "unit": "s"})
    for clip, comparison in made.items():
        basis = comparison.data["basis"]
        for name, value in figures_of(comparison).items():
            rows.append({"name": f"{clip.file}/{name}", "value": value, "unit": UNITS[name], "basis": basis})
        rows.append({"name": f"{clip.file}/report", "value": str(comparison.page), "unit": "path"})
    rows += [{"name": "line", "value": line, "unit": ""} for line in lines]
    rows.append({"name": "seconds", "value": seconds, "unit": "s"})
    rows.append({"name": "report", "value": str(page.resolve()), "unit": "path"})
    return rows


# --- what is rendered ------------------------------------------------------------------------------------------------


def text_to_video(num_forwards: int) -> RenderRequest:
    """The clip that goes three ways: a prompt and nothing else."""
    prompt = "a red circle moves left to right, low tone"
    return RenderRequest(prompt, SIZE, frames=FRAMES, num_forwards=num_forwards, dtype="float32")


def guided(out: Path, num_forwards: int) -> RenderRequest:
    """The last clip: its first frame, one guide in the middle and half a second of sound, all drawn here."""
    first = out / "first_frame.png"
    middle = out / "guide.png"
    scene = Scene("red", "circle", "changes", second="blue", tone="middle")
    write_image(first, scene.frame(*SIZE, 0.0))
    write_image(middle, scene.frame(*SIZE, MIDDLE / (FRAMES - 1)))
    sound = write_sound(out / "tone.wav", tone(440.0, SOUND_SECONDS))
    return RenderRequest(
        scene.prompt,
        SIZE,
        frames=FRAMES,
        first_frame=Media(str(first)),
        guides=(
            GuideRequest(Media(str(middle)), frame=MIDDLE),
            GuideRequest(Media(str(sound)), seconds=MIDDLE / FPS),
        ),
        num_forwards=num_forwards,
        seed=1,
        dtype="float32",
    )


def disc(colour: tuple[int, int, int], across: float) -> np.ndarray:
    """uint8 [H, W, 3]: a disc of ``colour`` at ``across`` (0..1) of the width, on grey."""
    width, height = SIZE
    y, x = np.mgrid[:height, :width]
    inside = (x - across * width) ** 2 + (y - height / 2) ** 2 < (height / 4) ** 2
    return np.where(inside[..., None], np.array(colour), np.array((128, 128, 128))).astype(np.uint8)


def tone(hertz: float, seconds: float) -> torch.Tensor:
    """float32 [2, L] at 32 kHz: a sine at a quarter of full scale on both channels."""
    time_points = torch.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (0.25 * torch.sin(2 * torch.pi * hertz * time_points)).expand(2, -1).contiguous()


def write_sound(path: Path, sound: torch.Tensor) -> Path:
    """float32 [2, L] at 32 kHz to a wav file of 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((sound.T * 32767).round().to(torch.int16).contiguous().numpy().astype("<i2").tobytes())
    return path
