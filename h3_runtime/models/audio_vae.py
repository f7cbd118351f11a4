"""The audio VAE: 32 kHz sound to 40 latents a second and back, each ear by itself, always in float32.

    waveform [1, 2, L] -- left, then right --.                          .-- left, then right --> waveform [1, 2, 800 T]
                                             v                          |
    [1, 1, 800 T]                                                sound [1, 1, 800 T], clamped to +-1
        |  strided convolutions /2 /4 /4 /5 /5                       ^  anti-aliased blocks x5 x5 x2 x2 x2 x2 x2
        v                                                            |
    [1, 2048, T]                                                 [1, 2048, T]
        |  causal attention, heads averaged away                     ^  1x1 convolution
        v                                                            |
    mean [1, 32, T] -> (z - mean) / std -> latent [1, 32, 2, T] -> z * std + mean

There is no spectrogram and no vocoder: both halves work on samples. Source of every formula: the reference package's
``AutoencoderKLMiniMaxH3Audio`` (an encoder of the DAC family, a decoder of the BigVGAN family). Attribute names equal
the keys of the ComfyUI file, in which weight norm is already folded into plain weights.

Memory beside the weights (0.6 GB), for the released sizes and A latents, float32, one ear at a time; a 15 s clip
(362 frames) has A = 603, so L = 482,400 samples:

- encode: the widest tensor is 64 x L (as is 128 x L/2 behind it): 123 MB. A residual unit holds three of them (its
  input, the activation, the convolution's result) and adds into its input: 371 MB, or 25 MB a second of sound.
- decode: from the second stage on every tensor is 256 x 5 x 5 x A = 3.9 M numbers: 15 MB. An activation holds eight of
  them (stage input, running sum, shortcut, input, padded input, both phases, one temporary), beside the trunk of
  2048 x A: 128 MB, or 8.5 MB a second.

A convolution's own workspace comes on top; it depends on the machine. No part looks at both ears, so a long sound
costs time and not a second copy of this. Attention is over A latents only (603 x 603 x 8 heads: 12 MB).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CheckpointError, H3Error, NonFiniteError
from ..geometry import AUDIO_CHANNELS
from .precision import is_finite

VIDEO_LATENT_CHANNELS = 24  # only to name the mistake when a video latent comes in
UNIT_DILATIONS = (1, 3, 9)  # the three residual units of an encoder stage
UNIT_KERNEL = 7
EDGE_KERNEL = 7  # first convolution of either half and the decoder's last
MLP_RATIO = 2
RESAMPLING_TAPS = 12  # taps of the x2 low-pass
SNAKE_FLOOR = 1e-9


@dataclass(frozen=True)
class AudioVAEConfig:
    """Sizes of the audio VAE; the defaults are the released model's.

    ``encoder_rates`` are the encoder's strides (their product is the hop, 800 samples a latent); ``decoder_rates``
    multiply to the same number. ``res_dilations`` has one tuple per entry of ``res_kernels``. H3Error when the numbers
    do not fit together.
    """

    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 4, 4, 5, 5)
    latent_dim: int = 2048
    latent_channels: int = 32
    heads: int = 8
    decoder_dim: int = 1024
    decoder_rates: tuple[int, ...] = (5, 5, 2, 2, 2, 2, 2)
    decoder_kernels: tuple[int, ...] = (9, 9, 4, 4, 4, 4, 4)
    res_kernels: tuple[int, ...] = (3, 7, 11)
    res_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _counted(field, getattr(self, field.name)))
        if min(self.encoder_rates) < 2:
            raise _misfit(f"encoder_rates is {self.encoder_rates}: every stride is at least 2")
        if math.prod(self.decoder_rates) != self.hop:
            raise _misfit(
                f"decoder_rates {self.decoder_rates} multiply to {math.prod(self.decoder_rates)}, encoder_rates "
                f"{self.encoder_rates} to {self.hop}: both must give the same number of samples a latent"
            )
        if len(self.decoder_kernels) != len(self.decoder_rates):
            raise _misfit(
                f"decoder_kernels {self.decoder_kernels} and decoder_rates {self.decoder_rates} differ in length"
            )
        for kernel, rate in zip(self.decoder_kernels, self.decoder_rates):
            if kernel < rate or (kernel - rate) % 2:
                raise _misfit(f"an upsampling kernel of {kernel} does not give exactly {rate} samples for one")
        if len(self.res_dilations) != len(self.res_kernels) or any(kernel % 2 == 0 for kernel in self.res_kernels):
            raise _misfit(
                f"res_kernels {self.res_kernels} must be odd, with one tuple each in res_dilations {self.res_dilations}"
            )
        if self.latent_dim % self.heads:
            raise _misfit(f"heads is {self.heads}: it must divide latent_dim {self.latent_dim}")
        if self.decoder_dim % 2 ** len(self.decoder_rates):
            raise _misfit(
                f"decoder_dim is {self.decoder_dim}: it must halve evenly in {len(self.decoder_rates)} stages"
            )

    @property
    def hop(self) -> int:
        """Samples behind one latent: 800 in the released model."""
        return math.prod(self.encoder_rates)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and tuples, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AudioVAEConfig:
        """The inverse of ``to_dict`` (lists or tuples). H3Error on a name that is no setting."""
        return cls(**_known_settings(values))

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], overrides: Mapping[str, Any] | None = None
    ) -> AudioVAEConfig:
        """The sizes of a weight file, read from its tensor shapes (ComfyUI names, weight norm folded).

        Shapes tell everything but three settings, taken from ``overrides`` or else as in the released model: ``heads``
        (8), ``res_dilations`` (1, 3, 5 in every block) and ``decoder_rates`` ((kernel + 1) // 2: 9 -> 5, 8 -> 4,
        4 -> 2; refused unless they multiply to the hop). CheckpointError when tensors are missing or an override
        contradicts a shape; H3Error when an override has an unknown name or the sizes do not fit together.
        """
        told = _sizes_told_by(shapes)
        given = _known_settings(overrides or {})
        for name, value in given.items():
            if name in told and told[name] != value:
                raise CheckpointError(
                    f"{name} is given as {value}, but the audio VAE's tensors say {told[name]}: "
                    "drop the setting or use the file it belongs to"
                )
        return cls(**{**_sizes_assumed_for(shapes, told, given), **told, **given})


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, (list, tuple)) else value


def _counted(field: Field, value: Any) -> Any:
    """``value`` with tuples for lists; H3Error unless it holds counts nested as the field's default is."""

    def alike(given: Any, default: Any) -> bool:
        if isinstance(default, tuple):
            return isinstance(given, tuple) and bool(given) and all(alike(item, default[0]) for item in given)
        return isinstance(given, int) and not isinstance(given, bool) and given >= 1

    value = _tupled(value)
    if not alike(value, field.default):
        raise _misfit(f"{field.name} is {value!r}: whole numbers of at least 1 are needed, as in {field.default}")
    return value


