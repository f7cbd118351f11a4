"""A render's label and plan before it runs: from headers and sizes, by the code that makes the real ones.

    Part, Part ... (headers) ─describe_part─▶ CheckpointInfo ─┐
    RenderSizes, recipe, what is foreign ─────────────────────┼─foresee─▶ Fidelity
                                                  plan_sizes ─┴─────────▶ Plan

What runs may still differ from what was foreseen (an out-of-memory retry, a picture that another node makes): the
label of the result stands then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .checkpoint.info import PART_WORDS, CheckpointInfo, on_device
from .checkpoint.load import open_audio_vae, open_dit, open_video_vae
from .fidelity import Fidelity, compose
from .graph import Part, add_foreign
from .lora import Lora
from .memory.rows import RenderSizes
from .models.attention import CANONICAL
from .render import TILE_BATCH, LabelFacts, beyond_of, casts_up, reasons_of
from .solvers import SOLVERS
from .text.encoder import open_weights


@dataclass(frozen=True)
class Foreseen:
    """A render as a graph describes it. ``sizes``: canvas, guides, references, masks, schedule. ``conditions``: infos
    of the parts that encode its prompt and pictures; ``foreign``: names of what another program encodes beside the
    prompt; ``kept``: the dtype of a prompt that comes from a file ("" when it is encoded anew); ``state``: it goes on
    from a saved state; ``beyond``: what else the reference does not have; ``plan_paths``: what its plan chose;
    ``ways``: paths of its solver and accelerators (none: the baseline's)."""

    sizes: RenderSizes
    conditions: Mapping[str, CheckpointInfo] = field(default_factory=dict)
    recipe: str = "reference"
    foreign: tuple[str, ...] = ()
    prompt_foreign: bool = False
    kept: str = ""
    state: bool = False
    beyond: tuple[str, ...] = ()
    plan_paths: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()


def describe_part(part: Part) -> CheckpointInfo:
    """What a part without its LoRAs will be on its device; nothing but headers, and the pages that its fingerprint
    samples, is read."""
    models = part.models
    if part.kind == "text_encoder":
        return models.describe_encoder(open_weights(part.path))
    online = models.loading.online(part.kind) if part.kind != "audio_vae" else None
    if part.kind == "dit":
        info = open_dit(part.path, models.dtype, models.layout, quantise=online).info
    elif part.kind == "video_vae":
        info = open_video_vae(part.path, quantise=online).info
    else:
        info = open_audio_vae(part.path).info
    return on_device(info, part.device)


def loras_beside(info: CheckpointInfo, loras: Sequence[Lora]) -> CheckpointInfo:
    """The info of a DiT with LoRAs on its weights."""
    return replace(info, paths=(*info.paths, "dit/lora")) if loras else info


def label_of_parts(
    parts: Iterable[tuple[Part, CheckpointInfo]],
    recipe: str = "",
    foreign: Iterable[str] = (),
    beyond: Iterable[str] = (),
    kept: Iterable[CheckpointInfo] = (),
) -> Fidelity:
    """What parts give before anything is rendered: a loader's label, or that of an encoded condition.

    ``foreign``, ``beyond``: as for a render; ``kept``: infos of encoders whose states come out of a file.
    """
    names, infos, compute = [], list(kept), ""
    names += ["condition/kept"] if infos else []
    names += [path for info in infos for path in info.paths]
    for part, info in parts:
        word = PART_WORDS[part.kind]
        plain = part.kind in ("dit", "text_encoder") and not casts_up(part.models, info)
        compute = "fp32 compute" if not plain and word in ("dit", "encoder") else compute
        names += [f"{word}/stored" if plain else f"{word}/float32", *info.paths]
        infos.append(info)
    names += [f"recipe/{recipe}"] if recipe else []
    return add_foreign(compose(names, beyond, compute, reasons_of(infos)), foreign)


def foresee(dit: Part, info: CheckpointInfo, job: Foreseen) -> Fidelity:
    """The label that a render of ``job`` on ``dit`` will carry, where all goes as foreseen."""
    sizes, cast = job.sizes, casts_up(dit.models, info)
    float32 = job.kept == "float32" if job.kept else cast
    condition = ["encoder/float32" if float32 else "encoder/stored"]
    condition += ["condition/kept"] if job.kept else []
    facts = LabelFacts(
        {**job.conditions, "dit": info},
        () if job.prompt_foreign else tuple(condition),
        cast,
        job.recipe,
        "chunks/smaller" not in job.plan_paths if job.plan_paths else dit.models.loading.chunks == CANONICAL,
        sizes.step_counts().before_loop,
        sizes.num_forwards,
        sizes.shifts,
        job.state,
        ways=job.ways or (SOLVERS["euler"].path,),
    )
    stop = sizes.num_forwards if sizes.stop is None else sizes.stop
    beyond = beyond_of(
        sizes.canvas,
        sizes.guides,
        bool(sizes.references),
        bool(sizes.video_levels or sizes.sound_levels),
        sizes.denoise < 1,
        bool(sizes.start or stop < sizes.num_forwards),
    )
    return add_foreign(
        facts.fidelity([*beyond, *job.beyond]), [*(["the prompt"] if job.prompt_foreign else []), *job.foreign]
    )


def with_decoders(
    fidelity: Fidelity, infos: Iterable[CheckpointInfo], tile_batch: int = 1, paths: Iterable[str] = ()
) -> Fidelity:
    """The label with the VAEs that decode the render, ``tile_batch`` tiles at once, and other ``paths`` of how."""
    infos = list(infos)
    reasons = {part.name: part.reason for part in fidelity.parts} | reasons_of(infos)
    names = [part.name for part in fidelity.parts] + [path for info in infos for path in info.paths]
    names += [*paths, *([TILE_BATCH] if tile_batch > 1 else [])]
    return compose(names, fidelity.beyond, fidelity.compute, reasons)
