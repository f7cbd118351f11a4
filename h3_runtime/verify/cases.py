"""One runner per group of cases: what the runtime computes for the outputs that a case stores.

    layout                       PackedLayout           vae, audio_vae, dit/weights   checkpoint loading
    schedule                     grids, map, step       vae_encode, vae_decode        VideoVAE
    dit, mask, curve, quant      VelocityModel          audio_encode, audio_decode    AudioVAE
    loop                         sample on a RenderJob          quant_linear, quant/dequant   quantised linears

Every value comes out of a runtime function. Put together here is only what the host keeps for itself: the place of a
timestep in ComfyUI's own list, its comparison schedules, and what its sampler shows the model under a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..accelerators import Accelerator
from ..checkpoint.formats import FORMATS
from ..checkpoint.reader import listed
from ..errors import H3Error
from ..geometry import PIXELS_PER_LATENT, Canvas
from ..job import Guide, Masks, Reference, RenderJob, TextCondition
from ..layout import ConditionShape, PackedLayout, audio_to_rows, patchify_video, rows_to_audio, unpatchify_video
from ..models.dit import MODALITIES, DiT
from ..sampler import Rows, VelocityModel, condition_rows, draw_noise, sample
from ..schedule import (
    AUDIO_SHIFT,
    CONDITION_TIMESTEP,
    VIDEO_SHIFT,
    Schedule,
    euler_step,
    map_sigma,
    mix,
    shift_sigma,
    sigma_grid,
)
from ..steps import StepPlan, Steps, plan_steps
from .folder import COMFYUI_WORD, EXACT, Case, Golden, Tensors, Value, is_weights, layout_word
from .quantised import (
    DECODED_FILE,
    RoundedInputs,
    check_markers,
    decoded_linear,
    replaced,
    run_decoded,
    run_linear,
)

POSITION_TOLERANCE = {"atol": 1e-9, "rtol": 0.0}
SIGMA_TOLERANCE = {"atol": 2e-7, "rtol": 2e-7}
MIXED_TOLERANCE = {"atol": 1e-6, "rtol": 0.0}  # condition rows after their mix with noise
SAME_TIMESTEP = 1e-6  # labels nearer than this are one label
STORED_SIGMAS = 1000  # ComfyUI's comparison schedules choose among, or evenly between, so many
KIND_CODES = {
    "text": 0,
    "guide_video": 1,
    "guide_audio": 2,
    "reference_video": 3,
    "reference_audio": 4,
    "audio": 5,
    "video": 6,
}
DIT_SIZES = {  # the index's word -> our setting
    "hidden": "hidden",
    "layers": "layers",
    "refiner": "refiner_layers",
    "heads": "heads",
    "head_dim": "head_dim",
    "ffn": "ffn",
    "text_dim": "text_dim",
    "latents": "video_channels",
    "audio": "audio_channels",
    "tin": "time_features",
    "thid": "time_hidden",
    "tdim": "time_dim",
    "rope": "rope_frequencies",
    "adaln_curve_grid": "curve_points",
    "time_embed_dim": "time_dim",
}
UNUSED_TENSORS = ("decoder.mask_token",)  # only training used it: files may lack it, and then zeros stand in
VIDEO_VAE_SIZES = {"res": "resnets", "layers": "layers", "heads": "heads", "dim_head": "head_dim"}


# --- layouts ----------------------------------------------------------------------------------------------------------


def layout_of(config: Mapping[str, Any], tags: Tensor) -> PackedLayout:
    """The packed layout of a request in the index's words."""
    height, width = config["latent_h"], config["latent_w"]
    shapes = []
    for guide in config.get("keyframes", ()):
        video = (guide["latent_frames"], height, width) if guide["latent_frames"] else None
        shapes.append(ConditionShape(video, guide["audio_latent_t"], guide["frame_index"]))
    for reference in config.get("refs", ()):
        video = None if reference["kind"] == "audio" else (reference.get("t", 1), reference["h"], reference["w"])
        shapes.append(ConditionShape(video, reference.get("at", 0), kind=reference["kind"]))
    return PackedLayout.build(tags, (config["latent_t"], height, width), config["audio_t"], shapes)


