"""The video VAE: pixels to latents through a causal 3D CNN, latents to pixels through a non-causal ViT.

    encode   uint8 [F, H, W, 3] -> ImageNet-normalised [1, 3, F, H, W] -> 17-frame clips -> 256 px tiles
             -> CNN /16 in space, /4 in time -> mean and log variance [1, 24, T, H/16, W/16]
    decode   latent [1, 24, T, h, w] -> clips of 7 latents -> 16x16 tiles -> one token per latent
             -> blocks -> 4x16x16 pixels per token -> tiles and clips blended -> [1, 3, f, H, W] in [0, 1], clip by clip

Facts come from diffusers' ``AutoencoderKLMiniMaxH3`` and its pipeline; attribute names are the ComfyUI file's keys
(``to_qkv`` rows per head q, k, v; ``ff.w1`` = gate; value). Latents that leave or enter are normalised, fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import CheckpointError, H3Error, NonFiniteError
from ..geometry import CLIP_FRAMES, PIXELS_PER_LATENT, pixel_frames
from .precision import is_finite
from .video_statistics import RELEASED_LATENT_MEAN, RELEASED_LATENT_STD
from .video_tiles import (
    DROPPED_LATENTS,
    FRAMES_PER_LATENT,
    TILE,
    DecodeClip,
    Stitcher,
    TilePlan,
    blend_in,
    decode_clips,
    encode_clips,
)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CONDITION_SEED = 42  # every visual condition samples its posterior with a fresh generator seeded so
LOGVAR_LIMITS = (-30.0, 20.0)
AUDIO_LATENT_CHANNELS = 32  # named in the message for a latent of the wrong kind
SMALLEST_EDGE = 2 * PIXELS_PER_LATENT  # reflect padding needs two cells at the coarsest level


@dataclass(frozen=True)
class VideoVAEConfig:
    """Sizes of a video VAE; the defaults are the released model's. CheckpointError where they do not fit together."""

    pixel_channels: int = 3
    latent_channels: int = 24
    channels: tuple[int, ...] = (128, 256, 256, 512, 512, 1024)  # per encoder level
    resnets: int = 2  # per encoder level
    space_strides: tuple[int, ...] = (2, 2, 2, 2, 1, 1)
    time_strides: tuple[int, ...] = (1, 2, 2, 1, 1, 1)
    norm_groups: int = 32
    norm_eps: float = 1e-6
    layers: int = 36
    heads: int = 32
    head_dim: int = 64
    ffn: int = 8192
    registers: int = 4
    rope_theta: float = 100.0
    rope_fraction: float = 0.75  # of a head's channels
    decoder_eps: float = 1e-5

    def __post_init__(self):
        levels = len(self.channels)
        if not levels == len(self.space_strides) == len(self.time_strides):
            raise CheckpointError(f"{levels} encoder levels need as many space and time strides")
        if (math.prod(self.space_strides), math.prod(self.time_strides)) != (PIXELS_PER_LATENT, FRAMES_PER_LATENT):
            raise CheckpointError(
                f"encoder strides {self.space_strides} in space and {self.time_strides} in time: "
                f"their products must be {PIXELS_PER_LATENT} and {FRAMES_PER_LATENT}"
            )
        if any(time > 1 and space != 2 for space, time in zip(self.space_strides, self.time_strides)):
            raise CheckpointError("an encoder level that strides in time must halve space too")
        if any(width % self.norm_groups for width in self.channels):
            raise CheckpointError(f"encoder channels {self.channels} must be multiples of {self.norm_groups}")
        if self.rotary_dim % 6:
            raise CheckpointError(f"{self.rotary_dim} rotated channels a head: they must be a multiple of 6")

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope_fraction)

    @staticmethod
    def from_shapes(shapes: Mapping[str, tuple[int, ...]], overrides: Mapping | None = None) -> VideoVAEConfig:
        """Read the sizes off the tensor shapes of a ComfyUI-named file.

        ``overrides`` are fields that no shape tells (heads or head_dim, strides, eps ...); without one the released
        value stands. Raises CheckpointError when a needed key is missing or the sizes contradict each other.
        """
        overrides = dict(overrides or {})
        _refuse_unknown_fields(overrides)

        def size(key: str, axis: int) -> int:
            if key not in shapes:
                raise CheckpointError(f"{key} is missing: this is not a complete MiniMax-H3 video VAE")
            return int(shapes[key][axis])

        levels = _count(shapes, "encoder.down.{}.block.0.conv1.weight")
        width = size("decoder.norm_out.weight", 0)
        found = {
            "pixel_channels": size("encoder.conv_in.weight", 1),
            "latent_channels": size("post_quant_conv.weight", 0),
            "channels": tuple(size(f"encoder.down.{level}.block.0.conv1.weight", 0) for level in range(levels)),
            "resnets": _count(shapes, "encoder.down.0.block.{}.conv1.weight"),
            "layers": _count(shapes, "decoder.transformer_blocks.{}.scale1"),
            "ffn": size("decoder.transformer_blocks.0.ff.w2.weight", 1),
            "registers": size("decoder.register_tokens", 1),
        }
        if "heads" in overrides and "head_dim" not in overrides:
            found["head_dim"] = width // overrides["heads"]
        else:
            found["heads"] = width // overrides.get("head_dim", VideoVAEConfig.head_dim)
        config = VideoVAEConfig(**{**found, **overrides})
        if config.width != width:
            raise CheckpointError(
                f"the decoder is {width} wide, which is not {config.heads} heads of {config.head_dim}: "
                f"give the number of heads"
            )
        patch = config.pixel_channels * FRAMES_PER_LATENT * PIXELS_PER_LATENT**2
        if size("decoder.proj_out.weight", 0) != patch:
            raise CheckpointError(
                f"decoder.proj_out has {size('decoder.proj_out.weight', 0)} rows: it must have {patch}"
            )
        return config

    def to_dict(self) -> dict:
        """All fields, ready for JSON; ``from_dict`` takes it back."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @staticmethod
    def from_dict(values: Mapping) -> VideoVAEConfig:
        _refuse_unknown_fields(values)
        return VideoVAEConfig(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        )


def _refuse_unknown_fields(values: Mapping) -> None:
    known = {field.name for field in fields(VideoVAEConfig)}
    for key in values:
        if key not in known:
            raise CheckpointError(f"{key!r} is no setting of a video VAE: allowed are {', '.join(sorted(known))}")


def _count(shapes: Mapping, pattern: str) -> int:
    count = 0
    while pattern.format(count) in shapes:
        count += 1
    if not count:
        raise CheckpointError(f"{pattern.format(0)} is missing: this is not a complete MiniMax-H3 video VAE")
    return count


class CausalConv3d(nn.Conv3d):
    """3x3x3 convolution: reflect padding in space, two zero frames in front in time.

    With a space stride of 2 the padding is one row and column at the bottom and right only.
    """

    def __init__(self, inputs: int, outputs: int, time_stride: int = 1, space_stride: int = 1):
        super().__init__(inputs, outputs, kernel_size=3, stride=(time_stride, space_stride, space_stride))
        before = 1 if space_stride == 1 else 0
        self._edges = (before, 1, before, 1)

    def forward(self, x: torch.Tensor, each_frame: Callable | None = None) -> torch.Tensor:
        """[B, C, T, H, W] -> [B, outputs, T', H', W']; ``each_frame`` changes every frame [B, C, H, W] first.

        Frames are written into the padded input one by one, so that norm, activation and padding never hold a
        second whole clip.
        """
        batch, channels, frames, height, width = x.shape
        left, right, top, bottom = self._edges
        lead = self.kernel_size[0] - 1
        padded = x.new_empty(batch, channels, lead + frames, height + top + bottom, width + left + right)
        padded[:, :, :lead] = 0
        for index in range(frames):
            frame = x[:, :, index]  # [B, C, H, W]
            if each_frame is not None:
                frame = each_frame(frame)
            padded[:, :, lead + index] = F.pad(frame, self._edges, mode="reflect")
        return F.conv3d(padded, self.weight, self.bias, self.stride)


class NormSilu(nn.GroupNorm):
    """GroupNorm over one frame, then SiLU."""

    def forward(self, frame: torch.Tensor) -> torch.Tensor:
        return F.silu(super().forward(frame), inplace=True)


class ResnetBlock(nn.Module):
    """Two normed convolutions with a shortcut. [B, C, T, H, W] -> [B, outputs, T, H, W]."""

    def __init__(self, inputs: int, outputs: int, config: VideoVAEConfig):
        super().__init__()
        self.norm1 = NormSilu(config.norm_groups, inputs, eps=config.norm_eps)
        self.conv1 = CausalConv3d(inputs, outputs)
        self.norm2 = NormSilu(config.norm_groups, outputs, eps=config.norm_eps)
        self.conv2 = CausalConv3d(outputs, outputs)
        self.nin_shortcut = nn.Conv3d(inputs, outputs, kernel_size=1) if inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv2(self.conv1(x, self.norm1), self.norm2)
        return h.add_(x if self.nin_shortcut is None else self.nin_shortcut(x))


class Downsample(nn.Module):
    def __init__(self, channels: int, time_stride: int, space_stride: int):
        super().__init__()
        self.conv = CausalConv3d(channels, channels, time_stride, space_stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class EncoderLevel(nn.Module):
    """The resnets of one resolution and the step down to the next, where there is one."""

    def __init__(self, inputs: int, level: int, config: VideoVAEConfig):
        super().__init__()
        outputs = config.channels[level]
        widths = [inputs] + [outputs] * config.resnets
        self.block = nn.ModuleList(ResnetBlock(*pair, config) for pair in pairwise(widths))
        time_stride, space_stride = config.time_strides[level], config.space_strides[level]
        strided = time_stride * space_stride > 1
        self.downsample = Downsample(outputs, time_stride, space_stride) if strided else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.block:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)


class VideoEncoder(nn.Module):
    """Pixels [1, 3, F, H, W] -> moments before quant_conv [1, 48, ceil(F / 4), H/16, W/16]; F is 1 or 17."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        self.conv_in = CausalConv3d(config.pixel_channels, config.channels[0])
        inputs = (config.channels[0], *config.channels[:-1])
        self.down = nn.ModuleList(EncoderLevel(inputs[level], level, config) for level in range(len(inputs)))
        self.norm_out = NormSilu(config.norm_groups, config.channels[-1], eps=config.norm_eps)
        self.conv_out = CausalConv3d(config.channels[-1], 2 * config.latent_channels)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        h = self.conv_in(pixels)
        for level in self.down:
            h = level(h)
        return self.conv_out(h, self.norm_out)


def rotary_tables(grid: Iterable[int], still: int, dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [S, dim / 2] (fp32, CPU) of a tile of ``grid`` = (t, h, w) tokens plus ``still`` ones at angle 0.

    angle = 2 pi * coordinate * theta^(-6i / dim); coordinates are cell centres over -1..1 within the tile; the
    angles of t, h and w stand side by side.
    """
    frequencies = 1.0 / theta ** torch.arange(0, 1, 6 / dim, dtype=torch.float32)  # [dim / 6]
    centres = [2.0 * (torch.arange(0.5, size, dtype=torch.float32) / size) - 1.0 for size in grid]
    places = torch.stack(torch.meshgrid(*centres, indexing="ij"), dim=-1).flatten(0, 2)  # [t*h*w, 3]
    places = torch.cat([places, places.new_zeros(still, 3)])
    angles = (2.0 * math.pi * places[:, :, None] * frequencies).flatten(1)  # [S, dim / 2]
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first 2 * cos.shape[-1] channels of every head of x [B, S, heads, head_dim], halves paired."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _compute_dtype(linear: nn.Module, otherwise: torch.dtype) -> torch.dtype:
    # A quantised linear's weight is integers: it takes what the rest of its block computes in.
    dtype = linear.weight.dtype
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else otherwise


class DecoderAttention(nn.Module):
    """Full self-attention with weightless RMSNorm on q and k, and rotary positions."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        self.heads, self.head_dim, self.eps = config.heads, config.head_dim, config.decoder_eps
        self.to_qkv = nn.Linear(config.width, 3 * config.width)
        self.to_out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = self.to_qkv(x).unflatten(-1, (self.heads, 3, self.head_dim))  # rows of the weight: head, q|k|v, channel
        query, key, value = qkv.unbind(-2)  # [1, S, heads, head_dim]
        query, key = (
            _rotate(F.rms_norm(part.float(), (self.head_dim,), eps=self.eps).to(part.dtype), cos, sin)
            for part in (query, key)
        )
        out = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (query, key, value)))
        return self.to_out(out.transpose(1, 2).flatten(2))  # [1, S, width]


