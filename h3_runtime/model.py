"""The parts of one model: where they lie, how they are loaded and placed, what is known of each before it is read.

PartPaths + Loading(quantise, exclude, loras, placement) ─▶ Models ─▶ text_encoder(), video_vae(), audio_vae()
                                                                    ─▶ place_dit(task, placement): DiT and layers
A part is loaded when it is first asked for and leaves when its stage is over (unless ``keep``); one DiT at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil
import torch

from .checkpoint.info import CheckpointInfo, on_device, stored_tensors
from .checkpoint.kept import cache_folder
from .checkpoint.load import OpenedPart, load_audio_vae, open_audio_vae, open_dit, open_video_vae
from .checkpoint.opening import open_checkpoint
from .checkpoint.parts import PartPaths
from .checkpoint.pieces import Online
from .checkpoint.reader import listed
from .checkpoint.text_layers import TextLayers
from .decode import Decoder
from .encodings import LatentCache, MediaOrigin
from .errors import H3Error
from .job import Plan
from .lora import Lora, LoraPlan
from .lora import apply as apply_loras
from .lora import plan as plan_loras
from .memory.placement import Placement, place_dit, place_video_encoder, place_video_vae
from .memory.plan_lines import gib
from .memory.streaming import DiTLayers, run_in_order
from .memory.weights import piece_bytes
from .models.attention import CANONICAL, ChunkSizes
from .models.dit import DiT
from .models.video_tiles import TILE
from .references import Encoder
from .text.conditions import ConditionCache
from .text.encoder import EncoderWeights, TextEncoder, open_weights

RESIDENT = Placement(adaln="resident")
DEVICES = ("cuda", "cpu")  # cuda: AMD's ROCm as well, on which nothing was tried


def check_device(device: str | torch.device) -> None:
    """H3Error for a kind of device that this runtime does not compute on, before anything is read for it."""
    kind = torch.device(device).type
    if kind not in DEVICES:
        raise H3Error(
            f"this runtime computes on {' and '.join(DEVICES)}, not on {kind}: choose one of them (ComfyUI: start it "
            "with --cpu)"
        )


@dataclass(frozen=True)
class Loading:
    """How weights are brought in. ``quantise`` (of a RenderRequest) while loading, all linears of a part's blocks but
    those that ``exclude`` names; ``loras`` as side branches, so that placement never changes a result. ``placement``:
    of the DiT; ``encoder``: where the text encoder's layers are (None: by what is free). ``converted``: the folder for
    converted weights, where the plan places the DiT on disk."""

    quantise: str | None = None
    exclude: tuple[str, ...] = ()
    loras: tuple[Lora, ...] = ()
    placement: Placement | None = None
    chunks: ChunkSizes = CANONICAL
    encoder: Placement | None = None
    converted: str = ""

    def online(self, part: str) -> Online | None:
        """How ``part`` (dit, text_encoder, video_vae) is quantised while it loads; None: it is not."""
        return Online.of(part, self.quantise, self.exclude)


def place_encoder(
    weights: EncoderWeights,
    dtype: torch.dtype | None,
    device: str | torch.device,
    keep: bool = False,
    online: Online | None = None,
) -> Placement:
    """Resident while the text encoder takes no more than half of the device's free memory, else streamed: from RAM when
    it is kept for more prompts and half of the free RAM holds it, else from its file."""
    checkpoint, device = weights.checkpoint, torch.device(device)
    names = stored_tensors(checkpoint)
    nbytes = sum(checkpoint.source.nbytes(name) for name in names)
    if online is not None:
        text = TextLayers(checkpoint.source.path, weights.config.layers, dtype, online)
        nbytes = sum(piece_bytes(text.pieces).values())
    elif dtype is not None:
        plain = frozenset(checkpoint.plain)
        values = sum(torch.Size(shape).numel() for name, shape in checkpoint.shapes.items() if name in plain)
        nbytes = max(nbytes, values * dtype.itemsize)
    host = psutil.virtual_memory().available
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
    if 2 * nbytes <= free:
        return Placement()
    return Placement("ram" if keep and device.type == "cuda" and 2 * nbytes <= host else "disk")


def _converted_notes(how: Loading, layers: DiTLayers) -> tuple[str, ...]:
    """What became of the wish for a converted file."""
    if not (how.converted or how.placement.converted) or layers.blocks.notes:
        return layers.blocks.notes
    reason = "the file's bytes are used as they are" if how.placement.rung == "disk" else f"the DiT is {how.placement}"
    return (f"nothing was converted: {reason}",)


@dataclass(frozen=True)
class Caches:
    """What was encoded before: the prompts' states, and the latents of pictures and sounds. Default: in memory only."""

    conditions: ConditionCache = field(default_factory=ConditionCache)
    latents: LatentCache = field(default_factory=LatentCache)

    @staticmethod
    def of_user(prompts: bool = True, media: bool = True) -> Caches:
        """Kept for the next run too, in the user's cache folder; ``prompts`` or ``media`` False: in memory only."""
        conditions = ConditionCache(cache_folder("conditions", "H3_CONDITIONS") if prompts else None)
        return Caches(conditions, LatentCache(cache_folder("latents", "H3_LATENTS") if media else None))


