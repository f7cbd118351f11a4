"""The labels and plans of a graph before it runs, as the page shows them.

graph {id: {class_type, inputs}} ─forecast─▶ labels {id: label, parts with reasons, what is assumed, or a sentence}
                                             plans  {id: stages against the card and the host, or a sentence}
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache

from . import host, remote
from .accelerate import acceleration_at, acceleration_of
from .load import CARRIED, carried_folder, file_stamp, foreseen_part
from .render import tile_paths
from .stand_ins import TILE
from .upstream import Step, Upstream
from .upstream_condition import CONDITIONS, condition_of

SAMPLER = "H3RuntimeSampler"
KINDS = {"text_encoder": "text encoder", "video_vae": "video VAE", "audio_vae": "audio VAE"}
MASK_VALUES = 2  # of a mask that is not known yet: kept and made anew
TIGHT = 0.9  # of what is free
LONGEST_SECONDS = 10  # for one graph


@lru_cache(maxsize=32)
def described(part):
    from ..h3_runtime import describe_part

    return describe_part(part)


@lru_cache(maxsize=16)
def weights_beside(dit, others: tuple):
    from ..h3_runtime import weights_of_parts

    return weights_of_parts(dit, others)


def described_with_loras(dit):
    """The info of a DiT; that of its file is kept, however many LoRAs are tried beside it."""
    from ..h3_runtime import loras_beside

    return loras_beside(described(dit.root), dit.loras)


# --- one render ------------------------------------------------------------------------------------------------------


def render_of(up: Upstream, step: Step):
    """(DiT, Foreseen, encoder and VAEs that encode its conditions) of a sampler. H3Error where it cannot run."""
    from ..h3_runtime import (
        Foreseen,
        H3Error,
        RenderSizes,
        ScheduleSettings,
        gradient_levels,
        partition_serves,
        prompt_rows,
    )

    given = step.inputs
    dit = up.model(given)
    if dit is None:
        raise H3Error("no model of H3 Load Model is connected: what the render takes is not known")
    acceleration = acceleration_of(up, given)
    widgets = (("steps", 49), ("video_shift", 12.0), ("audio_shift", 3.0))
    asked = ScheduleSettings(*(type(default)(up.value(given, name, default)) for name, default in widgets))
    schedule, _, _ = acceleration.settle([lora.path for lora in dit.loras], asked)
    seen = up.latent(given, frames=int(up.value(given, "frames", 124)))
    condition = condition_of(up, given, seen.canvas)
    needed = "ref2va" if condition.references else "fl2va"
    if not partition_serves(dit.partition, needed):
        names = {"fl2va": "FL2VA", "ref2va": "Ref2VA"}
        raise H3Error(f"{names[needed]} weights are needed here, and {dit.name} holds {names[dit.partition]} weights")
    levels = gradient_levels(MASK_VALUES) if seen.masks else ()
    start, denoise = int(up.value(given, "start_step", 0)), float(up.value(given, "denoise", 1.0))
    rows = {} if condition.prompt is None else {"prompt_rows": prompt_rows(condition.prompt)}
    sizes = RenderSizes(
        canvas=seen.canvas,
        guides=condition.guides,
        references=condition.references,
        video_levels=levels,
        sound_levels=levels,
        has_source=seen.has_clip and bool(levels or start or denoise < 1),
        num_forwards=schedule.num_forwards,
        start=start,
        stop=int(up.value(given, "stop_step", 0)) or None,
        denoise=denoise,
        shifts=(schedule.video_shift, schedule.audio_shift),
        text_rows=condition.text_rows,
        text_vision=condition.text_rows is not None and bool(condition.guides or condition.references),
        **rows,
    )
    infos = {info.part: info for info in (*condition.infos, *map(described, condition.parts))}
    job = Foreseen(
        sizes=sizes,
        conditions=infos,
        recipe=condition.recipe,
        foreign=condition.foreign,
        prompt_foreign=condition.prompt_foreign,
        kept=condition.kept,
        state=seen.state,
        beyond=condition.beyond,
        ways=acceleration.ways,
    )
    return dit, job, condition.parts


def plan_of(up: Upstream, step: Step, vram_gib: float = 0.0, ram_gib: float = 0.0):
    """The Plan of a sampler's render, for this machine or for one of other sizes."""
    from ..h3_runtime import plan_sizes

    dit, job, parts = render_of(up, step)
    others = {part.kind: part for part in parts}
    for kind, words in KINDS.items():
        part = others.get(kind) or up.loaded(kind)
        if part is None and dit.path.parent == carried_folder():
            part = foreseen_part(kind, CARRIED, file_stamp(kind, CARRIED))
        if part is None:
            up.assume(f"no {words} of ours is in the graph: the release's size is assumed")
        else:
            others[kind] = part
    weights = weights_beside(dit, tuple(others.values()))
    freed, accelerators = host.freed_for(dit.device), acceleration_of(up, step.inputs).built()
    return plan_sizes(dit, job.sizes, weights, vram_gib, ram_gib, freed, accelerators)


