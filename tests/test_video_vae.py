"""Video VAE: golden cases, diffusers as the oracle on small random models, and the laws of chunks, tiles and resume."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from h3_runtime.errors import CheckpointError, H3Error, NonFiniteError
from h3_runtime.models.video_tiles import Axis, Stitcher, TilePlan, decode_clips
from h3_runtime.models.video_vae import IMAGENET_MEAN, IMAGENET_STD, VideoVAE, VideoVAEConfig

GOLDEN = Path(__file__).parent / "golden"
INDEX = json.loads((GOLDEN / "index.json").read_text(encoding="utf-8"))["cases"]
# Twenty seconds of convolutions, left to the `verify` run over the whole folder; tiled clips are compared with
# diffusers below on a thinner encoder.
SLOW = {"vae_encode/enc_5f_tiled", "vae_encode/enc_22f_tiled"}
ENCODE = [case for case in INDEX if case["group"] == "vae_encode" and case["id"] not in SLOW]
DECODE = [case for case in INDEX if case["group"] == "vae_decode"]
TOLERANCE = 1e-5  # relative L2 in fp32, worst of SEEDS
SEEDS = range(5)


def case_id(case):
    return case["id"]


@pytest.fixture(scope="module")
def golden_tensors():
    return load_file(GOLDEN / "f_vae_cases.safetensors")


@pytest.fixture(scope="module")
def golden_weights():
    return {key: value.float() for key, value in load_file(GOLDEN / "f_vae_comfy.safetensors").items()}


@pytest.fixture(scope="module")
def golden_vae(golden_weights):
    shapes = {key: tuple(value.shape) for key, value in golden_weights.items()}
    config = VideoVAEConfig.from_shapes(shapes, overrides={"heads": 2})
    with torch.device("meta"):
        vae = VideoVAE(config)
    vae.load_state_dict(golden_weights, strict=True, assign=True)
    return vae.eval()


def golden_pixels(case, tensors):
    if "pixels" in case["inputs"]:
        return tensors[case["prefix"] + "pixels"]
    base = tensors[case["prefix"] + "pixels_base"].int()
    rows, columns = torch.arange(case["config"]["H"])[:, None], torch.arange(case["config"]["W"])[None]
    shift = (2 * rows + 3 * columns)[None, :, :, None]
    return ((base[:, rows % base.shape[1], columns % base.shape[2]] + shift) % 256).to(torch.uint8)


def check_golden(case, tensors, outputs):
    assert set(outputs) == set(case["outputs"])
    for name, got in outputs.items():
        want, bound = tensors[case["prefix"] + name], case["tolerance"][name]
        assert got.shape == want.shape, name
        excess = (got - want).abs() - bound["atol"] - bound["rtol"] * want.abs()
        assert float(excess.max()) <= 0, f"{name} misses its tolerance by {float(excess.max())}"


@pytest.mark.parametrize("case", ENCODE, ids=case_id)
def test_golden_encode(case, golden_vae, golden_tensors):
    pixels = golden_pixels(case, golden_tensors)
    outputs = {"out_latent": golden_vae.encode_mean(pixels)}
    if "out_diffusers_moments" in case["outputs"]:
        outputs["out_diffusers_moments"] = torch.cat(golden_vae.encode_moments(VideoVAE.normalise_pixels(pixels)), 1)
        outputs["out_diffusers_condition_latent"] = golden_vae.encode_condition(pixels)
    check_golden(case, golden_tensors, outputs)


@pytest.mark.parametrize("case", DECODE, ids=case_id)
def test_golden_decode(case, golden_vae, golden_tensors):
    pixels = golden_vae.decode(golden_tensors[case["prefix"] + "latent"])
    outputs = {"out_frame_sums": pixels.double().sum((-1, -2))}
    if "out_pixels" in case["outputs"]:
        outputs["out_pixels"] = pixels
    else:
        down, right = case["config"]["stride"]
        outputs["out_pixels_strided"] = pixels[..., ::down, ::right]
    check_golden(case, golden_tensors, outputs)


# diffusers as the oracle

# Few channels: on a CPU the convolutions are the whole cost. The golden cases have 32 and 64.
CONFIG = VideoVAEConfig(
    channels=(2, 2, 4, 4, 4, 8), resnets=1, norm_groups=2, layers=2, heads=2, head_dim=16, ffn=128, registers=4
)


def comfy_layout(state, heads, statistics):
    """diffusers names and rows -> ours (the ComfyUI file's)."""
    ours = dict(statistics)
    for key, value in state.items():
        if ".attn.to_k." in key or ".attn.to_v." in key:
            continue
        if ".attn.to_q." in key:
            parts = [state[key.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")]
            parts = [part.unflatten(0, (heads, -1)) for part in parts]  # [heads, head_dim, ...]
            key, value = key.replace("to_q", "to_qkv"), torch.stack(parts, 1).flatten(0, 2)
        elif ".ff.net.0.proj." in key:
            key, value = key.replace("net.0.proj", "w1"), torch.cat(value.chunk(2)[::-1])
        for theirs, name in (
            ("proj_in", "x_embedder"),
            ("to_out.0", "to_out"),
            ("ff.net.2", "ff.w2"),
            ("down_blocks", "down"),
            ("resnets", "block"),
            ("downsamplers.0", "downsample"),
            ("conv_shortcut", "nin_shortcut"),
        ):
            key = key.replace(theirs, name)
        ours[key] = value
    ours["decoder.mask_token"] = torch.zeros(1, *state["decoder.register_tokens"][0, :1].shape)
    return ours


def oracle_class():
    return pytest.importorskip("diffusers").AutoencoderKLMiniMaxH3


def diffusers_settings(config):
    return {
        "block_out_channels": config.channels,
        "layers_per_block": config.resnets,
        "norm_num_groups": config.norm_groups,
        "decoder_num_layers": config.layers,
        "decoder_num_attention_heads": config.heads,
        "decoder_attention_head_dim": config.head_dim,
        "decoder_num_register_tokens": config.registers,
    }


def random_pair(seed):
    """diffusers' module and ours with the same random weights; every parameter random, so that each one counts."""
    torch.manual_seed(seed)
    statistics = {"latents_mean": torch.randn(24), "latents_std": torch.rand(24) + 0.5}
    settings = {name: values.tolist() for name, values in statistics.items()}
    theirs = oracle_class()(**diffusers_settings(CONFIG), **settings).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            else:
                parameter.uniform_(0.3, 1.2)
    ours = VideoVAE(CONFIG)
    ours.load_state_dict(comfy_layout(theirs.state_dict(), CONFIG.heads, statistics), strict=True, assign=True)
    return theirs, ours.eval()


@pytest.fixture(scope="module")
def pairs():
    return [random_pair(seed) for seed in SEEDS]


def imagenet(values):
    return torch.tensor(values).view(1, -1, 1, 1, 1)


@torch.no_grad()
def oracle_encode(vae, pixels):
    """The pipeline's use of diffusers' module: (posterior, condition latent) of uint8 [F, H, W, 3]."""
    pixels = (pixels.permute(3, 0, 1, 2)[None].float() / 255 - imagenet(IMAGENET_MEAN)) / imagenet(IMAGENET_STD)
    posterior = vae.encode(pixels).latent_dist
    sample = posterior.sample(generator=torch.Generator().manual_seed(42)).half().float()
    return posterior, (sample - imagenet(vae.config.latents_mean)) / imagenet(vae.config.latents_std)


@torch.no_grad()
def oracle_decode(vae, latent):
    latent = latent * imagenet(vae.config.latents_std) + imagenet(vae.config.latents_mean)
    return (vae.decode(latent).sample * imagenet(IMAGENET_STD) + imagenet(IMAGENET_MEAN)).clamp(0, 1)


def relative(got, want):
    assert got.shape == want.shape
    return float((got.double() - want.double()).norm() / want.double().norm())


def random_pixels(seed, *shape):
    return torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_latent(seed, *shape):
    return torch.randn(1, 24, *shape, generator=torch.Generator().manual_seed(seed))


def test_diffusers_layout_converts_to_the_comfy_file_exactly(golden_weights):
    theirs = {key: value.float() for key, value in load_file(GOLDEN / "f_vae_diffusers.safetensors").items()}
    statistics = {key: golden_weights[key] for key in ("latents_mean", "latents_std")}
    ours = comfy_layout(theirs, 2, statistics)
    assert set(ours) == set(golden_weights)
    for key in set(ours) - {"decoder.mask_token"}:
        assert torch.equal(ours[key], golden_weights[key]), key


@pytest.mark.parametrize("frames", [1, 5, 9, 18, 22, 39])  # 9 and 18 fill the last clip with its last frame
def test_encode_one_tile_as_diffusers(frames, pairs):
    for seed in SEEDS:
        theirs, ours = pairs[seed]
        pixels = random_pixels(seed, frames, 32, 48)
        posterior, condition = oracle_encode(theirs, pixels)
        moments = torch.cat(ours.encode_moments(VideoVAE.normalise_pixels(pixels)), 1)
        assert relative(moments, posterior.parameters) <= TOLERANCE
        # One fp16 rounding that falls the other way is worth more than the whole tolerance.
        assert relative(ours.encode_condition(pixels), condition) <= 1e-4


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 160, 464), (5, 272, 32), (22, 32, 288), (39, 32, 272)])
def test_encode_many_tiles_as_diffusers(frames, height, width, pairs):
    for seed in SEEDS if frames < 22 else SEEDS[:2]:
        theirs, ours = pairs[seed]
        pixels = random_pixels(seed, frames, height, width)
        posterior, _ = oracle_encode(theirs, pixels)
        moments = torch.cat(ours.encode_moments(VideoVAE.normalise_pixels(pixels)), 1)
        assert relative(moments, posterior.parameters) <= TOLERANCE


