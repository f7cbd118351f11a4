"""What is alive on the card at each moment of a stage, in bytes: arithmetic over sizes and chunk constants, no forward.

    denoise    refine   tables   [ block: norm ─ q, k, v of a head group ─ attention ─ feed-forward chunk ]   heads
    a moment   weights + ring + rows held + hidden state + what this step of the work needs
    the peak   the largest moment

Every formula follows one function of the runtime, named beside it, and takes its chunk sizes from there; the tests
compare all of them with the live bytes of that code. A card's own needs (context, kernel workspaces, the allocator's
rounding) are not here: a plan keeps a reserve for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..accelerators import Accelerator
from ..layout import PackedLayout
from ..models.attention import CANONICAL, ChunkSizes
from ..models.dit import MODALITIES, TABLE_BATCH, DiTConfig
from ..quant import convrot, kernels
from ..quant.linear import DECODED as DECODED_WEIGHTS
from .rows import RenderSizes, StepCounts
from .weights import DECODED, FLOAT, INTEGER, DiTWeights, LoraWeights

FLOAT32 = 4
INT64 = 8
MODULATIONS = 6  # vectors of a block's table row


@dataclass(frozen=True)
class Moment:
    """One moment: ``parts`` are (what, bytes) of everything alive."""

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.parts)

    def and_also(self, *parts: tuple[str, int]) -> Moment:
        return Moment(self.name, (*self.parts, *parts))


def largest(moments: Iterable[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.nbytes)


# ---- the DiT


@dataclass(frozen=True)
class DiTLoad:
    """What one forward of the DiT works on: sizes, the chunks, and bytes that accelerators hold. ``refiner_stays``: its
    blocks are resident; else they come through a ring for as long as they run. ``calls``: forwards that run the blocks,
    what accelerators surely leave out not counted."""

    weights: DiTWeights
    layout: PackedLayout
    counts: StepCounts
    masked: tuple[bool, bool] = (False, False)  # picture, sound
    chunks: ChunkSizes = CANONICAL
    accelerators: int = 0
    accelerators_on_host: int = 0
    refiner_stays: bool = False
    calls: int = 0

    @staticmethod
    def of(sizes: RenderSizes, weights: DiTWeights, accelerators: Sequence[Accelerator] = ()) -> DiTLoad:
        """The loop of a render of these sizes, in canonical chunks."""
        layout = sizes.layout()
        held, on_host = (
            sum(getattr(accelerator, which)(layout, weights.config, weights.itemsize) for accelerator in accelerators)
            for which in ("bytes", "host_bytes")
        )
        on_host += sum(  # recovery's copy, while it is written
            accelerator.bytes(layout, weights.config, weights.itemsize)
            + accelerator.host_bytes(layout, weights.config, weights.itemsize)
            for accelerator in accelerators
            if accelerator.keeps_state
        )
        masked = (bool(sizes.video_levels), bool(sizes.sound_levels))
        counts, schedule = sizes.step_counts(), sizes.schedule
        calls = min([counts.forwards, *(accelerator.planned_calls(schedule) for accelerator in accelerators)])
        return DiTLoad(weights, layout, counts, masked, CANONICAL, held, on_host, calls=calls)

    @property
    def config(self) -> DiTConfig:
        return self.weights.config

    @property
    def item(self) -> int:
        return self.weights.itemsize

    @property
    def rows(self) -> int:
        return self.layout.num_rows

    @property
    def target(self) -> tuple[int, int]:
        return len(self.layout.target_video), len(self.layout.target_audio)


def streams(load: DiTLoad) -> tuple[str, int]:
    """Rows of both streams on the card (``sampler._streams``); under a mask also what it keeps, what the model is
    shown, the mask, where it is 0, and each row's labels for the blocks and the heads."""
    total = 0
    for count, width, masked in zip(
        load.target, (4 * load.config.video_channels, load.config.audio_channels), load.masked
    ):
        total += count * width * FLOAT32 * (3 if masked else 1)
        total += count * (FLOAT32 + 1 + 2 * INT64) if masked else 0
    return "rows of the streams", total


def held_rows(load: DiTLoad) -> tuple[tuple[str, int], ...]:
    """What lives through the whole loop besides weights (``sampler.sample``, ``VelocityModel.__init__``)."""
    config, layout, item = load.config, load.layout, load.item
    widths = (4 * config.video_channels, config.audio_channels)
    conditions = sum(len(segment) * widths[not segment.is_video] * FLOAT32 for segment in layout.conditions)
    return (
        streams(load),
        ("rows of the conditions", conditions),
        ("text rows", len(layout.text) * config.hidden * item),
        ("time embedding", load.counts.all_timesteps * config.time_dim * FLOAT32),
        ("final table", load.counts.all_timesteps * 2 * config.hidden * item),
        ("accelerators", load.accelerators),
    )


