"""A checkpoint's layers from RAM, disk or both give the resident bits, in every format; steps down under pressure."""

from __future__ import annotations

import itertools

import pytest
import torch

from h3_runtime.checkpoint.load import load_dit, load_video_vae, open_dit, open_video_vae
from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.demo.maker import make_model
from h3_runtime.errors import H3Error
from h3_runtime.lora import Lora, apply, plan
from h3_runtime.memory.placement import Placement, place_dit, place_video_vae
from h3_runtime.memory.streaming import ResidentLayers, StreamedLayers, run_in_order
from h3_runtime.model import Loading, Models
from h3_runtime.pressure import sample_under_pressure
from h3_runtime.recovery import RecoveryFolder
from h3_runtime.sampler import sample
from h3_runtime.selftest import tiny_job
from h3_runtime.text.encoder import TextEncoder

from .small_jobs import same

CPU = torch.device("cpu")
PLACEMENTS = (
    Placement("ram"),
    Placement("disk"),
    Placement("ram", resident=2, ahead=2, adaln="ram"),
    Placement("disk", resident=1, adaln="resident"),
    Placement("resident", adaln="disk"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def lora_file(folder, tmp_path_factory):
    """A rank 4 LoRA on every linear of two blocks, one AdaLN projection and the refiner."""
    from safetensors.torch import save_file

    dit, _ = load_dit(folder / "dit.safetensors")
    generator, tensors = torch.Generator().manual_seed(5), {}
    parts = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
    names = [f"blocks.{index}.{part}" for index, part in itertools.product((0, 2), parts)]
    names += ["blocks.1.adaln_proj.linear", "token_refiner.blocks.0.mlp.fc1"]
    for name in names:
        out, inside = dit.get_submodule(name).weight.shape
        key = f"diffusion_model.{name}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(4, inside, generator=generator) / inside**0.5
        tensors[f"{key}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.2
    path = tmp_path_factory.mktemp("lora") / "small.safetensors"
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("quantise", [None, "int8_convrot", "int8", "fp8"])
def test_every_placement_gives_the_resident_bits(folder, quantise):
    path, job = folder / "dit.safetensors", tiny_job()
    resident, _ = load_dit(path, quantise=quantise)
    expected = sample(resident, job).latent
    for placement in PLACEMENTS:
        dit, layers = place_dit(open_dit(path, quantise=quantise), placement, CPU)
        assert same(sample(dit, job, layers=layers).latent, expected), placement


@pytest.mark.parametrize("quantise", [None, "int8_convrot"])
def test_loras_travel_with_their_layer(folder, lora_file, quantise):
    path, job = folder / "dit.safetensors", tiny_job()
    resident, _ = load_dit(path, quantise=quantise)
    plain = sample(resident, job).latent
    apply(resident, plan(resident, [Lora(lora_file)]), mode="side")
    expected = sample(resident, job).latent
    assert not same(expected, plain)
    for placement in PLACEMENTS:
        opened = open_dit(path, quantise=quantise)
        dit, layers = place_dit(
            opened, placement, CPU, lambda dit: apply(dit, plan(dit, [Lora(lora_file)]), mode="side")
        )
        assert same(sample(dit, job, layers=layers).latent, expected), placement


def test_a_mixed_file_streams_layer_by_layer(folder, tmp_path):
    """Blocks stored in different formats have different layouts, and share the ring all the same."""
    path, job = folder / "dit.safetensors", tiny_job()
    exclude = ["blocks.0.*", "blocks.2.mlp.fc1"]
    resident, _ = load_dit(path, quantise="int8_convrot", exclude=exclude)
    expected = sample(resident, job).latent
    for placement in PLACEMENTS:
        dit, layers = place_dit(open_dit(path, quantise="int8_convrot", exclude=exclude), placement, CPU)
        assert same(sample(dit, job, layers=layers).latent, expected), placement


def test_the_video_decoder_streams_layer_major(folder):
    path = folder / "video_vae.safetensors"
    latent = torch.randn(1, 24, 7, 20, 18, generator=torch.Generator().manual_seed(1))
    whole, _ = load_video_vae(path)
    expected = whole.decode(latent)
    for placement in (Placement("ram"), Placement("disk", resident=1), Placement("ram", ahead=2)):
        vae, layers = place_video_vae(open_video_vae(path), placement, CPU)
        found = vae.decode(latent, layers=lambda layers=layers: run_in_order(layers))
        assert torch.equal(found, expected), placement


def test_nothing_of_a_streamed_layer_stays_in_the_module(folder):
    dit, layers = place_dit(open_dit(folder / "dit.safetensors"), Placement("disk"), CPU)
    hollow = ("blocks.", "token_refiner.blocks.")
    assert all(p.is_meta == name.startswith(hollow) for name, p in dit.named_parameters())
    assert isinstance(layers.blocks, StreamedLayers) and isinstance(layers.adaln, StreamedLayers)
    with layers.refiner() as refiner:
        assert len(refiner) == dit.config.refiner_layers
    dit, layers = place_dit(open_dit(folder / "dit.safetensors"), Placement("resident"), CPU)
    assert isinstance(layers.blocks, ResidentLayers) and dit.blocks[0].adaln_proj.linear.weight.is_meta
    assert layers.refiner is None


def test_bad_placements_are_one_sentence():
    for make in (lambda: Placement("cloud"), lambda: Placement("ram", -1), lambda: Placement("ram", 0, 0)):
        with pytest.raises(H3Error, match="placement"):
            make()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Placement("ram", resident=5), "5 layers shall stay on the device and the model has 4: give 0 to 4"),
        (Placement("disk", ahead=5), "5 layers shall be copied ahead and the model has 4: give 1 to 4"),
    ],
)
def test_more_layers_than_there_are_is_one_sentence(folder, given, said):
    with pytest.raises(H3Error, match=said):
        place_dit(open_dit(folder / "dit.safetensors"), given, CPU)
    Placement("ram", resident=4, ahead=4).check(4)
    Placement("ram", ahead=2).check(1)
    with pytest.raises(H3Error, match="placement resident keeps all layers, not 1"):
        Placement("resident", 1)


