"""What the DiT is trained on: scenes with their latents, text states and conditions, made once and kept in a file.

    random_scene ─▶ frames ─LinearEncoder─▶ video [24, T, h, w]     guides: single frames of the same scene
                 ─▶ sound  ─LinearEars────▶ audio [32, 2, A]         reference: a picture of the same colour
                 ─▶ words  ─TextEncoder───▶ hidden [L, 64], tags [L]

The encoders are the carried ones; theirs being linear, each is used as the one matrix it amounts to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...geometry import AUDIO_HOP, Canvas
from ...models.audio_vae import AudioVAE
from ...models.video_vae import VideoVAE
from ...text.encoder import TextEncoder
from ...text.presentation import Picture
from ...text.vision import preprocess_picture
from ..world import HELD, SHAPES, Scene, held_scenes, random_scene
from .audio_vae import CONFIG as EARS
from .audio_vae import KEPT
from .video_vae import LinearEncoder

KINDS = ("text", "first", "last", "both", "middle", "reference")
# kind, width, height, frames, how many
FIRST_PLAN = (("text", 128, 128, 22, 1400),)
PLAN = (
    *FIRST_PLAN,
    ("first", 128, 128, 22, 120),
    ("last", 128, 128, 22, 120),
    ("middle", 128, 128, 22, 200),
    ("reference", 128, 128, 22, 200),
    ("text", 192, 128, 39, 120),
    ("first", 192, 128, 39, 40),
)


@dataclass(frozen=True)
class Example:
    """One training clip; latents are normalised. ``guides`` (frame, video [24, 1, h, w]); ``reference`` [24, 1, h, w]
    or None; ``kind`` of ``KINDS``."""

    kind: str
    canvas: tuple[int, int, int]  # width, height, frames
    prompt: str
    hidden: Tensor
    tags: Tensor
    video: Tensor
    audio: Tensor
    guides: tuple[tuple[int, Tensor], ...] = ()
    reference: Tensor | None = None


class LinearEars:
    """The audio encoder as one matrix [32, 800] on blocks of samples."""

    def __init__(self, vae: AudioVAE):
        matrix = torch.ones(1, 1)  # [numbers, samples of a block]
        for stage, rate, kept in zip(list(vae.encoder.block)[1:-2], EARS.encoder_rates, KEPT):
            first, used = math.ceil(rate / 2), matrix.shape[0]
            taps = stage.block[4].weight[:kept, :used, first : first + rate]  # [kept, used, rate]
            matrix = torch.einsum("kur,ut->krt", taps, matrix).flatten(1)
        self.matrix, self.mean, self.std = matrix, vae.latents_mean, vae.latents_std

    def __call__(self, sound: Tensor, latents: int) -> Tensor:
        """[2, L] -> normalised [32, 2, latents]."""
        sound = torch.nn.functional.pad(sound, (0, max(0, latents * AUDIO_HOP - sound.shape[1])))
        blocks = sound[:, : latents * AUDIO_HOP].view(2, latents, AUDIO_HOP)
        return ((blocks @ self.matrix.T - self.mean) / self.std).permute(2, 0, 1).contiguous()


class Maker:
    """Makes examples of any kind with one set of encoders."""

    def __init__(self, video_vae: VideoVAE, audio_vae: AudioVAE, encoder: TextEncoder):
        self.see, self.hear, self.encoder = LinearEncoder(video_vae), LinearEars(audio_vae), encoder
        self.held = {scene.prompt for scene in held_scenes(HELD)}

    def example(self, kind: str, size: tuple[int, int, int], random: np.random.Generator) -> Example:
        width, height, count = size
        scene = random_scene(random)
        while scene.prompt in self.held:
            scene = random_scene(random)
        if kind == "reference" and scene.motion == "changes":
            scene = replace(scene, motion="stays")
        frames = scene.frames(width, height, count)
        video = self.see(torch.from_numpy(frames))[0]
        audio = self.hear(scene.sound(count), Canvas.fit(count, (width, height)).audio_t)
        places = {"first": (0,), "last": (count - 1,), "both": (0, count - 1)}.get(kind, ())
        prompt, pictures = scene.prompt, [frames[place] for place in places]
        reference = None
        if kind == "middle":
            places = (int(random.integers(1, count - 1)),)
        elif kind == "reference":
            picture = reference_picture(scene, random)
            prompt, pictures = reference_prompt(scene), [picture]
            reference = self.see(torch.from_numpy(picture[None]))[0]
        recipe = "comfy" if random.integers(2) else "reference"
        inputs = [preprocess_picture(picture, recipe) for picture in pictures]
        text = self.encoder.encode_items(prompt, [Picture(seen.grid[1:]) for seen in inputs], inputs)
        guides = tuple((place, self.see(torch.from_numpy(frames[place][None]))[0]) for place in places)
        return Example(kind, size, prompt, text.hidden.float(), text.tags, video, audio, guides, reference)


def reference_prompt(scene: Scene) -> str:
    """The scene's words with its colour left to a picture."""
    return scene.words(f"{scene.shape} in the colour of <Picture 1>")


def reference_picture(scene: Scene, random: np.random.Generator) -> np.ndarray:
    """uint8 [H, W, 3]: another shape of the same colour, anywhere, in one of several sizes."""
    other = replace(
        random_scene(random), colour=scene.colour, motion="stays", shape=SHAPES[int(random.integers(len(SHAPES)))]
    )
    edge = (64, 128, 128, 128, 192)[int(random.integers(5))]
    return other.frame(edge, edge, 0.0)


def make_all(maker: Maker, seed: int, say, plan=PLAN, done: list | None = None) -> list[list[Example]]:
    """The examples of every line of ``plan``, each line from a seed of its own; ``done``: those of its first lines."""
    groups = list(done or [])
    for index, (kind, width, height, count, number) in list(enumerate(plan))[len(groups) :]:
        random = np.random.default_rng((seed, index))
        groups.append([maker.example(kind, (width, height, count), random) for _ in range(number)])
        say(f"clips: {len(groups[-1])} of {kind} {width}x{height}, {count} frames")
    return groups


def save(groups: list[list[Example]], path) -> None:
    part = path.with_suffix(".part")
    torch.save([[_half(example).__dict__ for example in group] for group in groups], part)
    part.replace(path)


def load(path) -> list[list[Example]]:
    return [[Example(**values) for values in group] for group in torch.load(path, weights_only=True)]


def _half(example: Example) -> Example:
    """Latents as fp16 on the disk."""
    guides = tuple((place, latent.half()) for place, latent in example.guides)
    reference = None if example.reference is None else example.reference.half()
    return replace(
        example,
        hidden=example.hidden.half(),
        video=example.video.half(),
        audio=example.audio.half(),
        guides=guides,
        reference=reference,
    )