def refine_moments(load: DiTLoad) -> list[Moment]:
    """``DiT.refine_text``: the text rows through the refiner, before anything else of the loop exists."""
    config, item, rows = load.config, load.item, len(load.layout.text)
    hidden = rows * config.hidden * item
    held = (
        streams(load),
        ("refiner", 0 if load.refiner_stays else 2 * max(load.weights.refiner, default=0)),
        ("text condition", rows * config.text_dim * item),
        ("hidden state", hidden),
    )
    chunk = min(CANONICAL.rows, rows)
    joined = Moment("refine", (*held, ("refined rows", hidden + rows * FLOAT32)))
    held = (*held, ("normed rows", hidden), ("attention output", rows * config.heads * config.head_dim * item))
    plain = replace(load, weights=replace(load.weights, arithmetic=FLOAT, lora=LoraWeights()), chunks=CANONICAL)
    feed = _feed_forward(plain, (*held, ("normed chunk", chunk * config.hidden * item)), rows)
    return [joined, *_attention(plain, held, rows), *feed]


def table_moments(load: DiTLoad) -> list[Moment]:
    """``sampler.ModulationTables``: time embedding, final table, and the blocks' tables where they are kept."""
    config, item, counts = load.config, load.item, load.counts
    held = held_rows(replace(load, accelerators=0))[:3]
    steps = counts.all_timesteps
    embedding = steps * config.time_dim * FLOAT32
    final = steps * 2 * config.hidden * item
    cast = 0 if config.curve_points else steps * config.time_dim * item
    wide = FLOAT32 if config.curve_points else item
    moments = [
        Moment("time embedding", (*held, ("time embedding", _batched(steps, config.time_dim, FLOAT32)))),
        Moment(
            "final table",
            (*held, ("time embedding", embedding + cast), ("final table", _batched(steps, 2 * config.hidden, wide))),
        ),
    ]
    if counts.before_loop:
        rows = _batched(steps, MODALITIES * MODULATIONS * config.hidden, wide)
        parts = (("time embedding", embedding + cast), ("final table", final), ("a block's rows", rows))
        moments.append(Moment("tables", (*held, *parts)))
    return moments


def forward_moments(load: DiTLoad) -> list[Moment]:
    """One forward, weights left out: what ``VelocityModel.velocity`` holds at its moments."""
    config, item = load.config, load.item
    rotary = 2 * load.rows * 3 * config.rope_frequencies * item
    hidden = load.rows * config.hidden * item
    held = (*held_rows(load), ("rotary tables", rotary), ("hidden state", hidden))
    table = load.counts.pairs * MODULATIONS * config.hidden * item
    moments = [Moment("modulation", (*held, ("modulation of a block", max(table, _made_table(load)))))]
    held = (*held, ("modulation of a block", table), ("normed rows", hidden))
    moments.append(Moment("norm", (*held, ("norm chunk", _norm_chunk(load)))))
    held = (*held, ("attention output", load.rows * config.heads * config.head_dim * item))
    return [*moments, *_attention(load, held, load.rows), *_feed_forward(load, held, load.rows)]


def _made_table(load: DiTLoad) -> int:
    """``DiT.block_table`` inside a forward, where there are too many rows to keep all: what making them takes."""
    config, item, steps = load.config, load.item, load.counts.timesteps
    if load.counts.before_loop:
        return 0
    width, wide = MODALITIES * MODULATIONS * config.hidden, FLOAT32 if config.curve_points else item
    embedding = steps * config.time_dim * (FLOAT32 + (0 if config.curve_points else item))
    chosen = load.counts.pairs * MODULATIONS * config.hidden * item
    return embedding + max(_batched(steps, width, wide), steps * width * wide + chosen)


