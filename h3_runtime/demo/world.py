"""The small world that the carried model was trained in: one coloured shape on plain grey, and its tone.

    Scene(colour, shape, motion, place, tone, rhythm)        ─▶ prompt    "a red circle moves left to right, low tone"
                                                             ─▶ frames    uint8 [F, H, W, 3], 24 fps
                                                             ─▶ sound     float32 [2, L], 32 kHz, panned as it moves
    random_scene(generator) ─▶ Scene;  what the words leave open (where exactly, how large) is drawn too

Lengths are shares of the canvas, time is the share of the clip that has passed, so a scene fits any size and length.
Tones are multiples of 40 Hz and begin at phase 0: each sound latent (25 ms) holds whole periods.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..geometry import FPS, SAMPLE_RATE, audio_samples

COLOURS = {
    "red": (220, 40, 40),
    "yellow": (230, 210, 40),
    "green": (40, 170, 60),
    "cyan": (40, 200, 210),
    "blue": (40, 70, 220),
    "purple": (160, 50, 190),
}
GROUND = 128.0  # of 255, grey
SHAPES = ("circle", "square", "triangle")
RADIUS = 0.2  # half the extent of a shape, as a share of the short edge
TONES = {"low": 200.0, "middle": 320.0, "high": 480.0}  # Hz
BEEP = 600.0  # Hz, of a beep after a tone
RHYTHMS = ("tone", "beeps", "then")
MOTIONS = ("right", "left", "down", "up", "grows", "shrinks", "bounces", "stays", "changes")
MOTION_WORDS = {
    "right": "moves left to right",
    "left": "moves right to left",
    "down": "moves down",
    "up": "moves up",
    "grows": "grows",
    "shrinks": "shrinks",
    "bounces": "bounces",
    "stays": "stays still",
    "changes": "changes from {colour} to {second}",
}
PLACES = {"left": 0.25, "": 0.5, "right": 0.75}  # of the width, where a shape is that does not cross
EDGE = 2.0  # pixels over which a shape's edge fades, either way
TRAVEL = 0.27  # of the width or height, either way from the middle, for a shape that crosses
ACROSS = 0.1  # of the height, either way, that is left to chance
LEVEL = 0.3  # of full scale, both sides together
FADE = 0.0125  # seconds in which a beep rises and falls
BEEP_PERIOD, BEEP_LENGTH = 0.25, 0.125  # seconds
HELD, HELD_SEED = 50, 2027
THEN_AT = 0.7  # share of the clip at which the beep after a tone begins


@dataclass(frozen=True)
class Scene:
    """One clip in words, and what the words leave open: ``across`` (-1..1, how far off the middle of the axis it does
    not move on) and ``scale`` (of its size)."""

    colour: str = "red"
    shape: str = "circle"
    motion: str = "right"
    place: str = ""
    second: str = "blue"
    tone: str = "low"
    rhythm: str = "tone"
    across: float = 0.0
    scale: float = 1.0

    @property
    def prompt(self) -> str:
        """In plain words."""
        return self.words(f"{self.colour} {self.shape}")

    def words(self, subject: str) -> str:
        """The prompt about another ``subject``, for one that a picture shows."""
        named = subject if self.motion != "changes" else subject.replace(f"{self.colour} ", "", 1)
        motion = MOTION_WORDS[self.motion].format(colour=self.colour, second=self.second)
        place = f" on the {self.place}" if self.place else ""
        sound = {"tone": f"{self.tone} tone", "beeps": f"{self.tone} beeps", "then": f"{self.tone} tone, then a beep"}
        return f"a {named} {motion}{place}, {sound[self.rhythm]}"

    def centre(self, time: float) -> tuple[float, float]:
        """(x, y) as shares of the width and height at ``time`` 0..1."""
        along = (2 * time - 1) * TRAVEL
        still = PLACES[self.place]
        if self.motion in ("right", "left"):
            return 0.5 + (along if self.motion == "right" else -along), 0.5 + ACROSS * self.across
        if self.motion in ("down", "up"):
            return still, 0.5 + (along if self.motion == "down" else -along)
        if self.motion == "bounces":
            return still, 0.72 - 0.45 * abs(math.sin(2 * math.pi * time))
        return still, 0.5 + ACROSS * self.across

    def radius(self, time: float) -> float:
        """Half the extent at ``time``, as a share of the short edge."""
        full = RADIUS * self.scale
        if self.motion == "grows":
            return full * (0.5 + 0.8 * time)
        return full * (1.3 - 0.8 * time) if self.motion == "shrinks" else full

    def colour_at(self, time: float) -> np.ndarray:
        """float64 [3], 0..255; a change of colour goes through in the middle third."""
        first = np.array(COLOURS[self.colour], np.float64)
        if self.motion != "changes":
            return first
        share = min(max(3 * time - 1, 0.0), 1.0)
        return (1 - share) * first + share * np.array(COLOURS[self.second], np.float64)

    def frame(self, width: int, height: int, time: float) -> np.ndarray:
        """uint8 [height, width, 3]."""
        x, y = self.centre(time)
        inside = cover(self.shape, width, height, (x * width, y * height), self.radius(time) * min(width, height))
        picture = GROUND + inside[..., None] * (self.colour_at(time) - GROUND).astype(np.float32)
        return picture.round().clip(0, 255).astype(np.uint8)

    def frames(self, width: int, height: int, count: int) -> np.ndarray:
        """uint8 [count, height, width, 3]."""
        return np.stack([self.frame(width, height, index / max(count - 1, 1)) for index in range(count)])

    def sound(self, count: int) -> Tensor:
        """float32 [2, L] of a clip of ``count`` frames: the tone, panned to where the shape is."""
        length, seconds = audio_samples(count), count / FPS
        at = torch.arange(length, dtype=torch.float64) / SAMPLE_RATE
        main, beep = self.envelopes(at, seconds)
        wave = main * torch.sin(2 * math.pi * TONES[self.tone] * at) + beep * torch.sin(2 * math.pi * BEEP * at)
        points = np.linspace(0, 1, 65)
        place = np.interp((at / seconds).numpy(), points, [pan(self.centre(p)[0]) for p in points])
        right = torch.from_numpy(place)
        return (LEVEL * torch.stack([(1 - right) * wave, right * wave])).float()

    def envelopes(self, at: Tensor, seconds: float) -> tuple[Tensor, Tensor]:
        """0..1 at the times ``at`` [L] of a clip: the tone's loudness and the closing beep's."""
        whole = torch.ones_like(at)
        if self.rhythm == "tone":
            return whole, whole * 0
        if self.rhythm == "beeps":
            return _gate(at % BEEP_PERIOD, BEEP_LENGTH), whole * 0
        start = round(THEN_AT * seconds * 40) / 40
        return _gate(at + 1.0, start + 1.0), _gate(at - start, BEEP_LENGTH)


def pan(x: float) -> float:
    """Share of the right ear for a shape at ``x`` (0..1): from 0.1 far left to 0.9 far right."""
    return min(max(0.5 + (x - 0.5) / TRAVEL * 0.4, 0.1), 0.9)


def _gate(at: Tensor, length: float) -> Tensor:
    """1 from 0 to ``length`` seconds, with short ramps inside it."""
    return torch.minimum(at, length - at).div(FADE).clamp(0, 1)


def cover(shape: str, width: int, height: int, centre: tuple[float, float], radius: float) -> np.ndarray:
    """float32 [height, width]: how much of each pixel a shape takes, 0..1, with soft edges."""
    dx = (np.arange(width, dtype=np.float32) + 0.5 - centre[0])[None]
    dy = (np.arange(height, dtype=np.float32) + 0.5 - centre[1])[:, None]
    if shape == "circle":
        distance = np.hypot(dx, dy) - radius
    elif shape == "square":
        distance = np.maximum(np.abs(dx), np.abs(dy)) - 0.88 * radius
    else:
        slope = math.sqrt(3) / 2  # an upright triangle with equal sides
        distance = np.maximum(slope * np.abs(dx) - 0.5 * dy - 0.58 * radius, dy - 0.58 * radius) - 0.08 * radius
    return np.clip(0.5 - distance / np.float32(2 * EDGE), 0, 1).astype(np.float32)


def random_scene(random: np.random.Generator) -> Scene:
    """A scene with every word drawn."""

    def pick(values):
        values = list(values)
        return values[int(random.integers(len(values)))]

    colour = pick(COLOURS)
    scene = Scene(
        colour=colour,
        shape=pick(SHAPES),
        motion=pick(("right", "left", "down", "up") * 2 + MOTIONS[4:]),
        second=pick([name for name in COLOURS if name != colour]),
        tone=pick(TONES),
        rhythm=pick(RHYTHMS),
        across=float(random.uniform(-1, 1)),
        scale=float(random.uniform(0.9, 1.1)),
    )
    return replace(scene, place=pick(PLACES)) if scene.motion == "stays" else scene


def held_scenes(count: int, seed: int = HELD_SEED) -> list[Scene]:
    """Scenes to measure with; the prompts of the first ``HELD`` stand in no training."""
    random = np.random.default_rng(seed)
    return [random_scene(random) for _ in range(count)]
