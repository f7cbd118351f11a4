"""Our text encoder and VAEs as the host's CLIP and VAE, and the host's as ours.

EncoderAsClip    tokenize, encode_from_tokens_scheduled ...      CLIPTextEncode and the host's H3 nodes take it
PictureAsVae     encode, decode, decode_tiled ...                VAEEncode, VAEDecode, VAEDecodeTiled, H3 nodes
SoundAsVae       encode, decode ...                              VAEDecodeAudio, H3 nodes

part_of(vae)       one of ours, or the host's VAE in the same clothes (``VaeAsPart``), for the runtime to use
encode_with_clip   a prompt through the host's CLIP
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import host
from .conditioning import KEY as CARRIED
from .conditioning import TAGS, CarriedPrompt

SAMPLE_RATE = 32000
TILE = 256  # pixels; what the video VAE was trained on
DIALOGUE_TAGS = ("<d>", "</d>")


class _StandIn:
    """What all of ours share: a part of the runtime in the clothes of a host's object."""

    def __init__(self, part):
        self.part = part

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "part":
            raise AttributeError(name)
        raise AttributeError(
            f"{type(self).__name__} of the MiniMax-H3 Runtime has no {name}: this node works on the host's own models "
            "only; use the host's loader for it"
        )

    def clone(self, *args, **options):
        return self

    def is_dynamic(self) -> bool:
        return False

    def throw_exception_if_invalid(self) -> None:
        return None

    def load(self):
        """The module, loaded and told to the host; other models leave the card first where it is full."""
        return load_part(self.part)

    # what GraphModels asks of a part
    @property
    def models(self):
        return self.part.models

    @property
    def path(self):
        return self.part.path

    @property
    def info(self):
        return self.part.info


_last_dit: Callable[[], Any] = lambda: None  # noqa: E731  a weak reference to the DiT that was loaded last


def only_dit(part) -> None:
    """One DiT at a time: when another one is wanted, the weights of the last leave first, the card and main memory."""
    global _last_dit
    last = _last_dit()
    if last is not None and last is not part.root:
        last.release()
    _last_dit = weakref.ref(part.root)


def load_part(part, task: str = "t2va"):
    """A part's module, after the host has made room for it; it may be evicted when it is not at work."""
    if part.kind == "dit":
        only_dit(part)
    if not part.loaded:
        host.make_room(part.size, part.device)
    module = part.load(task)
    host.keep_evictable(part)
    return module


# --- VAEs ------------------------------------------------------------------------------------------------------------


