"""python -m h3_runtime demo: two clips with the small carried model, through the same code as real renders.

carried model ─▶ 1 text to video                                   OUT/1_text_to_video.mp4
              ─▶ 2 first frame + guide in the middle + sound guide   OUT/2_guided.mp4
"""

from __future__ import annotations

import time
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..checkpoint.parts import find_parts
from ..errors import H3Error
from ..geometry import FPS, SAMPLE_RATE
from ..media import write_image
from ..model import Models
from ..render import render_request
from ..request import GuideRequest, Media, RenderRequest
from ..save import check_output, save_clip
from ..schedule import check_forwards
from .carried import CARRIED_MODEL
from .world import Scene

CLIPS = ("1_text_to_video", "2_guided")
SIZE = (128, 128)  # what the carried model was trained at
FRAMES = 22
MIDDLE = 11
SOUND_SECONDS = 0.5


def demo(out: Path, num_forwards: int, say: Callable[[str], None], progress: Callable[[str, int, int], None]) -> list:
    """Render both clips into ``out``; returns the results block of the command."""
    check_forwards(num_forwards)
    if out.exists() and not out.is_dir():
        raise H3Error(f"--out {out} is a file: give a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise H3Error(f"--out {out} cannot be made ({error.strerror}): choose another folder") from None
    for name in CLIPS:
        check_output(out / f"{name}.mp4")
    began = time.perf_counter()
    say(f"the small carried model, of the release's architecture: {CARRIED_MODEL}")
    say("it knows one coloured shape on grey and its tones, nothing else: what it can do stands in its CARD.md")
    models = Models(find_parts(CARRIED_MODEL), torch.float32, "cpu", keep=True)
    results = []
    for name, request in zip(CLIPS, (text_to_video(num_forwards), guided(out, num_forwards))):
        say(f"{name}: {request.prompt}")
        result = render_request(request, models, progress)
        saved = save_clip(result, models, out / f"{name}.mp4", progress=progress)
        for note in saved.notes:
            say(f"  note: {note}")
        say(f"  label: {result.fidelity.title}")
        say(
            f"  wrote {saved.video} ({result.canvas.num_frames} frames, {result.canvas.seconds:.3f} s, "
            f"{result.dit_calls} forwards)"
        )
        results.append({"name": f"{name}/video", "value": str(saved.video), "unit": "path"})
        results.append({"name": f"{name}/label", "value": result.fidelity.title, "unit": ""})
        results.append({"name": f"{name}/frames", "value": result.canvas.num_frames, "unit": "frames"})
        results.append({"name": f"{name}/dit_calls", "value": result.dit_calls, "unit": "forwards"})
        results.append({"name": f"{name}/seconds", "value": sum(result.seconds.values()), "unit": "s"})
    seconds = time.perf_counter() - began
    say(f"done in {seconds:.1f} s")
    results.append({"name": "seconds", "value": seconds, "unit": "s"})
    return results


def text_to_video(num_forwards: int) -> RenderRequest:
    """The first clip: a prompt and nothing else."""
    prompt = "a red circle moves left to right, low tone"
    return RenderRequest(prompt, SIZE, frames=FRAMES, num_forwards=num_forwards, dtype="float32")


def guided(out: Path, num_forwards: int) -> RenderRequest:
    """The second clip: its first frame, one guide in the middle and half a second of sound, all drawn here."""
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