class GatedFeedForward(nn.Module):
    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        self.w1 = nn.Linear(config.width, 2 * config.ffn)
        self.w2 = nn.Linear(config.ffn, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate, inplace=True).mul_(value))


class DecoderBlock(nn.Module):
    """One ViT block. Changes the fp32 residual stream [1, S, width] it is given in place, and returns it."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=config.decoder_eps)
        self.attn = DecoderAttention(config)
        self.scale1 = nn.Parameter(torch.ones(config.width))
        self.norm2 = nn.RMSNorm(config.width, eps=config.decoder_eps)
        self.ff = GatedFeedForward(config)
        self.scale2 = nn.Parameter(torch.ones(config.width))

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        dtype = _compute_dtype(self.attn.to_qkv, self.scale1.dtype)
        normed = self._normed(self.norm1, hidden).to(dtype)
        hidden.add_(self.attn(normed, cos.to(dtype), sin.to(dtype)).float().mul_(self.scale1))
        normed = self._normed(self.norm2, hidden).to(_compute_dtype(self.ff.w1, self.scale2.dtype))
        return hidden.add_(self.ff(normed).float().mul_(self.scale2))

    @staticmethod
    def _normed(norm: nn.RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, norm.normalized_shape, norm.weight.float(), norm.eps)


Layers = Callable[[], Iterable[Callable]]


class VideoDecoder(nn.Module):
    """The ViT as embed -> blocks -> head, over a list of tiles.

    Every tile goes through alone (batch 1) by default, so tile-major and layer-major order give the same bits;
    layer-major reads each layer's weights once for all tiles of a clip, at the price of holding every tile's residual
    stream.
    """

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        self.config = config
        self.x_embedder = nn.Linear(config.latent_channels, config.width)
        self.register_tokens = nn.Parameter(torch.zeros(1, config.registers, config.width))
        self.register_buffer("mask_token", torch.zeros(1, 1, config.width))  # in the files; no part of decoding
        self.transformer_blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm_out = nn.LayerNorm(config.width, eps=config.decoder_eps)
        patch = config.pixel_channels * FRAMES_PER_LATENT * PIXELS_PER_LATENT**2
        self.proj_out = nn.Linear(config.width, patch)

    def embed(self, tile: torch.Tensor) -> torch.Tensor:
        """[1, C, t, h, w] -> fp32 residual stream [1, t*h*w + registers + 1, width]; the last token is zero."""
        tokens = self.x_embedder(tile.flatten(2).transpose(1, 2))  # [1, t*h*w, width]
        registers = self.register_tokens.to(tokens.dtype)
        return torch.cat([tokens, registers, torch.zeros_like(tokens[:, :1])], dim=1).float()

    def rotary(self, tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for the tokens of ``tile`` [1, C, t, h, w], each [S, 1, rotary_dim / 2], on its device."""
        config = self.config
        tables = rotary_tables(tile.shape[2:], config.registers + 1, config.rotary_dim, config.rope_theta)
        return tuple(table.to(tile.device).unsqueeze(1) for table in tables)

    def head(self, hidden: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """Residual stream of a tile of ``grid`` = (t, h, w) tokens -> fp32 pixels [1, 3, 4t, 16h, 16w]."""
        frames, height, width = grid
        norm = self.norm_out
        hidden = F.layer_norm(
            hidden[:, : frames * height * width],
            norm.normalized_shape,
            norm.weight.float(),
            norm.bias.float(),
            norm.eps,
        )
        patches = self.proj_out(hidden.to(_compute_dtype(self.proj_out, norm.weight.dtype))).float()
        patches = patches.view(frames, height, width, -1, FRAMES_PER_LATENT, PIXELS_PER_LATENT, PIXELS_PER_LATENT)
        pixels = patches.permute(3, 0, 4, 1, 5, 2, 6)  # [3, t, 4, h, 16, w, 16]
        return pixels.reshape(1, -1, frames * FRAMES_PER_LATENT, height * PIXELS_PER_LATENT, width * PIXELS_PER_LATENT)

    def forward(
        self, tiles: list[torch.Tensor], layers: Layers | None = None, batch: int = 1
    ) -> Iterator[torch.Tensor]:
        """Decode tiles [1, C, t, h, w] of one shape, in order, each yielded as fp32 pixels [1, 3, 4t, 16h, 16w].

        Without ``layers``: tile by tile. With it: layer by layer; it is called once and gives the blocks in order
        (callables hidden, cos, sin -> hidden), so that a streamer may load each while the one before runs. ``batch``
        tiles run through a block at once: the sums of a larger product may be made in another order.
        """
        grid = tuple(tiles[0].shape[2:])
        cos, sin = self.rotary(tiles[0])
        groups = [tiles[start : start + batch] for start in range(0, len(tiles), batch)]
        if layers is None:
            for group in groups:
                hidden = self._embed_all(group)
                for block in self.transformer_blocks:
                    hidden = block(hidden, cos, sin)
                for stream in hidden.split(1):
                    yield self.head(stream, grid)
            return
        streams = [self._embed_all(group) for group in groups]
        for block in layers():
            for index in range(len(streams)):
                streams[index] = block(streams[index], cos, sin)
        while streams:
            for stream in streams.pop(0).split(1):
                yield self.head(stream, grid)

    def _embed_all(self, tiles: list[torch.Tensor]) -> torch.Tensor:
        streams = [self.embed(tile) for tile in tiles]
        return streams[0] if len(streams) == 1 else torch.cat(streams)


class VideoVAE(nn.Module):
    """Both halves, with tiling, clips and normalisation. Computes in its weights' dtype (baseline: fp32)."""

    def __init__(self, config: VideoVAEConfig):
        super().__init__()
        self.config = config
        channels = config.latent_channels
        self.encoder = VideoEncoder(config)
        self.quant_conv = nn.Conv3d(2 * channels, 2 * channels, kernel_size=1)
        self.post_quant_conv = nn.Conv3d(channels, channels, kernel_size=1)
        self.decoder = VideoDecoder(config)
        released = channels == len(RELEASED_LATENT_MEAN)
        self.register_buffer("latents_mean", torch.tensor(RELEASED_LATENT_MEAN if released else (0.0,) * channels))
        self.register_buffer("latents_std", torch.tensor(RELEASED_LATENT_STD if released else (1.0,) * channels))

    # Encode

    @staticmethod
    def normalise_pixels(pixels: torch.Tensor) -> torch.Tensor:
        """uint8 RGB [F, H, W, 3] -> ImageNet-normalised fp32 [1, 3, F, H, W]."""
        mean, std = _imagenet(pixels.device)
        return pixels.permute(3, 0, 1, 2)[None].float().div_(255.0).sub_(mean).div_(std).contiguous()

    def encode_moments(
        self, pixels: torch.Tensor, progress: Callable[[int, int], None] | None = None, tile: int = TILE
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Posterior mean and log variance, un-normalised fp32, each [1, 24, T, H/16, W/16], on the VAE's device.

        ``pixels`` are ImageNet-normalised [1, 3, F, H, W], H and W multiples of 16 from 32 on. One frame is encoded
        alone (T = 1); more go in clips of 17, the last filled with the last frame, and the last 3 latents of the
        whole are dropped: F = 17k + 5 gives T = 5k + 2. ``progress(done, total)`` counts tiles.
        """
        if pixels.ndim != 5 or pixels.shape[0] != 1 or pixels.shape[1] != self.config.pixel_channels:
            raise H3Error(f"pixels are {list(pixels.shape)}: give one clip [1, 3, frames, height, width]")
        if not pixels.is_floating_point():
            raise H3Error(f"pixels are {pixels.dtype}: give ImageNet-normalised floats (see normalise_pixels)")
        frames, height, width = pixels.shape[2:]
        plan = _encode_plan(frames, height, width, tile)
        runs = encode_clips(frames)
        return self._encode((pixels[:, :, list(run)] for run in runs), len(runs), frames, plan, progress)

    def encode_mean(self, pixels: torch.Tensor, progress: Callable[[int, int], None] | None = None) -> torch.Tensor:
        """uint8 RGB [F, H, W, 3] -> normalised posterior mean [1, 24, T, H/16, W/16], fp32 on the CPU."""
        mean, _ = self._encode_uint8(pixels, progress)
        return self._normalised(mean.cpu())

    def encode_condition(
        self, pixels: torch.Tensor, progress: Callable[[int, int], None] | None = None
    ) -> torch.Tensor:
        """uint8 RGB [F, H, W, 3] -> a visual condition, normalised fp32 [1, 24, T, H/16, W/16] on the CPU.

        The reference's recipe: the posterior is sampled with a fresh CPU generator seeded 42 (one draw of the
        latent's shape), rounded to fp16, then normalised.
        """
        mean, logvar = self._encode_uint8(pixels, progress)
        generator = torch.Generator().manual_seed(CONDITION_SEED)
        noise = torch.randn(mean.shape, generator=generator).to(mean.device)
        sample = mean + torch.exp(0.5 * logvar.clamp(*LOGVAR_LIMITS)) * noise
        return self._normalised(sample.half().float().cpu())

    def _encode_uint8(self, pixels: torch.Tensor, progress: Callable | None) -> tuple[torch.Tensor, torch.Tensor]:
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[-1] != self.config.pixel_channels:
            raise H3Error(
                f"pixels are {pixels.dtype} {list(pixels.shape)}: give uint8 RGB frames [frames, height, width, 3]"
            )
        frames, height, width, _ = pixels.shape
        plan = _encode_plan(frames, height, width, TILE)
        runs = encode_clips(frames)
        device = self.quant_conv.weight.device
        clips = (self.normalise_pixels(pixels[list(run)].to(device)) for run in runs)
        return self._encode(clips, len(runs), frames, plan, progress)

    @torch.no_grad()
    def _encode(
        self,
        clips: Iterable[torch.Tensor],
        count: int,
        frames: int,
        plan: TilePlan,
        progress: Callable | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.encoder.conv_in.weight
        windows = plan.scaled(PIXELS_PER_LATENT).windows()
        moments = []
        for index, clip in enumerate(clips):
            clip = clip.to(weight.device, weight.dtype)
            stitcher = Stitcher(plan)
            for done, (rows, columns) in enumerate(windows, start=index * len(windows) + 1):
                stitcher.add(self.quant_conv(self.encoder(clip[..., rows, columns])).float())
                if progress is not None:
                    progress(done, count * len(windows))
            moments.append(stitcher.finish())
        result = torch.cat(moments, dim=2)  # [1, 48, T, h, w]
        if frames > 1:
            result = result[:, :, :-DROPPED_LATENTS]
        if not is_finite(result):
            raise NonFiniteError("the video VAE encoded to NaN or infinity: check the pixels and the VAE file")
        return result.chunk(2, dim=1)

    def _normalised(self, latent: torch.Tensor) -> torch.Tensor:
        mean, std = self._statistics(latent.device)
        return (latent - mean) / std

    def _statistics(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(
            values.to(device, torch.float32).view(1, -1, 1, 1, 1) for values in (self.latents_mean, self.latents_std)
        )

    # Decode

    @staticmethod
    def decode_chunk_count(latent_t: int) -> int:
        """Chunks that ``decode_chunks`` yields for ``latent_t`` latents: k for 5k + 2, one for 1 and 2."""
        return len(decode_clips(latent_t))

    def decode_chunks(
        self, latent: torch.Tensor, start: int = 0, tile: int = TILE, layers: Layers | None = None, batch: int = 1
    ) -> Iterator[torch.Tensor]:
        """Decode normalised ``latent`` [1, 24, T, h, w] chunk by chunk, each fp32 [1, 3, f, 16h, 16w] in [0, 1], final.

        T = 5k + 2 gives k chunks: f = 17, and 22 for the last (T = 2: 5, T = 1: 1). Chunk i starts at frame 17i.
        Between chunks only 5 frames are held. Chunks are on the VAE's device and the caller's to keep or change.
        ``start`` skips chunks, bit-identically, at the price of one extra decoder run. ``tile`` in pixels: only 256
        is the reference. ``layers`` runs each clip layer by layer (``VideoDecoder.forward``), with the same bits;
        ``batch`` tiles at once are the same formula, and the bits may differ.
        Raises H3Error for a latent of the wrong shape, NonFiniteError for NaN or infinity in or out.
        """
        self._check_latent(latent)
        clips = decode_clips(latent.shape[2])
        if not 0 <= start <= len(clips):
            raise H3Error(f"start chunk {start} is outside 0..{len(clips)}: this latent has {len(clips)} chunks")
        plan = TilePlan.latents(*latent.shape[3:], tile)
        decoder = partial(self.decoder, layers=layers, batch=batch)
        return self._decode_chunks(latent, clips, start, plan, decoder)

    @torch.no_grad()
    def _decode_chunks(
        self, latent: torch.Tensor, clips: list[DecodeClip], start: int, plan: TilePlan, decoder: Callable
    ) -> Iterator[torch.Tensor]:
        tail = None
        if 0 < start < len(clips):
            tail = self._decode_clip(latent, clips[start - 1], (clips[start - 1].tail,), plan, decoder)
        mean, std = _imagenet(self.post_quant_conv.weight.device)
        for clip in clips[start:]:
            parts = (clip.head,) if clip.tail is None else (clip.head, clip.tail)
            chunk = self._decode_clip(latent, clip, parts, plan, decoder)
            if tail is not None:
                blend_in(chunk, tail, dim=2)
                tail = None
            if clip.tail is not None and clip is not clips[-1]:
                tail = chunk[:, :, clip.head_frames :].clone()
                chunk = chunk[:, :, : clip.head_frames]
            yield chunk.mul_(std).add_(mean).clamp_(0.0, 1.0)
            del chunk

    def _decode_clip(
        self,
        latent: torch.Tensor,
        clip: DecodeClip,
        parts: tuple[slice, ...],
        plan: TilePlan,
        decoder: Callable,
    ) -> torch.Tensor:
        """The kept frames ``parts`` of one clip, tiles blended, still ImageNet-normalised: [1, 3, f, 16h, 16w]."""
        weight = self.post_quant_conv.weight
        mean, std = self._statistics(weight.device)
        z = (latent[:, :, list(clip.latents)].to(weight.device, torch.float32) * std + mean).to(weight.dtype)
        tiles = [self.post_quant_conv(z[..., rows, columns]) for rows, columns in plan.windows()]
        stitcher = Stitcher(plan.scaled(PIXELS_PER_LATENT))
        for pixels in decoder(tiles):  # [1, 3, 4t, 16h', 16w']
            stitcher.add(torch.cat([pixels[:, :, part] for part in parts], dim=2))
        canvas = stitcher.finish()
        if not is_finite(canvas):
            raise NonFiniteError("the video VAE decoded to NaN or infinity: check the VAE file and its precision")
        return canvas

    def decode(
        self, latent: torch.Tensor, tile: int = TILE, layers: Layers | None = None, batch: int = 1
    ) -> torch.Tensor:
        """The chunks of ``decode_chunks`` in one tensor [1, 3, F, 16h, 16w], on the latent's device."""
        chunks = self.decode_chunks(latent, tile=tile, layers=layers, batch=batch)
        frames, height, width = pixel_frames(latent.shape[2]), *latent.shape[3:]
        size = (1, self.config.pixel_channels, frames, height * PIXELS_PER_LATENT, width * PIXELS_PER_LATENT)
        out = torch.empty(size, device=latent.device)
        for index, chunk in enumerate(chunks):
            out[:, :, index * CLIP_FRAMES :][:, :, : chunk.shape[2]] = chunk
        return out

    def _check_latent(self, latent: torch.Tensor) -> None:
        channels = self.config.latent_channels
        shape = list(latent.shape)
        if latent.ndim < 2 or shape[1] != channels:
            found = shape[1] if latent.ndim > 1 else 0
            raise H3Error(
                f"this has {found} channels ({shape}): {AUDIO_LATENT_CHANNELS} is an audio latent, "
                f"give the video latent [1, {channels}, frames, height, width]"
            )
        if latent.ndim != 5 or shape[0] != 1 or 0 in shape:
            raise H3Error(f"the video latent is {shape}: give one clip [1, {channels}, frames, height, width]")
        if not latent.is_floating_point():
            raise H3Error(f"the video latent is {latent.dtype}: give floats")
        if not is_finite(latent):
            raise NonFiniteError("the video latent holds NaN or infinity: it cannot be decoded, render it again")


def _imagenet(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.tensor(values, device=device).view(1, -1, 1, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))


def _encode_plan(frames: int, height: int, width: int, tile: int) -> TilePlan:
    if frames < 1:
        raise H3Error("there are no frames to encode: give at least 1")
    for name, edge in (("height", height), ("width", width)):
        if edge % PIXELS_PER_LATENT or edge < SMALLEST_EDGE:
            raise H3Error(
                f"{name} {edge} cannot be encoded: give a multiple of {PIXELS_PER_LATENT} of at least {SMALLEST_EDGE}"
            )
    return TilePlan.latents(height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT, tile)