@pytest.mark.parametrize(("frames", "height", "width"), [(7, 3, 4), (12, 4, 3), (17, 2, 2), (7, 18, 20), (12, 2, 33)])
def test_decode_as_diffusers(frames, height, width, pairs):
    for seed in SEEDS if height < 18 else SEEDS[:3]:
        theirs, ours = pairs[seed]
        latent = random_latent(seed, frames, height, width)
        want = oracle_decode(theirs, latent)
        assert 0.05 < float(want.std()) and want.shape[2] == (frames - 2) // 5 * 17 + 5
        assert relative(ours.decode(latent), want) <= TOLERANCE


def test_other_tile_sizes_follow_the_same_plan(pairs):
    theirs, ours = random_pair(7)
    theirs.enable_tiling(128, 128)
    latent, pixels = random_latent(1, 7, 18, 11), random_pixels(1, 1, 288, 176)
    assert relative(ours.decode(latent, tile=128), oracle_decode(theirs, latent)) <= TOLERANCE
    moments = torch.cat(ours.encode_moments(VideoVAE.normalise_pixels(pixels), tile=128), 1)
    assert relative(moments, oracle_encode(theirs, pixels)[0].parameters) <= TOLERANCE
    assert relative(ours.decode(latent), oracle_decode(theirs, latent)) > 1e-3


