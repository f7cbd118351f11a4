"""The plan of a render: what stays on the card, what is streamed, from where, how much it takes and how long.

    RenderSizes + ModelWeights + Card + Host (+ accelerators)
        text ─▶ encode ─▶ denoise ─▶ video decode ─▶ sound decode        each stage gives back what it had
                            │
          ladder            resident ▸ first R blocks resident, rest from RAM ▸ ... from disk ▸ smaller chunks
          choice            the first that fits card and host; of those that do, the fastest
          ─▶ Plan           or its refusal: what is needed, what there is, what would fit

Pure arithmetic: no forward runs and no weight is read. Peaks come from ``moments``, rates from ``probe``. The card's
own workspaces and the allocator's rounding are covered by ``reserve``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..checkpoint.load import open_dit
from ..checkpoint.parts import PartPaths
from ..checkpoint.pieces import Online
from ..geometry import CLIP_FRAMES, MIN_FRAMES, PIXELS_PER_LATENT, PIXELS_PER_TOKEN, Canvas
from ..guides import Placement as PlacedMedia
from ..guides import place
from ..job import Plan, StagePlan
from ..layout import PackedLayout
from ..lora import Lora
from ..models.attention import CANONICAL, ChunkSizes
from ..models.video_tiles import TILE, TilePlan, decode_clips
from ..quant.online import PARTS
from ..request import RenderRequest
from ..text.vision import PATCH_VALUES
from .moments import FLOAT32, INT64, MODULATIONS, DiTLoad, Moment, denoise_weights, denoise_work, largest
from .moments_media import (
    decode_moments,
    encode_moments,
    sound_decode_moments,
    sound_encode_moments,
    text_moments,
)
from .placement import Placement
from .probe import GIB, Card, Host
from .rows import RenderSizes
from .weights import DiTWeights, ModelWeights, TextWeights, dit_of, parts_of, with_loras

MIB = 1 << 20
CHUNK_LADDER = (CANONICAL, ChunkSizes(4, 1024), ChunkSizes(2, 512), ChunkSizes(1, 256))
RESERVE_BYTES = 160 * MIB  # matmul workspaces and small things
RESERVE_SHARE = 32  # one part in so many of the peak: what the allocator rounds up and cannot join
PROCESS_BYTES = 2 * GIB  # Python, PyTorch, the driver's host side
CPU_PROCESS_BYTES = GIB
STEPS_ALIKE = 1.01  # placements whose steps are this close count as equally fast
MANY_ROWS = 150_000
SHARE_TOLD = 0.1  # of the rows, that conditions must have before leaving some out is advised


def reserve(peak: int) -> int:
    """Bytes of the card that a stage with this peak leaves alone."""
    return RESERVE_BYTES + peak // RESERVE_SHARE


def room(free: int) -> int:
    """The largest peak whose reserve still fits into ``free``."""
    return max(0, (free - RESERVE_BYTES) * RESERVE_SHARE // (RESERVE_SHARE + 1))


class Times(NamedTuple):
    """Seconds of a pass: each resource alone, and the pass itself."""

    compute: float
    copy: float
    disk: float
    total: float

    @property
    def bound(self) -> str:
        """The resource that the pass waits for."""
        alone = {"compute": self.compute, "copy": self.copy, "disk": self.disk}
        return max(alone, key=alone.get)


def pass_seconds(copies: Sequence[float], computes: Sequence[float], ahead: int) -> float:
    """One pass of many over layers that are copied up to ``ahead`` in advance: ``streaming.LayerStream``'s schedule.

    Layers that stay have a copy of 0. Copy i begins when copy i - 1 is done and its slot is free, that is when streamed
    layer i - ahead - 1 has computed; so the next pass's first copies run during this one's end, and while resident
    layers compute.
    """
    ends = [_streamed_end(list(copies) * passes, list(computes) * passes, ahead) for passes in (2, 3)]
    return ends[1] - ends[0]


def _streamed_end(copies: Sequence[float], computes: Sequence[float], ahead: int) -> float:
    """When the last of these layers has computed, the first copy beginning at 0."""
    copied, now, computed = 0.0, 0.0, []  # computed: of the streamed layers
    for copy, compute in zip(copies, computes):
        if not copy:
            now += compute
            continue
        copied = max(copied, computed[-ahead - 1] if len(computed) > ahead else 0.0) + copy
        now = max(copied, now) + compute
        computed.append(now)
    return now


# ---- denoise


@dataclass(frozen=True)
class _Denoise:
    """One way to place the DiT."""

    load: DiTLoad
    placement: Placement
    peak: Moment
    host: int
    moved: int
    times: Times

    @property
    def ahead(self) -> int:
        """Layers copied in advance; three for a DiT that is all resident, which is better than any ring."""
        return 3 if self.placement.rung == "resident" else self.placement.ahead

    @property
    def stage(self) -> StagePlan:
        weights, chunks = self.load.weights, self.load.chunks
        layers = len(weights.blocks)
        kept = layers if self.placement.rung == "resident" else self.placement.resident
        tables = "tables before the loop" if self.load.counts.before_loop else "tables forward by forward"
        return StagePlan(
            name="denoise",
            rung=self.placement.rung,
            layers=layers,
            resident=kept,
            ahead=0 if kept == layers else self.placement.ahead,
            vram=self.peak.nbytes,
            host=self.host,
            peak_at=self.peak.name,
            parts=self.peak.parts,
            passes=self.load.calls,
            moved=self.moved,
            seconds=self.times.total,
            bound=self.times.bound,
            times=(("compute", self.times.compute), ("copy", self.times.copy), ("disk", self.times.disk)),
            how=f"{chunks.heads} heads, {chunks.rows} rows at a time; {tables}",
            pinned=self.placement.pin,
            adaln=self.placement.adaln,
        )


def _denoise_ways(load: DiTLoad, card: Card, host: Host, held: int) -> list[_Denoise]:
    """The placements of the DiT that fit card and host with these chunks and are as fast as any that do, best first:
    from RAM rather than disk, two layers ahead rather than one, fewer bytes moved."""
    weights, layers = load.weights, len(load.weights.blocks)
    resident, streamed = (largest(denoise_work(replace(load, refiner_stays=stays))) for stays in (True, False))
    found = []
    for rung, ahead in (("resident", 1), ("ram", 2), ("ram", 1), ("disk", 2), ("disk", 1)):
        if card.is_host and rung == "ram":
            continue  # the same memory twice
        work = resident if rung == "resident" else streamed
        for adaln in ("disk",) if load.counts.before_loop else ("ram", "disk"):
            space = host.available - held if card.is_host else room(card.free)
            kept = layers if rung == "resident" else _most_resident(work, weights, ahead, space)
            if kept is None or (kept == layers and rung != "resident"):
                continue
            way = _way(load, work, (rung, kept, ahead, adaln), (card, host), held)
            if _fits(way.peak.nbytes, way.host, card, host):
                found.append(way)
    best = min((way.times.total for way in found), default=0.0)
    alike = [way for way in found if way.times.total <= best * STEPS_ALIKE]
    return sorted(alike, key=lambda way: (way.placement.rung == "disk", -way.ahead, way.moved))


def _fits(peak: int, used: int, card: Card, host: Host) -> bool:
    """Whether ``peak`` bytes on the card beside ``used`` on the host leave the reserves alone."""
    if card.is_host:
        return peak + used <= host.available
    return peak <= room(card.free) and used <= host.available


def _most_resident(work: Moment, weights: DiTWeights, ahead: int, space: int) -> int | None:
    """The most blocks that can stay on the card beside the work and the rings; None when not even none does."""
    kept = None
    for resident in range(len(weights.blocks) + 1):
        if work.and_also(*denoise_weights(weights, resident, ahead)).nbytes > space:
            break
        kept = resident
    return kept


def _way(load: DiTLoad, work: Moment, place: tuple[str, int, int, str], machine: tuple[Card, Host], held: int):
    rung, kept, ahead, adaln = place
    card, host = machine
    weights, blocks = load.weights, load.weights.block_bytes
    peak = work.and_also(*denoise_weights(weights, kept, ahead))
    streamed = blocks[kept:]
    slots = ahead + 1
    store = sum(streamed) if rung == "ram" else slots * max(streamed, default=0)
    adaln_store = len(blocks) * weights.adaln if adaln == "ram" else slots * weights.adaln
    pinned = host.pinnable > 0 and (rung != "ram" or store + (adaln_store if adaln == "ram" else 0) <= host.pinnable)
    if card.is_host:
        store = adaln_store = 0  # slots are the ring itself
    again = 0 if load.counts.before_loop else weights.adaln
    moved = sum(streamed) + again * len(blocks)
    placement = Placement(rung, 0 if rung == "resident" else kept, ahead, adaln, pinned, host.converted)
    return _Denoise(
        load,
        placement,
        peak,
        held + store + adaln_store + _denoise_host(load),
        0 if card.is_host and rung == "resident" else moved,
        _denoise_times(load, placement, kept, again, machine),
    )


def _denoise_times(load: DiTLoad, placement: Placement, kept: int, again: int, machine: tuple[Card, Host]) -> Times:
    """One forward: each block's matmuls and attention, its copy, and with it that of its AdaLN projection."""
    card, host = machine
    config, rows, blocks = load.config, load.rows, load.weights.block_bytes
    inner = config.heads * config.head_dim
    linear = 2 * rows * (4 * config.hidden * inner + 3 * config.hidden * config.ffn)
    compute = (linear + 4 * rows * rows * inner) / (card.matmul_rate if load.item < 4 else card.float32_rate)
    bus = card.copy_rate if placement.pin else card.pageable_rate
    over_bus = [((0 if i < kept else block) + again) / bus for i, block in enumerate(blocks)]
    from_disk = [0.0] * len(blocks)
    if placement.rung == "disk":
        a_byte = 1 / host.disk_rate
        if not placement.converts:
            a_byte += host.transform_seconds(load.weights.transforms)
        from_disk = [0.0 if i < kept else block * a_byte for i, block in enumerate(blocks)]
    if again and placement.adaln == "disk":
        from_disk = [seconds + again / host.disk_rate for seconds in from_disk]
    copies = [max(pair) for pair in zip(over_bus, from_disk)]
    computes = [compute] * len(blocks)
    total = pass_seconds(copies, computes, placement.ahead)
    return Times(sum(computes), sum(over_bus), sum(from_disk), total)