def _batched(rows: int, width: int, item: int) -> int:
    """``dit._batched``: the rows of all batches, and the same once more while they are joined."""
    whole = -(-rows // TABLE_BATCH) * TABLE_BATCH
    return (whole + rows) * width * item


def _norm_chunk(load: DiTLoad) -> int:
    """``dit.modulated_norm``: the normed rows of one chunk; with masks also gathered scale and shift."""
    rows = min(load.chunks.rows, load.rows)
    return rows * load.config.hidden * load.item * (3 if any(load.masked) else 1) + rows * FLOAT32


def _attention(load: DiTLoad, held: tuple, rows: int) -> list[Moment]:
    """``Attention.attend``: q, k, v of one head group and one more of their size, beside the norm's chunk."""
    config, item, weights = load.config, load.item, load.weights
    heads, chunk = min(load.chunks.heads, config.heads), min(load.chunks.rows, rows)
    one = rows * heads * config.head_dim * item
    held = (*held, ("LoRA inputs", rows * weights.lora.qkv_rank * item)) if weights.lora.qkv_rank else held
    moments = []
    if weights.arithmetic == INTEGER:
        values = rows * (config.hidden + FLOAT32)
        scratch = _quantising(rows, config.hidden, item)
        moments.append(Moment("quantise", (*held, ("quantised rows", values), ("quantising", scratch))))
        held = (*held, ("quantised rows", values))
        sums = _sums(rows, heads * config.head_dim, config.hidden)
        moments.append(Moment("q, k, v", (*held, ("head group", 3 * one), ("integer sums", sums))))
    elif weights.arithmetic == DECODED:
        decoded = _decoded(heads * config.head_dim, config.hidden, item)
        moments.append(Moment("q, k, v", (*held, ("head group", 3 * one), ("decoded weights", decoded))))
    normed = chunk * heads * config.head_dim * item
    passing = normed * (2 if rows > chunk else 1) + chunk * heads * FLOAT32
    sums = rows * heads * FLOAT32  # of the softmax, inside the kernel
    return [*moments, Moment("attention", (*held, ("head group", 4 * one), ("attention chunk", max(passing, sums))))]


def _feed_forward(load: DiTLoad, held: tuple, rows: int) -> list[Moment]:
    """``mlp`` on one row chunk: fc1's output, then fc2's beside it."""
    config, item = load.config, load.item
    chunk = min(load.chunks.rows, rows)
    wide, narrow = chunk * 2 * config.ffn * item, chunk * config.hidden * item
    need = wide + narrow
    if load.weights.arithmetic == INTEGER:
        need = max(_integer_feed_forward(load, count) for count in {chunk, rows % chunk or chunk})
    elif load.weights.arithmetic == DECODED:
        need = 2 * wide + _decoded(2 * config.ffn, config.hidden, item)
    low = chunk * load.weights.lora.other_rank * item
    return [Moment("feed-forward", (*held, ("feed-forward chunk", need + low)))]


def _integer_feed_forward(load: DiTLoad, rows: int) -> int:
    """The same for int8 linears: what each reads is quantised first, its sums are integers."""
    config, item = load.config, load.item
    wide, narrow = rows * 2 * config.ffn * item, rows * config.hidden * item
    first, second = rows * config.hidden, wide + rows * config.ffn  # what fc1 and fc2 read, quantised
    return max(
        first + _quantising(rows, config.hidden, item),
        first + wide + _sums(rows, 2 * config.ffn, config.hidden),
        second + _quantising(rows, config.ffn, 2 * item),  # fc2 reads a view, which is joined first
        second + narrow + _sums(rows, config.hidden, config.ffn),
    )


def _sums(rows: int, columns: int, inputs: int) -> int:
    """``quant.kernels.int8_linear``: int32 sums of one piece, once more where its rows have to be filled up."""
    height = min(rows, kernels.PIECE_ROWS)
    width = min(columns, max(64, kernels.DEVICE_SUMS // max(height, 1) // 64 * 64))
    last = rows % height or height
    filled = -(-last // 32 if last < 32 else -last // 8) * (32 if last < 32 else 8)
    ragged = filled * (width * FLOAT32 + inputs) if filled != last else 0
    return height * width * FLOAT32 + ragged


def _quantising(rows: int, columns: int, item: int) -> int:
    """``quant.convrot.quantise_rows``: a piece of the rows rotated, and as float32."""
    piece = min(rows, max(1, convrot.DEVICE_CHUNK // columns))
    return piece * columns * (FLOAT32 + item)


def _decoded(outputs: int, inputs: int, item: int) -> int:
    """``QuantisedLinear._dequantised_rows``: rows of a weight as float32 (once more while rotated), then cast."""
    rows = min(outputs, max(1, DECODED_WEIGHTS // inputs))
    return rows * inputs * (2 * FLOAT32 + item)


def denoise_work(load: DiTLoad) -> list[Moment]:
    """The moments of the whole stage without the weights that stay or stream (``denoise_weights``)."""
    return [*refine_moments(load), *table_moments(load), *forward_moments(load)]


def denoise_weights(weights: DiTWeights, resident: int, ahead: int) -> tuple[tuple[str, int], ...]:
    """Weights on the card through the stage: the first ``resident`` blocks stay, ``ahead`` layers are copied before
    their turn. The AdaLN projections come through a ring of their own; the refiner stays only where all blocks do."""
    blocks = weights.block_bytes
    ring = 0 if resident >= len(blocks) else (ahead + 1) * max(blocks[resident:])
    refiner = sum(weights.refiner) if resident >= len(blocks) else 0
    return (
        ("weights outside the blocks", weights.rest + weights.lora.rest),
        ("resident blocks", sum(blocks[:resident])),
        ("resident refiner", refiner),
        ("ring of blocks", ring),
        ("ring of AdaLN projections", (ahead + 1) * weights.adaln),
    )


def denoise_moments(load: DiTLoad, resident: int, ahead: int) -> list[Moment]:
    """Work and weights together."""
    load = replace(load, refiner_stays=resident >= len(load.weights.blocks))
    placed = denoise_weights(load.weights, resident, ahead)
    return [moment.and_also(*placed) for moment in denoise_work(load)]
