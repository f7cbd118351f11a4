"""The audio VAE against the golden vectors and against diffusers, with its laws and its refusals."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from h3_runtime.errors import CheckpointError, H3Error, NonFiniteError
from h3_runtime.models.audio_vae import AliasFree, AudioVAE, AudioVAEConfig, resampling_filter

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-5  # relative L2 to diffusers, float32
WEIGHTS = "audio_vae/weights:comfy"

# Small models of the same architecture; a seed each. The first has the released hop of 800 and seven-stage decoder.
SMALL = [
    AudioVAEConfig(encoder_dim=2, latent_dim=64, heads=2, decoder_dim=128),
    AudioVAEConfig(4, (2, 4), 32, 8, 2, 16, (4, 2), (8, 4), (3, 7), ((1, 3, 5), (1, 2))),
    AudioVAEConfig(6, (5, 3), 64, 16, 8, 24, (3, 5), (5, 9), (11,), ((1, 3, 5),)),
    AudioVAEConfig(8, (2, 2, 3), 48, 24, 1, 32, (2, 2, 3), (4, 6, 7), (3, 7, 11), ((1, 3, 5),) * 3),
    AudioVAEConfig(3, (4, 5), 96, 32, 4, 20, (5, 4), (9, 8), (5, 3), ((2,), (1, 4))),
]


def golden_cases(group: str) -> list[dict]:
    index = json.loads((GOLDEN / "index.json").read_text(encoding="utf-8"))
    return [case for case in index["cases"] if case["group"] == group]


def golden_weights(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor.float() for key, tensor in load_file(GOLDEN / name).items()}


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def folded(state: dict[str, torch.Tensor], mean, std) -> dict[str, torch.Tensor]:
    """diffusers' tensors under ComfyUI's names: weight norm folded, statistics taken in.

    weight = v * g / |v|, the norm over all dimensions but the first, for transposed convolutions too.
    """
    ours = {"latents_mean": torch.as_tensor(mean).float(), "latents_std": torch.as_tensor(std).float()}
    for name, tensor in state.items():
        if name.endswith(".weight_v"):
            stem = name.removesuffix("_v")
            length = tensor.float().pow(2).sum(dim=(1, 2), keepdim=True).sqrt()
            ours[stem] = tensor.float() * (state[stem + "_g"].float() / length)
        elif not name.endswith(".weight_g"):
            ours[name] = tensor.float()
    return ours


def loaded(config: AudioVAEConfig, tensors: dict[str, torch.Tensor]) -> AudioVAE:
    with torch.device("meta"):
        model = AudioVAE(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval()


@pytest.fixture(scope="module")
def golden_model() -> AudioVAE:
    case = next(case for case in golden_cases("audio_vae") if case["id"] == WEIGHTS)
    tensors = golden_weights(case["file"])
    config = AudioVAEConfig.from_shapes(shapes_of(tensors), {"heads": case["config"]["comfy"]["heads"]})
    assert config == AudioVAEConfig.from_dict(case["config"]["comfy"])
    return loaded(config, tensors)


def relative_l2(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def reference_of(config: AudioVAEConfig, seed: int):
    """A diffusers model with every parameter random and weight_g unlike |weight_v|."""
    diffusers = pytest.importorskip("diffusers")
    names = config.to_dict()
    names["num_attention_heads"] = names.pop("heads")
    names["decoder_kernel_sizes"] = names.pop("decoder_kernels")
    names["resblock_kernel_sizes"] = names.pop("res_kernels")
    names["resblock_dilation_sizes"] = names.pop("res_dilations")
    model = diffusers.AutoencoderKLMiniMaxH3Audio(**names).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("weight_g"):
            gain = parameter.data * (1 + 0.3 * torch.rand(parameter.shape, generator=generator))
            # A small last layer keeps the sound inside +-1, where the clamp would hide differences.
            parameter.data = gain * 0.05 if "conv_post" in name else gain
        elif name.endswith(("alpha", "beta")):
            parameter.data = parameter.data + 0.3 * noise
        elif name.endswith("bias"):
            parameter.data = 0.1 * noise
    statistics = [torch.randn(config.latent_channels, generator=generator) for _ in range(2)]
    return model, statistics[0], statistics[1].abs() + 0.5


# --- golden vectors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["audio_encode", "audio_decode"])
def test_golden_cases(golden_model, group):
    cases = golden_cases(group)
    assert len(cases) == 2
    for case in cases:
        with safe_open(GOLDEN / case["file"], "pt") as file:
            given = file.get_tensor(case["prefix"] + case["inputs"][0])
            wanted = file.get_tensor(case["prefix"] + case["outputs"][0])
        result = golden_model.encode(given) if group == "audio_encode" else golden_model.decode(given)
        torch.testing.assert_close(result, wanted, **case["tolerance"][case["outputs"][0]], msg=case["id"])


def test_folding_turns_the_diffusers_file_into_the_comfyui_file():
    case = golden_cases("audio_vae")[1]
    stored = load_file(GOLDEN / case["file"])
    spread = [
        (tensor.flatten() / stored[name[:-1] + "v"].float().flatten(1).norm(dim=1) - 1).abs().max().item()
        for name, tensor in stored.items()
        if name.endswith("weight_g")
    ]
    assert max(spread) > 0.1  # otherwise a fold that forgets weight_g would pass
    statistics = case["config"]["diffusers_config"]
    ours = folded(stored, statistics["latents_mean"], statistics["latents_std"])
    wanted = golden_weights("g_audio_vae_comfy.safetensors")
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=0, msg=name)


def test_fresh_filter_is_the_one_in_weight_files(golden_model):
    for name, stored in golden_model.state_dict().items():
        if name.endswith("filter"):
            torch.testing.assert_close(resampling_filter(), stored, rtol=0, atol=1e-7)


# --- against diffusers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_against_diffusers(seed):
    config = SMALL[seed]
    reference, mean, std = reference_of(config, seed)
    ours = loaded(config, folded(reference.state_dict(), mean, std))
    generator = torch.Generator().manual_seed(100 + seed)
    for samples in (7 * config.hop, 6 * config.hop + 3, 1):
        waveform = torch.rand(1, 2, samples, generator=generator) * 2 - 1
        with torch.no_grad():
            posterior = reference.encode(waveform.transpose(0, 1)).latent_dist.mode()  # [2, C, T]
        wanted = ((posterior - mean[:, None]) / std[:, None]).transpose(0, 1).unsqueeze(0)
        result = ours.encode(waveform)
        assert result.shape == (1, config.latent_channels, 2, -(-samples // config.hop)) and result.is_contiguous()
        assert relative_l2(result, wanted) <= TOLERANCE, samples
    for length in (9, 1):
        latent = torch.randn(1, config.latent_channels, 2, length, generator=generator)
        with torch.no_grad():
            rows = latent[0].transpose(0, 1) * std[:, None] + mean[:, None]  # [2, C, T]
            wanted = reference.decode(rows).sample.transpose(0, 1)
        result = ours.decode(latent)
        assert result.shape == (1, 2, config.hop * length)
        assert wanted.std() > 1e-3 and (wanted.abs() == 1).float().mean() < 0.1
        assert relative_l2(result, wanted) <= TOLERANCE, length


@pytest.mark.parametrize("length", [1, 2, 3, 40])
def test_phase_sums_equal_the_resampled_activation(length):
    torch.manual_seed(length)
    part = AliasFree(3)
    part.act.alpha.data.normal_()
    part.act.beta.data.normal_()
    part.upsample.filter.normal_()  # lopsided taps tell left from right
    part.downsample.lowpass.filter.normal_()
    x = torch.randn(1, 3, length)
    with torch.no_grad():
        doubled = F.conv_transpose1d(
            F.pad(x, (5, 5), mode="replicate"), part.upsample.filter.repeat(3, 1, 1), stride=2, groups=3
        )
        doubled = 2 * doubled[..., 15:-15]
        frequency, size = part.act.alpha.exp()[:, None], part.act.beta.exp()[:, None] + 1e-9
        doubled = doubled + torch.sin(frequency * doubled) ** 2 / size
        taps = part.downsample.lowpass.filter.repeat(3, 1, 1)
        wanted = F.conv1d(F.pad(doubled, (5, 6), mode="replicate"), taps, stride=2, groups=3)
        torch.testing.assert_close(part(x), wanted, rtol=1e-5, atol=1e-4)


# --- laws -------------------------------------------------------------------------------------------------------------


def test_same_input_same_result_and_inputs_stay_as_they_are(golden_model):
    torch.manual_seed(0)
    waveform, latent = torch.rand(1, 2, 1600) - 0.5, torch.randn(1, 32, 2, 2)
    kept = waveform.clone(), latent.clone()
    before = {name: tensor.clone() for name, tensor in golden_model.state_dict().items()}
    assert torch.equal(golden_model.encode(waveform), golden_model.encode(waveform))
    assert torch.equal(golden_model.decode(latent), golden_model.decode(latent))
    assert torch.equal(waveform, kept[0]) and torch.equal(latent, kept[1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in golden_model.state_dict().items())


def test_ears_do_not_hear_each_other(golden_model):
    torch.manual_seed(1)
    waveform, latent = torch.rand(1, 2, 1000) - 0.5, torch.randn(1, 32, 2, 2)
    encoded, decoded = golden_model.encode(waveform), golden_model.decode(latent)
    assert not torch.equal(encoded[:, :, 0], encoded[:, :, 1])
    assert torch.equal(golden_model.encode(waveform.flip(1)), encoded.flip(2))
    assert torch.equal(golden_model.decode(latent.flip(2)), decoded.flip(1))


def test_a_short_sound_is_filled_up_with_silence_on_the_right(golden_model):
    torch.manual_seed(2)
    waveform = torch.rand(1, 2, 1001) - 0.5
    assert torch.equal(golden_model.encode(waveform), golden_model.encode(F.pad(waveform, (0, 599))))


def test_sound_stays_within_plus_minus_one(golden_model):
    loud = golden_model.decode(torch.randn(1, 32, 2, 2) * 20)
    assert loud.abs().max() == 1


# --- the released size, without its weights ---------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside and still alive, views of weights left out."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.sizes = {}
        self.own = {tensor.untyped_storage()._cdata for tensor in model.state_dict(keep_vars=True).values()}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.own and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
                self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def test_released_size_and_its_peak_for_fifteen_seconds():
    with torch.device("meta"):
        model = AudioVAE(AudioVAEConfig())
        waveform, latent = torch.empty(1, 1, 603 * 800), torch.empty(1, 32, 603)
    tensors = model.state_dict()
    assert len(tensors) == 917 and sum(tensor.numel() for tensor in tensors.values()) * 4 == 605_149_280
    assert AudioVAEConfig.from_shapes(shapes_of(tensors)) == AudioVAEConfig()
    with torch.no_grad(), LiveBytes(model) as encode:
        assert model._encode_mono(waveform).shape == (1, 32, 603)
    with torch.no_grad(), LiveBytes(model) as decode:
        assert model._decode_mono(latent).shape == (1, 1, 603 * 800)
    # The docstring's arithmetic: three tensors of 64 x L; eight of 256 x 25 x A and the trunk. Small change on top.
    assert 0 <= encode.peak - 3 * 64 * 482_400 * 4 <= 4e6, encode.peak
    assert 0 <= decode.peak - (8 * 256 * 25 + 2048) * 603 * 4 <= 4e6, decode.peak


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [AudioVAEConfig(), *SMALL])
def test_config_survives_json_and_is_found_from_shapes(config):
    assert AudioVAEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with torch.device("meta"):
        shapes = shapes_of(AudioVAE(config).state_dict())
    untold = {"heads": config.heads, "res_dilations": config.res_dilations, "decoder_rates": config.decoder_rates}
    assert AudioVAEConfig.from_shapes(shapes, untold) == config
    assert AudioVAEConfig.from_shapes(shapes, json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoder_rates": (2, 4, 4, 5, 1)}, "at least 2"),
        ({"encoder_rates": (2, 4, 4, 5)}, "multiply to 800"),
        ({"decoder_kernels": (9, 9, 4, 4, 4, 4)}, "differ in length"),
        ({"decoder_kernels": (9, 9, 4, 4, 4, 4, 5)}, "exactly 2 samples"),
        ({"res_kernels": (3, 7)}, "one tuple each"),
        ({"res_kernels": (3, 7, 10)}, "odd"),
        ({"res_dilations": ((1, 3, 5), (), (1,))}, "at least 1"),
        ({"res_dilations": (1, 3, 5)}, "as in"),
        ({"encoder_rates": 800}, "as in"),
        ({"heads": (8,)}, "at least 1"),
        ({"heads": 8.0}, "at least 1"),
        ({"heads": 7}, "must divide"),
        ({"heads": 0}, "at least 1"),
        ({"decoder_dim": 1000}, "halve evenly"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, words):
    with pytest.raises(H3Error, match=words):
        replace(AudioVAEConfig(), **change)


def test_files_that_are_no_audio_vae_are_refused():
    comfy = shapes_of(load_file(GOLDEN / "g_audio_vae_comfy.safetensors"))
    with pytest.raises(CheckpointError, match="the video VAE's weights"):
        AudioVAEConfig.from_shapes(shapes_of(load_file(GOLDEN / "f_vae_comfy.safetensors")))
    with pytest.raises(CheckpointError, match="weight norm is not folded"):
        AudioVAEConfig.from_shapes(shapes_of(load_file(GOLDEN / "g_audio_vae_diffusers.safetensors")))
    with pytest.raises(CheckpointError, match=r"mean_proj\.weight is missing"):
        AudioVAEConfig.from_shapes({name: shape for name, shape in comfy.items() if "mean_proj" not in name})
    with pytest.raises(CheckpointError, match=r"encoder\.block\.0\.weight has shape \[2\]"):
        AudioVAEConfig.from_shapes({**comfy, "encoder.block.0.weight": (2,)})
    with pytest.raises(CheckpointError, match="14 residual blocks"):
        AudioVAEConfig.from_shapes({name: shape for name, shape in comfy.items() if "resblocks.14." not in name})


def test_overrides_that_do_not_fit_are_refused():
    comfy = shapes_of(load_file(GOLDEN / "g_audio_vae_comfy.safetensors"))
    with pytest.raises(CheckpointError, match="latent_channels is given as 24, but the audio VAE's tensors say 32"):
        AudioVAEConfig.from_shapes(comfy, {"latent_channels": 24})
    with pytest.raises(H3Error, match="'num_attention_heads' is none of"):
        AudioVAEConfig.from_shapes(comfy, {"num_attention_heads": 2})
    with pytest.raises(CheckpointError, match=r"have \[3, 3, 3\] dilations each"):
        AudioVAEConfig.from_shapes(comfy, {"res_dilations": [[1, 3]] * 3})
    with pytest.raises(H3Error, match="res_dilations is 3: whole numbers"):
        AudioVAEConfig.from_shapes(comfy, {"res_dilations": 3})
    with pytest.raises(H3Error, match="multiply to 1000"):  # 9 -> 5 again where a 9 stood for 4
        AudioVAEConfig.from_shapes({**comfy, "decoder.ups.2.0.weight": (8, 4, 9)})


# --- refusals at the door ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waveform", "words"),
    [
        (torch.zeros(1, 1, 800), r"\[1, 1, 800\], that is mono"),
        (torch.zeros(2, 800), r"has shape \[2, 800\]"),
        (torch.zeros(1, 6, 800), r"has shape \[1, 6, 800\]"),
        (torch.zeros(2, 2, 800), "one stereo sound"),
        (torch.zeros(1, 2, 0), "at least one sample"),
        (torch.zeros(5, 32, 32, 3), r"has shape \[5, 32, 32, 3\]"),
        (torch.zeros(1, 2, 800, dtype=torch.int16), r"is torch\.int16"),
        (torch.zeros(1, 2, 800, dtype=torch.float64), r"is torch\.float64"),
        ({"waveform": torch.zeros(1, 2, 800)}, "is a dict"),
    ],
)
def test_wrong_waveforms_are_refused(golden_model, waveform, words):
    with pytest.raises(H3Error, match=words):
        golden_model.encode(waveform)


@pytest.mark.parametrize(
    ("latent", "words"),
    [
        (torch.zeros(1, 24, 7, 8, 8), r"\[1, 24, 7, 8, 8\], 24 channels: this is the video latent"),
        (torch.zeros(1, 24, 2, 8), "24 channels: this is the video latent"),
        (torch.zeros(1, 16, 2, 8), r"\[1, 16, 2, 8\]: the audio VAE decodes one audio latent \[1, 32, 2, T\]"),
        (torch.zeros(1, 32, 1, 8), "left and right"),
        (torch.zeros(1, 32, 2, 0), r"\[1, 32, 2, 0\]"),
        (torch.zeros(16, 32), r"\[16, 32\]"),
        (torch.zeros(32), r"\[32\]"),
        (torch.zeros(1, 32, 2, 8, dtype=torch.bfloat16), r"is torch\.bfloat16"),
        ([0.0], "is a list"),
    ],
)
def test_wrong_latents_are_refused(golden_model, latent, words):
    with pytest.raises(H3Error, match=words):
        golden_model.decode(latent)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_input_is_refused(golden_model, value):
    waveform, latent = torch.zeros(1, 2, 800), torch.zeros(1, 32, 2, 2)
    waveform[0, 1, 17] = value
    latent[0, 3, 1, 1] = value
    with pytest.raises(NonFiniteError, match="waveform holds NaN or infinity in 1 of 1600"):
        golden_model.encode(waveform)
    with pytest.raises(NonFiniteError, match="latent holds NaN or infinity in 1 of 128"):
        golden_model.decode(latent)


def test_non_finite_results_are_not_handed_out(golden_model):
    with pytest.raises(NonFiniteError, match="far out of range"):
        golden_model.decode(torch.full((1, 32, 2, 2), 3e38))
    tensors = dict(golden_model.state_dict())
    tensors["mean_proj.bias"] = torch.full_like(tensors["mean_proj.bias"], float("nan"))
    with pytest.raises(NonFiniteError, match="weights are damaged"):
        loaded(golden_model.config, tensors).encode(torch.zeros(1, 2, 800))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_that_are_not_float32_are_refused(dtype):
    model = AudioVAE(SMALL[1]).to(dtype)
    with pytest.raises(H3Error, match=rf"weights are {dtype} \(.*runs in torch\.float32 only"):
        model.encode(torch.zeros(1, 2, 8))
    with pytest.raises(H3Error, match="float32 only"):
        model.decode(torch.zeros(1, 8, 2, 1))
