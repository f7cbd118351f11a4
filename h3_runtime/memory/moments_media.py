"""Moments of the stages around the loop: text encoder, both VAEs, encoding and decoding. See ``moments``.

text     vision tower ─▶ language layers, one pass           the layer's feed-forward is the peak
encode   clips of 17 frames in tiles of 256 px               the first level of the CNN is the peak
decode   clips of 7 latents, tile by tile or layer by layer  the finished canvas, or a tile
sound    one ear at a time                                   the widest convolution's three or eight tensors
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from ..geometry import AUDIO_CHANNELS, CLIP_FRAMES, CLIP_LATENTS, PIXELS_PER_LATENT
from ..models.attention import ROW_CHUNK
from ..models.audio_vae import AudioVAEConfig
from ..models.video_tiles import FRAMES_PER_LATENT, TILE, TilePlan, decode_clips
from ..models.video_vae import VideoVAEConfig
from ..text.tower import Look, batches
from ..text.vision import MERGE, PATCH_VALUES
from .moments import FLOAT32, Moment
from .weights import AudioVAEWeights, TextWeights, VideoVAEWeights

COLOURS = 3


# ---- text


def text_moments(weights: TextWeights, rows: int, patches: Sequence[int], resident: bool, ahead: int) -> list[Moment]:
    """The prompt through the encoder: ``rows`` text rows, ``patches`` of each picture or frame pair before them.

    Words stay on the host. Without ``resident`` the tower is there only for the pictures, the ring only for the layers
    (``text.placed``); the layers work in canonical chunks (``text.layer``), the tower in batches (``text.tower``).
    """
    sizes, item = weights.sizes, weights.itemsize
    layers = sum(weights.layers) if resident else 0
    ring = 0 if resident else min(ahead + 1, len(weights.layers)) * max(weights.layers)
    states = (
        ("hidden state", rows * sizes.hidden * item),
        ("deepstack rows", sizes.deepstack * (sum(patches) // MERGE**2) * sizes.hidden * item),
    )
    tower = (("vision tower", weights.vision), ("resident layers", layers))
    moments = []
    if patches:
        largest_batch = _largest_batch(patches)
        moments.append(Moment("vision tower", (*tower, *states, ("batch of pictures", _tower(weights, largest_batch)))))
    held = (*(tower if resident else ()), ("ring of layers", ring), *states)
    chunk = min(ROW_CHUNK, rows)
    tables = 2 * rows * sizes.head_dim * item
    attention = rows * (sizes.query_rows + 2 * sizes.key_rows) * item
    group = sizes.query_rows // (sizes.key_rows // sizes.head_dim)  # width of the queries that share one key head
    queries = chunk * (sizes.hidden * item + sizes.query_rows * (item + 2 * FLOAT32))  # q_norm works in float32
    seen = rows * (group * item + group // sizes.head_dim * FLOAT32)
    feed = chunk * (sizes.hidden + 2 * sizes.ffn) * item
    work = (("rotary tables", tables), ("queries, keys, values", attention), ("chunk", max(queries, seen)))
    moments.append(Moment("language layer", (*held, *work)))
    return [*moments, Moment("feed-forward", (*held, ("rotary tables", tables), ("feed-forward chunk", feed)))]


def _largest_batch(patches: Sequence[int]) -> int:
    """Patches of the largest batch that the tower takes at once."""
    looks = [Look(range(count), (MERGE, MERGE), 0) for count in patches]
    return max(sum(patches[index] for index in batch) for batch in batches(looks))


def _tower(weights: TextWeights, patches: int) -> int:
    """One batch in a block of transformers' tower: patches, hidden and normed rows, q, k, v, six float32 tensors of
    their rotation; and the deepstack rows made so far."""
    sizes, item = weights.sizes, weights.itemsize
    taps = sizes.deepstack * (patches // MERGE**2) * sizes.hidden * item
    return patches * (PATCH_VALUES * item + sizes.vision_hidden * (5 * item + 6 * FLOAT32)) + taps


# ---- video VAE


def encode_moments(weights: VideoVAEWeights, frames: int, height: int, width: int) -> list[Moment]:
    """``VideoVAE._encode`` of ``frames`` (1, or clips of 17) of ``width`` x ``height`` pixels; the decoder's layers are
    not counted."""
    config = weights.config
    clip = 1 if frames == 1 else CLIP_FRAMES
    plan = TilePlan.latents(height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT, TILE).scaled(PIXELS_PER_LATENT)
    pixels = config.pixel_channels * clip * height * width
    cells = 2 * config.latent_channels * (height // PIXELS_PER_LATENT) * (width // PIXELS_PER_LATENT)
    latents = -(-frames // CLIP_FRAMES) * (1 if frames == 1 else CLIP_LATENTS)
    held = (
        ("video VAE outside the layers", weights.rest),
        ("pixels of a clip", pixels * FLOAT32),
        ("moments", cells * latents * FLOAT32),
    )
    moments = [Moment("pixels", (*held, ("pixels made ready", pixels * (FLOAT32 + 1))))]
    size = [clip, plan.rows.size, plan.columns.size]
    inputs = config.channels[0]
    for level, channels in enumerate(config.channels):
        moments.append(Moment(f"encoder level {level}", (*held, ("tile", _level(config, inputs, channels, size)))))
        space, time = config.space_strides[level], config.time_strides[level]
        size = [-(-size[0] // time), size[1] // space, size[2] // space]
        inputs = channels
    return moments


def _level(config: VideoVAEConfig, inputs: int, channels: int, size: Sequence[int]) -> int:
    """One level of the encoder: its input, which the encoder holds, then a resnet block's tensors."""
    frames, height, width = size
    frame = height * width
    lead = 2  # zero frames in front of a causal convolution
    given, one = inputs * frames * frame, channels * frames * frame
    edges = (height + 2) * (width + 2)
    padded, normed = channels * (lead + frames) * edges, channels * frame
    blocks = given + (one if config.resnets > 1 else 0)  # the encoder's own hold, and the block's input
    padding = blocks + one + padded + normed + channels * edges
    return max(padding, blocks + 2 * one + padded + normed) * FLOAT32