def foreseen_label(up: Upstream, step: Step):
    """The Fidelity of a sampler's render."""
    from ..h3_runtime import foresee

    dit, job, _ = render_of(up, step)
    if dit.device.type == "cuda" and dit.models.loading.placement is None:
        job = replace(job, plan_paths=plan_of(up, step).paths)
    return foresee(dit, described_with_loras(dit), job)


# --- labels by node --------------------------------------------------------------------------------------------------


def _of_model(up: Upstream, step: Step):
    from ..h3_runtime import label_of_parts

    dit = up.model_of(step)
    return None if dit is None else label_of_parts([(dit, described_with_loras(dit))])


def _of_loader(up: Upstream, step: Step):
    from ..h3_runtime import label_of_parts

    outputs = (0, 1) if step.kind == "H3RuntimeLoadVaes" else (0,)
    parts = [up.part({"here": [step.id, output]}, "here") for output in outputs]
    return label_of_parts([(part, described(part)) for part in parts])


def _of_condition(up: Upstream, step: Step):
    from ..h3_runtime import label_of_parts

    canvas = up.latent(step.inputs).canvas if "latent" in step.inputs else up.trained()
    seen = CONDITIONS[step.kind](up, step, canvas)
    foreign = [*(["the prompt"] if seen.prompt_foreign else []), *seen.foreign]
    parts = [(part, described(part)) for part in seen.parts]
    beyond = ["guides in the middle"] if any(not guide.keyframe for guide in seen.guides) else []
    beyond += ["guide strength"] if any(guide.strength < 1 for guide in seen.guides) else []
    return label_of_parts(parts, seen.recipe, foreign, [*beyond, *seen.beyond], seen.infos)


def _of_acceleration(up: Upstream, step: Step):
    return acceleration_at(up, step).fidelity


def _of_sampler(up: Upstream, step: Step):
    return foreseen_label(up, step)


def _of_clip(up: Upstream, step: Step):
    """What is decoded, saved or joined carries the labels of its renders, and those of the VAEs that decode it."""
    from ..h3_runtime import weakest, with_decoders

    names = ("first", "second") if step.kind == "H3RuntimeJoinClips" else ("latent",)
    renders = [
        render for name in names if up.linked(step.inputs, name) for render in up.latent(step.inputs, name).renders
    ]
    if not renders:
        up.assume("it is not known that an H3 Sampler rendered this: it carries no label")
        return None
    made = [foreseen_label(up, up.at(render)) for render in dict.fromkeys(renders)]
    fidelity = made[0] if len(made) == 1 else weakest(made)
    return with_decoders(fidelity, *_decoders(up, step))


def _decoders(up: Upstream, step: Step) -> tuple[list, int, tuple[str, ...]]:
    """(infos of our VAEs that decode for a node, tiles at once, other paths of how); another program's has none."""
    decoder = up.step(step.inputs, "images")
    if decoder is not None and decoder.kind == "H3RuntimeDecodeVideo":  # a node that saves its frames
        with up.inside(decoder):
            return _decoders(up, decoder)
    vaes = [up.part(step.inputs, name) for name in ("video_vae", "audio_vae")]
    tile = TILE if vaes[0] is None else int(up.value(step.inputs, "tile", TILE))
    batch = 1 if vaes[0] is None else int(up.value(step.inputs, "tile_batch", 1))
    return [described(vae) for vae in vaes if vae is not None], batch, tile_paths(tile)