def layout_values(layout: PackedLayout) -> dict[str, Tensor]:
    """A packed layout in the form of the reference vectors."""

    def generated(is_stream: Callable) -> Tensor:
        return torch.cat([torch.full((len(s),), s.is_target) for s in layout.segments if is_stream(s)])

    return {
        "segments": torch.tensor([[s.start, s.stop, KIND_CODES[s.kind]] for s in layout.segments]),
        "position_ids": layout.positions,
        "video_pos": layout.video_rows(),
        "audio_pos": layout.audio_rows(),
        "video_update": generated(lambda segment: segment.is_video),
        "audio_update": generated(lambda segment: segment.is_audio),
    }


def run_layout(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    tags = torch.ones(case["config"]["text_len"], dtype=torch.int64)
    for name, got in layout_values(layout_of(case["config"], tags)).items():
        yield Value(name, got)


def check_layout(layout: PackedLayout, case: Case, given: Tensors) -> Iterator[Value]:
    """A layout among a case's inputs is not used but compared: the runtime builds its own."""
    for name, got in layout_values(layout).items():
        if name in case["inputs"]:
            yield Value(name, got, "", given[name], POSITION_TOLERANCE if name == "position_ids" else EXACT)


# --- one forward ------------------------------------------------------------------------------------------------------


class Probe(Accelerator):
    """Keeps copies of what passes the seams: target rows going in, and the hidden state after each block."""

    name = "probe"

    def __init__(self):
        self.rows: list[Rows] = []
        self.hidden: list[Tensor] = []

    def wrap_block(self, call: Callable) -> Callable:
        def kept(index: int, h: Tensor, step: StepPlan) -> Tensor:
            h = call(index, h, step)
            self.hidden.append(h.clone())
            return h

        return kept

    def wrap_velocity(self, call: Callable) -> Callable:
        def kept(rows: Rows, step: StepPlan) -> Rows:
            self.rows.append(Rows(rows.video.clone(), rows.audio.clone()))
            return call(rows, step)

        return kept


def run_dit(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    yield from (run_weights if is_weights(case) else run_forward)(golden, case, given)


def run_quantised(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    if DECODED_FILE in case["file"]:
        yield from run_decoded(golden, case, given)
        return
    yield from run_dit(golden, case, given)
    if is_weights(case):
        yield from check_markers(golden, case, golden.model(case["file"])[0])


def run_mask(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    yield from (run_sampler_side if "video_mask" in case["inputs"] else run_forward)(golden, case, given)


def run_forward(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    """One forward at one sigma, for every weight file and number type that the case asks for."""
    config = case["config"]
    layout = layout_of(config, given["text_token_tags"])
    yield from check_layout(layout, case, given)
    sigma = given["sigma"]
    audio_sigma = map_sigma(sigma, config.get("shift_v", VIDEO_SHIFT), config.get("shift_a", AUDIO_SHIFT))
    schedule = Schedule((sigma.item(), 0.0), (audio_sigma.item(), 0.0), 0, 1)
    masks = forward_masks(given)
    steps = plan_steps(layout, schedule, masks)
    unmasked = plan_steps(layout, schedule).timesteps
    labels = comfy_labels(steps.forwards[0], torch.cat((steps.timesteps, unmasked)), given)
    if masks is not None and masks.video is not None:
        labels["inner_video_row_mask"] = masks.video_tokens
    for file in golden.weight_files(config["weights"]):
        for kind, wanted in by_kind(case["outputs"]).items():
            dit = model_of_kind(golden, file, kind)
            values = {**labels, **forward_values(dit, layout, steps, given)}
            values["inner_t_emb"] = dit.embed_time(labels["inner_t_values"])
            for name, plain in wanted.items():
                if plain in values:
                    yield Value(name, values[plain], file)


KINDS = {"bf16": "_bf16", "fp8_activations": "_fp8_activations"}  # kind of a forward -> the end of its outputs' names
DECODED = "decoded"  # out_dequant_*: float32 weights that are the decoded ones


def by_kind(outputs: Iterable[str]) -> dict[str, dict[str, str]]:
    """Kind of forward -> {output: its name in an ordinary forward}."""
    found: dict[str, dict[str, str]] = {}
    for name in outputs:
        kind = next((kind for kind, end in KINDS.items() if name.endswith(end)), "float32")
        plain = name.removesuffix(KINDS.get(kind, ""))
        if plain.startswith("out_dequant_"):
            kind, plain = DECODED, plain.replace("out_dequant_", "out_comfy_")
        found.setdefault(kind, {})[name] = plain
    return found


def model_of_kind(golden: Golden, file: str, kind: str) -> DiT:
    """The DiT of ``file`` for one kind of forward: as loaded in float32 or bf16, or its quantised linears replaced."""
    dit = golden.model(file, torch.bfloat16 if kind == "bf16" else torch.float32)[0]
    if kind == DECODED:
        return replaced(dit, decoded_linear)
    return replaced(dit, RoundedInputs) if kind == "fp8_activations" else dit


def forward_values(dit: DiT, layout: PackedLayout, steps: Steps, given: Tensors) -> dict[str, Tensor]:
    """Outputs and inner activations of the one forward of ``steps``; ComfyUI's outputs are the negated velocity."""
    probe = Probe()
    text_rows = dit.refine_text(given["text"][0])
    model = VelocityModel(dit, layout, steps, text_rows, held_rows(layout, given), (probe,))
    rows = Rows(patchify_video(given["video_x"]), audio_to_rows(given["audio_x"]))
    velocity = model.velocity(rows, steps.forwards[0])
    values = {
        "out_diffusers_video_rows": velocity.video,
        "out_diffusers_audio_rows": velocity.audio,
        "out_comfy_video": -unpatchify_video(velocity.video, layout.target_video.shape),
        "out_comfy_audio": -rows_to_audio(velocity.audio),
        "inner_text_refined": text_rows,
    }
    return {**values, **{f"inner_hidden_after_block{index}": h for index, h in enumerate(probe.hidden)}}


def held_rows(layout: PackedLayout, given: Tensors) -> list[tuple[int, int, bool, Tensor]]:
    """The condition rows as the reference fed them (its noise is its own): per stream, in packed order."""
    taken = {True: 0, False: 0}
    held = []
    for segment in layout.conditions:
        rows = given["cond_video_rows" if segment.is_video else "cond_audio_rows"]
        start = taken[segment.is_video]
        taken[segment.is_video] += len(segment)
        held.append((segment.start, segment.stop, segment.is_video, rows[start : start + len(segment)]))
    return held


def forward_masks(given: Tensors) -> Masks | None:
    """The masks of one forward, not rounded (the host has done it), those that keep nothing dropped."""
    video, audio = (given[n][0, 0] if n in given else None for n in ("denoise_mask", "audio_denoise_mask"))
    kept = Masks.make(video, audio)
    if kept is None:
        return None
    return Masks(video if kept.video is not None else None, audio if kept.audio is not None else None)


def comfy_labels(step: StepPlan, available: Tensor, given: Tensors) -> dict[str, Tensor]:
    """Our timestep and modality of every row in ComfyUI's numbering: place in ITS list of timesteps * 3 + modality.

    ComfyUI's list keeps doubles and timesteps that no row reads, so ours cannot equal it; only its numbering is taken.
    An entry that rows read gets the timestep of those rows (the farthest off); of the others the nearest one of
    ``available``. A row whose timestep is not in the list is numbered -1.
    """
    timesteps = torch.empty(step.runs[-1].stop, dtype=torch.float32)
    modality = torch.empty(step.runs[-1].stop, dtype=torch.int64)
    for run in step.runs:
        pair = step.pairs[run.row]
        timesteps[run.start : run.stop] = step.timesteps[pair // MODALITIES]
        modality[run.start : run.stop] = pair % MODALITIES
    entries = given.get("inner_t_values", step.timesteps)
    theirs = given.get("inner_mod_row_per_token")
    distance = (timesteps[:, None] - entries).abs()  # [S, n]
    nearest, place = distance.min(dim=1)
    if theirs is not None and theirs.shape == place.shape:  # of doubles, the one it reads itself
        stated = (theirs // MODALITIES).clamp(0, entries.shape[0] - 1)
        tied = distance.gather(1, stated[:, None])[:, 0] == nearest
        place = torch.where(tied, stated, place)
    place = torch.where(nearest <= SAME_TIMESTEP, place, -1)
    values = []
    for index, entry in enumerate(entries):
        own = timesteps[place == index]
        pool, pick = (own, torch.argmax) if own.numel() else (available, torch.argmin)
        values.append(pool[pick((pool - entry).abs())])
    numbers = torch.where(place < 0, -1, place * MODALITIES + modality)
    return {"inner_t_values": torch.stack(values), "inner_mod_row_per_token": numbers}


def run_sampler_side(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    """What ComfyUI's sampler makes of a person's masks. Masks and mixes are ours, the blend is its bookkeeping."""
    config, sigma = case["config"], given["sigma"]
    cells, sound = given["video_mask"][0, 0], given["audio_mask"][0, 0]
    masks = Masks.make(cells, sound) or Masks()
    tokens, levels = torch.ones_like(cells), torch.ones_like(sound)
    if masks.video is not None:
        _, height, width = cells.shape
        grid = masks.video_tokens.view(-1, math.ceil(height / 2), math.ceil(width / 2))
        tokens = grid.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, :height, :width]
    if masks.audio is not None:
        levels = masks.audio_tokens.view_as(sound)
    yield Value("out_denoise_mask", tokens[None, None])
    yield Value("out_audio_denoise_mask", levels[None, None])
    kept = mix(given["clean_video"], given["noise_video"], CONDITION_TIMESTEP)
    yield Value("out_injected_video", injected(given["x_video"], kept, tokens, cells))
    carried = given["clean_audio"] * (sigma / map_sigma(sigma, config["shift_video"], config["shift_audio"]))
    yield Value("out_injected_audio_carried", injected(given["x_audio_carried"], carried, levels, sound))


def injected(x: Tensor, kept: Tensor, token: Tensor, cell: Tensor) -> Tensor:
    """w * x + (1 - w) * kept with w = (token - cell) / (1 - cell), 0 where the cell mask is 1: blended once more by
    the cell mask, as the sampler does next, it comes out blended by the token mask."""
    weight = torch.where(cell < 1, (token - cell) / (1 - cell).clamp(min=1e-6), torch.zeros_like(cell))
    return weight * x + (1 - weight) * kept


# --- schedules and the loop -------------------------------------------------------------------------------------------


def run_schedule(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    config, name = case["config"], case["id"].rpartition("/")[2]
    if "sigma_in" in given:
        yield Value("out_sigma", map_sigma(given["sigma_in"], config["from_shift"], config["to_shift"]))
    elif "sigma_pair" in given:
        now, after = given["sigma_pair"].tolist()
        yield Value("out_sample", euler_step(given["sample"], given["velocity"], now, after))
    elif name.startswith("comfy_"):
        scheduler = name.removeprefix("comfy_").rpartition("_")[0]
        yield Value("out_sigmas", comparison_sigmas(scheduler, config["steps"], config["shift"]))
    else:
        grid = sigma_grid(config["grid_points"], config["shift"])
        yield Value("out_sigmas", grid)
        yield Value("out_timesteps", planned_timesteps(grid))


def planned_timesteps(grid: Tensor) -> Tensor:
    """The timestep that the target's picture rows are told at each forward of ``grid``, from the step plans."""
    layout = PackedLayout.build(torch.ones(1, dtype=torch.int64), (2, 2, 2), 1)
    sigmas = tuple(grid.tolist())
    steps = plan_steps(layout, Schedule(sigmas, sigmas, 0, len(sigmas) - 1))
    return torch.stack([step.timesteps[step.video_runs[0].row] for step in steps.forwards])


def comparison_sigmas(scheduler: str, steps: int, shift: float) -> Tensor:
    """[steps + 1] sigmas of a ComfyUI scheduler: stored sigmas taken at even distances ("simple"), or even distances
    between the first and the last, shifted ("normal" with, "sgm_uniform" without the last). H3Error for others."""
    stored = shift_sigma(torch.arange(1, STORED_SIGMAS + 1) / STORED_SIGMAS, shift)
    first, last = stored[-1].item(), stored[0].item()
    if scheduler == "simple":
        chosen = stored.flip(0)[[int(k * (STORED_SIGMAS / steps)) for k in range(steps)]]
    elif scheduler == "normal":
        chosen = shift_sigma(torch.linspace(first, last, steps), shift)
    elif scheduler == "sgm_uniform":
        chosen = shift_sigma(torch.linspace(first, last, steps + 1)[:-1], shift)
    else:
        raise H3Error(f"the comparison schedule {scheduler} is not known here: simple, normal and sgm_uniform are")
    return torch.cat((chosen, torch.zeros(1)))


def run_loop(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    """A whole denoising loop through ``sample``, from noise that the runtime draws itself."""
    job = job_of(case["config"], given)
    layout = PackedLayout.of(job.text.tags, job.canvas, job.guides, job.references)
    yield from check_layout(layout, case, given)
    yield from check_start(job, layout, given)
    for file in golden.weight_files(case["config"]["weights"]):
        probe = Probe()
        latent = sample(golden.model(file)[0], job, (probe,)).latent
        final = Rows(patchify_video(latent.video), audio_to_rows(latent.audio))
        values = {
            "out_video_latent": latent.video,
            "out_audio_latent": latent.audio,
            "out_comfy_video": latent.video,
            "out_comfy_audio": latent.audio,
            "out_video_rows": final.video,
            "out_audio_rows": final.audio,
            # without masks the rows fed to forward k + 1 are the state after forward k
            "out_rms_per_step": torch.stack([_rms(rows) for rows in (*probe.rows[1:], final)], dim=1),
        }
        for name, got in values.items():
            yield Value(name, got, file)


def job_of(config: Mapping[str, Any], given: Tensors) -> RenderJob:
    """The render job of a loop case, its conditions ready latents."""
    guides = tuple(
        Guide(guide["frame_index"], given.get(f"kf{i}_latent"), given.get(f"kf{i}_audio_latent"), name=f"keyframe {i}")
        for i, guide in enumerate(config.get("keyframes", ()))
    )
    references = tuple(
        Reference(item["kind"], given.get(f"ref{i}_latent"), given.get(f"ref{i}_audio_latent"), f"reference {i}")
        for i, item in enumerate(config.get("refs", ()))
    )
    size = (config["latent_w"] * PIXELS_PER_LATENT, config["latent_h"] * PIXELS_PER_LATENT)
    return RenderJob(
        canvas=Canvas.fit(config["pixel_frames"], size),
        text=TextCondition(given["text"][0], given["text_token_tags"]),
        guides=guides,
        references=references,
        seed=config["noise_seed"],
        num_forwards=config["steps"] - 1,
        video_shift=config["shift_v"],
        audio_shift=config["shift_a"],
    )


def check_start(job: RenderJob, layout: PackedLayout, given: Tensors) -> Iterator[Value]:
    """Sigmas, noise and mixed condition rows of the job, against those among the case's inputs."""
    noise = draw_noise(job)
    drawn = {"noise_video": noise.video, "noise_audio_rows": noise.audio}
    names = [f"kf{i}_noise" for i, guide in enumerate(job.guides) if guide.video is not None]
    names += [f"ref{i}_noise" for i, reference in enumerate(job.references) if reference.video is not None]
    drawn.update(zip(names, noise.conditions))
    held = condition_rows(job, layout, noise)
    for name, is_video in (("cond_video_rows", True), ("cond_audio_rows", False)):
        rows = [part[3] for part in held if part[2] == is_video]
        if name in given:
            yield Value(name, torch.cat(rows), "", given[name], MIXED_TOLERANCE)
    for name, got in drawn.items():
        if name in given:
            yield Value(name, got, "", given[name], EXACT)
    for name, sigmas in (("video_sigmas", job.schedule.video), ("audio_sigmas", job.schedule.audio)):
        if name in given:
            yield Value(name, torch.tensor(sigmas), "", given[name], SIGMA_TOLERANCE)


def _rms(rows: Rows) -> Tensor:
    """float64 [2]: root mean square of the picture rows and of the sound rows."""
    return torch.stack([stream.double().square().mean().sqrt() for stream in rows])


# --- VAEs -------------------------------------------------------------------------------------------------------------


def pixels_of(config: Mapping[str, Any], given: Tensors) -> Tensor:
    """uint8 [F, H, W, 3]: the stored frames, or the stored base grown to full size (``conventions.pixels_base``)."""
    if "pixels" in given:
        return given["pixels"]
    base = given["pixels_base"].long()
    y, x = torch.arange(config["H"]), torch.arange(config["W"])
    tiled = base[:, y % base.shape[1]][:, :, x % base.shape[2]]
    return ((tiled + (2 * y[:, None] + 3 * x)[None, :, :, None]) % 256).to(torch.uint8)


def run_video_encode(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    vae, pixels = golden.vae("vae"), pixels_of(case["config"], given)
    for name in case["outputs"]:
        if name == "out_latent":
            yield Value(name, vae.encode_mean(pixels))
        elif name == "out_diffusers_moments":
            yield Value(name, torch.cat(vae.encode_moments(vae.normalise_pixels(pixels)), dim=1))
        elif name == "out_diffusers_condition_latent":
            yield Value(name, vae.encode_condition(pixels))


def run_video_decode(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    pixels = golden.vae("vae").decode(given["latent"])
    for name in case["outputs"]:
        if name == "out_pixels":
            yield Value(name, pixels)
        elif name == "out_pixels_strided":
            down, across = case["config"]["stride"]
            yield Value(name, pixels[..., ::down, ::across])
        elif name == "out_frame_sums":
            yield Value(name, pixels.double().sum(dim=(3, 4)))


def run_audio_encode(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    yield Value("out_latent", golden.vae("audio_vae").encode(given["waveform"]))


def run_audio_decode(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    yield Value("out_waveform", golden.vae("audio_vae").decode(given["latent"]))


# --- weight files -----------------------------------------------------------------------------------------------------


def run_weights(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    """A weight file, loaded strictly: the sizes that the index states, and tensor by tensor the ComfyUI file beside it
    (that file itself: its stored tensors; with none beside it: its own tensors under our names)."""
    model, info = golden.model(case["file"])
    for name, size in stated_sizes(case).items():
        yield Value(f"config.{name}", torch.tensor(getattr(model.config, name)), "", torch.tensor(size), EXACT)
    twin, got, file = golden.comfyui_twin(case), model.state_dict(), golden.file(case["file"])
    if twin is None:
        wanted = golden.canonical(case["file"])
    elif layout_word(case) == COMFYUI_WORD:
        wanted = {name: file.read(name) for name in file.shapes}
    else:
        wanted = golden.model(twin["file"])[0].state_dict()
    odd = set(wanted) ^ set(got) if twin else set(wanted) - set(got)
    if odd:
        raise H3Error(f"{case['file']} has other tensors than wanted: {listed(sorted(odd))}")
    bound = next(f.tolerance for f in FORMATS if (f.part, f.name) == (info.part, info.format))
    for name, tensor in wanted.items():
        if name in UNUSED_TENSORS and name not in file.shapes:
            continue
        yield Value(name, got[name], "", tensor, {"rel_l2": bound} if bound else EXACT)


def stated_sizes(case: Case) -> dict[str, Any]:
    """The sizes that the index states of a weight file, under our setting names."""
    config = case["config"]
    if case["group"] in ("dit", "curve", "quant"):
        sizes = {**config, **config.get("dit", {})}
        if config.get("curve"):
            sizes |= {"adaln_curve_grid": config["curve"]["grid"], "time_embed_dim": config["curve"]["k"]}
        return {ours: sizes[theirs] for theirs, ours in DIT_SIZES.items() if theirs in sizes}
    stated = config.get("comfy", {})
    if case["group"] == "audio_vae":
        return dict(stated)
    sizes = {ours: stated[theirs] for theirs, ours in VIDEO_VAE_SIZES.items() if theirs in stated}
    if "ch_mult" in stated:
        sizes["channels"] = [stated["ch"] * factor for factor in stated["ch_mult"]]
    return sizes


Runner = Callable[[Golden, Case, Tensors], Iterator[Value]]
RUNNERS: dict[str, Runner] = {
    "layout": run_layout,
    "schedule": run_schedule,
    "dit": run_dit,
    "curve": run_dit,
    "quant": run_quantised,
    "quant_linear": run_linear,
    "mask": run_mask,
    "loop": run_loop,
    "vae": run_weights,
    "vae_encode": run_video_encode,
    "vae_decode": run_video_decode,
    "audio_vae": run_weights,
    "audio_encode": run_audio_encode,
    "audio_decode": run_audio_decode,
}
