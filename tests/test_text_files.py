"""Text encoder files: every layout gives the same states; what does not fit is named; unfit libraries are told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3_runtime.demo.text_maker import make_text_encoder
from h3_runtime.errors import CheckpointError, H3Error, MissingDependency, NonFiniteError
from h3_runtime.text.config import TextEncoderConfig
from h3_runtime.text.encoder import CONFIG_KEY, TextEncoder, build_module, check_states, import_qwen

PROMPT = "A red ball rolls slowly across a wooden floor. He says: <d>[English] Hello there</d>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("encoder")
    make_text_encoder(made, seed=3)
    return made


@pytest.fixture(scope="module")
def encoder(folder) -> TextEncoder:
    return TextEncoder.load(folder, dtype=torch.float32)


def rewritten(folder: Path, target: Path, rename=lambda name: name, config=None, extra=None, without=()) -> Path:
    target.mkdir(exist_ok=True)
    tensors = {rename(n): v for n, v in load_file(folder / "text_encoder.safetensors").items() if n not in without}
    tensors.update(extra or {})
    metadata = {CONFIG_KEY: json.dumps(config.to_dict())} if config else None
    save_file(tensors, target / "model.safetensors", metadata=metadata)
    for name in ("vocab.json", "merges.txt"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target / "model.safetensors"


def to_official(name: str) -> str:
    return "model." + name if name.startswith("visual.") else "model.language_model." + name.removeprefix("model.")


def to_transformers(name: str) -> str:
    return name if name.startswith("visual.") else "language_model." + name.removeprefix("model.")


def to_all_in_one(name: str) -> str:
    return "text_encoders.qwen3vl_32b.transformer." + name


def whole_config_json(config: TextEncoderConfig, layers: int) -> dict:
    """A config.json as transformers writes it."""
    _, version = import_qwen()
    whole = TextEncoderConfig.from_dict({**config.to_dict(), "layers": layers})
    return json.loads(whole.to_transformers(version).to_json_string(use_diff=False))


def later_parts(encoder: TextEncoder, prefix: str) -> dict[str, torch.Tensor]:
    """A layer after the condition, the last norm and the head: in whole encoders, and not read."""
    layer = {n: v for n, v in encoder.module.state_dict().items() if n.startswith("language_model.layers.0.")}
    extra = {prefix + n.removeprefix("language_model.").replace("s.0.", "s.3."): v.clone() for n, v in layer.items()}
    return {**extra, prefix + "norm.weight": torch.ones(64), "lm_head.weight": torch.zeros(896, 64)}


@pytest.mark.parametrize("old_style", [False, True])
def test_official_folder(folder, encoder, tmp_path, old_style):
    later = later_parts(encoder, "model.language_model.")
    file = rewritten(folder, tmp_path, to_official, extra=later)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        TextEncoder.load(tmp_path)
    config = whole_config_json(encoder.config, 4)
    if old_style:  # as transformers 4.57 wrote it
        text = config["text_config"]
        if "rope_parameters" in text:  # newer versions write it so
            rope = text.pop("rope_parameters")
            text["rope_theta"] = rope.pop("rope_theta")
            text["rope_scaling"] = rope
        assert text["rope_theta"] == 5e6 and text["rope_scaling"]["mrope_section"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    index = {"weight_map": dict.fromkeys(load_file(file), file.name)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"has 4 layers .* layer 50"):
        TextEncoder.load(tmp_path)
    loaded = TextEncoder.load(tmp_path, dtype=torch.float32, layers=3)
    assert loaded.config == encoder.config
    assert torch.equal(loaded.encode(PROMPT).hidden, encoder.encode(PROMPT).hidden)
    shorter = TextEncoder.load(tmp_path, dtype=torch.float32, layers=2)
    assert not torch.equal(shorter.encode(PROMPT).hidden, encoder.encode(PROMPT).hidden)


@pytest.mark.parametrize("rename", [to_transformers, to_all_in_one])
def test_other_layouts_give_the_same_states(folder, encoder, tmp_path, rename):
    marker = torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)
    extra = {"model.diffusion_model.x.comfy_quant": marker} if rename is to_all_in_one else {}
    file = rewritten(folder, tmp_path, rename, config=encoder.config, extra=extra)
    loaded = TextEncoder.load(file, dtype=torch.float32)
    assert torch.equal(loaded.encode(PROMPT).hidden, encoder.encode(PROMPT).hidden)


def test_files_that_do_not_fit_are_named(folder, encoder, tmp_path):
    lost = "model.layers.1.mlp.up_proj.weight"
    cases = [
        ({"without": (lost,)}, r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"extra": {"model.layers.1.surprise": torch.zeros(2)}}, r"1 not known: model\.layers\.1\.surprise"),
        ({"extra": {"stranger": torch.zeros(2)}}, "1 not known: stranger"),
        ({"extra": {lost: torch.zeros(4, 64)}}, r"up_proj\.weight is \[4, 64\], needed \[160, 64\]"),
        ({"extra": {lost + "_scale": torch.zeros(4)}}, r"1 not known: model\.layers\.1\.mlp\.up_proj\.weight_scale"),
        ({"extra": {lost: torch.zeros(160, 64, dtype=torch.int8)}}, "up_proj.weight is stored as I8"),
        ({"extra": {to_official(lost): torch.zeros(2)}}, "mixes text encoder layouts"),
        ({"rename": lambda name: "blocks." + name}, "is no Qwen3-VL text encoder"),
        ({"config": None}, r"word embeddings of \[896, 64\] and carries no config"),
    ]
    for changes, message in cases:
        file = rewritten(folder, tmp_path, **{"config": encoder.config, **changes})
        with pytest.raises(CheckpointError, match=message):
            TextEncoder.load(file)


def test_truncated_and_absent_files(folder, tmp_path):
    whole = (folder / "text_encoder.safetensors").read_bytes()
    (tmp_path / "text_encoder.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="100 missing"):
        TextEncoder.load(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        TextEncoder.load(tmp_path / "nothing.safetensors")


def test_foreign_vocabulary_is_refused(folder, tmp_path):
    words = {letter: number for number, letter in enumerate("abcdef")}
    (tmp_path / "vocab.json").write_text(json.dumps(words), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    with pytest.raises(H3Error, match="came with this encoder"):
        TextEncoder.load(folder, tokenizer_dir=tmp_path)
    many = {chr(0x4E00 + number): number for number in range(5000)}
    (tmp_path / "vocab.json").write_text(json.dumps(many), encoding="utf-8")
    with pytest.raises(H3Error, match="5033 tokens and the text encoder knows 896"):
        TextEncoder.load(folder, tokenizer_dir=tmp_path)


@pytest.mark.parametrize(
    "value, error, message",
    [
        (0.0, CheckpointError, "ends in zeros"),
        (1e-30, CheckpointError, "prompt would have no effect"),
        (float("nan"), CheckpointError, "NaN or infinity"),
    ],
)
def test_dead_weights_stop_the_render(folder, encoder, tmp_path, value, error, message):
    """A zeroed or broken encoder must not turn into a clip that ignores its prompt."""
    names = load_file(folder / "text_encoder.safetensors")
    file = rewritten(folder, tmp_path, config=encoder.config, extra={n: v * 0 + value for n, v in names.items()})
    with pytest.raises(error, match=message):
        TextEncoder.load(file).encode(PROMPT)


def test_states_that_ignore_the_prompt(folder):
    ids = torch.tensor([1, 2, 3])
    rows = torch.randn(1, 8).expand(3, 8)
    with pytest.raises(CheckpointError, match="same row for all 3 tokens"):
        check_states(rows, ids, "x")
    check_states(rows, torch.tensor([1, 1, 1]), "x")  # one word repeated may well look the same everywhere
    check_states(rows[:1], ids[:1], "x")
    with pytest.raises(CheckpointError, match="constant 2"):
        check_states(torch.full((1, 8), 2.0), ids[:1], "x")
    with pytest.raises(NonFiniteError, match="1 of 3 rows"):
        check_states(torch.tensor([[1.0, 2.0], [3.0, float("inf")], [0.0, 1.0]]), ids, "x")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_sections": [4, 2, 3]}, "rope_sections"),
        ({"kv_heads": 4}, "kv_heads"),
        ({"vision_positions": 200}, "vision_positions"),
        ({"deepstack": [0, 9]}, "deepstack"),
        ({"layers": "three"}, "wrong kind"),
        ({"surprise": 1}, "differing: surprise"),
    ],
)
def test_bad_configs(encoder, change, message):
    with pytest.raises(CheckpointError, match=message):
        TextEncoderConfig.from_dict({**encoder.config.to_dict(), **change})


def test_published_config_needs_fifty_layers_and_902_tensors():
    """The released sizes, on the meta device: 50 layers of 11, the embedding, 351 of the vision tower."""
    module = build_module(TextEncoderConfig())
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    assert len(shapes) == 902
    assert sum(name.startswith("visual.") for name in shapes) == 351
    layer = sum(v.numel() for n, v in module.state_dict().items() if n.startswith("language_model.layers.7."))
    assert layer == 2 * 5120 * (8192 + 1024) + 3 * 5120 * 25_600 + 2 * 5120 + 2 * 128
    assert all(value.is_meta for value in module.parameters())


@pytest.mark.parametrize(
    "version, message", [("4.57.0", "4.57.1 or newer"), ("4.50.3", "4.57.1 or newer"), ("5.0.0", "torchaudio")]
)
def test_unfit_transformers(monkeypatch, version, message):
    fake = ModuleType("transformers")
    fake.__version__ = version
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with pytest.raises(MissingDependency, match=message):
        import_qwen()


def test_absent_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependency, match="pip install"):
        import_qwen()