LABELS = {
    "H3RuntimeLoadModel": _of_model,
    "H3RuntimeLoadLora": _of_model,
    "H3RuntimeQuantise": _of_model,
    "H3RuntimeLoadTextEncoder": _of_loader,
    "H3RuntimeLoadVaes": _of_loader,
    **dict.fromkeys(CONDITIONS, _of_condition),
    "H3RuntimeAccelerate": _of_acceleration,
    SAMPLER: _of_sampler,
    **dict.fromkeys(
        ("H3RuntimeJoinClips", "H3RuntimeDecodeVideo", "H3RuntimeDecodeSound", "H3RuntimeSaveVideo"), _of_clip
    ),
    "H3RuntimeDecodeAndSave": _of_clip,
    "H3RuntimeRemoteRender": remote.label_of,
}


# --- the whole graph -------------------------------------------------------------------------------------------------


def forecast(graph: dict[str, dict], wrong: dict[str, str], vram_gib: float = 0.0, ram_gib: float = 0.0) -> dict:
    """Labels and plans of every node that has one. ``wrong``: nodes whose widgets cannot be used, and why."""
    busy = host.compute_device().type == "cuda" and host.is_running()
    labels, plans, until = {}, {}, time.monotonic() + LONGEST_SECONDS
    for node, found in graph.items():
        kind = found["class_type"]
        if time.monotonic() > until:  # the page's other questions wait behind this one
            late = {
                "error": f"not foreseen: the labels of this graph take more than {LONGEST_SECONDS} s",
                "assumed": [],
            }
            labels |= {node: late} if kind in LABELS else {}
            plans |= {node: late} if kind == SAMPLER else {}
            continue
        if kind in LABELS:
            labels[node] = _told(graph, wrong, node, lambda up, step: shown_label(LABELS[step.kind](up, step)))
        if kind == SAMPLER:
            if busy:
                plans[node] = {"busy": True}
            else:
                plans[node] = _told(
                    graph, wrong, node, lambda up, step: shown_plan(plan_of(up, step, vram_gib, ram_gib), up, vram_gib)
                )
    return {"labels": labels, "plans": plans}


def _told(graph: dict, wrong: dict, node: str, make) -> dict:
    """What ``make`` shows of a node with what was assumed, or the sentence that says why it cannot be told."""
    from ..h3_runtime import H3Error

    up = Upstream(graph, wrong)
    try:
        return {**make(up, up.at(node)), "assumed": up.unknown}
    except H3Error as error:
        return {"error": str(error), "assumed": up.unknown}
    except Exception as error:
        host.log.exception("H3 Runtime: node %s cannot be foreseen", node)
        return {"error": f"this cannot be foreseen ({type(error).__name__}); the log says more", "assumed": up.unknown}


def shown_label(fidelity) -> dict:
    """A Fidelity for the page; one of None is no label."""
    return {"fidelity": None if fidelity is None else fidelity.to_dict()}


def shown_plan(plan, up: Upstream, vram_gib: float) -> dict:
    """A Plan for the page: per stage what it takes and of what, in GiB, and whether that is easy, tight or too much."""
    from ..h3_runtime import plan_lines

    on_host = host.compute_device().type == "cpu" and not vram_gib
    gib = 1 << 30
    stages = []
    for stage in plan.stages:
        card, ram = (0, stage.vram + stage.host) if on_host else (stage.vram, stage.host)
        stages.append({"name": stage.name, "card": card / gib, "host": ram / gib, "from": stage.rung})
    card, ram = (max(stage[where] for stage in stages) for where in ("card", "host"))
    free = (0.0 if on_host else plan.free_vram / gib, plan.free_host / gib)
    streamed = any(stage["from"] != "resident" for stage in stages)
    full = card > TIGHT * free[0] or ram > TIGHT * free[1]
    smaller = "chunks/smaller" in plan.paths
    return {
        "state": "no" if not plan.fits else "tight" if streamed or full or smaller else "fits",
        "card": "" if on_host else plan.card,
        "free_card": free[0],
        "free_host": free[1],
        "peak_card": card,
        "peak_host": ram,
        "stages": stages,
        "streamed": streamed,
        "refusal": plan.refusal,
        "seconds": plan.seconds,
        "notes": list(plan.notes),
        "lines": plan_lines(plan),
    }
