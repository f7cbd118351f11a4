"""python -m h3_runtime.demo.score [--json]: what the carried small model can do, measured with held prompts.

    50 scenes that no training saw ─render─▶ colour, shape, direction │ pitch, side        (also with the few-step LoRA)
    first, last, middle frame      ─render─▶ PSNR at the frame that was given
    a mask over the shape          ─render─▶ changed inside, latent cells outside the same bits, tiles outside too
    a picture of a colour          ─render─▶ the colour carries over
    both VAEs                      ─round trip─▶ PSNR, signal to noise
    lossless against shortcuts     ─render─▶ PSNR, median of seeds

Every figure is of this machine's run; the targets stand beside it, and what misses one is shown so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..accelerators import parse
from ..checkpoint.parts import find_parts
from ..lora import Lora
from ..model import Loading, Models
from ..render import RenderResult, render_request
from ..request import GuideRequest, Media, ReferenceRequest, RenderRequest
from ..schedule import DEFAULT_FORWARDS
from .carried import CARRIED_MODEL, FEW_STEP_LORA
from .measure import judge_picture, judge_sound, look, nearest_colour, psnr
from .world import COLOURS, HELD_SEED, Scene, held_scenes

SIZE, FRAMES = (128, 128), 22
FORWARDS, FEWER, FEW = 24, 12, 4
TWO_TILES = (448, 256)


@dataclass(frozen=True)
class Line:
    """One figure. ``passed`` None: no target stands for it."""

    name: str
    value: float
    unit: str
    target: str = ""
    passed: bool | None = None

    def __str__(self) -> str:
        verdict = "" if self.passed is None else "  reached" if self.passed else "  NOT reached"
        return f"{self.name:<42} {self.value:9.2f} {self.unit:<6} {self.target}{verdict}"


class Renderer:
    """The carried model, loaded once per way to load it."""

    def __init__(self, loading: Loading | None = None, forwards: int = FORWARDS):
        self.models = Models(find_parts(CARRIED_MODEL), torch.float32, "cpu", keep=True, loading=loading)
        self.forwards = forwards

    def run(self, prompt: str, seed: int = 0, forwards: int | None = None, **given) -> RenderResult:
        request = RenderRequest(
            prompt,
            **{"size": SIZE, "frames": FRAMES, **given},
            num_forwards=forwards or self.forwards,
            seed=seed,
            dtype="float32",
        )
        return render_request(request, self.models)

    def frames(self, latent: Tensor) -> np.ndarray:
        """uint8 [F, H, W, 3] of a normalised picture latent."""
        return self.models.video_vae().decode(latent)[0].permute(1, 2, 3, 0).mul(255).round().byte().numpy()

    def sound(self, latent: Tensor) -> Tensor:
        """float32 [2, L] of a normalised sound latent."""
        return self.models.audio_vae().decode(latent)[0]


def percent(values: list[bool]) -> float:
    return 100 * sum(values) / max(len(values), 1)


def score_prompts(renderer: Renderer, scenes: list[Scene], name: str = "prompts", held: bool = True) -> list[Line]:
    """Colour, shape, direction, pitch and side over ``scenes``, each rendered once."""
    verdicts = []
    for number, scene in enumerate(scenes):
        result = renderer.run(scene.prompt, seed=number)
        sound = judge_sound(renderer.sound(result.latent.audio), scene)
        verdicts.append({**judge_picture(renderer.frames(result.latent.video), scene), **sound})
    lines = []
    for what in ("colour", "shape", "direction", "pitch", "side"):
        share = percent([verdict[what] for verdict in verdicts])
        lines.append(Line(f"{name}/{what}", share, "%", ">= 90 %" if held else "", share >= 90 if held else None))
    share = percent([all(verdict.values()) for verdict in verdicts])
    return [*lines, Line(f"{name}/all five", share, "%")]


def score_anchors(renderer: Renderer, scenes: list[Scene]) -> list[Line]:
    """PSNR of the decoded frame at a first, last and middle frame that was given as a picture."""
    lines = []
    for where, index in (("first frame", 0), ("last frame", FRAMES - 1), ("middle guide", FRAMES // 2)):
        values = []
        for number, scene in enumerate(scenes):
            picture = scene.frame(*SIZE, index / (FRAMES - 1))
            media = Media(frames=picture[None], name="anchor.png")
            given = {"first frame": {"first_frame": media}, "last frame": {"last_frame": media}}.get(
                where, {"guides": (GuideRequest(media, frame=index),)}
            )
            made = renderer.frames(renderer.run(scene.prompt, seed=number, **given).latent.video)
            values.append(psnr(made[index], picture))
        median = float(np.median(values))
        lines.append(Line(f"anchor/{where}", median, "dB", ">= 25 dB", median >= 25))
    return lines


def score_edit(renderer: Renderer) -> list[Line]:
    """A red circle is made blue inside a mask; what is kept must be the source's own bits."""
    lines = []
    for name, size in (("edit", SIZE), ("edit two tiles", TWO_TILES)):
        scene = Scene("red", "circle", "stays", place="left")
        clip, sound = scene.frames(*size, FRAMES), scene.sound(FRAMES)
        mask = np.zeros((1, size[1], size[0]), np.float32)
        mask[:, : size[1] * 7 // 8, : min(size[0] // 2, 192) if name == "edit" else 176] = 1
        source = Media(frames=clip, audio=sound, name="source")
        result = renderer.run(
            replace(scene, colour="blue").prompt,
            size=size,
            source=source,
            mask=Media(frames=mask, name="mask"),
            sound_mask="keep",
        )
        before, after = result.job.source.video, result.latent.video
        cells = result.job.masks.video == 0
        same = bool((before[0][:, cells] == after[0][:, cells]).all()) and torch.equal(
            result.job.source.audio, result.latent.audio
        )
        old, new = renderer.frames(before), renderer.frames(after)
        seen = look(new[FRAMES // 2])
        changed = seen is not None and nearest_colour(seen.colour) == "blue"
        lines += [
            Line(f"{name}/blue inside", float(changed), "", "1", changed),
            Line(f"{name}/kept cells same bits", float(same), "", "1", same),
        ]
        if name != "edit":
            alone = slice(16 * 16, size[0])  # what only the second tile decodes
            equal = bool((old[:, :, alone] == new[:, :, alone]).all())
            lines.append(Line(f"{name}/second tile's own pixels same bits", float(equal), "", "1", equal))
    return lines


def score_references(renderer: Renderer, count: int) -> list[Line]:
    """A picture gives the colour, the prompt everything else. By the recipe comfy, which does not enlarge pictures."""
    right = []
    for number in range(count):
        scene = replace(Scene(motion="stays"), colour=list(COLOURS)[number % len(COLOURS)])
        shown = replace(scene, shape="square").frame(128, 128, 0.0)
        prompt = scene.words(f"{scene.shape} in the colour of <Picture 1>")
        reference = ReferenceRequest("image", Media(frames=shown[None], name="colour.png"))
        result = renderer.run(prompt, seed=number, references=(reference,), recipe="comfy")
        seen = look(renderer.frames(result.latent.video)[FRAMES // 2])
        right.append(seen is not None and nearest_colour(seen.colour) == scene.colour)
    share = percent(right)
    return [Line("reference/colour", share, "%", ">= 80 %", share >= 80)]


def score_codecs(renderer: Renderer, scenes: list[Scene]) -> list[Line]:
    """Both VAEs' round trips over scenes."""
    errors, signal, noise = [], 0.0, 0.0
    for scene in scenes:
        clip = scene.frames(*SIZE, FRAMES)
        made = renderer.frames(renderer.models.video_vae().encode_mean(torch.from_numpy(clip)))
        errors.append(float(((made.astype(np.float64) - clip) ** 2).mean()))
        sound = scene.sound(FRAMES)
        back = renderer.sound(renderer.models.audio_vae().encode(sound[None]))[:, : sound.shape[1]]
        signal, noise = signal + sound.square().sum().item(), noise + (back - sound).square().sum().item()
    picture, heard = 10 * np.log10(255**2 / np.mean(errors)), 10 * np.log10(signal / noise)
    return [
        Line("video VAE round trip", float(picture), "dB", ">= 28 dB", picture >= 28),
        Line("audio VAE round trip", float(heard), "dB", ">= 15 dB", heard >= 15),
    ]


def score_shortcuts(renderer: Renderer, seeds: int) -> list[Line]:
    """PSNR against the lossless render of the same seed: INT8, half of the calls forecast, half the steps.

    The order is wanted at the release's number of forwards. Fewer of them lie further apart, so that forecasting falls
    behind INT8: the figures at 12 stand beside it.
    """
    quantised = Renderer(Loading(quantise="int8_convrot"))
    prompt, lines = held_scenes(1)[0].prompt, []
    for forwards in (DEFAULT_FORWARDS, FEWER):
        values: dict[str, list[float]] = {"INT8": [], "forecast": [], "half": []}
        for seed in range(seeds):
            lossless = renderer.frames(renderer.run(prompt, seed, forwards).latent.video)
            for name, result in (
                ("INT8", quantised.run(prompt, seed, forwards)),
                ("forecast", renderer.run(prompt, seed, forwards, accelerators=(parse("forecast:calls=0.5"),))),
                ("half", renderer.run(prompt, seed, forwards // 2)),
            ):
                values[name].append(psnr(renderer.frames(result.latent.video), lossless))
        int8, forecast, steps = (float(np.median(of)) for of in values.values())
        name, wanted = f"against lossless, {forwards} forwards", forwards == DEFAULT_FORWARDS
        for what, value, target, passed in (
            ("INT8", int8, "above forecasting", int8 > forecast),
            ("half the calls forecast", forecast, "above half the steps", forecast > steps),
        ):
            lines.append(Line(f"{name}/{what}", value, "dB", target if wanted else "", passed if wanted else None))
        lines.append(Line(f"{name}/half the steps", steps, "dB"))
    return lines


def few_step() -> Renderer:
    """The carried model with its few-step LoRA."""
    return Renderer(Loading(loras=(Lora(FEW_STEP_LORA, 1.0),)), FEW)


def score_few(scenes: list[Scene]) -> list[Line]:
    """Four forwards with the few-step LoRA, and as many without it: what they show, and how far they are from the clip
    that all forwards make of the same noise."""
    lines, full = [], Renderer()
    for name, few in (
        (f"few-step LoRA, {FEW} forwards", few_step()),
        (f"without it, {FEW} forwards", Renderer(forwards=FEW)),
    ):
        lines += score_prompts(few, scenes, name, held=False)
        values = []
        for seed, scene in enumerate(scenes):
            whole = full.frames(full.run(scene.prompt, seed).latent.video)
            values.append(psnr(few.frames(few.run(scene.prompt, seed).latent.video), whole))
        lines.append(Line(f"{name}/against {full.forwards} forwards", float(np.median(values)), "dB"))
    return lines


def score(prompts: int = 50, say: Callable[[str], None] = lambda text: None) -> list[Line]:
    """All of it. ``prompts`` held prompts; the other parts shrink with it."""
    renderer, scenes = Renderer(), held_scenes(prompts)
    some = max(1, prompts // 10)
    parts: list[tuple[str, Callable[[], list[Line]]]] = [
        ("prompts", lambda: score_prompts(renderer, scenes)),
        ("anchors", lambda: score_anchors(renderer, held_scenes(some, HELD_SEED + 1))),
        ("edits", lambda: score_edit(renderer)),
        ("references", lambda: score_references(renderer, max(3, prompts // 4))),
        ("codecs", lambda: score_codecs(renderer, held_scenes(some, HELD_SEED + 2))),
        ("shortcuts", lambda: score_shortcuts(renderer, min(8, prompts))),
        ("few steps", lambda: score_few(scenes[: max(4, prompts // 2)])),
    ]
    lines = []
    for name, part in parts:
        if name == "few steps" and not FEW_STEP_LORA.is_file():
            continue
        began = time.perf_counter()
        made = part()
        for line in made:
            say(str(line))
        say(f"  ({name}: {time.perf_counter() - began:.1f} s)")
        lines += made
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m h3_runtime.demo.score", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--prompts", type=int, default=50, metavar="N", help="held prompts (default 50)")
    given = parser.parse_args(arguments)
    lines = score(given.prompts, (lambda text: None) if given.json else print)
    if given.json:
        print(json.dumps([line.__dict__ for line in lines], indent=1))
    return 0 if all(line.passed is not False for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