class Models:
    """The parts of one model. ``keep`` holds them between renders (nodes, demo); else each leaves after its stage."""

    def __init__(
        self,
        parts: PartPaths,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        layout: str | None = None,
        keep: bool = False,
        embedding_folders: Sequence[str | Path] = (),
        caches: Caches | None = None,
        loading: Loading | None = None,
    ):
        self.parts, self.dtype, self.device, self.layout, self.keep = parts, dtype, device, layout, keep
        self.embedding_folders = tuple(embedding_folders)
        self.caches = caches or Caches()
        self.loading = loading or Loading()
        self.infos: dict[str, CheckpointInfo] = {}
        self.lora_plan: LoraPlan | None = None
        self._loaded: dict[str, object] = {}

    @property
    def cast_to(self) -> str | None:
        """float32 when the weights are cast up, None when they stay as stored: what a request's ``dtype`` says."""
        return "float32" if self.dtype == torch.float32 else None

    def check(self, task: str, encoder: bool = True) -> None:
        """Raise before any weights are read when a part is missing or its file is not whole; ``encoder``: whether it is
        needed. The VAEs' infos are known from here on: what decodes a clip belongs to its label and manifest."""
        dit = self.parts.dit_for(task).path
        for name, path in (
            ("video VAE", self.parts.video_vae),
            ("audio VAE", self.parts.audio_vae),
            ("text encoder", self.parts.text_encoder if encoder else Path()),
        ):
            if path is None:
                unusable = f" (not usable: {listed(self.parts.skipped, '; ')})" if self.parts.skipped else ""
                raise H3Error(f"no {name} was found in the model folder{unusable}: add its file")
        if f"dit:{dit}" not in self._loaded:
            how = self.loading
            opened = open_dit(dit, self.dtype, self.layout, quantise=how.online("dit"))
            if how.placement is not None:
                how.placement.check(opened.module.config.layers, "DiT")
            if how.loras:
                plan_loras(opened.module, how.loras)
        if encoder:
            self.describe_encoder(open_weights(self.parts.text_encoder))  # refuses what it cannot quantise
        for part in ("video_vae", "audio_vae"):
            self._describe_vae(part)

    def follow(self, plan: Plan) -> list[str]:
        """Have the DiT placed as ``plan`` says, from its next load on; sentences about it. H3Error with what would fit
        where the planned render does not."""
        if not plan.fits:
            raise H3Error(plan.refusal)
        stage = plan.stage("denoise")
        kept = 0 if stage.rung == "resident" else stage.resident
        ahead, adaln = max(stage.ahead, 1), stage.adaln or "disk"
        placement = Placement(stage.rung, kept, ahead, adaln, stage.pinned, self.loading.converted)
        self.loading = replace(self.loading, placement=placement, chunks=ChunkSizes(*plan.chunks))
        return [f"the plan: {placement}, {gib(plan.vram)} of {gib(plan.free_vram)}", *plan.notes]

    def dit(self, task: str) -> DiT:
        """The DiT for ``task`` (t2va, fl2va: FL2VA weights; ref2va: Ref2VA weights)."""
        return self.place_dit(task)[0]

    def place_dit(self, task: str, placement: Placement | None = None) -> tuple[DiT, DiTLayers]:
        """The DiT for ``task`` and where its layers come from; another ``placement`` than before reads it anew."""
        placement = placement or self.loading.placement or RESIDENT
        if placement != self.loading.placement:
            self.release("dit")
            self.loading = replace(self.loading, placement=placement)
        path = self.parts.dit_for(task).path
        return self._load(f"dit:{path}", "dit", lambda: self._placed(path))

    def _placed(self, path: Path) -> tuple[tuple[DiT, DiTLayers], CheckpointInfo]:
        how, self.lora_plan = self.loading, None
        opened = open_dit(path, self.dtype, self.layout, quantise=how.online("dit"))
        info = on_device(opened.info, self.device)

        def put_loras(dit: DiT) -> None:
            self.lora_plan = plan_loras(dit, how.loras)
            apply_loras(dit, self.lora_plan, mode="side")

        device = torch.device(self.device)
        dit, layers = place_dit(opened, how.placement, device, put_loras if how.loras else lambda dit: None)
        if self.lora_plan is not None:
            plan = self.lora_plan
            marks = [f"+{f.fingerprint}@{lora.strength:g}" for f, lora in zip(plan.files, plan.loras)]
            notes = [*(plan.summary(index) for index in range(len(plan.loras))), *plan.notes]
            info = replace(
                info,
                fingerprint=info.fingerprint + "".join(marks),
                paths=(*info.paths, "dit/lora"),
                notes=(*info.notes, *notes),
            )
        info = replace(info, notes=(*info.notes, *_converted_notes(how, layers)))
        return (dit, layers._replace(chunks=how.chunks)), info

    def _describe_vae(self, part: str) -> CheckpointInfo:
        """What is known of a VAE, from its header where it has not been loaded."""
        if part not in self.infos:
            opened = self._open_video_vae() if part == "video_vae" else open_audio_vae(self.parts.audio_vae)
            self.infos[part] = on_device(opened.info, self.device)
        return self.infos[part]

    def _open_video_vae(self) -> OpenedPart:
        return open_video_vae(self.parts.video_vae, quantise=self.loading.online("video_vae"))

    def video_vae(self) -> torch.nn.Module:
        if "video_vae" not in self._loaded:
            self.release("video_vae")  # what was there for encoding
        return self._load("video_vae", "video_vae", lambda: self._open_video_vae().load(self.device))

    def video_encoder(self, device: str | torch.device | None = None) -> torch.nn.Module:
        """The video VAE for encoding, without its decoder's layers; the whole one where that is here already."""
        if "video_vae" in self._loaded and device is None:
            return self.video_vae()
        where = torch.device(self.device if device is None else device)

        def load():
            opened = self._open_video_vae()
            return place_video_encoder(opened, where), on_device(opened.info, self.device)

        return self._load(f"video_vae:encoder on {where}", "video_vae", load)

    def encoders(self) -> list[Encoder]:
        """Ways to encode pictures, the next one for when memory runs out."""

        def on_cpu():
            self.release("video_vae")
            return self.video_encoder("cpu")

        ways = [Encoder(f"on {self.device}", self.video_encoder)]
        if torch.device(self.device).type != "cpu":
            ways.append(Encoder("on the CPU", on_cpu))
        return ways

    def decoders(self, batch: int = 1, tile: int = TILE) -> list[Decoder]:
        """Ways to decode the picture, the next one for when memory runs out: whole on the device, layer by layer from
        RAM (the same bits), on the CPU. ``tile`` in pixels: only 256 is the reference."""

        def whole(latent: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
            return self.video_vae().decode_chunks(latent.to(self.device), start=start, tile=tile)

        def batched(latent: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
            return self.video_vae().decode_chunks(latent.to(self.device), start=start, tile=tile, batch=batch)

        def streamed(device: str | torch.device, latent: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
            self.release("video_vae")
            vae, layers = place_video_vae(self._open_video_vae(), Placement("ram"), torch.device(device))
            return vae.decode_chunks(latent.to(device), start=start, tile=tile, layers=lambda: run_in_order(layers))

        ways = [Decoder(f"resident on {self.device}", whole), Decoder("layer by layer", partial(streamed, self.device))]
        if batch > 1:
            ways.insert(0, Decoder(f"resident on {self.device}, {batch} tiles at once", batched))
        if torch.device(self.device).type != "cpu":
            ways.append(Decoder("layer by layer on the CPU", partial(streamed, "cpu")))
        return ways

    def audio_vae(self) -> torch.nn.Module:
        return self._load("audio_vae", "audio_vae", lambda: load_audio_vae(self.parts.audio_vae, self.device))

    def kept_latents(self, part: str) -> tuple[LatentCache, MediaOrigin | None]:
        """Where latents of ``part`` (video_vae, audio_vae) are kept, and what beside the media decides them; None where
        nothing is known of that VAE. Only its header and sampled bytes are read."""
        if getattr(self.parts, part) is None:
            return self.caches.latents, None
        return self.caches.latents, MediaOrigin.of(self._describe_vae(part), self.device)

    def text_encoder(self) -> TextEncoder:
        def load():
            weights = open_weights(self.parts.text_encoder)
            online = self.loading.online("text_encoder")
            placement = self.loading.encoder or place_encoder(weights, self.dtype, self.device, self.keep, online)
            encoder = TextEncoder.load(
                self.parts.text_encoder, self.parts.tokenizer, self.dtype, self.device, None, placement, online
            )
            return encoder, on_device(encoder.info, self.device)

        return self._load("text_encoder", "text_encoder", load)

    def describe_encoder(self, weights: EncoderWeights) -> CheckpointInfo:
        """The encoder's info from its headers, without its weights: a kept condition needs no more."""
        online = self.loading.online("text_encoder")
        layers = TextLayers(self.parts.text_encoder, weights.config.layers, self.dtype, online)
        return on_device(layers.info, self.device)

    def text_width(self, task: str) -> int:
        """How wide the DiT of ``task`` wants a condition's rows, from its header."""
        checkpoint = open_checkpoint(self.parts.dit_for(task).path, "dit", self.layout)
        return checkpoint.shapes["condition_proj.weight"][1]

    def _load(self, key: str, part: str, load: Callable):
        if key not in self._loaded:
            if part == "dit":  # one DiT at a time
                self.release("dit")
            self._loaded[key], self.infos[part] = load()
        return self._loaded[key]

    def release(self, *parts: str) -> None:
        """Let parts go; the DiT always leaves before another is loaded."""
        for key in [k for k in self._loaded if k.split(":")[0] in parts]:
            del self._loaded[key]

    def done(self, *parts: str) -> None:
        """A stage is over: its parts leave unless models are kept."""
        if not self.keep:
            self.release(*parts)
