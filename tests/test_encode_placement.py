"""Encoding pictures takes the encoder only, with the same bits, and goes on elsewhere when memory runs out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h3_runtime.checkpoint.load import load_video_vae
from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.demo.maker import make_model
from h3_runtime.encodings import Encode, LatentCache, MediaOrigin, encode_each
from h3_runtime.errors import H3Error
from h3_runtime.geometry import Canvas
from h3_runtime.memory.measure import LiveBytes
from h3_runtime.memory.plan import plan
from h3_runtime.memory.probe import Card, Host
from h3_runtime.memory.rows import GuideSize, RenderSizes
from h3_runtime.memory.weights import named_video_vae, released
from h3_runtime.model import Models
from h3_runtime.models.precision import is_finite
from h3_runtime.references import Encoder, PixelEncoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(folder):
    return load_video_vae(folder / "video_vae.safetensors")[0]


def frames(count: int = 5) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (count, 64, 96, 3), np.uint8)


@pytest.mark.parametrize("recipe", ["reference", "comfy"])
def test_encoding_without_the_decoder_gives_the_same_bits(folder, whole, recipe):
    models = Models(find_parts(folder))
    found = PixelEncoder(models.encoders())(frames(), recipe)
    expected = (whole.encode_mean if recipe == "comfy" else whole.encode_condition)(torch.from_numpy(frames()))
    assert torch.equal(found, expected)


def test_the_decoders_layers_are_not_read_for_it(folder):
    models = Models(find_parts(folder), keep=True)
    vae = models.video_encoder()
    assert all(tensor.is_meta for tensor in vae.decoder.transformer_blocks.parameters())
    assert not any(tensor.is_meta for tensor in vae.encoder.parameters())
    assert models.video_encoder() is vae and models.infos["video_vae"].part == "video_vae"
    decoder = models.video_vae()  # asked for the whole, it is read whole, and serves both
    assert not any(tensor.is_meta for tensor in decoder.parameters())
    assert models.video_encoder() is decoder and len(models._loaded) == 1
    models.release("video_vae")
    assert not models._loaded


def out_of_memory(*arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class Full:
    """A VAE on a device whose memory is not enough."""

    encode_mean = encode_condition = staticmethod(out_of_memory)


@pytest.mark.parametrize("load", [out_of_memory, Full])
def test_memory_that_runs_out_hands_over_to_the_next_way(whole, load):
    said, loads = [], []

    def first():
        loads.append(1)
        return load()

    encode = PixelEncoder([Encoder("on cuda", first), Encoder("on the CPU", lambda: whole)], said.append)
    for _ in range(2):  # the second picture does not try what failed
        assert torch.equal(encode(frames()), whole.encode_condition(torch.from_numpy(frames())))
    assert said == ["96x64 pixels could not be encoded on cuda, its memory is not enough: encoded on the CPU"]
    assert len(loads) == 1
    with pytest.raises(H3Error, match=r"96x64 pixels could not be encoded on cuda \(CUDA out of memory"):
        PixelEncoder([Encoder("on cuda", load)])(frames())


def test_what_another_device_encoded_is_not_kept_for_the_first(whole):
    cache, origin = LatentCache(), MediaOrigin("vae", ())
    wanted = [Encode(frames(), "sampled", lambda encode: encode(frames()))]
    for ways, kept in (([Encoder("on cuda", out_of_memory)], 0), ([], 1)):
        ways.append(Encoder("on the CPU", lambda: whole))
        notes = []
        encode_each(wanted, lambda ways=ways, notes=notes: PixelEncoder(ways, notes.append), cache, origin, notes)
        assert (cache.look_up(origin.key(frames(), "sampled")) is not None) == kept and len(notes) == 1 - kept


def test_a_card_has_the_cpu_to_fall_back_on(folder):
    assert [way.name for way in Models(find_parts(folder), device="cuda").encoders()] == ["on cuda", "on the CPU"]
    assert [way.name for way in Models(find_parts(folder)).encoders()] == ["on cpu"]


def test_the_plan_counts_the_encoder_alone():
    sizes = RenderSizes(Canvas.fit(124, (1344, 768)), guides=(GuideSize(0, 22),), text_rows=100)
    stage = plan(sizes, released(), Card.given(12.0), Host.given(64.0)).stage("encode")
    vae = named_video_vae()
    assert dict(stage.parts)["video VAE outside the layers"] == vae.rest and stage.moved < vae.nbytes / 2
    assert not any("decoder" in what for what, _ in stage.parts) and "are not read" in stage.how


def test_finite_is_told_without_a_copy():
    values = torch.ones(1000, 1000)
    assert is_finite(values) and is_finite(values[:0]) and is_finite(values.bfloat16())
    for broken in (float("nan"), float("inf"), float("-inf")):
        values[500, 7] = broken
        assert not is_finite(values) and not is_finite(values.half())
    with LiveBytes() as live:
        live.hold([values], counted=False)
        is_finite(values)
    assert live.peak["cpu"] < 100
