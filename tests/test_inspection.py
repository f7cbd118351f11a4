"""``inspect`` and ``quantize``: what is told of a file, what is written, and that ComfyUI's own loader takes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3_runtime.checkpoint.convert import quantise_checkpoint
from h3_runtime.checkpoint.load import load_dit, load_video_vae
from h3_runtime.checkpoint.pieces import Online
from h3_runtime.checkpoint.reader import SafetensorsFile
from h3_runtime.checkpoint.text_layers import TextLayers
from h3_runtime.checkpoint.writer import write_safetensors
from h3_runtime.cli import main
from h3_runtime.demo.maker import make_model, make_reference_dit
from h3_runtime.errors import CheckpointError, H3Error
from h3_runtime.inspection import inspect_file, quantize_file

from .checkpoint_fixtures import diffusers_repository, golden, official_repository
from .quantised_fixtures import BLOCK_LINEARS, pruned, quantised, velocity, write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def saved(tmp_path, given, name="dit.safetensors", metadata=None):
    save_file(given, tmp_path / name, metadata)
    return tmp_path / name


def rows_of(path, **options) -> dict:
    """name -> value, repeated names -> list of values."""
    found = {}
    for row in inspect_file(path, **options)[0]:
        found.setdefault(row["name"], []).append(row["value"])
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def same_state(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return set(a) == set(b) and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# ---- inspect


def test_a_quantised_dit_is_told_layer_by_layer(tmp_path):
    given = quantised("nvfp4", quantised("int8_convrot", None, BLOCK_LINEARS[:4]), BLOCK_LINEARS[4:6])
    told = rows_of(saved(tmp_path, given, "h3_ref2va_mixed.safetensors"))
    assert (told["part"], told["layout"], told["partition"]) == ("DiT", "ComfyUI", "ref2va")
    assert told["format"] == ["int8_convrot g256", "nvfp4"] and told["label"] == "APPROXIMATE"
    assert told["layers"] == {
        **dict.fromkeys(BLOCK_LINEARS[:4], "int8_convrot g256"),
        **dict.fromkeys(BLOCK_LINEARS[4:6], "nvfp4"),
        **dict.fromkeys(BLOCK_LINEARS[6:], "BF16"),
    }
    assert told["sizes"]["hidden"] == 256 and told["fingerprint"].partition("-")[0].isdigit()
    assert any("torch._int_mm" in kernel for kernel in told["kernel"]) and "dit/nvfp4" in told["path"]
    _, lines = inspect_file(tmp_path / "h3_ref2va_mixed.safetensors")
    assert "layers: blocks.*.attn.qkv_proj: int8_convrot g256 x 1" in lines
    assert "layers: blocks.*.mlp.fc1: BF16 x 1" in lines


def test_every_part_and_layout_is_told(model, tmp_path):
    assert rows_of(model / "text_encoder.safetensors")["part"] == "text encoder"
    assert rows_of(model / "audio_vae.safetensors")["label"] == "LOSSLESS"
    assert rows_of(model / "video_vae.safetensors")["part"] == "video VAE"
    official, diffusers = official_repository(tmp_path / "official"), diffusers_repository(tmp_path / "diffusers")
    told = rows_of(official / "Ref2VA" / "transformer")
    assert (told["layout"], told["partition"], told["label"]) == ("official", "ref2va", "LOSSLESS")
    told = rows_of(diffusers / "transformer")
    assert (told["layout"], told["partition"]) == ("diffusers", "fl2va")
    assert rows_of(official / "FL2VA" / "video_vae" / "source")["layout"] == "official"
    told = rows_of(write_gguf(tmp_path / "h3.gguf", pruned(), {f"{name}.weight": "Q4_K" for name in BLOCK_LINEARS}))
    assert told["format"] == "Q4_K" and told["path"] == ["dit/gguf", "dit/pruned-curve", "kernel/gguf-dequantised"]
    assert any("partition" in need for need in told["needs"])


def test_a_model_folder_is_told_part_by_part(model, tmp_path, capsys):
    make_reference_dit(model)
    results, lines = inspect_file(model)
    parts = {row["of"]: row["value"] for row in results if row["name"] == "part"}
    assert parts == {
        "dit.safetensors": "DiT",
        "dit_ref2va.safetensors": "DiT",
        "text_encoder.safetensors": "text encoder",
        "video_vae.safetensors": "video VAE",
        "audio_vae.safetensors": "audio VAE",
    }
    told = {row["of"]: row["value"] for row in results if row["name"] == "partition"}
    assert told == {"dit.safetensors": "fl2va", "dit_ref2va.safetensors": "ref2va"}
    alone = inspect_file(model / "video_vae.safetensors")[0]
    assert [{**row, "of": "video_vae.safetensors"} for row in alone] == [
        row for row in results if row.get("of") == "video_vae.safetensors"
    ]
    assert [line for line in lines if line.startswith("--- ")] == [f"--- {name}" for name in parts]
    official = official_repository(tmp_path / "official")
    results, _ = inspect_file(official)
    assert {row.get("of") for row in results} >= {os.path.join(name, "transformer") for name in ("FL2VA", "Ref2VA")}
    assert main(["inspect", str(model)]) == 0 and "--- dit.safetensors" in capsys.readouterr().out


def test_a_model_folder_tells_what_in_it_is_not_usable(model, tmp_path, capsys):
    for name in ("dit", "video_vae", "audio_vae"):
        os.link(model / f"{name}.safetensors", tmp_path / f"{name}.safetensors")
    tensors = load_file(model / "dit.safetensors")
    tensors.pop("blocks.0.norm1.weight")
    save_file(tensors, tmp_path / "torn_dit.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"no header")
    assert main(["inspect", str(tmp_path), "--json"]) == 1
    results = json.loads(capsys.readouterr().out)["results"]
    unusable = [row for row in results if row["name"] == "not usable"]
    assert [row["of"] for row in unusable] == ["torn_dit.safetensors"] and "norm1" in unusable[0]["value"]
    assert any(row["name"] == "skipped" and "torn.safetensors" in row["value"] for row in results)
    assert {row["of"] for row in results if row["name"] == "fingerprint"} == {
        "dit.safetensors",
        "video_vae.safetensors",
        "audio_vae.safetensors",
    }
    lone = tmp_path / "lone"  # one part beside what is not usable
    lone.mkdir()
    os.link(model / "dit.safetensors", lone / "dit.safetensors")
    (lone / "torn.safetensors").write_bytes(b"no header")
    results, _ = inspect_file(lone)
    assert {row["of"] for row in results if row["name"] == "fingerprint"} == {"dit.safetensors"}
    assert any(row["name"] == "skipped" and "torn.safetensors" in row["value"] for row in results)


def test_a_lora_is_told(tmp_path):
    shapes = {"lora_A": (4, 256), "lora_B": (768, 4)}
    names = [(f"diffusion_model.blocks.{i}.attn.qkv_proj.{k}.weight", n) for i in range(2) for k, n in shapes.items()]
    given = {name: torch.ones(shape) for name, shape in names}
    told = rows_of(saved(tmp_path, given, "lora.safetensors"))
    assert (told["part"], told["pairs"], told["ranks"]) == ("LoRA", 2, {4: 2})


def test_what_cannot_be_used_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect_file(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="is no MiniMax-H3 part"):
        inspect_file(saved(tmp_path, {"a": torch.ones(1)}))
    torch.save({}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="is a pickle"):
        inspect_file(tmp_path / "a.ckpt")


def test_inspect_on_the_command_line(tmp_path, capsys):
    path = saved(tmp_path, quantised("fp8"))
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "format: fp8_e4m3 scaled (8 layers)" in out and "label: APPROXIMATE" in out
    assert main(["inspect", str(path), "--json", "--sha256"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["command"] == "inspect" and {"part", "layers", "sha256"} <= {row["name"] for row in told["results"]}
    assert main(["inspect", str(tmp_path / "none")]) == 2


# ---- quantize


@pytest.mark.parametrize("method", ["int8_convrot", "int8", "fp8"])
def test_the_written_dit_is_the_one_quantised_while_loading(method, model, tmp_path):
    source, out = model / "dit.safetensors", tmp_path / "out.safetensors"
    made = quantise_checkpoint(source, out, Online(method))
    assert made.bytes_after == out.stat().st_size and len(made.linears) == 16 and made.partition == "fl2va"
    written, info = load_dit(out)
    online, _ = load_dit(source, quantise=method)
    assert same_state(written, online)
    assert info.partition == "fl2va" and sum(info.formats.values()) == 16
    metadata = SafetensorsFile(out).metadata
    assert metadata["h3_runtime.config"] == SafetensorsFile(source).metadata["h3_runtime.config"]
    assert metadata["h3_runtime.quantised"] == method
    plain, stored = load_file(source), load_file(out)
    for name, tensor in plain.items():
        if name.removesuffix(".weight") not in made.linears:
            assert torch.equal(stored[name], tensor) and stored[name].dtype == tensor.dtype


def test_every_layout_becomes_the_same_file(tmp_path):
    official, diffusers = official_repository(tmp_path / "official"), diffusers_repository(tmp_path / "diffusers")
    comfy = saved(tmp_path, golden("b_dit_comfy"), "fl2va.safetensors")
    files = []
    for index, source in enumerate((comfy, official / "FL2VA" / "transformer", diffusers / "transformer")):
        files.append(tmp_path / f"out{index}.safetensors")
        made = quantise_checkpoint(source, files[-1], Online("int8_convrot", adaln=True))
        assert made.partition == "fl2va"
    first = load_file(files[0])
    for file in files[1:]:
        other = load_file(file)
        assert set(other) == set(first)
        for name in first:
            if name == "rope.inv_freq":  # the diffusers folder has none: computed
                assert torch.allclose(other[name], first[name], rtol=1e-6)
            else:
                assert torch.equal(other[name].view(torch.uint8), first[name].view(torch.uint8)), name


def test_video_vae_and_text_encoder_are_written_too(model, tmp_path):
    made = quantise_checkpoint(model / "video_vae.safetensors", tmp_path / "vae.safetensors", Online("int8_convrot"))
    assert len(made.linears) == 12
    written, _ = load_video_vae(tmp_path / "vae.safetensors")
    assert same_state(written, load_video_vae(model / "video_vae.safetensors", quantise="int8_convrot")[0])
    out = tmp_path / "text.safetensors"
    quantise_checkpoint(model / "text_encoder.safetensors", out, Online("int8", ("language_model.layers.0",)))
    layers = TextLayers(out)
    assert sum(layers.info.formats.values()) == 14 and layers.info.format == "comfyui"
    whole = TextLayers(model / "text_encoder.safetensors")
    assert torch.equal(layers.layer(0)["mlp.up_proj.weight"], whole.layer(0)["mlp.up_proj.weight"])
    vae = diffusers_repository(tmp_path / "diffusers") / "vae"
    quantise_checkpoint(vae, tmp_path / "small_vae.safetensors", Online("fp8"))
    assert same_state(load_video_vae(tmp_path / "small_vae.safetensors")[0], load_video_vae(vae, quantise="fp8")[0])


def test_a_pruned_dit_keeps_its_curve(tmp_path):
    out = tmp_path / "out.safetensors"
    quantise_checkpoint(saved(tmp_path, pruned()), out, Online("int8_convrot"))
    stored = load_file(out)
    assert stored["blocks.0.adaln_proj.linear.weight"].dtype is torch.float16
    assert stored["adaln_t_table"].dtype is torch.float32
    assert torch.isfinite(velocity(load_dit(out)[0])).all()


def test_quantize_refuses_before_it_reads(model, tmp_path, monkeypatch):
    source = model / "dit.safetensors"
    taken = saved(tmp_path, {"a": torch.ones(1)}, "taken.safetensors")
    for out, message in (
        (tmp_path / "a.bin", "must end in .safetensors"),
        (tmp_path / "no" / "a.safetensors", "is not a folder"),
        (taken, "is there already"),
    ):
        with pytest.raises(H3Error, match=message):
            quantise_checkpoint(source, out, Online("int8"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(H3Error, match="1,000 bytes free and"):
        quantise_checkpoint(source, tmp_path / "a.safetensors", Online("int8"))
    with pytest.raises(H3Error, match="float32 only"):
        quantise_checkpoint(model / "audio_vae.safetensors", tmp_path / "a.safetensors", Online("int8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken.safetensors"]


def test_a_stopped_write_leaves_nothing(model, tmp_path):
    def stop(done, total):
        if done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise_checkpoint(model / "dit.safetensors", tmp_path / "a.safetensors", Online("int8"), stop)
    assert not list(tmp_path.iterdir())
    with pytest.raises(AssertionError):
        write_safetensors(tmp_path / "b.safetensors", {"a": ("F32", (2,))}, [("a", torch.ones(3))], {})
    assert not list(tmp_path.iterdir())


def test_quantize_on_the_command_line(model, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    command = ["quantize", str(model / "dit.safetensors"), str(out), "--int8-convrot", "--exclude", "blocks.0.*"]
    assert main([*command, "--json"]) == 0
    told = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)["results"]}
    assert told["linears"] == 12 and told["bytes"] == out.stat().st_size and told["method"] == "int8_convrot"
    assert main(command) == 2 and "is there already" in capsys.readouterr().out
    assert main(["quantize", "a", "b"]) == 2 and "is required" in capsys.readouterr().err
    rows, lines = quantize_file(model / "dit.safetensors", tmp_path / "b.safetensors", "fp8")
    assert rows[0]["value"].endswith("b.safetensors") and any(line.startswith("bytes: ") for line in lines)


# ---- ComfyUI's own loader

HOST = """
import importlib.abc, importlib.machinery, sys
from unittest.mock import MagicMock
checkout, *paths = sys.argv[1:]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, checkout)