def _misfit(what: str) -> H3Error:
    return H3Error(f"audio VAE settings: {what}; use the settings that came with the weights")


def _known_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    allowed = {field.name: field for field in fields(AudioVAEConfig)}
    unknown = [name for name in values if name not in allowed]
    if unknown:
        raise H3Error(f"audio VAE settings: {unknown[0]!r} is none of {', '.join(allowed)}; leave it out")
    return {name: _counted(allowed[name], value) for name, value in values.items()}


def _sizes_told_by(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Every setting that tensor shapes determine."""

    def shape(name: str) -> tuple[int, ...]:
        found = tuple(shapes.get(name, ()))
        if len(found) != 3:
            raise CheckpointError(_why_no_audio_vae(shapes, name, found))
        return found

    encoder_dim = shape("encoder.block.0.weight")[0]
    stages = _count(shapes, "encoder.block.{}.block.4.weight", start=1)
    strided = [shape(f"encoder.block.{stage}.block.4.weight")[2] for stage in range(1, stages + 1)]
    latent_dim = shape(f"encoder.block.{stages + 2}.weight")[0]
    upsamplers = _count(shapes, "decoder.ups.{}.0.weight")
    blocks = _count(shapes, "decoder.resblocks.{}.convs1.0.weight")
    if not upsamplers or not blocks or blocks % upsamplers or any(kernel % 2 for kernel in strided):
        raise CheckpointError(
            f"the audio VAE's tensors do not fit together: {upsamplers} upsampling stages, {blocks} residual blocks, "
            f"strided kernels {strided} (blocks come in equal numbers a stage, kernels are even): the file is damaged"
        )
    return {
        "encoder_dim": encoder_dim,
        "encoder_rates": tuple(kernel // 2 for kernel in strided),
        "latent_dim": latent_dim,
        "latent_channels": shape("mean_proj.weight")[0],
        "decoder_dim": shape("decoder.conv_pre.weight")[0],
        "decoder_kernels": tuple(shape(f"decoder.ups.{stage}.0.weight")[2] for stage in range(upsamplers)),
        "res_kernels": tuple(
            shape(f"decoder.resblocks.{branch}.convs1.0.weight")[2] for branch in range(blocks // upsamplers)
        ),
    }


def _count(shapes: Mapping[str, tuple[int, ...]], pattern: str, start: int = 0) -> int:
    number = start
    while pattern.format(number) in shapes:
        number += 1
    return number - start


def _sizes_assumed_for(shapes: Mapping[str, tuple[int, ...]], told: dict[str, Any], given: dict[str, Any]) -> dict:
    """The released model's ``decoder_rates`` and ``res_dilations`` as far as they fit; CheckpointError when not."""
    usual = (1, 3, 5)
    branches = range(len(told["res_kernels"]))
    counts = [_count(shapes, f"decoder.resblocks.{branch}.convs1.{{}}.weight") for branch in branches]
    dilations = given.get("res_dilations", (usual,) * len(counts))
    if [len(steps) for steps in dilations] != counts:
        raise CheckpointError(
            f"res_dilations is {dilations}, but the audio VAE's residual blocks have {counts} dilations each: "
            "give the ones it was made with"
        )
    return {"decoder_rates": tuple((kernel + 1) // 2 for kernel in told["decoder_kernels"]), "res_dilations": dilations}


def _why_no_audio_vae(shapes: Mapping[str, tuple[int, ...]], name: str, found: tuple[int, ...]) -> str:
    if any(key.startswith("decoder.transformer_blocks.") for key in shapes):
        return f"these are the video VAE's weights ({name} is not among them): choose the audio VAE file"
    if any(key.endswith(".weight_g") for key in shapes):
        return (
            f"{name} is missing: weight norm is not folded, so these are the diffusers or official names; "
            "load them as a diffusers or official folder"
        )
    if found:
        return f"{name} has shape {list(found)}, three sizes are needed: this is not the audio VAE, or it is damaged"
    return f"{name} is missing: this is not the audio VAE (ComfyUI layout), or the file is incomplete"


class Snake(nn.Module):
    """Encoder activation x + sin(alpha x)^2 / alpha, one alpha per channel; [1, C, L] -> [1, C, L]."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        ripple = (x * self.alpha).sin_().square_()
        return ripple.mul_((self.alpha + SNAKE_FLOOR).reciprocal()).add_(x)

    def overwrite(self, x: Tensor) -> Tensor:
        """The same inside ``x``, for an ``x`` that nobody else reads: one full-width tensor less at the peak."""
        ripple = (x * self.alpha).sin_().square_()
        return x.addcmul_(ripple, (self.alpha + SNAKE_FLOOR).reciprocal())


class SnakeBeta(nn.Module):
    """Decoder activation x + sin(a x)^2 / b with a = exp(alpha), b = exp(beta) per channel."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def overwrite(self, x: Tensor) -> Tensor:
        """Applied inside ``x`` [1, C, L], which is returned."""
        frequency = self.alpha.exp().unsqueeze(-1)  # [C, 1]
        inverse = (self.beta.exp() + SNAKE_FLOOR).reciprocal().unsqueeze(-1)  # [C, 1]
        return x.addcmul_((x * frequency).sin_().square_(), inverse)


def resampling_filter() -> Tensor:
    """The low-pass of the x2 resampling [1, 1, 12]: a sinc cut at a quarter of the doubled rate under a Kaiser window.

    The window's shape follows Kaiser's formula for a transition width of 0.3 and 12 taps. Weight files carry their own
    copy, which replaces this one.
    """
    half = RESAMPLING_TAPS // 2
    attenuation = 2.285 * (half - 1) * math.pi * 4 * 0.3 + 7.95
    assert attenuation > 50, "Kaiser's other branches do not occur at these fixed numbers"
    beta = 0.1102 * (attenuation - 8.7)
    window = torch.kaiser_window(RESAMPLING_TAPS, periodic=False, beta=beta, dtype=torch.float64, device="cpu")
    offset = torch.arange(RESAMPLING_TAPS, dtype=torch.float64, device="cpu") - (RESAMPLING_TAPS - 1) / 2
    taps = window * torch.sinc(offset / 2)
    return (taps / taps.sum()).float().view(1, 1, -1)


class LowPass(nn.Module):
    """Holds one low-pass under the name that weight files use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", resampling_filter())


class AliasFree(nn.Module):
    """An activation at twice the sample rate: x2 low-pass, activation, low-pass /2; [1, C, L] -> [1, C, L].

    The doubled signal is never built. Its even and odd samples are kept as two tensors of the original length, and both
    low-passes become sums of shifted copies of them (6 taps fall on either phase). Ends are repeated, as in the
    reference: 3 samples before doubling, 5 on the left and 6 on the right of the doubled signal.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.act = SnakeBeta(channels)
        self.upsample = LowPass()
        self.downsample = nn.Module()
        self.downsample.lowpass = LowPass()

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1]
        rise = 2 * self.upsample.filter.view(-1).flip(0)  # [12]; doubling the rate halves the level
        wide = F.pad(x, (3, 3), mode="replicate")  # [1, C, L + 6]
        even = self.act.overwrite(_shifted_sum(wide, rise[0::2], length))
        odd = self.act.overwrite(_shifted_sum(wide[..., 1:], rise[1::2], length))
        del wide
        fall = self.downsample.lowpass.filter.view(-1)  # [12]
        # Beyond the ends the doubled signal repeats its first sample (an even one) and its last (an odd one).
        first, last = even[..., :1].expand(-1, -1, 3), odd[..., -1:].expand(-1, -1, 3)  # [1, C, 3]
        result = _shifted_sum(torch.cat((first[..., :2], even, last), dim=-1), fall[1::2], length)
        del even
        odd = torch.cat((first, odd, last[..., :2]), dim=-1)  # [1, C, L + 5]
        return _shifted_sum(odd, fall[0::2], length, onto=result)


def _shifted_sum(signal: Tensor, taps: Tensor, length: int, onto: Tensor | None = None) -> Tensor:
    """sum over j of taps[j] * signal[..., j : j + length], added inside ``onto`` when there is one."""
    total = signal[..., :length] * taps[0] if onto is None else onto.addcmul_(signal[..., :length], taps[0])
    for shift in range(1, taps.numel()):
        total.addcmul_(signal[..., shift : shift + length], taps[shift])
    return total


class ResidualUnit(nn.Module):
    """x + conv1(snake(conv7(snake(x)))), added inside x: nobody else reads it, and it is the widest tensor there is."""

    def __init__(self, channels: int, dilation: int):
        super().__init__()
        reach = (UNIT_KERNEL - 1) * dilation // 2
        self.block = nn.Sequential(
            Snake(channels),
            nn.Conv1d(channels, channels, UNIT_KERNEL, dilation=dilation, padding=reach),
            Snake(channels),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, wide, second, narrow = self.block
        return x.add_(narrow(second.overwrite(wide(first(x)))))


class EncoderStage(nn.Module):
    """Three residual units, then a strided convolution: [1, C, L] -> [1, 2C, L / stride]."""

    def __init__(self, channels: int, stride: int):
        super().__init__()
        self.block = nn.Sequential(
            *(ResidualUnit(channels, dilation) for dilation in UNIT_DILATIONS),
            Snake(channels),
            nn.Conv1d(channels, 2 * channels, 2 * stride, stride=stride, padding=math.ceil(stride / 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        *units, snake, strided = self.block
        for unit in units:
            x = unit(x)
        return strided(snake.overwrite(x))


class Encoder(nn.Module):
    """Samples [1, 1, hop * T] -> trunk [1, latent_dim, T]."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        widths = [config.encoder_dim * 2**stage for stage in range(len(config.encoder_rates) + 1)]
        self.block = nn.Sequential(
            nn.Conv1d(1, widths[0], EDGE_KERNEL, padding=EDGE_KERNEL // 2),
            *(EncoderStage(width, stride) for width, stride in zip(widths, config.encoder_rates)),
            Snake(widths[-1]),
            nn.Conv1d(widths[-1], config.latent_dim, 3, padding=1),
        )

    def forward(self, samples: Tensor) -> Tensor:
        return self.block(samples)


class HeadMeanAttention(nn.Module):
    """Causal self-attention whose heads are averaged, then pooled from head width to ``out_dim``.

    [1, T, in_dim] -> [1, T, out_dim]. Queries and values have biases; the key's is stored but always zero.
    """

    def __init__(self, in_dim: int, out_dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.out_dim = out_dim
        self.qkv = nn.Linear(in_dim, 3 * in_dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(in_dim))
        self.v_bias = nn.Parameter(torch.zeros(in_dim))
        self.register_buffer("zero_k_bias", torch.zeros(in_dim))
        self.proj = nn.Linear(out_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        bias = torch.cat((self.q_bias, self.zero_k_bias, self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [1, heads, T, head width]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(F.adaptive_avg_pool1d(seen.mean(dim=1), self.out_dim))


class GatedMLP(nn.Module):
    """w2(gelu(w0(n)) * w1(n)) with n = norm(x); [1, T, D] -> [1, T, D]."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.w0 = nn.Linear(width, MLP_RATIO * width)
        self.w1 = nn.Linear(width, MLP_RATIO * width)
        self.w2 = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(F.gelu(self.w0(x), approximate="tanh") * self.w1(x))


class LatentProjection(nn.Module):
    """Trunk [1, T, latent_dim] -> [1, T, latent_channels]: a linear path plus attention, then a gated MLP."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.latent_dim)
        self.attn = HeadMeanAttention(config.latent_dim, config.latent_channels, config.heads)
        self.norm3 = nn.LayerNorm(config.latent_dim)
        self.proj = nn.Linear(config.latent_dim, config.latent_channels)
        self.norm2 = nn.LayerNorm(config.latent_channels)
        self.mlp = GatedMLP(config.latent_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(self.norm3(x)) + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ResidualBlock(nn.Module):
    """One kernel size of a decoder stage: for every dilation x + conv(act(dilated conv(act(x)))).

    ``activations`` alternates: before the dilated convolution, before the plain one.
    """

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]):
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=(kernel - 1) * dilation // 2)
            for dilation in dilations
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel, padding=kernel // 2) for _ in dilations)
        self.activations = nn.ModuleList(AliasFree(channels) for _ in range(2 * len(dilations)))

    def forward(self, x: Tensor) -> Tensor:
        for step, (dilated, plain) in enumerate(zip(self.convs1, self.convs2)):
            inner = dilated(self.activations[2 * step](x))
            x = plain(self.activations[2 * step + 1](inner)).add_(x)
        return x


class Decoder(nn.Module):
    """Trunk [1, latent_dim, T] -> samples [1, 1, hop * T], not yet clamped."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        self.branches = len(config.res_kernels)
        width = config.decoder_dim
        self.conv_pre = nn.Conv1d(config.latent_dim, width, EDGE_KERNEL, padding=EDGE_KERNEL // 2)
        self.ups = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for kernel, rate in zip(config.decoder_kernels, config.decoder_rates):
            upsampler = nn.ConvTranspose1d(width, width // 2, kernel, rate, padding=(kernel - rate) // 2)
            self.ups.append(nn.ModuleList([upsampler]))
            width //= 2
            for res_kernel, dilations in zip(config.res_kernels, config.res_dilations):
                self.resblocks.append(ResidualBlock(width, res_kernel, dilations))
        self.activation_post = AliasFree(width)
        self.conv_post = nn.Conv1d(width, 1, EDGE_KERNEL, padding=EDGE_KERNEL // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_pre(x)
        for stage, (upsampler,) in enumerate(self.ups):
            x = upsampler(x)
            total = self.resblocks[stage * self.branches](x)
            for branch in range(1, self.branches):
                total.add_(self.resblocks[stage * self.branches + branch](x))
            x = total.div_(self.branches)
        return self.conv_post(self.activation_post(x))


class AudioVAE(nn.Module):
    """Sound to normalised latents and back.

    Attribute names equal the ComfyUI file's keys, so ``load_state_dict(tensors, strict=True, assign=True)`` takes such
    a file as it is, once every tensor is float32; a fresh module has torch's random weights, and statistics 0 and 1.
    The reference keeps this VAE in float32 (half precision decodes about 20 dB quieter), so other weights are refused
    at the door. TF32 is the runtime's switch and not this module's: it must be off for the reference's numbers.
    """

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.pre_block = LatentProjection(config)
        self.mean_proj = nn.Conv1d(config.latent_channels, config.latent_channels, 1)
        # Every weight file has it; the posterior's spread is never drawn from, so it is loaded and not run.
        self.logs_proj = nn.Conv1d(config.latent_channels, config.latent_channels, 1)
        self.dec_in_proj = nn.Conv1d(config.latent_channels, config.latent_dim, 1)
        self.decoder = Decoder(config)
        self.register_buffer("latents_mean", torch.zeros(config.latent_channels))
        self.register_buffer("latents_std", torch.ones(config.latent_channels))

    @torch.no_grad()
    def encode(self, waveform: Tensor) -> Tensor:
        """The normalised posterior mean of a stereo sound, on the VAE's device wherever the sound is.

        ``waveform``: float32 [1, 2, L] at 32 kHz in [-1, 1], left then right, L >= 1; filled up with zeros on the right
        to a whole number of latents (800 samples each). Returns float32 [1, 32, 2, ceil(L / 800)]. Mono is refused:
        whoever reads the file repeats it for both ears. H3Error on another shape, dtype or on weights that are not
        float32; NonFiniteError when the sound or the result holds NaN or infinity.
        """
        self._refuse_other_weights()
        _check_waveform(waveform)
        waveform = waveform.to(self.latents_mean.device)
        ears = [self._encode_mono(waveform[:, ear : ear + 1]) for ear in range(AUDIO_CHANNELS)]
        latent = torch.stack(ears, dim=2)  # [1, 32, 2, T]
        if not is_finite(latent):
            raise NonFiniteError(
                "the audio VAE turned a finite sound into NaN or infinity: its weights are damaged, load them again"
            )
        return latent

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        """The stereo sound of a normalised latent.

        ``latent``: float32 [1, 32, 2, T], left then right, T >= 1. Returns float32 [1, 2, 800 T] at 32 kHz, clamped to
        [-1, 1]. H3Error on another shape (a video latent is named as such), dtype or on weights that are not float32;
        NonFiniteError when the latent or the result before the clamp holds NaN or infinity.
        """
        self._refuse_other_weights()
        _check_latent(latent, self.config.latent_channels)
        latent = latent.to(self.latents_mean.device)
        ears = []
        for ear in range(AUDIO_CHANNELS):
            sound = self._decode_mono(latent[:, :, ear])  # [1, 1, 800 T]
            if not is_finite(sound):
                raise NonFiniteError(
                    "the audio VAE decoded a finite latent to NaN or infinity: the latent is far out of range "
                    f"(largest value {latent.abs().max().item():.3g}) or the weights are damaged; render it again"
                )
            ears.append(sound.clamp_(-1, 1))
        return torch.cat(ears, dim=1)

    def _encode_mono(self, samples: Tensor) -> Tensor:
        """[1, 1, L] -> normalised mean [1, 32, ceil(L / hop)]."""
        samples = F.pad(samples, (0, -samples.shape[-1] % self.config.hop))  # [1, 1, hop * T]
        trunk = self.encoder(samples)  # [1, latent_dim, T]
        mean = self.mean_proj(self.pre_block(trunk.transpose(1, 2)).transpose(1, 2))  # [1, 32, T]
        return (mean - self.latents_mean.view(-1, 1)) / self.latents_std.view(-1, 1)

    def _decode_mono(self, latent: Tensor) -> Tensor:
        """Normalised [1, 32, T] -> samples [1, 1, hop * T], not clamped."""
        latent = latent * self.latents_std.view(-1, 1) + self.latents_mean.view(-1, 1)
        return self.decoder(self.dec_in_proj(latent))

    def _refuse_other_weights(self) -> None:
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if tensor.dtype != torch.float32:
                raise H3Error(
                    f"the audio VAE's weights are {tensor.dtype} ({name}): it runs in torch.float32 only, since half "
                    "precision decodes about 20 dB quieter; load it in float32"
                )


def _check_waveform(waveform: Tensor) -> None:
    wanted = "the audio VAE encodes one stereo sound [1, 2, samples], float32 in [-1, 1] at 32 kHz"
    if not isinstance(waveform, Tensor):
        raise H3Error(f"the waveform is a {type(waveform).__name__}: {wanted}; pass the tensor itself")
    given = list(waveform.shape)
    if waveform.ndim == 3 and waveform.shape[1] == 1:
        raise H3Error(f"the waveform has shape {given}, that is mono: {wanted}; repeat the channel for left and right")
    if waveform.ndim != 3 or waveform.shape[0] != 1 or waveform.shape[1] != AUDIO_CHANNELS or waveform.shape[2] < 1:
        raise H3Error(f"the waveform has shape {given}: {wanted}; connect one sound of at least one sample")
    _check_numbers("the waveform", waveform, wanted)


def _check_latent(latent: Tensor, channels: int) -> None:
    wanted = f"the audio VAE decodes one audio latent [1, {channels}, 2, T], float32"
    if not isinstance(latent, Tensor):
        raise H3Error(f"the latent is a {type(latent).__name__}: {wanted}; pass the audio tensor itself")
    given = list(latent.shape)
    if latent.ndim == 5 or (latent.ndim > 1 and latent.shape[1] == VIDEO_LATENT_CHANNELS != channels):
        raise H3Error(
            f"the latent has shape {given}, {given[1]} channels: this is the video latent. {wanted}; "
            "connect the audio part, or use the video VAE"
        )
    if latent.ndim != 4 or latent.shape[:3] != (1, channels, AUDIO_CHANNELS) or latent.shape[3] < 1:
        raise H3Error(f"the latent has shape {given}: {wanted}; connect the audio part of one result, left and right")
    _check_numbers("the latent", latent, wanted)


def _check_numbers(what: str, tensor: Tensor, wanted: str) -> None:
    if tensor.dtype != torch.float32:
        raise H3Error(f"{what} is {tensor.dtype}: {wanted}; convert it to torch.float32")
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise NonFiniteError(
            f"{what} holds NaN or infinity in {bad} of {tensor.numel()} places: {wanted}; mend or replace it"
        )