def test_tile_plan_as_diffusers():
    theirs = oracle_class()(**diffusers_settings(CONFIG))
    for tile in (256, 128, 512):
        for length in range(16, 3000, 16):
            starts, lengths, overlaps = theirs._split_tiles(length, tile, 64)
            axis = Axis.split(length // 16, tile // 16, 4).scaled(16)
            assert (axis.starts, axis.overlaps) == (tuple(starts), tuple(overlaps))
            assert {axis.size} == set(lengths) and axis.length == length
            assert Axis.split(length, tile, 64).length == length


@pytest.fixture(scope="module")
def thin_pair():
    """A decoder just wide enough for a full canvas: the plan is what is tested."""
    torch.manual_seed(0)
    config = VideoVAEConfig(
        channels=(4,) * 6, resnets=1, norm_groups=4, layers=1, heads=1, head_dim=8, ffn=32, registers=4
    )
    theirs = oracle_class()(**diffusers_settings(config)).eval()
    torch.nn.init.ones_(theirs.decoder.transformer_blocks[0].scale1)
    torch.nn.init.normal_(theirs.decoder.proj_out.weight)
    ours = VideoVAE(config)
    statistics = {"latents_mean": torch.zeros(24), "latents_std": torch.ones(24)}
    ours.load_state_dict(comfy_layout(theirs.state_dict(), 1, statistics), strict=True)
    return theirs, ours.eval()


def test_bottom_of_the_last_frames_at_full_canvas_and_124_frames_equals_the_reference(thin_pair):
    # The last chunk depends on the last 12 latents only, and below its seam the last row of tiles on nothing else,
    # so the reference is given no more than those.
    theirs, ours = thin_pair
    latent = random_latent(0, 37, 48, 84)
    (tail,) = ours.decode_chunks(latent, start=6)
    want = oracle_decode(theirs, latent[:, :, -12:, -16:])[:, :, -22:]
    below = TilePlan.latents(48, 84).scaled(16).rows.overlaps[-1]
    got, want = tail[..., -256:, :][..., below:, :], want[..., below:, :]
    assert tail.shape == (1, 3, 22, 768, 1344)
    assert relative(got, want) <= TOLERANCE
    assert float((got - want)[:, :, -4:].abs().max()) <= 1e-5


@pytest.mark.parametrize("latent_t", [7, 12, 22, 37])
def test_tail_at_several_lengths_equals_the_reference(latent_t, thin_pair):
    theirs, ours = thin_pair
    latent = random_latent(latent_t, latent_t, 5, 4)
    got, want = ours.decode(latent), oracle_decode(theirs, latent)
    assert relative(got[:, :, -5:], want[:, :, -5:]) <= TOLERANCE
    assert relative(got, want) <= TOLERANCE


# Laws of our own


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(11)
    model = VideoVAE(CONFIG).eval()
    torch.nn.init.normal_(model.decoder.proj_out.weight, std=0.5)
    return model


@pytest.mark.parametrize("latent_t", [1, 2, 7, 22])
def test_chunks_are_the_whole_decode_bit_for_bit_and_any_start_resumes_it(latent_t, vae):
    latent = random_latent(3, latent_t, 3, 18)
    whole = vae.decode(latent)
    chunks = [chunk.clone() for chunk in vae.decode_chunks(latent)]
    assert len(chunks) == VideoVAE.decode_chunk_count(latent_t) == max(1, (latent_t - 2) // 5)
    assert torch.equal(torch.cat(chunks, 2), whole)
    assert whole.min() >= 0 and whole.max() <= 1 and whole.dtype == torch.float32
    for start in range(len(chunks) + 1):
        resumed = list(vae.decode_chunks(latent, start=start))
        assert len(resumed) == len(chunks) - start
        assert all(torch.equal(got, want) for got, want in zip(resumed, chunks[start:]))


def test_a_changed_chunk_does_not_leak_into_the_next(vae):
    latent = random_latent(4, 12, 3, 2)
    want = list(vae.decode_chunks(latent))
    chunks = vae.decode_chunks(latent)
    next(chunks).fill_(math.nan)
    assert torch.equal(next(chunks), want[1])


def test_decoding_is_lazy_and_visits_each_tile_once(vae, monkeypatch):
    visited = []
    embed = vae.decoder.embed
    monkeypatch.setattr(vae.decoder, "embed", lambda tile: visited.append(tile.shape) or embed(tile))
    chunks = vae.decode_chunks(random_latent(5, 12, 2, 20))
    assert not visited
    next(chunks)
    assert visited == [(1, 24, 7, 2, 16)] * 2
    next(chunks)
    assert len(visited) == 4


def test_layer_major_equals_tile_major_bit_for_bit(vae):
    latent = random_latent(6, 12, 2, 33)
    reads = []

    def streamed():
        for index, block in enumerate(vae.decoder.transformer_blocks):
            reads.append(index)
            yield block

    assert torch.equal(vae.decode(latent, layers=streamed), vae.decode(latent))
    assert reads == [0, 1, 0, 1]  # each layer once per clip, however many tiles


def test_stitching_gives_back_a_cut_canvas():
    plan = TilePlan.latents(29, 33)
    canvas = torch.rand(1, 2, 3, 29, 33)
    stitcher = Stitcher(plan)
    for rows, columns in plan.windows():
        stitcher.add(canvas[..., rows, columns].clone())
    torch.testing.assert_close(stitcher.finish(), canvas)


def test_encode_reports_every_tile(vae):
    seen = []
    vae.encode_mean(random_pixels(0, 22, 32, 272), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 4) for done in range(1, 5)]


def test_condition_is_sampled_rounded_to_fp16_and_repeatable(vae):
    pixels = random_pixels(1, 1, 32, 48)
    condition = vae.encode_condition(pixels)
    assert torch.equal(condition, vae.encode_condition(pixels))
    assert not torch.allclose(condition, vae.encode_mean(pixels), atol=1e-2)
    back = condition.double() * vae.latents_std.double().view(1, -1, 1, 1, 1)
    back += vae.latents_mean.double().view(1, -1, 1, 1, 1)
    torch.testing.assert_close(back, back.half().double(), atol=1e-6, rtol=1e-6)


def test_a_half_precision_module_works_and_differs(vae):
    half = VideoVAE(CONFIG)
    half.load_state_dict(vae.state_dict())
    half = half.to(torch.bfloat16)
    latent, pixels = random_latent(8, 7, 3, 3), random_pixels(2, 5, 32, 48)
    assert 0 < relative(half.decode(latent), vae.decode(latent)) < 0.05
    assert 0 < relative(half.encode_mean(pixels), vae.encode_mean(pixels)) < 0.1
    assert half.decode(latent).dtype == half.encode_mean(pixels).dtype == torch.float32


def test_config_round_trips_through_json_and_released_defaults_match_the_facts():
    assert VideoVAEConfig.from_dict(json.loads(json.dumps(CONFIG.to_dict()))) == CONFIG
    released = VideoVAEConfig()
    with torch.device("meta"):
        model = VideoVAE(released)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert VideoVAEConfig.from_shapes(shapes) == released
    # The published fp16 file: 562 tensors, 5,207,808,496 bytes, a header of some tens of kilobytes among them.
    statistics = [shapes[key][0] for key in ("latents_mean", "latents_std")]
    payload = 2 * sum(math.prod(shape) for shape in shapes.values()) + 2 * sum(statistics)
    assert len(shapes) == 562
    assert 30_000 < 5_207_808_496 - payload < 100_000


# Bad input


@pytest.mark.parametrize("latent_t", [0, 3, 6, 8, 11])
def test_latent_counts_that_no_clip_has_are_refused(latent_t, vae):
    with pytest.raises(H3Error, match=r"5k \+ 2|give one clip"):
        vae.decode_chunks(torch.zeros(1, 24, latent_t, 2, 2))


def test_the_nearest_latent_counts_are_named():
    for latent_t, nearest in ((3, "2 and 7"), (6, "2 and 7"), (8, "7 and 12"), (11, "7 and 12"), (13, "12 and 17")):
        with pytest.raises(H3Error, match=f"has {latent_t} frames.*nearest are {nearest}"):
            decode_clips(latent_t)


@pytest.mark.parametrize("shape", [(1, 32, 2, 40), (2, 32, 40), (1, 32, 7, 4, 4)])
def test_an_audio_latent_is_named(shape, vae):
    with pytest.raises(H3Error, match=r"this has 32 channels.*audio latent.*give the video latent"):
        vae.decode(torch.zeros(shape))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_latents_are_never_decoded(value, vae):
    latent = torch.zeros(1, 24, 7, 2, 2)
    latent[0, 3, 1, 0, 1] = value
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        vae.decode_chunks(latent)


def test_a_damaged_weight_stops_both_directions():
    model = VideoVAE(CONFIG)
    with torch.no_grad():
        model.decoder.transformer_blocks[1].ff.w2.weight[0, 0] = math.nan
        model.encoder.conv_in.bias[0] = math.inf
    with pytest.raises(NonFiniteError, match="decoded to NaN"):
        next(model.decode_chunks(torch.zeros(1, 24, 7, 2, 2)))
    with pytest.raises(NonFiniteError, match="encoded to NaN"):
        model.encode_mean(random_pixels(0, 1, 32, 32))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda vae: vae.decode(torch.zeros(2, 24, 7, 2, 2)), "give one clip"),
        (lambda vae: vae.decode(torch.zeros(1, 24, 7, 2, 2, dtype=torch.int32)), "give floats"),
        (lambda vae: vae.decode_chunks(torch.zeros(1, 24, 7, 2, 2), start=2), "start chunk 2 is outside 0..1"),
        (lambda vae: vae.decode_chunks(torch.zeros(1, 24, 7, 2, 2), tile=100), "tile 100"),
        (lambda vae: vae.decode_chunks(torch.zeros(1, 24, 7, 2, 2), tile=64), "at least 128"),
        (lambda vae: vae.encode_mean(torch.zeros(1, 3, 1, 32, 32)), "give uint8 RGB"),
        (lambda vae: vae.encode_mean(torch.zeros(1, 40, 32, 3, dtype=torch.uint8)), "height 40"),
        (lambda vae: vae.encode_mean(torch.zeros(1, 32, 16, 3, dtype=torch.uint8)), "width 16"),
        (lambda vae: vae.encode_mean(torch.zeros(0, 32, 32, 3, dtype=torch.uint8)), "no frames"),
        (lambda vae: vae.encode_moments(torch.zeros(1, 3, 1, 32, 32, dtype=torch.uint8)), "ImageNet-normalised"),
        (lambda vae: vae.encode_moments(torch.zeros(3, 1, 32, 32)), "give one clip"),
    ],
)
def test_bad_input_is_named_before_any_work(call, words, vae, monkeypatch):
    monkeypatch.setattr(VideoVAE, "_encode", None)
    monkeypatch.setattr(VideoVAE, "_decode_chunks", None)
    with pytest.raises(H3Error, match=words):
        call(vae)


def test_shapes_that_are_no_video_vae_are_refused(golden_weights):
    shapes = {key: tuple(value.shape) for key, value in golden_weights.items()}
    with pytest.raises(CheckpointError, match="give the number of heads"):
        VideoVAEConfig.from_shapes(shapes)
    with pytest.raises(CheckpointError, match="no setting of a video VAE"):
        VideoVAEConfig.from_shapes(shapes, {"head": 2})
    for key in ("decoder.norm_out.weight", "encoder.down.0.block.0.conv1.weight", "decoder.proj_out.weight"):
        rest = {name: shape for name, shape in shapes.items() if name != key}
        with pytest.raises(CheckpointError, match=key):
            VideoVAEConfig.from_shapes(rest, {"heads": 2})
    with pytest.raises(CheckpointError, match="proj_out has 3000 rows"):
        VideoVAEConfig.from_shapes({**shapes, "decoder.proj_out.weight": (3000, 32)}, {"heads": 2})