class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    # what the checkout imports and the loader does not use on a CPU
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("comfy_aimdo", "torchsde", "sentencepiece", "torchvision", "spandrel", "aiohttp"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module
    def exec_module(self, module):
        pass

sys.meta_path.append(Absent())
import comfy.options
comfy.options.enable_args_parsing()
import comfy.sd, comfy.utils, torch
from comfy.quant_ops import QuantizedTensor
for path in paths:
    tensors, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    model = comfy.sd.load_diffusion_model_state_dict(dict(tensors), metadata=metadata).model
    inner = model.diffusion_model
    print("quantised", sum(isinstance(p, QuantizedTensor) for p in inner.parameters()))
    torch.save({name: t.detach().clone() for name, t in inner.state_dict().items()}, path + ".state")
"""


def test_comfyui_loads_what_quantize_writes(model, tmp_path, incomplete):
    """The host recognises the model and every quantised layer, and writes back the very tensors of our file."""
    what = "quantised file through ComfyUI's own loader"
    checkout = os.environ.get("COMFYUI_PATH")
    if not checkout:
        incomplete(what, "COMFYUI_PATH names no ComfyUI", needs="comfyui")
    paths = [tmp_path / f"{method}.safetensors" for method in ("int8_convrot", "int8", "fp8")]
    for path in paths:
        quantise_checkpoint(model / "dit.safetensors", path, Online(path.stem))
    (tmp_path / "host.py").write_text(HOST)
    command = [sys.executable, str(tmp_path / "host.py"), checkout, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "ModuleNotFoundError" in done.stderr:
        incomplete(what, f"ComfyUI lacks a package here: {done.stderr.splitlines()[-1]}", needs="comfyui")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("quantised 16") == len(paths)
    for path in paths:
        theirs, ours = torch.load(f"{path}.state"), load_file(path)
        assert set(ours) <= set(theirs)
        for name, tensor in ours.items():
            other = theirs[name].to(tensor.dtype)
            if name.endswith(".comfy_quant"):
                assert json.loads(bytes(other.tolist())) == json.loads(bytes(tensor.tolist())), name
            else:
                assert torch.equal(other.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
