"""A label is a test: each registered path is proven on a small model, LOSSLESS bit for bit, the others by differing."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from h3_runtime.accelerators import ACCELERATORS, KERNELS, Accelerator, spec_of
from h3_runtime.checkpoint.load import load_audio_vae, load_dit, load_video_vae
from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.demo.maker import make_model
from h3_runtime.demo.text_maker import make_text_encoder
from h3_runtime.errors import H3Error
from h3_runtime.fidelity import REGISTRY, Label, compose, register, use
from h3_runtime.geometry import Canvas
from h3_runtime.guides import place
from h3_runtime.job import AVLatent, Guide, Masks, RenderJob, TextCondition
from h3_runtime.lora import Lora, apply, plan
from h3_runtime.media import Mp4Writer, read_clip, to_uint8
from h3_runtime.memory.streaming import DiTLayers
from h3_runtime.model import Caches, Models
from h3_runtime.models import attention, dit
from h3_runtime.models.attention import ChunkSizes
from h3_runtime.references import Encoder, PixelEncoder
from h3_runtime.render import beyond_the_reference, condition_text, label
from h3_runtime.request import Media, RenderRequest
from h3_runtime.sampler import sample
from h3_runtime.solvers import SOLVERS
from h3_runtime.text.conditions import ConditionCache, save_condition
from h3_runtime.text.encoder import TextEncoder
from h3_runtime.text.shown import Shown, present_shown

from .quantised_proofs import PROOFS as QUANTISED
from .small_jobs import same

CANVAS = Canvas.fit(22, (96, 64))


class Model:
    """The parts of the small model, in float32 as the demo computes them, and its stored bf16 DiT."""

    def __init__(self, folder):
        self.folder = folder
        self.dit, _ = load_dit(folder / "dit.safetensors", torch.float32)
        self.stored, _ = load_dit(folder / "dit.safetensors")
        self.video_vae, _ = load_video_vae(folder / "video_vae.safetensors")
        self.audio_vae, _ = load_audio_vae(folder / "audio_vae.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return Model(make_model(tmp_path_factory.mktemp("model")))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def job(**changes) -> RenderJob:
    text = TextCondition(noise(9, 64), torch.ones(9, dtype=torch.int64))
    return replace(RenderJob(CANVAS, text, num_forwards=3), **changes)


def clip() -> AVLatent:
    return AVLatent(noise(1, 24, 7, 4, 6, seed=3), noise(1, 32, 2, 37, seed=4))


def masked() -> RenderJob:
    levels = (torch.arange(7 * 4 * 6).view(7, 4, 6) % 7) / 6
    return job(source=clip(), masks=Masks.make(levels, None))


def latent(model: torch.nn.Module, asked: RenderJob) -> AVLatent:
    return sample(model, asked).latent


def twice(name: str, asked: RenderJob):
    """The baseline itself: the same job gives the same bits."""

    def proof(model, monkeypatch):
        part = getattr(model, name)
        return same(latent(part, asked), latent(part, asked))

    return proof


def chunk_baseline(model, monkeypatch):
    """Canonical chunks are fixed numbers, and the bits are those of the same numbers."""
    first = latent(model.dit, job())
    assert (attention.HEAD_GROUP, attention.ROW_CHUNK, dit.TABLE_BATCH) == (8, 2048, 64)
    return same(first, latent(model.dit, job()))


class HeadsSeen(Accelerator):
    """Keeps how many heads each attention call of a block has."""

    name = "heads-seen"

    def __init__(self):
        self.counts = set()

    def wrap_attention(self, call):
        def seen(q, k, v, where):
            if where.block >= 0:
                self.counts.add(where.head_stop - where.head_start)
            return call(q, k, v, where)

        return seen


def smaller_chunks(model, monkeypatch):
    """The plan's smaller chunks: another order of sums, the same result within the bounds, worst of five seeds."""
    heads = HeadsSeen()

    def chunked(part, asked):
        layers = DiTLayers.resident(part.blocks)._replace(chunks=ChunkSizes(1, 8))
        return sample(part, asked, [heads], layers=layers).latent

    for seed in range(5):
        asked = job(seed=seed, num_forwards=1)
        exact, half = latent(model.dit, asked), latent(model.stored, asked)
        assert distance(chunked(model.dit, asked), exact) <= 1e-5
        assert distance(chunked(model.stored, asked), exact) <= 1.25 * distance(half, exact)
    return heads.counts == {1}