def _denoise_host(load: DiTLoad) -> int:
    """Host memory of the loop besides the weights' stores: tables, step plans, noise and latents, one tensor read."""
    config, layout = load.config, load.layout
    tables = _tables(load)
    masked = sum(count for count, mask in zip(load.target, load.masked) if mask)
    plans = 2 * INT64 * masked * load.counts.forwards  # labels for the blocks and for the heads
    rows = layout.num_rows * 4 * config.video_channels * FLOAT32
    text = len(layout.text) * config.text_dim * load.item
    return tables + plans + 4 * rows + text + 2 * load.weights.largest + load.accelerators_on_host


def _tables(load: DiTLoad) -> int:
    """Bytes of the modulation tables on the host."""
    if not load.counts.before_loop:
        return 0
    return load.counts.all_pairs * MODULATIONS * load.config.hidden * load.item * load.config.layers


# ---- the other stages


def _plan_text(sizes: RenderSizes, weights: ModelWeights, card: Card, host: Host, held: int) -> StagePlan:
    """One pass over the language layers: resident where they all fit, else each read from disk as its turn comes."""
    text, rows = weights.text, sizes.rows_of_text
    patches = [count for vision in sizes.shown for count in vision.patches]
    states = rows * text.sizes.hidden * text.itemsize + sum(patches) * PATCH_VALUES * FLOAT32
    rate = card.matmul_rate if text.itemsize < FLOAT32 else card.float32_rate
    layers = 2 * rows * sum(text.layers) / text.itemsize + 2 * rows * rows * text.sizes.query_rows * len(text.layers)
    tower = 2 * sum(patches) * text.vision / text.itemsize + 4 * sum(n * n for n in patches) * _tower_width(text)
    nbytes = sum(text.layers) + (text.vision if patches else 0)
    for rung, ahead in (("resident", 0), ("disk", 2), ("disk", 1)):
        peak = largest(text_moments(text, rows, patches, rung == "resident", ahead))
        staging = (ahead + 1) * max(text.layers) if rung == "disk" and not card.is_host else 0
        words = min(text.embedding, rows * text.embedding // text.sizes.vocab) if rung == "disk" else text.embedding
        used = held + states + words + staging + max(text.layers)
        if _fits(peak.nbytes, used, card, host):
            break
    from_disk, over_bus = (nbytes + words) / host.disk_rate, nbytes / card.copy_rate
    compute = (layers + tower) / rate
    times = Times(compute, over_bus, from_disk, max(compute, over_bus, from_disk))
    how = f"{rows:,} rows" + (f", {sum(patches):,} patches in the vision tower" if patches else "")
    kept = (len(text.layers), len(text.layers) if rung == "resident" else 0)
    return _stage("text", rung, kept, ahead, (peak, used), (1, nbytes, times), how)


def _tower_width(text: TextWeights) -> int:
    """Attention channels of all blocks of the vision tower."""
    return text.sizes.vision_hidden * text.sizes.vision_depth


def _plan_encode(sizes: RenderSizes, weights: ModelWeights, card: Card, host: Host, held: int) -> StagePlan | None:
    """Guides, references and the clip to edit through both VAEs; None when there are none. The decoder's layers are
    not read (``placement.place_video_encoder``)."""
    vae, canvas = weights.video_vae, sizes.canvas
    clips = [(c.video, c.audio) for c in sizes.conditions]
    if sizes.has_source:
        clips.append(((canvas.latent_t, canvas.latent_h, canvas.latent_w), canvas.audio_t))
    if not clips:
        return None
    moments, tiles = [], 0
    for video, sound in clips:
        if video is not None:
            height, width = (edge * PIXELS_PER_LATENT for edge in video[1:])
            moments += encode_moments(vae, 1 if video[0] == 1 else CLIP_FRAMES * -(-video[0] // 5), height, width)
            tiles += len(TilePlan.latents(*video[1:], TILE)) * (1 if video[0] == 1 else CLIP_FRAMES * -(-video[0] // 5))
        if sound:
            moments += sound_encode_moments(weights.audio_vae, sound)
    work = largest(moments)
    compute = tiles * _encoder_frame_flops(weights) / card.float32_rate
    moved = vae.rest + weights.audio_vae.nbytes
    from_disk = moved / host.disk_rate
    times = Times(compute, moved / card.copy_rate, from_disk, compute + from_disk)
    how = "tiles of 256 px; the decoder's layers are not read"
    return _stage("encode", "resident", (0, 0), 0, (work, held + max(vae.layers)), (1, moved, times), how)


def _encoder_frame_flops(weights: ModelWeights) -> float:
    """Operations of the video encoder on one frame of one tile."""
    config, cells, total, inputs = weights.video_vae.config, TILE * TILE, 0.0, weights.video_vae.config.channels[0]
    share = 1.0
    for channels, space, time in zip(config.channels, config.space_strides, config.time_strides):
        total += share * cells * 2 * 27 * (inputs * channels + (2 * config.resnets - 1) * channels * channels)
        cells, share, inputs = cells // space**2, share / time, channels
    return total


def _plan_video_decode(sizes: RenderSizes, weights: ModelWeights, card: Card, host: Host, held: int) -> StagePlan:
    """Resident and tile by tile; where the decoder does not fit, layer by layer from RAM or disk."""
    vae, canvas = weights.video_vae, sizes.canvas
    latent = (canvas.latent_t, canvas.latent_h, canvas.latent_w)
    clips, tiles = len(decode_clips(canvas.latent_t)), len(TilePlan.latents(*latent[1:], TILE))
    frames = 4 * 3 * (CLIP_FRAMES + 5) * canvas.height * canvas.width
    tokens = min(latent[1], 16) * min(latent[2], 16) * len(decode_clips(canvas.latent_t)[0].latents)
    parameters = sum(vae.layers) / vae.itemsize
    flops = tiles * (2 * tokens * parameters + 4 * tokens**2 * vae.config.width * len(vae.layers))
    compute = flops / card.float32_rate
    for rung, ahead in (("resident", 0), ("ram", 1), ("disk", 1)):
        resident = rung == "resident"
        batch = min(sizes.tile_batch, tiles) if resident else 1
        peak = largest(decode_moments(vae, latent, resident, ahead, batch))
        store = {"resident": 0, "ram": sum(vae.layers), "disk": 2 * max(vae.layers)}[rung]
        used = held + (0 if card.is_host else store) + 2 * frames + max(vae.layers)
        if _fits(peak.nbytes, used, card, host):
            break
    layers = sum(vae.layers)
    over_bus = 0.0 if resident else layers / card.copy_rate
    from_disk = layers / host.disk_rate if rung == "disk" else 0.0
    times = Times(compute, over_bus, from_disk, max(compute, over_bus, from_disk))
    alone = "tile by tile" if batch == 1 else f"{batch} at once"
    how = alone if resident else "layer by layer over all tiles of a clip"
    kept = (len(vae.layers), len(vae.layers) if resident else 0)
    work = (clips, 0 if resident else layers, times)
    return _stage("video decode", rung, kept, ahead, (peak, used), work, f"{tiles} tiles of {TILE} px, {how}")


def _plan_sound_decode(sizes: RenderSizes, weights: ModelWeights, card: Card, host: Host, held: int) -> StagePlan:
    audio, vae = sizes.canvas.audio_t, weights.audio_vae
    peak = largest(sound_decode_moments(vae, audio))
    compute = 2 * 2 * vae.nbytes / FLOAT32 * audio * 40 / card.float32_rate
    times = Times(compute, vae.nbytes / card.copy_rate, vae.nbytes / host.disk_rate, compute)
    used = held + vae.nbytes // 4
    return _stage("sound decode", "resident", (0, 0), 0, (peak, used), (1, vae.nbytes, times), "one ear at a time")


def _stage(
    name: str,
    rung: str,
    layers: tuple[int, int],
    ahead: int,
    memory: tuple[Moment, int],
    work: tuple[int, int, Times],
    how: str,
) -> StagePlan:
    peak, used = memory
    passes, moved, times = work
    return StagePlan(
        name=name,
        rung=rung,
        layers=layers[0],
        resident=layers[1],
        ahead=0 if rung == "resident" else ahead,
        vram=peak.nbytes,
        host=used,
        peak_at=peak.name,
        parts=peak.parts,
        passes=passes,
        moved=moved,
        seconds=times.total,
        bound=times.bound,
        times=(("compute", times.compute), ("copy", times.copy), ("disk", times.disk)),
        how=how,
    )


# ---- the whole


def plan(
    sizes: RenderSizes,
    weights: ModelWeights,
    card: Card,
    host: Host,
    accelerators: Sequence = (),
    suggest: bool = True,
) -> Plan:
    """Where everything goes, what it takes and how long it lasts. A plan that does not fit has a ``refusal``, with
    ``suggest`` also what would fit."""
    held = (CPU_PROCESS_BYTES if card.is_host else PROCESS_BYTES) + _media_bytes(sizes)
    canonical = DiTLoad.of(sizes, weights.dit, accelerators)
    denoise = None
    for chunks in CHUNK_LADDER:
        ways = _denoise_ways(replace(canonical, chunks=chunks), card, host, held)
        if ways:
            denoise = ways[0]
            break
    stages = [] if sizes.text_rows is not None else [_plan_text(sizes, weights, card, host, held)]
    encode = _plan_encode(sizes, weights, card, host, held)
    stages += [encode] if encode is not None else []
    lowest = denoise or _lowest(canonical, card, host, held)
    stages.append(lowest.stage)
    stages += [make(sizes, weights, card, host, held) for make in (_plan_video_decode, _plan_sound_decode)]
    refusal = next((said for stage in stages if (said := _refusal(stage, sizes.canvas, card, host))), "")
    made = Plan(
        stages=tuple(stages),
        rows=_segments(canonical.layout),
        tables=_tables(canonical),
        chunks=tuple(lowest.load.chunks),
        card=card.name,
        free_vram=card.free,
        free_host=host.available,
        reserve=reserve(lowest.peak.nbytes),
        notes=tuple(_notes(lowest, sizes, card, host)),
        paths=tuple(_paths(lowest, stages)),
    )
    if not refusal:
        return made
    if suggest:
        refusal += _suggestion(sizes, lambda other: plan(other, weights, card, host, accelerators, suggest=False).fits)
    return replace(made, refusal=refusal)


def plan_request(
    request: RenderRequest,
    parts: PartPaths,
    card: Card,
    host: Host,
    placed: PlacedMedia | None = None,
    loras: Sequence[Lora] = (),
    accelerators: Sequence = (),
    layout: str | None = None,
) -> Plan:
    """The plan of ``request`` on the model ``parts``, before any weights are read. ``placed`` is what
    ``guides.place(request)`` gave, where it has been called already. H3Error for parts that cannot be used."""
    placed = place(request) if placed is None else placed
    dtype = torch.float32 if request.dtype == "float32" else None
    path = parts.dit_for(placed.task).path
    online = {part: Online.of(part, request.quantise, request.exclude) for part in PARTS.values()}
    dit = dit_of(open_dit(path, dtype, layout, quantise=online["dit"]))
    weights = parts_of(parts, with_loras(dit, loras), online)
    host = host.with_transforms(dit.transforms)
    return plan(RenderSizes.of_request(request, placed), weights, card, host, accelerators)


def _lowest(load: DiTLoad, card: Card, host: Host, held: int) -> _Denoise:
    """The placement that takes least of the card, for the sentence that says it does not fit."""
    load = replace(load, chunks=CHUNK_LADDER[-1])
    adaln = "disk"
    return _way(load, largest(denoise_work(load)), ("disk", 0, 1, adaln), (card, host), held)


def _refusal(stage: StagePlan, canvas: Canvas, card: Card, host: Host) -> str:
    """Why this stage does not fit, "" when it does."""
    what = f"{canvas.num_frames} frames at {canvas.width}x{canvas.height}"
    if card.is_host:
        if stage.vram + stage.host > host.available:
            need = _gib(stage.vram + stage.host)
            return f"{what} needs {need} GiB of memory ({stage.name}); {_gib(host.available)} GiB are free"
        return ""
    if stage.vram > room(card.free):
        need = _gib(stage.vram + reserve(stage.vram))
        return f"{what} needs {need} GiB ({stage.name}); this card has {_gib(card.free)} GiB free"
    if stage.host > host.available:
        return (
            f"{what} needs {_gib(stage.host)} GiB of host memory ({stage.name}); "
            f"{_gib(host.available)} GiB are free ({host.limit})"
        )
    return ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"


def _suggestion(sizes: RenderSizes, fits: Callable[[RenderSizes], bool]) -> str:
    """What would fit: fewer frames at this size, a smaller size at these frames, or fewer references."""
    canvas, found = sizes.canvas, []
    shorter = range(canvas.num_frames - CLIP_FRAMES, 0, -CLIP_FRAMES)
    frames = _first_that(shorter, lambda count: fits(sizes.on(replace(canvas, num_frames=count, notes=()))))
    if frames is not None:
        found.append(f"{frames} frames fit")
    smaller = _smaller_sizes(canvas)
    size = _first_that(smaller, lambda pair: fits(sizes.on(Canvas(*pair, canvas.num_frames))))
    if size is not None:
        found.append(f"{size[0]}x{size[1]}" if found else f"{size[0]}x{size[1]} fits")
    counts = range(len(sizes.references) - 1, -1, -1)
    kept = _first_that(counts, lambda count: fits(replace(sizes, references=sizes.references[:count])))
    if kept is not None:
        found.append(f"{kept or 'no'} of the {len(sizes.references)} references" + ("" if found else " fit"))
    return f": {', or '.join(found)}" if found else ": nothing smaller fits either; close other programs"


def _smaller_sizes(canvas: Canvas) -> list[tuple[int, int]]:
    """Sizes below this one of about the same ratio, largest first."""
    found = []
    for width in range(canvas.width - PIXELS_PER_TOKEN, 0, -PIXELS_PER_TOKEN):
        height = round(width * canvas.height / canvas.width / PIXELS_PER_TOKEN) * PIXELS_PER_TOKEN
        if PIXELS_PER_TOKEN <= height <= canvas.height:
            found.append((width, height))
    return found


def _first_that(candidates: Sequence, fits: Callable[..., bool]):
    """The first of ``candidates`` (most demanding first) that fits, by halving; None when the last does not."""
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if fits(candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return candidates[low] if low < len(candidates) else None


def _media_bytes(sizes: RenderSizes) -> int:
    """Pixels of guides, references and source in host memory, uint8."""
    canvas = sizes.canvas
    videos = [condition.video for condition in sizes.conditions if condition.video is not None]
    if sizes.has_source:
        videos.append((canvas.latent_t, canvas.latent_h, canvas.latent_w))
    per_cell = 3 * PIXELS_PER_LATENT**2
    return sum((1 if t == 1 else t * 4) * h * w * per_cell for t, h, w in videos)


def _segments(layout: PackedLayout) -> tuple[tuple[str, int], ...]:
    """Rows by kind of segment, in packed order."""
    rows: dict[str, int] = {}
    for segment in layout.segments:
        rows[segment.kind.replace("_", " ")] = rows.get(segment.kind.replace("_", " "), 0) + len(segment)
    return tuple(rows.items())


def _paths(denoise: _Denoise, stages: Sequence[StagePlan]) -> list[str]:
    """Names of the fidelity registry for what the plan chose."""
    chosen = ["chunks/canonical" if denoise.load.chunks == CANONICAL else "chunks/smaller"]
    chosen.append("modulation/tables" if denoise.load.counts.before_loop else "modulation/by-forward")
    if any(stage.name == "video decode" and stage.rung != "resident" for stage in stages):
        chosen.append("video-vae/layer-major")
    return chosen


def _transform_note(denoise: _Denoise, host: Host) -> str:
    """Where the transform of the blocks runs, how often, and what it costs."""
    weights, placement = denoise.load.weights, denoise.placement
    whole = sum(weights.block_bytes)
    rate = host.transform_seconds(weights.transforms)
    once = f" ({rate * whole:.0f} s)" if rate else ""
    if placement.rung == "resident":
        return f"once, while loading{once}"
    if placement.rung == "ram":
        return f"once, into RAM{once}"
    size = f"{whole / 1e9:.1f} GB"
    if placement.converts:
        return f"once, into a converted file of {size} in {placement.converted}{once}, which is reused from then on"
    each = rate * sum(weights.block_bytes[placement.resident :])
    cost = f" ({each:.1f} s each)" if rate else ""
    return f"at each read, in every forward{cost}; --converted DIR keeps a converted file of {size} and does it once"


def _notes(denoise: _Denoise, sizes: RenderSizes, card: Card, host: Host) -> list[str]:
    """Sentences a person should read before the render starts."""
    weights, notes = denoise.load.weights, []
    rows = denoise.load.rows
    share = 1 - (sizes.canvas.rows_video + sizes.canvas.rows_audio) / rows
    if rows > MANY_ROWS and share > SHARE_TOLD:
        notes.append(
            f"{rows:,} rows: {share:.0%} of them are conditions and their text, and time grows with the square of "
            "all; shorter reference clips and fewer pictures cost less"
        )
    left_out = denoise.load.counts.forwards - denoise.load.calls
    if left_out:
        notes.append(
            f"{left_out} of {denoise.load.counts.forwards} forwards are left out by what accelerates: they run no "
            "block and load nothing; where the sound asks for more forwards, it takes longer"
        )
    if denoise.load.chunks != CANONICAL:
        chunks = denoise.load.chunks
        notes.append(
            f"chunks of {chunks.heads} heads and {chunks.rows} rows, smaller than canonical: EXACT MATH, not LOSSLESS"
        )
    if weights.transform:
        notes.append(f"{weights.transform}: {_transform_note(denoise, host)}")
    if not denoise.load.counts.before_loop:
        notes.append(
            f"{denoise.load.counts.all_pairs:,} modulation rows are too many to keep: the AdaLN projections "
            f"({len(weights.blocks) * weights.adaln / 1e9:.0f} GB, from {denoise.placement.adaln}) are read in every "
            "forward"
        )
    else:
        once = len(weights.blocks) * weights.adaln
        notes.append(
            f"AdaLN projections are read once: {once / 1e9:.1f} GB, {once / host.disk_rate:.0f} s from this disk"
        )
    if not denoise.placement.pin:
        why = "more than this system pins safely" if host.pinnable else "as asked"
        notes.append(f"streamed weights are not page-locked: {why}, so copies are slower")
    if not card.measured or not host.disk_measured:
        guessed = [name for name, known in (("card", card.measured), ("disk", host.disk_measured)) if not known]
        notes.append(f"rates of the {' and '.join(guessed)} are assumed, not measured: times are rough")
    if sizes.canvas.num_frames < MIN_FRAMES:
        notes.append("one frame is a picture without motion")
    return notes