def decode_moments(
    weights: VideoVAEWeights, latent: tuple[int, int, int], resident: bool, ahead: int, batch: int = 1
) -> list[Moment]:
    """``decode.decode_video`` of ``latent`` (T, h, w): ``batch`` tiles at once when the decoder is resident, else layer
    by layer.

    While a clip is decoded the one before is still in its reader's hands.
    """
    config, item = weights.config, weights.itemsize
    frames, height, width = latent
    clips = decode_clips(frames)
    plan = TilePlan.latents(height, width, TILE)
    shown = max(clip.head_frames + (0 if clip.tail is None else clip.tail.stop - clip.tail.start) for clip in clips)
    canvas = COLOURS * shown * height * width * PIXELS_PER_LATENT**2
    seam = COLOURS * (shown - CLIP_FRAMES) * height * width * PIXELS_PER_LATENT**2 if len(clips) > 1 else 0
    window = len(clips[0].latents)
    tile = plan.rows.size * plan.columns.size * window
    tiles = len(plan) * config.latent_channels * tile
    before = canvas + seam if len(clips) > 1 else 0
    held = (
        ("video VAE outside the layers", weights.rest),
        ("resident layers", sum(weights.layers) if resident else 0),
        ("ring of layers", 0 if resident else (ahead + 1) * max(weights.layers)),
        ("latent", config.latent_channels * height * width * (frames + window) * FLOAT32),
        ("tiles", tiles * item),
        ("frames before", before * FLOAT32),
    )
    tokens = tile + config.registers + 1
    stream = tokens * config.width * FLOAT32
    work = max(
        tokens * (config.width * (2 * item + FLOAT32) + 2 * config.ffn * item),
        tokens * config.width * (8 * item),
    )
    patch = COLOURS * FRAMES_PER_LATENT * PIXELS_PER_LATENT**2
    pixels = tile * patch * FLOAT32
    finished = canvas * FLOAT32 + pixels  # the last tile's are alive until the canvas is whole
    seams = COLOURS * shown * PIXELS_PER_LATENT**2 * (width * max(plan.rows.overlaps, default=0)) * FLOAT32
    moments = [Moment("finished clip", (*held, ("canvas and last tile", finished)))]
    growing = (("canvas", canvas * FLOAT32), ("seams", seams))
    if resident:
        moments.append(
            Moment(
                "tile",
                (*held, *growing, ("streams", batch * stream), ("decoder block", batch * work), ("pixels", pixels)),
            )
        )
    else:
        streams = len(plan) * stream
        moments.append(Moment("layer", (*held, ("streams of all tiles", streams), ("decoder block", work))))
        head = tile * config.width * FLOAT32 + 3 * pixels
        moments.append(Moment("heads", (*held, *growing, ("streams of all tiles", streams), ("head", head))))
    return moments


# ---- audio VAE


def sound_decode_moments(weights: AudioVAEWeights, audio_t: int) -> list[Moment]:
    """``AudioVAE.decode`` of ``audio_t`` latents: one ear at a time, eight tensors of the widest stage."""
    config: AudioVAEConfig = weights.config
    lengths = accumulate(config.decoder_rates, mul)
    widest = max(config.decoder_dim // 2 ** (stage + 1) * length for stage, length in enumerate(lengths)) * audio_t
    trunk = config.latent_dim * audio_t
    latent = 2 * AUDIO_CHANNELS * config.latent_channels * audio_t
    first_ear = audio_t * config.hop
    parts = (
        ("audio VAE", weights.nbytes),
        ("latent and trunk", (latent + trunk) * FLOAT32),
        ("decoder stage", 8 * widest * FLOAT32),
        ("first ear", first_ear * FLOAT32),
    )
    return [Moment("sound decode", parts)]


def sound_encode_moments(weights: AudioVAEWeights, audio_t: int) -> list[Moment]:
    """``AudioVAE.encode`` of ``audio_t`` latents of sound: three tensors of the widest convolution."""
    config: AudioVAEConfig = weights.config
    samples = audio_t * config.hop
    widest = max(
        config.encoder_dim * 2**stage * samples // math.prod(config.encoder_rates[:stage])
        for stage in range(len(config.encoder_rates))
    )
    parts = (
        ("audio VAE", weights.nbytes),
        ("sound", (AUDIO_CHANNELS + 1) * samples * FLOAT32),
        ("encoder stage", 3 * widest * FLOAT32),
    )
    return [Moment("sound encode", parts)]
