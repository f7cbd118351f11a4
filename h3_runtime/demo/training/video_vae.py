"""The carried video VAE, computed from the world: the best linear codec that the release's architecture can hold.

    encoder   strided convolutions as block transforms, level by level:  2x2 pixels ─▶ 8 numbers
                    2x2x2 of them ─▶ 24 ─▶ 2x2x2 ─▶ 32 ─▶ 2x2 ─▶ 24 = the latent     (residual branches silent)
              each transform holds the largest principal directions of the world's blocks
    decoder   token ─▶ layers that add nothing ─▶ LayerNorm ─▶ proj_out by least squares

The norms are kept out of the way by constant channels: one large constant in a norm's group makes it nearly a fixed
scale, and SiLU far above zero is nearly the identity. A later training of the decoder's layers would begin
there instead of at noise; none was needed for flat shapes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.video_tiles import LEAD_FRAMES
from ...models.video_vae import VideoVAE, VideoVAEConfig
from ..world import random_scene

CONFIG = VideoVAEConfig(
    channels=(8, 24, 32, 40, 40, 40), resnets=1, norm_groups=8, layers=3, heads=4, head_dim=32, ffn=256
)
SEED = 7
CONSTANT = 8000.0  # of the encoder's last norm, far above every signal
LIFT = 20.0  # where SiLU works there
DECODER_CONSTANT = 400.0  # likewise, of the decoder's tokens
POSTERIOR = 0.02  # spread of the posterior in units of each latent channel's own
SCALE = 0.5  # of the decoder's layers at the start, whose last linears begin at zero
SILENT = 1e-7  # of the branches that add nothing: all zeros would be taken for a damaged file
STD_FLOOR = 0.15  # of the largest channel's spread: channels that hardly move are not blown up
SIZES = ((128, 128),)  # height, width


def start(clips: int = 24) -> VideoVAE:
    """The codec, from ``clips`` scenes."""
    torch.manual_seed(SEED)
    vae = VideoVAE(CONFIG).eval().requires_grad_(False)
    samples = [clip for _, clip in zip(range(clips), draw_clips(SEED))]
    with torch.no_grad():
        _start_encoder(vae, samples)
        _start_decoder(vae, samples)
    return vae


def draw_clips(seed: int, sizes=SIZES, frames: int = 22) -> Iterator[Tensor]:
    """Clips uint8 [frames, H, W, 3] of random scenes, without end."""
    random = np.random.default_rng(seed)
    while True:
        height, width = sizes[int(random.integers(len(sizes)))]
        yield torch.from_numpy(random_scene(random).frames(width, height, frames))


def signal_rows() -> list[int]:
    """The channels of the encoder's trunk that carry the latent: three of every norm group of five.

    The other two are constants of opposite sign: the norm takes its group's mean off, and they show how much that was.
    """
    return [5 * (n // 3) + n % 3 for n in range(CONFIG.latent_channels)]


def _start_encoder(vae: VideoVAE, samples: list[Tensor]) -> None:
    encoder, channels = vae.encoder, CONFIG.channels
    encoder.conv_in.weight.zero_()
    encoder.conv_in.bias.zero_()
    for colour in range(3):
        encoder.conv_in.weight[colour, colour, 2, 1, 1] = 1.0
    # a clip's latent 0 sees one frame after zeros in front, the others four: both kinds are in the sample
    grids = [_pad_time(vae.normalise_pixels(clip[:17])) for clip in samples]  # each [1, 3, 20, H, W]
    used = 3
    for index, level in enumerate(encoder.down):
        for block in level.block:
            block.conv2.weight.normal_(std=SILENT)
            block.conv2.bias.zero_()
            if block.nin_shortcut is not None:
                block.nin_shortcut.weight.zero_()
                block.nin_shortcut.bias.zero_()
                block.nin_shortcut.weight[range(used), range(used)] = 1.0
        if level.downsample is None:
            continue
        last = index == 3
        kept = CONFIG.latent_channels if last else channels[index]
        blocks = [_blocks(grid, CONFIG.time_strides[index]) for grid in grids]  # each [C * steps * 2 * 2, T, H, W]
        basis = _main_directions(torch.cat([block.flatten(1) for block in blocks], dim=1), kept)
        conv = level.downsample.conv
        conv.weight.zero_()
        conv.bias.zero_()
        steps = CONFIG.time_strides[index]
        rows = signal_rows() if last else list(range(kept))
        conv.weight[rows, :used, 3 - steps :, :2, :2] = basis.view(kept, used, steps, 2, 2)
        if last:
            conv.bias[3::5], conv.bias[4::5] = CONSTANT, -CONSTANT
        grids = [(basis @ block.flatten(1)).view(1, kept, *block.shape[1:]) for block in blocks]
        used = kept
    _start_encoder_head(vae, grids)


def _main_directions(columns: Tensor, kept: int) -> Tensor:
    """[D, N] -> [kept, D]: the eigenvectors of the second moment, largest first; zero stays zero."""
    gram = columns @ columns.T
    return torch.linalg.eigh(gram.double()).eigenvectors[:, -kept:].flip(1).T.float().contiguous()


def _pad_time(clip: Tensor) -> Tensor:
    """[1, 3, 17, H, W] with three zero frames in front: five groups of four."""
    return F.pad(clip, (0, 0, 0, 0, LEAD_FRAMES, 0))


def _blocks(grid: Tensor, steps: int) -> Tensor:
    """[1, C, T, H, W] -> [C * steps * 2 * 2, T / steps, H / 2, W / 2]."""
    _, channels, frames, height, width = grid.shape
    x = grid.reshape(channels, frames // steps, steps, height // 2, 2, width // 2, 2)
    return x.permute(0, 2, 4, 6, 1, 3, 5).reshape(-1, frames // steps, height // 2, width // 2)


def _start_encoder_head(vae: VideoVAE, grids: list[Tensor]) -> None:
    """Norm, SiLU and the last convolution as near to the identity as they come, fitted on what they see.

    ``grids``: the signals [1, 24, 5, h, w] of every sample.
    """
    encoder, latent = vae.encoder, CONFIG.latent_channels
    flat = torch.cat([grid[0].flatten(1) for grid in grids], dim=1)  # [24, N]
    encoder.norm_out.weight.fill_(CONSTANT * 0.4**0.5 * 5.0 / flat.abs().amax())
    encoder.norm_out.bias.fill_(LIFT)
    seen = []
    for grid in grids:
        trunk = torch.full((5, CONFIG.channels[-1], *grid.shape[3:]), CONSTANT)
        trunk[:, 4::5] = -CONSTANT
        trunk[:, signal_rows()] = grid[0].transpose(0, 1)
        seen.append(encoder.norm_out(trunk).transpose(0, 1).flatten(1))
    weight, bias = fit(torch.cat(seen, dim=1).T, flat.T, 1e-12)
    encoder.conv_out.weight.zero_()
    encoder.conv_out.weight[:latent, :, 2, 1, 1] = weight
    encoder.conv_out.bias.zero_()
    encoder.conv_out.bias[:latent] = bias
    for conv, size in ((vae.quant_conv, 2 * latent), (vae.post_quant_conv, latent)):
        conv.weight.zero_()
        conv.bias.zero_()
        conv.weight[range(size), range(size)] = 1.0
    spread = flat.std(dim=1)
    vae.latents_mean.copy_(flat.mean(dim=1))
    vae.latents_std.copy_(spread.clamp(min=STD_FLOOR * spread.max().item()))
    vae.quant_conv.bias[latent:] = 2 * torch.log(POSTERIOR * vae.latents_std)


class LinearEncoder:
    """What ``start``'s encoder computes, as the one matrix it amounts to: [24, 3 * 4 * 16 * 16] on blocks of pixels."""

    def __init__(self, vae: VideoVAE):
        used, matrix = 3, torch.eye(3).view(3, 3, 1, 1, 1)  # [out, colour, t, y, x]
        for index, level in enumerate(vae.encoder.down):
            if level.downsample is None:
                continue
            weight = level.downsample.conv.weight
            rows = signal_rows() if index == 3 else list(range(CONFIG.channels[index]))
            steps = CONFIG.time_strides[index]
            taps = weight[rows, :used, 3 - steps :, :2, :2]  # [out, in, t', y', x']
            joined = torch.einsum("oituv,icabd->octaubvd", taps, matrix)
            out, colours, t, a, u, b, v, d = joined.shape
            matrix = joined.reshape(out, colours, t * a, u * b, v * d)
            used = len(rows)
        self.matrix = matrix.flatten(1)  # [24, 3072]
        self.mean, self.std = vae.latents_mean, vae.latents_std

    def __call__(self, clip: Tensor) -> Tensor:
        """uint8 [1 or 17k + 5, H, W, 3] -> normalised mean [1, 24, T, h, w]."""
        pixels = VideoVAE.normalise_pixels(clip)
        parts = []
        for first in range(0, pixels.shape[2], 17):
            part = pixels[:, :, first : first + 17]
            part = F.pad(part, (0, 0, 0, 0, LEAD_FRAMES, -(part.shape[2] + LEAD_FRAMES) % 4))
            parts.append((_patches(part) @ self.matrix.T).view(-1, *[n // 16 for n in clip.shape[1:3]], 24))
        latent = torch.cat(parts).permute(3, 0, 1, 2)[None]  # [1, 24, T, h, w]
        return (latent - self.mean.view(1, -1, 1, 1, 1)) / self.std.view(1, -1, 1, 1, 1)


def fit(features: Tensor, target: Tensor, ridge: float = 1e-6) -> tuple[Tensor, Tensor]:
    """weight [out, in] and bias [out] by least squares of ``target`` [N, out] on ``features`` [N, in]."""
    x = torch.cat([features, torch.ones(len(features), 1)], dim=1).double()
    gram = x.T @ x
    gram += ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    solved = torch.linalg.solve(gram, x.T @ target.double()).T.float()
    return solved[:, :-1].contiguous(), solved[:, -1].contiguous()


def _start_decoder(vae: VideoVAE, samples: list[Tensor]) -> None:
    decoder, width, latent = vae.decoder, CONFIG.width, CONFIG.latent_channels
    decoder.x_embedder.weight.zero_()
    decoder.x_embedder.bias.zero_()
    decoder.x_embedder.weight[range(latent), range(latent)] = 1 / vae.latents_std
    decoder.x_embedder.bias[:latent] = -vae.latents_mean / vae.latents_std
    decoder.x_embedder.bias[-1] = DECODER_CONSTANT
    decoder.register_tokens.normal_()
    decoder.register_tokens[..., -1] = DECODER_CONSTANT
    scale = DECODER_CONSTANT / width**0.5
    for block in decoder.transformer_blocks:
        block.scale1.fill_(SCALE)
        block.scale2.fill_(SCALE)
        block.scale1[-1] = block.scale2[-1] = 0.0
        for norm in (block.norm1, block.norm2):
            norm.weight.fill_(scale)
            norm.weight[-1] = 0.1
        for end in (block.attn.to_out, block.ff.w2):
            end.weight.normal_(std=SILENT)
            end.bias.zero_()
    decoder.norm_out.weight.fill_(scale)
    decoder.norm_out.bias.zero_()
    encode = LinearEncoder(vae)
    features, targets, shown = [], [], []
    for clip in samples:
        z = denormalised(vae, encode(clip[:17]))  # [1, 24, 5, h, w]
        hidden = decoder.embed(z)[0, : z[0, 0].numel()]
        norm = decoder.norm_out
        features.append(F.layer_norm(hidden, (width,), norm.weight, norm.bias, norm.eps))
        targets.append(_patches(_pad_time(vae.normalise_pixels(clip[:17]))))
        shown.append(torch.arange(len(hidden)) >= z.shape[3] * z.shape[4])
    features, targets, shown = torch.cat(features), torch.cat(targets), torch.cat(shown)
    slots = torch.arange(targets.shape[1]).view(3, 4, 256)
    for slot in range(4):  # of a clip's first latent only the last frame is ever shown
        rows = slots[:, slot].flatten()
        use = torch.ones_like(shown) if slot == 3 else shown
        weight, bias = fit(features[use], targets[use][:, rows])
        decoder.proj_out.weight[rows] = weight
        decoder.proj_out.bias[rows] = bias


def denormalised(vae: VideoVAE, latent: Tensor) -> Tensor:
    return latent * vae.latents_std.view(1, -1, 1, 1, 1) + vae.latents_mean.view(1, -1, 1, 1, 1)


def _patches(pixels: Tensor) -> Tensor:
    """[1, 3, 4t, 16h, 16w] -> [t * h * w, 3 * 4 * 16 * 16], as proj_out has them."""
    _, colours, frames, height, width = pixels.shape
    x = pixels.reshape(colours, frames // 4, 4, height // 16, 16, width // 16, 16)
    return x.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, colours * 4 * 256)