def test_every_part_refuses_more_layers_than_it_has(folder):
    """The DiT before any weights are read; VAE and text encoder where they are placed."""
    models = Models(find_parts(folder), loading=Loading(placement=Placement("ram", resident=99)))
    with pytest.raises(H3Error, match=r"99 layers .* the DiT has 4"):
        models.check("t2va")
    with pytest.raises(H3Error, match="99 layers"):
        place_video_vae(open_video_vae(folder / "video_vae.safetensors"), Placement("ram", 99), CPU)
    with pytest.raises(H3Error, match="99 layers"):
        TextEncoder.load(find_parts(folder).text_encoder, placement=Placement("disk", 99))


def test_the_ladder_ends():
    placement, steps = Placement("resident"), []
    while placement is not None:
        steps.append(str(placement))
        placement = placement.lower()
    assert steps == ["resident", "streamed from ram, 1 ahead"]
    assert Placement("disk", 8, 2).lower() == Placement("disk", 8, 1)
    assert Placement("disk", 8, 1).lower() == Placement("disk", 4, 1)


# --- pressure --------------------------------------------------------------------------------------------------------


def placer(folder, fails: dict[str, int]):
    """``place`` whose placements run out of memory: name of a placement -> how many blocks it manages."""
    given = []

    def place(placement: Placement):
        given.append(str(placement))
        dit, layers = place_dit(open_dit(folder / "dit.safetensors"), placement, CPU)
        left = fails.get(str(placement))
        if left is not None:
            seen = itertools.count()
            forward = type(dit.blocks[0]).forward

            def limited(self, *arguments):
                if next(seen) >= left:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nmore words")
                return forward(self, *arguments)

            limited_type = type("Limited", (type(dit.blocks[0]),), {"forward": limited})
            for block in dit.blocks:
                block.__class__ = limited_type
        return dit, layers

    return place, given


@pytest.mark.parametrize("blocks", [0, 3, 4, 9])
@pytest.mark.parametrize("on_disk", [True, False])
def test_out_of_memory_steps_down_and_goes_on(folder, tmp_path, blocks, on_disk):
    job = tiny_job()
    expected = sample(load_dit(folder / "dit.safetensors")[0], job).latent
    place, given = placer(folder, {"resident": blocks})
    recovery = RecoveryFolder(tmp_path).run("a" * 64, job.canvas) if on_disk else None
    result, placement, notes = sample_under_pressure(place, Placement("resident"), job, recovery)
    assert same(result.latent, expected)
    assert given == ["resident", "streamed from ram, 1 ahead"] and str(placement) == given[-1]
    done = blocks // 4  # four blocks a forward
    assert result.dit_calls == 3 - done and (result.resumed_after or 0) == done
    assert notes == [f"forward {done + 1} ran out of memory (resident): went on from it {given[-1]}"]


def test_the_last_rung_says_what_to_do(folder):
    place, _ = placer(folder, {"resident": 5, "streamed from ram, 1 ahead": 2})
    with pytest.raises(H3Error, match="forward 2 does not fit into the device's memory, even streamed from ram"):
        sample_under_pressure(place, Placement("resident"), tiny_job())


def test_ten_renders_in_a_row_leave_nothing(folder):
    import gc

    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    job, counts = tiny_job(), []
    for _ in range(10):
        dit, layers = place_dit(open_dit(folder / "dit.safetensors"), Placement("disk"), CPU)
        sample(dit, job, layers=layers)
        del dit, layers
        counts.append(alive())
    assert max(counts[2:]) == min(counts[2:])
