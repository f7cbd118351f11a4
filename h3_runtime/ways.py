"""Paths to set side by side: each is one request changed in the way that its name says, rendered and kept for compare.

"int8_convrot+forecast:calls=0.5" ─read─▶ Way ─on─▶ RenderRequest, Loading ─▶ clip.mp4 + clip.kept.mkv ─▶ Taken
lossless clip, this clip ─measure─▶ PSNR, SSIM, sound distances, before encoding

A way's name is what one types: parts joined by ``+``, each ``lossless``, a way to quantise the DiT, ``steps=N``, a
preset, ``second-order``, an accelerator as after ``--accelerate``, ``lora`` (the bed's LoRA is on the DiT), or
``few-step`` (the same, with the steps and shifts that it was trained for).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .accelerators import parse
from .accelerators.presets import PRESETS, Acceleration
from .compare.measured import is_number, not_measured
from .compare.report import Comparison
from .errors import H3Error
from .lora import Lora
from .model import Caches, Loading, Models
from .quant.online import SCHEMES
from .render import RenderResult, render_request
from .request import LoraRequest, Media, RenderRequest
from .save import Saved, save_clip
from .schedule import DEFAULT_FORWARDS, check_forwards

LOSSLESS = "lossless"
LORA = "lora"
# of a comparison: name, title, unit, where its data has it (None: mean of the sound's channels)
FIGURES = (
    ("psnr", "PSNR", "dB"),
    ("psnr_min", "PSNR, worst frame", "dB"),
    ("ssim", "SSIM", ""),
    ("mr_stft", "sound: multi-resolution STFT distance", ""),
    ("log_spectral_distance", "sound: log-spectral distance", "dB"),
    ("snr", "sound: signal to noise", "dB"),
)


@dataclass(frozen=True)
class Way:
    """One path by its name: how the DiT is quantised, how many forwards (None: as asked), what accelerates it."""

    name: str = LOSSLESS
    quantise: str | None = None
    forwards: int | None = None
    lora: bool = False
    asked: Acceleration = field(default_factory=Acceleration)

    @staticmethod
    def read(text: str) -> Way:
        """H3Error names the part that is unknown."""
        made = Way(text.strip())
        for part in made.name.split("+"):
            made = made._and(part.strip())
        return made

    def _and(self, part: str) -> Way:
        if part == LOSSLESS:
            return self
        if part == LORA:
            return replace(self, lora=True)
        if part in SCHEMES:
            if self.quantise is not None:
                raise H3Error(f"path {self.name!r} quantises twice: leave {self.quantise} or {part} out")
            return replace(self, quantise=part)
        if found := re.fullmatch(r"steps=(\d{1,6})", part):
            check_forwards(int(found[1]))
            return replace(self, forwards=int(found[1]))
        if part in PRESETS:
            return replace(self, asked=self.asked.and_preset(part))
        try:
            name, options = parse(part)
            return replace(self, asked=self.asked.and_part(name, **options))
        except H3Error as error:
            raise H3Error(
                f"path {self.name!r}, part {part!r}: {error}; or give {LOSSLESS}, {LORA}, steps=N, "
                f"{', '.join(SCHEMES)}, or a preset ({', '.join(PRESETS)})"
            ) from None

    @property
    def file_name(self) -> str:
        """The name as a file may have it, on any system."""
        return re.sub(r"[^A-Za-z0-9.=-]+", "_", self.name)

    @property
    def needs_lora(self) -> bool:
        return self.lora or self.asked.few_step

    def on(self, request: RenderRequest, lora: str | None = None) -> tuple[RenderRequest, Loading, list[str]]:
        """The request that goes this way, how its weights are loaded, and sentences. H3Error where it cannot be."""
        loras = request.loras
        if self.needs_lora and lora is not None:
            loras = (*loras, LoraRequest(Media(lora)))
        if self.lora and lora is None:
            raise H3Error(f"path {self.name!r} needs a LoRA: give one, or leave {LORA} out")
        forwards = self.forwards
        if forwards is None:  # a few-step LoRA sets them where nobody does
            forwards = DEFAULT_FORWARDS if self.asked.few_step else request.num_forwards
        changed = replace(request, quantise=self.quantise, num_forwards=forwards, loras=loras)
        changed, said = self.asked.on_request(changed)
        loading = Loading(self.quantise, (), tuple(Lora(lora.media.path, lora.strength) for lora in changed.loras))
        return changed, loading, said


@dataclass(frozen=True)
class Taken:
    """A clip that went one way."""

    way: Way
    result: RenderResult
    saved: Saved

    @property
    def exact(self) -> bool:
        """Whether it claims to be the baseline, bit for bit."""
        return self.result.fidelity.title.startswith("LOSSLESS")


@dataclass(frozen=True)
class Bed:
    """What all ways have in common: where the model's parts lie, and on what and in which dtype it is computed."""

    parts: Any
    dtype: torch.dtype | None = None
    device: str | torch.device = "cpu"
    caches: Caches | None = None
    lora: str | None = None
    embedding_folders: tuple[Path, ...] = ()
    layout: str | None = None

    def take(
        self,
        way: Way,
        request: RenderRequest,
        out: Path,
        progress: Callable[[str, int, int], None] | None = None,
        keep_frames: bool = True,
    ) -> Taken:
        """Render ``request`` this way to ``out``, its frames and sound from before encoding kept beside it. The model's
        parts leave after their stage, as in ``render``."""
        changed, loading, said = way.on(request, self.lora)
        models = Models(
            self.parts,
            self.dtype,
            self.device,
            self.layout,
            embedding_folders=self.embedding_folders,
            caches=self.caches,
            loading=loading,
        )
        result = render_request(changed, models, progress, said=said)
        return Taken(way, result, save_clip(result, models, out, progress=progress, keep_frames=keep_frames))


def figures_of(made: Comparison) -> dict[str, Any]:
    """The FIGURES of a comparison by name; of the sound the channels' mean. What was not measured says so."""
    channels, found = list(made.data["sound"]["channels"].values()), {}
    for name, _, _ in FIGURES:
        if name in made.data["picture"]:
            found[name] = made.data["picture"][name]
            continue
        values = [channel[name] for channel in channels]
        numbers = [value for value in values if is_number(value)]
        if values and len(numbers) == len(values):
            found[name] = sum(numbers) / len(numbers)
        else:
            words = [value for value in values if not is_number(value)]
            found[name] = words[0] if words else not_measured(made.data["sound"]["why"] or "there is no sound")
    return found