class PictureAsVae(_StandIn):
    """The video VAE. Frames [F, H, W, 3] in 0..1 both ways, latents [1, 24, T, h, w] normalised; the tiles are always
    the reference's 256 px, whatever a node asks for."""

    latent_channels, latent_dim, output_channels = 24, 3, 3
    upscale_ratio = (lambda frames: max(1, (frames - 2) // 5 * 17 + 5), 16, 16)
    downscale_ratio = (lambda frames: max(1, (frames - 5) // 17 * 5 + 2) if frames > 1 else 1, 16, 16)
    upscale_index_formula = downscale_index_formula = (4, 16, 16)
    vae_dtype = torch.float32

    @property
    def device(self):
        return self.part.device

    def spacial_compression_encode(self) -> int:
        return 16

    spacial_compression_decode = spacial_compression_encode

    def temporal_compression_decode(self) -> int:
        return 3

    @host.runtime_mode
    def encode(self, pixels: Tensor) -> Tensor:
        """Posterior means, as the host's VAE gives them. A clip is cut to 17k + 5 frames, sides to multiples of 32."""
        from ..h3_runtime import PixelEncoder, floor_frames, to_uint8

        frames = pixels[0] if pixels.ndim == 5 else pixels
        height, width = (side // 32 * 32 for side in frames.shape[1:3])
        top, left = (frames.shape[1] - height) // 2, (frames.shape[2] - width) // 2
        frames = frames[: floor_frames(len(frames)), top : top + height, left : left + width, :3]
        return PixelEncoder(self.encoders(), host.log.info)(to_uint8(frames), mean=True)

    def encoders(self):
        """Ways to encode, after the host has made room: the decoder's layers are not loaded for it."""
        if not self.part.loaded:
            host.make_room(self.part.size, self.part.device)
        return [way._replace(load=lambda load=way.load: self._kept(load)) for way in self.part.encoders()]

    def _kept(self, load):
        loaded = load()
        host.keep_evictable(self.part)
        return loaded

    def prepare(self) -> None:
        """Load it where there is room; where there is not, the ways to decode find one."""
        try:
            self.load()
        except torch.OutOfMemoryError:
            host.log.info("H3 Runtime: the video VAE does not fit whole, it is decoded layer by layer")

    def encode_tiled(self, pixels: Tensor, **tiles) -> Tensor:
        return self.encode(pixels)

    @host.runtime_mode
    def decode(self, latent: Tensor, vae_options=None) -> Tensor:
        """[1, 24, T, h, w] -> frames [1, F, H, W, 3] in 0..1 on the CPU."""
        return self.frames(latent, host.Teller(None, 1, "decoding the picture").steps)[None]

    def decode_tiled(self, latent: Tensor, **tiles) -> Tensor:
        return self.decode(latent)

    def frames(
        self, latent: Tensor, progress=None, notes: list[str] | None = None, batch: int = 1, tile: int = TILE
    ) -> Tensor:
        """The frames of a latent, [F, H, W, 3] in 0..1 on the CPU; ``progress(done, total)`` per chunk; ``batch`` tiles
        of ``tile`` pixels at once. Sentences about the decode go to ``notes``, and to the log where a node of the host
        asks, which shows none."""
        from ..h3_runtime import AVLatent, H3Error, decode_video, pixel_frames

        latent = _one(latent, 5, "the video VAE")
        if latent.shape[1] != 24:
            what = "a sound latent" if latent.shape[1] == 32 else "another model's latent"
            raise H3Error(f"the latent has {latent.shape[1]} channels, it is {what}: give the video VAE a video latent")
        count, (height, width) = max(5, pixel_frames(latent.shape[2])), latent.shape[3:]  # the decode judges lengths
        sink = FrameList(count, 16 * height, 16 * width)
        self.prepare()
        clip = AVLatent(latent, torch.zeros(1, 32, 2, 1))
        said = decode_video(self.part.models.decoders(batch, tile), clip, sink, progress)
        if notes is not None:
            gib = sink.nbytes / 2**30
            notes += [*said, f"the frames take {gib:.2f} GiB of memory; H3 Decode and Save Video needs none of it"]
        for note in said if notes is None else ():
            host.log.warning("H3 Runtime: %s", note)
        return sink.frames()


class SoundAsVae(_StandIn):
    """The audio VAE. Sound [1, L, 2] at 32 kHz both ways, latents [1, 32, 2, A] normalised."""

    latent_channels, latent_dim, output_channels = 32, 2, 2
    upscale_ratio = downscale_ratio = 800
    audio_sample_rate = audio_sample_rate_output = SAMPLE_RATE
    vae_dtype = torch.float32

    @property
    def device(self):
        return self.part.device

    def spacial_compression_encode(self) -> int:
        return 800

    spacial_compression_decode = spacial_compression_encode

    def temporal_compression_decode(self):
        return None

    @host.runtime_mode
    def encode(self, waveform: Tensor) -> Tensor:
        """[1, L, 1 or 2] at 32 kHz -> [1, 32, 2, ceil(L / 800)]; mono stands on both ears."""
        sound = waveform[:1].movedim(-1, 1).detach().cpu().float()
        if sound.shape[1] == 1:
            sound = sound.expand(-1, 2, -1)
        return self.load().encode(sound[:, :2].contiguous()).cpu()

    def encode_tiled(self, waveform: Tensor, **tiles) -> Tensor:
        return self.encode(waveform)

    @host.runtime_mode
    def decode(self, latent: Tensor, vae_options=None) -> Tensor:
        """[1, 32, 2, A] -> sound [1, 800 A, 2]."""
        latent = latent.detach().to("cpu", torch.float32, copy=True)
        return self.load().decode(latent).cpu().movedim(1, -1)

    def decode_tiled(self, latent: Tensor, **tiles) -> Tensor:
        return self.decode(latent)


def _one(latent: Tensor, dims: int, who: str) -> Tensor:
    from ..h3_runtime import H3Error

    latent = latent.detach().to("cpu", torch.float32, copy=True)
    if latent.ndim != dims or latent.shape[0] != 1:
        raise H3Error(f"the latent has shape {list(latent.shape)}: {who} takes one clip of {dims} dimensions")
    return latent


class FrameList:
    """A sink that keeps decoded frames: float [1, 3, f, H, W] chunks to [F, H, W, 3], each held once.

    H3Error, before anything is decoded, where this machine has not the memory for ``count`` frames.
    """

    def __init__(self, count: int, height: int, width: int):
        from ..h3_runtime import H3Error, probe_host

        self.nbytes = count * height * width * 3 * 4
        free = probe_host().available
        if self.nbytes > free:
            raise H3Error(
                f"{count} frames of {width}x{height} take {self.nbytes / 2**30:.1f} GiB of memory and "
                f"{free / 2**30:.1f} GiB are free: use H3 Decode and Save Video, which needs none of it"
            )
        self.held = torch.empty(count, height, width, 3)
        self.done = 0

    def write(self, frames: Tensor) -> None:
        host.poll()
        chunk = frames[0].permute(1, 2, 3, 0)  # [f, H, W, 3]
        self.held[self.done : self.done + len(chunk)] = chunk
        self.done += len(chunk)

    def frames(self) -> Tensor:
        assert self.done == len(self.held), (self.done, self.held.shape)
        return self.held


class VaeAsPart:
    """The host's VAE as a part of ours: posterior means by its own code, with no file that we know of."""

    info = None

    def __init__(self, vae, kind: str):
        self.vae, self.kind = vae, kind

    def load(self) -> VaeAsPart:
        return self

    def encode_mean(self, pixels: Tensor, progress=None) -> Tensor:
        """uint8 [F, H, W, 3] -> [1, 24, T, h, w]."""
        return self.vae.encode(pixels.float() / 255).detach().to("cpu", torch.float32, copy=True)

    encode_condition = encode_mean

    def encode(self, waveform: Tensor) -> Tensor:
        """[1, 2, L] at 32 kHz -> [1, 32, 2, A]."""
        return self.vae.encode(waveform.movedim(1, -1)).detach().to("cpu", torch.float32, copy=True)


def part_of(vae, kind: str):
    """What ``GraphModels`` takes, of a VAE socket (None stays None). H3Error when it is plainly the other VAE."""
    from ..h3_runtime import H3Error

    if vae is None:
        return None
    channels = {"video_vae": 24, "audio_vae": 32}[kind]
    have = getattr(vae, "latent_channels", channels)
    if have != channels:
        names = {24: "the video VAE", 32: "the audio VAE"}
        raise H3Error(
            f"{names[channels]} is needed here and {names.get(have, f'a VAE of {have} channels')} was connected: "
            "connect the other output of H3 Load VAEs"
        )
    return vae if isinstance(vae, _StandIn) else VaeAsPart(vae, kind)


def is_ours(value) -> bool:
    return isinstance(value, _StandIn)


# --- CLIP ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """What ``tokenize`` hands to ``encode``: the prompt and what stands before it."""

    text: str
    items: tuple[dict, ...] = ()


class EncoderAsClip(_StandIn):
    """The text encoder. Tokens are words until they are encoded: labels, blocks and tags are made in one go."""

    def tokenize(self, text: str, return_word_ids: bool = False, images=(), minimax_ref_items=None, **ignored) -> dict:
        items = minimax_ref_items or [{"type": "image", "data": image} for image in images]
        return {"h3_runtime": Tokens(text, tuple(items))}

    def encode_from_tokens(self, tokens: dict, return_pooled=False, return_dict=False, **ignored):
        (hidden, values), *_ = self.encode_from_tokens_scheduled(tokens)
        if return_dict:
            return {"cond": hidden, **values}
        return (hidden, None) if return_pooled else hidden

    @host.runtime_mode
    def encode_from_tokens_scheduled(self, tokens: dict, unprojected=False, add_dict=None, show_pbar=True) -> list:
        """CONDITIONING of what ``tokenize`` was given, shown to the encoder as the host's nodes prepared it."""
        from ..h3_runtime import GraphModels, RenderRequest, Shown, condition_shown

        asked: Tokens = tokens["h3_runtime"]
        shown = tuple(_shown(item, number, Shown) for number, item in enumerate(asked.items, start=1))
        models = GraphModels(text_encoder=self)
        made = condition_shown(RenderRequest(asked.text), shown, models)
        hidden = made.text.hidden
        values = {"pooled_output": None, TAGS: made.text.tags, **(add_dict or {})}
        values[CARRIED] = CarriedPrompt(hidden, made, dict(models.infos))
        return [[hidden[None], values]]


def _shown(item: dict, number: int, kind_of_shown) -> Any:
    """One of the host's reference items as the runtime shows it to the encoder."""
    from ..h3_runtime import to_uint8

    kind, name = item["type"], f"item {number}"
    if kind == "audio":
        return kind_of_shown("sound", name)
    pixels = to_uint8(item["data"][..., :3])
    if kind == "image":
        return kind_of_shown("picture", name, pixels[:1])
    times = list(item.get("timestamps") or [index / 2 for index in range(len(pixels))])
    times += times[-1:] * (len(times) % 2)
    pairs = tuple((first + second) / 2 for first, second in zip(times[::2], times[1::2]))
    return kind_of_shown("clip", name, pixels, pairs)


def encode_with_clip(clip, prompt: str, pictures: list[Tensor] = (), items: list[dict] | None = None):
    """(CONDITIONING, sentences) of ``prompt`` through the host's own CLIP.

    H3Error for a CLIP of another model. Hosts whose vocabulary lacks H3's tokens split ``<d>``: said, not refused.
    """
    from ..h3_runtime import H3Error

    notes = []
    for tag in DIALOGUE_TAGS:
        count = _token_count(clip, tag)
        if count is not None and count != 1 and tag in prompt:
            notes.append(
                f"this ComfyUI reads {tag} as {count} tokens, not as the one H3 knows: speech will not be recognised; "
                "update it, or use H3 Load Text Encoder"
            )
    options = {"images": list(pictures)} if items is None else {"minimax_ref_items": items}
    if not (pictures or items):
        options = {}
    conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(prompt, **options))
    if TAGS not in conditioning[0][1]:
        raise H3Error(
            "the CLIP that is connected is not MiniMax H3's text encoder (its conditioning has no token tags): load "
            "Qwen3-VL with type minimax, or use H3 Load Text Encoder"
        )
    return conditioning, notes


def _token_count(clip, word: str) -> int | None:
    """How many tokens the CLIP makes of ``word``; None where its tokens cannot be counted."""
    try:
        batches = next(iter(clip.tokenize(word).values()))
        return len(batches[0])
    except (StopIteration, TypeError, AttributeError, IndexError):
        return None