def distance(a: AVLatent, b: AVLatent) -> float:
    """The larger relative L2 of picture and sound."""
    pairs = ((a.video, b.video), (a.audio, b.audio))
    return max(((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in pairs)


def refined_once(model, monkeypatch):
    """Text rows refined anew in every forward give the same bits as rows refined once."""
    text = job().text.hidden
    once = model.dit.refine_text(text)
    return all(torch.equal(once, model.dit.refine_text(text)) for _ in range(3))


def tables_by_forward(model, monkeypatch):
    before = latent(model.dit, masked())
    monkeypatch.setattr("h3_runtime.steps.MAX_TABLE_PAIRS", 0)
    result = sample(model.dit, masked())
    assert not result.tables_before_loop
    return same(before, result.latent)


def resumed(model, monkeypatch):
    whole = latent(model.dit, job())
    state = latent(model.dit, job(stop=2))
    return same(whole, latent(model.dit, job(start=2, state=state)))


def chunk_stream(model, monkeypatch):
    video = noise(1, 24, 12, 4, 6)
    return torch.equal(torch.cat(list(model.video_vae.decode_chunks(video)), 2), model.video_vae.decode(video))


def layer_major(model, monkeypatch):
    video, blocks = noise(1, 24, 7, 20, 18), model.video_vae.decoder.transformer_blocks
    return torch.equal(model.video_vae.decode(video), model.video_vae.decode(video, layers=lambda: iter(blocks)))


def tile_batch(model, monkeypatch):
    """Within float32 rounding of one tile at a time, for full and rest groups, resident and layer by layer."""
    video, blocks = noise(1, 24, 7, 20, 18), model.video_vae.decoder.transformer_blocks
    alone = model.video_vae.decode(video)
    for batch in (3, 64):
        for layers in (None, lambda: iter(blocks)):
            found = model.video_vae.decode(video, layers=layers, batch=batch)
            if not (found - alone).norm() <= 1e-5 * alone.norm():
                return False
    return True


def sound_twice(model, monkeypatch):
    sound = noise(1, 32, 2, 9)
    return torch.equal(model.audio_vae.decode(sound), model.audio_vae.decode(sound))


def condition_recipe(model, monkeypatch):
    pixels = (noise(1, 64, 96, 3).abs() * 80).clamp(0, 255).to(torch.uint8)
    first, second = model.video_vae.encode_condition(pixels), model.video_vae.encode_condition(pixels)
    assert not torch.equal(first, model.video_vae.encode_mean(pixels))
    return torch.equal(first, second)


def condition_means(model, monkeypatch):
    """ComfyUI's recipe encodes another condition, and the encoder is shown another picture."""
    pixels = (noise(1, 64, 96, 3).abs() * 80).clamp(0, 255).to(torch.uint8).numpy()
    shown = [Shown("picture", "p", (noise(1, 70, 90, 3).abs() * 80).clamp(0, 255).to(torch.uint8).numpy())]
    ours, theirs = (present_shown(shown, recipe)[1][0].patches for recipe in ("reference", "comfy"))
    assert ours.shape != theirs.shape or not torch.equal(ours, theirs)
    encode = PixelEncoder([Encoder("here", lambda: model.video_vae)])
    return not torch.equal(*(encode(pixels, recipe) for recipe in ("reference", "comfy")))


def encode_twice(models: Models, prompt: str = "a red ball") -> tuple:
    request = RenderRequest(prompt, (96, 64), frames=22)
    return tuple(condition_text(request, place(request), models) for _ in range(2))


def condition_kept(model, monkeypatch):
    """States out of memory, and out of a file, are those of the first encode."""
    parts, kept = find_parts(model.folder), model.folder / "kept"
    first, second = encode_twice(Models(parts, caches=Caches(conditions=ConditionCache(kept))))
    third, _ = encode_twice(Models(parts, caches=Caches(conditions=ConditionCache(kept))))
    assert [made.source for made in (first, second, third)] == ["encoded", "cache", "cache"]
    asked = job()
    assert label(asked, Sampled(), Models(parts), first) == label(asked, Sampled(), Models(parts), third)
    return torch.equal(first.text.hidden, second.text.hidden) and torch.equal(first.text.hidden, third.text.hidden)


def condition_of_another(model, monkeypatch):
    """A saved condition is taken beside another encoder, and then says so; that encoder's own states differ."""
    parts, other = find_parts(model.folder), model.folder / "other"
    make_text_encoder(other, seed=9)
    there = replace(parts, text_encoder=other / "text_encoder.safetensors", tokenizer=other)
    file = save_condition(model.folder / "c.safetensors", encode_twice(Models(parts))[0])
    request = RenderRequest("a red ball", (96, 64), frames=22, embeds=Media(str(file)))
    here, elsewhere = (condition_text(request, place(request), Models(p)) for p in (parts, there))
    names = [part.name for part in label(job(), Sampled(), Models(there), elsewhere).parts]
    assert not here.other_encoder and {"condition/kept", "condition/other-encoder"} <= set(names)
    assert any("another encoder" in note for note in elsewhere.text.notes)
    return not torch.equal(elsewhere.text.hidden, encode_twice(Models(there))[0].text.hidden)


class Sampled:
    tables_before_loop = True
    paths = ()


def encoder_twice(dtype):
    def proof(model, monkeypatch):
        encoder = TextEncoder.load(model.folder / "text_encoder.safetensors", model.folder, dtype=dtype)
        return torch.equal(encoder.encode("a red ball").hidden, encoder.encode("a red ball").hidden)

    return proof


def differs(**changes):
    def proof(model, monkeypatch):
        return not same(latent(model.dit, job()), latent(model.dit, job(**changes)))

    return proof


def half_file(name: str, loader: str, run):
    """A part whose file was rounded to half precision gives another result, and its info says so."""

    def proof(model, monkeypatch):
        from safetensors.torch import load_file, save_file

        import h3_runtime.checkpoint.load as load

        whole = model.folder / f"{name}.safetensors"
        half = model.folder / f"half_{name}.safetensors"
        tensors = {k: v if k.endswith("inv_freq") else v.half() for k, v in load_file(whole).items()}
        metadata = load.open_checkpoint(whole).source.metadata
        save_file(tensors, half, metadata=metadata)
        exact, _ = getattr(load, loader)(whole)
        rounded, info = getattr(load, loader)(half)
        half.unlink()
        assert info.approximate
        return not torch.equal(run(exact.float()), run(rounded.float()))

    return proof


def foreign_condition(model, monkeypatch):
    """Posterior means, as other programs encode keyframes, are another clip than the reference's recipe gives."""
    pixels = (noise(1, 64, 96, 3).abs() * 80).clamp(0, 255).to(torch.uint8)
    ours, theirs = (
        job(guides=(Guide(0, latent),))
        for latent in (model.video_vae.encode_condition(pixels), model.video_vae.encode_mean(pixels))
    )
    return not same(latent(model.dit, ours), latent(model.dit, theirs))


def lora(model, monkeypatch):
    from safetensors.torch import save_file

    file = model.folder / "lora.safetensors"
    name = "diffusion_model.blocks.0.attn.out_proj"
    linear = model.dit.blocks[0].attn.out_proj
    factors = {"lora_down": noise(2, linear.in_features), "lora_up": noise(linear.out_features, 2, seed=1)}
    save_file({f"{name}.{key}.weight": value * 0.1 for key, value in factors.items()}, file)
    base = latent(model.dit, job())
    applied = apply(model.dit, plan(model.dit, [Lora(file)]), mode="side")
    with_lora = latent(model.dit, job())
    applied.remove()
    assert same(base, latent(model.dit, job()))
    return not same(base, with_lora)


def distances(model, spec):
    """Of a job with this accelerator and without, worst of five seeds: in float32, and in the stored dtype against the
    bounds of EXACT MATH."""
    found = []
    for seed in range(5):
        plain = job(seed=seed, num_forwards=1)
        asked = replace(plain, accelerators=(spec,))
        exact, half = latent(model.dit, plain), latent(model.stored, plain)
        own = distance(latent(model.stored, asked), exact) / distance(half, exact)
        found.append((distance(latent(model.dit, asked), exact), own))
    return [max(values) for values in zip(*found)]


def exact_math(name, **options):
    """Within the bounds, and the path ran."""

    def proof(model, monkeypatch):
        spec = spec_of(name, **options)
        ran = sample(model.dit, job(num_forwards=1, accelerators=(spec,)))
        assert ran.paths and "did not engage" not in ran.notes[0]
        whole, half = distances(model, spec)
        return whole <= 1e-5 and half <= 1.25

    return proof


def kernel(name):
    """A kernel of this machine keeps its label; one that is missing here is refused, and its eager twin, whose own
    entry is proven, has the same label."""

    def proof(model, monkeypatch):
        entry, options = use(f"attention/{name}"), {"kernel": name}
        if entry.unproven():
            with pytest.raises(H3Error, match="cannot run here"):
                sample(model.dit, job(accelerators=(spec_of("attention", **options),)))
            twin = "flash-eager" if KERNELS[name].exact else "int8-eager"
            return use(f"attention/{twin}").label is entry.label and not use(f"attention/{twin}").unproven()
        if entry.label is Label.EXACT_MATH:
            return exact_math("attention", **options)(model, monkeypatch)
        return accelerated("attention", **options)(model, monkeypatch)

    return proof


def accelerated(name, forwards=6, **options):
    """An APPROXIMATE accelerator engages, and the result is another one."""

    def proof(model, monkeypatch):
        plain = job(num_forwards=forwards)
        ran = sample(model.dit, replace(plain, accelerators=(spec_of(name, **options),)))
        assert ran.paths == (use(ran.paths[0]).name,) and "did not engage" not in ran.notes[0]
        return not same(ran.latent, latent(model.dit, plain))

    return proof


def compiled(model, monkeypatch):
    """The compiler's own work is torch's; here it is the tracing of the block that has to keep its results."""
    return exact_math("compile", backend="eager")(model, monkeypatch)


def few_step_lora(model, monkeypatch):
    """A few-step LoRA sets forwards and shifts, and the label says so."""
    request = RenderRequest("x", (96, 64), frames=22, few_step="fl2v_4step_v0.1")
    asked = job(request=request, num_forwards=4)
    names = [part.name for part in label(asked, Sampled(), Models(None)).parts]
    return "accelerator/few-step" in names and "schedule/steps" in names


def other_tile(model, monkeypatch):
    video = noise(1, 24, 7, 20, 18)
    return not torch.equal(model.video_vae.decode(video), model.video_vae.decode(video, tile=192))


def coded_elsewhere(model, monkeypatch):
    """What a server gives has gone through its encoder: no pixel can be taken for the one that was rendered."""
    rendered = model.video_vae.decode(noise(1, 24, 2, 4, 6)).clamp(0, 1)
    with tempfile.TemporaryDirectory() as folder:
        with Mp4Writer(Path(folder) / "clip.mp4", 96, 64) as writer:
            writer.write(rendered)
        returned = read_clip(Path(folder) / "clip.mp4").frames
    return not (returned == to_uint8(rendered[0].permute(1, 2, 3, 0))).all()


PROOFS = {
    **QUANTISED,
    "dit/stored": twice("stored", job()),
    "dit/float32": twice("dit", job()),
    "dit/file-approximate": half_file("dit", "load_dit", lambda m: latent(m, job()).video),
    "attention/sdpa": twice("dit", job()),
    "chunks/canonical": chunk_baseline,
    "chunks/smaller": smaller_chunks,
    "refiner/once": refined_once,
    "modulation/tables": twice("dit", masked()),
    "modulation/by-forward": tables_by_forward,
    "solver/euler": twice("dit", masked()),
    "schedule/reference": twice("dit", job(num_forwards=49)),
    "schedule/steps": differs(num_forwards=4),
    "schedule/shifts": differs(video_shift=6.0),
    "recipe/reference": condition_recipe,
    "recipe/comfy": condition_means,
    "condition/kept": condition_kept,
    "condition/other-encoder": condition_of_another,
    "encoder/stored": encoder_twice(None),
    "encoder/float32": encoder_twice(torch.float32),
    "video-vae/float32": chunk_stream,
    "video-vae/file-approximate": half_file("video_vae", "load_video_vae", lambda m: m.decode(noise(1, 24, 2, 4, 6))),
    "video-vae/layer-major": layer_major,
    "video-vae/tile-batch": tile_batch,
    "video-vae/chunk-stream": chunk_stream,
    "video-vae/other-tile": other_tile,
    "audio-vae/float32": sound_twice,
    "audio-vae/file-approximate": half_file("audio_vae", "load_audio_vae", lambda m: m.decode(noise(1, 32, 2, 5))),
    "resume/state": resumed,
    "condition/foreign": foreign_condition,
    "dit/lora": lora,
    "remote/engine": coded_elsewhere,
    "solver/second-order": differs(solver="second-order"),
    "accelerator/sparse": accelerated("sparse", keep=0.5, block=4, warmup=1, tail=1),
    "accelerator/block-cache": accelerated("block-cache", video=10.0, audio=10.0, warmup=1, tail=1),
    "accelerator/forecast": accelerated("forecast", calls=0.1, warmup=2, tail=1),
    "accelerator/compile": compiled,
    "accelerator/few-step": few_step_lora,
    **{f"attention/{name}": kernel(name) for name in KERNELS},
}


def test_every_path_has_its_proof():
    assert set(PROOFS) == set(REGISTRY)


@pytest.mark.parametrize("name", PROOFS)
def test_the_label_holds(name, model, monkeypatch):
    assert PROOFS[name](model, monkeypatch)


def test_no_accelerator_or_solver_is_without_a_path():
    for kind in ACCELERATORS:
        assert kind.fidelity in REGISTRY if kind.fidelity else all(k.path in REGISTRY for k in KERNELS.values())
    assert all(solver.path in REGISTRY for solver in SOLVERS.values())


def test_the_weakest_part_names_the_render():
    assert compose(["dit/stored", "solver/euler"]).label is Label.LOSSLESS
    fidelity = compose(["dit/stored", "schedule/steps"], ["masks"], "fp32 compute")
    assert fidelity.title == "APPROXIMATE (fp32 compute) + BEYOND THE REFERENCE: masks"
    assert [part["name"] for part in fidelity.to_dict()["parts"]] == ["dit/stored", "schedule/steps"]


def test_a_path_without_an_entry_cannot_be_used(monkeypatch):
    with pytest.raises(KeyError):
        use("attention/none")
    monkeypatch.setattr("h3_runtime.fidelity.REGISTRY", {})
    register("gpu/only", Label.LOSSLESS, "a kernel", lambda: "no GPU")
    assert "UNPROVEN HERE: gpu/only" in compose(["gpu/only"]).title


def test_a_render_at_the_release_settings_is_lossless():
    canvas = Canvas.fit(124, (1344, 768))
    text = TextCondition(noise(9, 64), torch.ones(9, dtype=torch.int64))
    plain = RenderJob(canvas, text)

    def title(asked):
        return label(asked, Sampled(), Models(None)).title

    assert title(plain) == "LOSSLESS"
    assert title(replace(plain, num_forwards=20)) == "APPROXIMATE"
    assert title(replace(plain, request=RenderRequest("", recipe="comfy"))) == "APPROXIMATE"


def test_what_is_beyond_the_reference_is_listed():
    canvas = Canvas.fit(124, (1344, 768))
    text = TextCondition(noise(9, 64), torch.ones(9, dtype=torch.int64))
    picture = noise(1, 24, 1, 48, 84)
    plain = RenderJob(canvas, text)
    assert beyond_the_reference(plain) == []
    assert beyond_the_reference(replace(plain, guides=(Guide(0, picture, keyframe=True),))) == []
    middle = replace(plain, guides=(Guide(60, picture, strength=0.5),))
    assert beyond_the_reference(middle) == ["guides in the middle", "guide strength"]
    assert beyond_the_reference(replace(plain, stop=3)) == ["start and stop"]
    long = replace(plain, canvas=Canvas.fit(379, (1344, 768)))
    assert beyond_the_reference(long) == ["379 frames (15.8 s; trained 124 to 362)"]
    assert beyond_the_reference(replace(plain, canvas=Canvas.fit(124, (640, 640)))) == ["size 640x640"]
    for ratio in ((21, 9), (16, 9), (4, 3), (1, 1), (3, 4), (9, 16)):
        assert beyond_the_reference(replace(plain, canvas=Canvas.fit(124, ratio=ratio))) == []


def test_the_first_keyframe_shapes_the_canvas_and_is_stretched():
    tall = Media(frames=torch.zeros(1, 120, 80, 3, dtype=torch.uint8).numpy(), name="tall")
    wide = Media(frames=torch.zeros(1, 80, 120, 3, dtype=torch.uint8).numpy(), name="wide")
    placed = place(RenderRequest("x", first_frame=tall, last_frame=wide))
    assert (placed.canvas.width, placed.canvas.height) == (768, 1152) or placed.canvas.height > placed.canvas.width
    assert "tall (80x120) was resized to 768x1152" in placed.notes, "neither cropped nor stretched"
    assert any(note.startswith("wide (120x80) was cropped") for note in placed.notes)
    assert [g.frame_index for g in placed.guides] == [0, 123]
    alone = place(RenderRequest("x", last_frame=wide, size=(96, 96)))
    assert any("wide (120x80) was stretched 50.0 % taller" in note for note in alone.notes)
