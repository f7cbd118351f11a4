"""The text encoder's layers from RAM or disk, in every format: the resident bits, nothing left behind, any chunk."""

from __future__ import annotations

import copy
import gc
import json
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from h3_runtime import bench_text
from h3_runtime.checkpoint import reader
from h3_runtime.checkpoint.reader import SafetensorsFile
from h3_runtime.checkpoint.text_layers import TextLayers
from h3_runtime.demo.text_maker import make_text_encoder
from h3_runtime.errors import CheckpointError, MissingDependency
from h3_runtime.memory import placement as placement_module
from h3_runtime.memory.measure import FakeMemory
from h3_runtime.memory.placement import Placement
from h3_runtime.model import Loading, Models, place_encoder
from h3_runtime.quant.linear import QuantisedLinear
from h3_runtime.text import placed as placed_module
from h3_runtime.text.config import TextEncoderConfig
from h3_runtime.text.encoder import TextEncoder, build_module, import_qwen, open_weights
from h3_runtime.text.layer import ChunkedLayer
from h3_runtime.text.placed import PlacedWeights
from h3_runtime.text.tower import Look, batches, place
from h3_runtime.text.vision import VisionInput

from .fake_card import SlotsOnly
from .quantised_fixtures import quantised, relative, text_linears, write_gguf
from .small_jobs import one_thread  # noqa: F401 (a fixture)

LAYERS = 3
PROMPT = "A red ball rolls slowly across a wooden floor. He says: <d>[English] Hello there</d>"
PICTURE = np.random.default_rng(1).integers(0, 256, (256, 288, 3), dtype=np.uint8)
STREAMED = (Placement("ram"), Placement("disk"), Placement("disk", resident=1, ahead=2))
# relative distance of the states to bf16's, with room: three layers of a small encoder add up their weights' errors
TOLERANCES = {"int8_convrot": 0.035, "fp8": 0.08, "fp8_tower": 0.1, "nvfp4_awq": 0.25, "gguf": 0.03, "mixed": 0.15}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_text_encoder(tmp_path_factory.mktemp("encoder"), seed=3)


@pytest.fixture(scope="module")
def resident(plain):
    return TextEncoder.load(plain, dtype=torch.float32)


def written(plain, format: str, tmp_path):
    """The encoder in ``format``, with its own config."""
    weights, metadata = load_file(plain), SafetensorsFile(plain).metadata
    linears = text_linears(LAYERS)
    path = tmp_path / "text.safetensors"
    if format == "gguf":
        types = {f"{name}.weight": "Q8_0" for name in linears} | {"model.embed_tokens.weight": "Q8_0"}
        return write_gguf(tmp_path / "text.gguf", weights, types, dict(metadata))
    if format == "nvfp4_awq":  # as the public file: inputs of two linears scaled, embeddings int8 by row
        smoothed = tuple(name for name in linears if name.endswith(("o_proj", "down_proj")))
        made = quantised("nvfp4_awq", weights, smoothed)
        made = quantised("nvfp4", made, tuple(name for name in linears if name not in smoothed))
        made = quantised("int8", made, ("model.embed_tokens",))
    elif format == "fp8_tower":
        tower = [n.removesuffix(".weight") for n, t in weights.items() if n.startswith("visual.") and t.dim() == 2]
        made = quantised("fp8_legacy", weights, (*linears, *(name for name in tower if "pos_embed" not in name)))
    elif format == "mixed":
        made = quantised("nvfp4", weights, tuple(name for name in linears if ".1." in name))
        made = quantised("int8_convrot", made, tuple(name for name in linears if ".2." in name))
    else:
        made = quantised(format, weights, linears)
    save_file(made, path, metadata)
    return path


def loaded(plain, path, **options) -> TextEncoder:
    return TextEncoder.load(path, tokenizer_dir=plain.parent, **options)


def states(encoder: TextEncoder) -> list[torch.Tensor]:
    return [encoder.encode(PROMPT).hidden, encoder.encode(PROMPT, [PICTURE, PICTURE]).hidden]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


# ---- streamed is resident


@pytest.mark.parametrize("dtype", [torch.float32, None], ids=["fp32", "bf16"])
def test_streamed_states_are_the_resident_ones(plain, dtype):
    want = states(TextEncoder.load(plain, dtype=dtype))
    for placement in STREAMED:
        encoder = TextEncoder.load(plain, dtype=dtype, placement=placement)
        assert_same(states(encoder), want)
        assert_same(states(encoder), want)  # nothing stays behind that another call would see


@pytest.mark.parametrize("format", TOLERANCES)
def test_every_format_streams_to_the_resident_bits(plain, format, tmp_path):
    path = written(plain, format, tmp_path)
    encoder = loaded(plain, path)
    want = states(encoder)
    bf16 = states(TextEncoder.load(plain))
    assert all(relative(one.float(), other.float()) < TOLERANCES[format] for one, other in zip(want, bf16, strict=True))
    assert not torch.equal(want[0], bf16[0]) and want[0].dtype == encoder.dtype == torch.bfloat16
    for placement in STREAMED[:2]:
        assert_same(states(loaded(plain, path, placement=placement)), want)
    assert encoder.info.approximate and encoder.info.format == "comfyui"


def test_formats_are_read_layer_by_layer_and_named(plain, tmp_path):
    encoder = loaded(plain, written(plain, "mixed", tmp_path), placement=Placement("disk"))
    assert encoder.info.formats["nvfp4"] == 7 and sum(encoder.info.formats.values()) == 14
    assert "7 layers in nvfp4" in encoder.info.approximate and "int8_convrot" in encoder.info.approximate
    kinds = [type(layer.self_attn.q_proj).__name__ for layer in encoder.module.language_model.layers]
    assert kinds == ["Linear", "Nvfp4Linear", "Int8Linear"]


def test_what_is_streamed_keeps_no_memory_and_nothing_changes(plain):
    for rung in ("ram", "disk"):
        encoder = TextEncoder.load(plain, placement=Placement(rung))
        before = encoder.module.state_dict()
        states(encoder)
        after = encoder.module.state_dict()
        assert all(after[name] is value or after[name].data_ptr() == value.data_ptr() for name, value in before.items())
        held = [name for name, value in after.items() if not value.is_meta]
        assert held == (["language_model.embed_tokens.weight"] if rung == "ram" else [])


def test_ten_encodes_leave_nothing(plain):
    encoder = TextEncoder.load(plain, placement=Placement("disk"))
    want = states(encoder)
    gc.collect()
    threads, tensors = threading.active_count(), _live_bytes()
    rss = psutil.Process().memory_info().rss
    for _ in range(10):
        got = states(encoder)
    assert_same(got, want)
    del got
    gc.collect()
    assert threading.active_count() <= threads and _live_bytes() == tensors
    assert psutil.Process().memory_info().rss - rss < 32e6


def _live_bytes() -> int:
    kinds = (torch.Tensor, torch.nn.Parameter)
    return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) in kinds and not t.is_meta)


# ---- words and ring


WORDS = [300, 0, 17, 18, 19, 300, 5, 0]
TABLES = ("plain", "int8", "fp8", "nvfp4", "Q8_0", "folded Q8_0", "F16")


def table_file(plain, kind: str, tmp_path):
    """The encoder with its word table stored as ``kind``, and how many of its bytes WORDS may take."""
    weights, metadata, name = load_file(plain), SafetensorsFile(plain).metadata, "model.embed_tokens.weight"
    vocab, width = weights[name].shape
    if kind in ("Q8_0", "folded Q8_0", "F16"):
        folds, pairs = {}, dict(metadata)
        if kind.startswith("folded"):
            folds, pairs = {name: (vocab * width // 32, 32)}, {**pairs, f"comfy.gguf.orig_shape.{name}": [vocab, width]}
        path = write_gguf(tmp_path / "text.gguf", weights, {name: kind.split()[-1]}, pairs, folds)
        return path, 6 * width * (2 if kind == "F16" else 34 / 32)
    made = weights if kind == "plain" else quantised(kind, weights, ("model.embed_tokens",))
    save_file(made, tmp_path / "text.safetensors", metadata)
    each = {"plain": 2 * width, "int8": width + 4, "fp8": width, "nvfp4": vocab * width}[kind]
    return tmp_path / "text.safetensors", 6 * each + 8  # and a scale or two for all


@pytest.mark.parametrize("kind", TABLES)
def test_from_disk_only_the_rows_of_the_prompt_are_read(plain, kind, tmp_path, monkeypatch):
    path, most = table_file(plain, kind, tmp_path)
    layers = TextLayers(path)
    ids = torch.tensor(WORDS)
    want = layers.embeddings()(ids)
    read = []
    runs = reader.read_runs

    def counted(path, size, wanted):
        wanted = list(wanted)
        read.append(sum(len(buffer) for buffer, _ in wanted))
        runs(path, size, wanted)

    with monkeypatch.context() as patched:
        patched.setattr(reader, "read_runs", counted)
        got = layers.words(ids)
    assert got.dtype == want.dtype and torch.equal(got, want) and 0 < sum(read) <= most
    for dtype in (torch.float32, torch.bfloat16):
        layers = TextLayers(path, dtype=dtype)
        assert torch.equal(layers.words(ids), layers.embeddings()(ids)) and layers.words(ids).dtype == dtype
    resident, streamed = (loaded(plain, path, placement=p) for p in (Placement(), Placement("disk")))
    assert torch.equal(resident.encode(PROMPT).hidden, streamed.encode(PROMPT).hidden)


def test_rows_come_from_shards_too_and_a_cut_file_is_told(plain, tmp_path):
    weights = load_file(plain)
    table = "model.embed_tokens.weight"
    save_file({table: weights[table]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
    shards = {table: "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    source = reader.open_source(tmp_path)
    assert torch.equal(source.read_rows(table, [0, 3, 4]), weights[table][[0, 3, 4]])
    assert source.read_rows(table, []).shape == (0, weights[table].shape[1])
    with open(tmp_path / "model-00001-of-00002.safetensors", "r+b") as file:
        file.truncate(4000)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        source.read_rows(table, [3])


def test_a_ring_is_made_once_a_prompt_and_its_slots_have_one_owner(plain, monkeypatch):
    """On the fake card: nothing of a ring while the encoder is loaded; then one ring, closed when the layers end."""
    made, closed = [], []

    class Ring(SlotsOnly):
        def __init__(self, store, layers, slots, device, pin):
            super().__init__([store.layout(index) for index in range(layers)], slots)
            made.append(sum(slot.nbytes for slot in self.slots))

        def close(self):
            closed.append(True)

    monkeypatch.setattr(placement_module, "CudaMover", Ring)
    text = TextLayers(plain)
    module = build_module(open_weights(plain).config)
    placed = PlacedWeights(module, text, Placement("disk"), torch.device("cpu"))
    placed.device = torch.device("cuda")
    assert made == []
    with FakeMemory() as card:
        for count in (1, 2):
            with placed.layers() as layers:
                assert len(made) == count and len(closed) == count - 1 and card.now["cuda"] == made[0] > 0
                assert len(layers) == LAYERS
            del layers
            gc.collect()
            assert len(closed) == count and card.now["cuda"] == 0
        assert card.peak["cuda"] == made[0]


def test_loading_a_streamed_encoder_makes_no_ring(plain, monkeypatch):
    rings = []
    make = placed_module.make_ring
    monkeypatch.setattr(placed_module, "make_ring", lambda *given: rings.append(make(*given)) or rings[-1])
    monkeypatch.setattr(placement_module, "make_ring", lambda *given: pytest.fail("a ring was made while loading"))
    encoder = TextEncoder.load(plain, placement=Placement("disk"))
    assert rings == []
    states(encoder)
    assert len(rings) == 2


# ---- cancelled and broken


def test_a_cancel_in_any_layer_leaves_a_whole_encoder(plain, monkeypatch):
    encoder = TextEncoder.load(plain, placement=Placement("disk"))
    want = states(encoder)
    threads = threading.active_count()
    forward = ChunkedLayer.forward

    class Cancelled(BaseException):
        pass

    for stop in range(LAYERS):
        calls = iter(range(LAYERS))

        def cancelled(self, *arguments, stop=stop, calls=calls, **named):
            if next(calls) == stop:
                raise Cancelled
            return forward(self, *arguments, **named)

        with monkeypatch.context() as patched:
            patched.setattr(ChunkedLayer, "forward", cancelled)
            with pytest.raises(Cancelled):
                encoder.encode(PROMPT, [PICTURE])
        assert threading.active_count() == threads
        assert all(value.is_meta for value in encoder.module.parameters())
        assert_same(states(encoder), want)


def test_the_tower_is_let_go_even_when_it_fails(plain, monkeypatch):
    encoder = TextEncoder.load(plain, placement=Placement("disk"))
    kept = []

    def broken(self, *arguments, **named):
        kept.append(weakref.ref(self.patch_embed.proj.weight))
        raise RuntimeError("stop")

    with monkeypatch.context() as patched:
        patched.setattr(type(encoder.module.visual), "forward", broken)
        with pytest.raises(RuntimeError, match="stop"):
            encoder.encode(PROMPT, [PICTURE])
    gc.collect()
    assert len(kept) == 1 and kept[0]() is None
    assert encoder.module.visual.patch_embed.proj.weight.is_meta


def test_a_file_that_changes_under_a_stream_is_told(plain, tmp_path):
    for name in (plain.name, "vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((plain.parent / name).read_bytes())
    encoder = TextEncoder.load(tmp_path, placement=Placement("disk"))
    whole = (tmp_path / plain.name).read_bytes()
    (tmp_path / plain.name).write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        encoder.encode(PROMPT)
    (tmp_path / plain.name).write_bytes(whole)
    assert torch.equal(encoder.encode(PROMPT).hidden, TextEncoder.load(plain).encode(PROMPT).hidden)


def test_a_missing_layer_and_a_damaged_one_are_named(plain, tmp_path):
    weights, metadata = load_file(plain), SafetensorsFile(plain).metadata
    path = tmp_path / "text.safetensors"
    save_file({name: t for name, t in weights.items() if ".layers.1." not in name}, path, metadata)
    with pytest.raises(CheckpointError, match=r"11 missing: model\.layers\.1\.input_layernorm\.weight"):
        loaded(plain, path, placement=Placement("disk"))
    save_file({name: t for name, t in weights.items() if ".layers.2." not in name}, path, metadata)
    with pytest.raises(CheckpointError, match=r"has 2 layers and the condition is the state after layer 3"):
        loaded(plain, path)
    made = written(plain, "int8_convrot", tmp_path)
    tensors = load_file(made)
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj.*weight_scale"):
        loaded(plain, path)
    bad = "model.layers.2.mlp.down_proj.weight"
    save_file(weights | {bad: weights[bad] * float("nan")}, path, metadata)
    for placement, moment in ((Placement("ram"), "load"), (Placement("disk"), "encode")):
        with pytest.raises(CheckpointError, match=rf"{bad} holds NaN or infinity"):
            encoder = loaded(plain, path, placement=placement)
            assert moment == "encode"
            encoder.encode(PROMPT)


# ---- chunks


@pytest.fixture(scope="module")
def layers():
    """transformers' own decoder layer with seeded weights, a state of 300 rows and its rotary tables."""
    qwen, version = import_qwen()
    config = TextEncoderConfig(
        vocab=64, hidden=64, layers=1, ffn=160, heads=8, kv_heads=2, head_dim=16, rope_sections=(4, 2, 2),
        vision_depth=1, vision_hidden=48, vision_ffn=96, vision_heads=3, vision_positions=256, deepstack=(0,),
    )  # fmt: skip
    torch.manual_seed(5)
    model = qwen(config.to_transformers(version)).eval().requires_grad_(False).language_model
    hidden = torch.randn(1, 300, 64)
    positions = torch.stack([torch.arange(300), torch.arange(300) // 7, torch.arange(300) % 7])[:, None]
    return model, hidden, model.rotary_emb(hidden, positions)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)], ids=["fp32", "bf16"])
def test_a_chunked_layer_is_transformers_layer(layers, dtype, bound):
    model, hidden, rotary = layers
    layer = copy.deepcopy(model.layers[0]).to(dtype)
    hidden, rotary = hidden.to(dtype), tuple(table.to(dtype) for table in rotary)
    want = layer(hidden.clone(), position_embeddings=rotary, attention_mask=None)
    want = want[0] if isinstance(want, tuple) else want
    assert torch.equal(ChunkedLayer(layer)(hidden.clone(), rotary), want)  # all rows in one chunk
    for chunk in (128, 300, 7):
        got = ChunkedLayer(layer, chunk)(hidden.clone(), rotary)
        assert relative(got.float(), want.float()) <= bound, chunk
    assert {name for name, _ in ChunkedLayer(layer).named_parameters()} == dict(layer.named_parameters()).keys()


def test_quantised_linears_do_not_feel_the_chunks(plain, layers, tmp_path):
    _, hidden, _ = layers
    encoder = loaded(plain, written(plain, "int8_convrot", tmp_path))
    layer = encoder.module.language_model.layers[1]
    assert isinstance(layer.mlp.up_proj, QuantisedLinear)
    rotary = encoder.module.language_model.rotary_emb(hidden.bfloat16(), torch.arange(300).expand(3, 1, -1))
    whole = layer(hidden.bfloat16(), rotary)
    small = copy.copy(layer)
    small.chunk = 64
    assert relative(small(hidden.bfloat16(), rotary).float(), whole.float()) <= 6e-3


def test_more_rows_than_one_chunk_equal_transformers(resident):
    """2,500 words: two canonical chunks of the language layers, against transformers' own loop and attention."""
    ids = torch.tensor(resident.tokenizer.encode("ball red " * 1300))
    assert len(ids) > 2048
    qwen, version = import_qwen()
    model = qwen(resident.config.to_transformers(version)).eval()
    model.language_model.norm = torch.nn.Identity()
    model.load_state_dict(resident.module.state_dict())
    with torch.no_grad():
        want = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).last_hidden_state[0]
    assert relative(resident.encode("ball red " * 1300).hidden, want) <= 1e-6


def test_pictures_go_through_the_tower_in_batches():
    looks = [Look(torch.empty(count, 1), (1, 1), 0) for count in (3, 4, 2, 9, 1, 1)]
    assert list(batches(looks, 8)) == [[0, 1], [2], [3], [4, 5]]  # one beyond the limit goes alone
    pads = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0]).bool()
    values = [VisionInput(torch.arange(8.0).view(8, 1), (1, 2, 4)), VisionInput(torch.ones(8, 1), (2, 2, 2))]
    placed = place(values, pads)
    assert [(look.first, look.rows, look.grid) for look in placed] == [(1, 2, (2, 4)), (4, 1, (2, 2)), (6, 1, (2, 2))]
    with pytest.raises(AssertionError, match="places differ"):
        place(values[:1], pads)


def test_batches_of_the_tower_change_nothing_but_rounding(resident, monkeypatch):
    pictures = [np.roll(PICTURE, step, 0) for step in range(3)]
    whole = resident.encode(PROMPT, pictures).hidden
    monkeypatch.setattr("h3_runtime.text.tower.batches", lambda looks: ([index] for index in range(len(looks))))
    assert relative(resident.encode(PROMPT, pictures).hidden, whole) <= 1e-6


# ---- what fits


def test_an_encoder_is_streamed_when_it_takes_more_than_half_of_what_is_free(plain, monkeypatch):
    weights = open_weights(plain)
    nbytes = TextLayers(plain).info.nbytes

    def placed(free: int, host: int, dtype=None, keep=False) -> str:
        memory = type("Memory", (), {"available": host})
        monkeypatch.setattr("h3_runtime.model.psutil.virtual_memory", lambda: memory)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        return place_encoder(weights, dtype, "cuda" if free else "cpu", keep).rung

    assert placed(2 * nbytes, 0) == "resident" and placed(2 * nbytes - 1, 10 * nbytes) == "disk"
    assert placed(nbytes, 2 * nbytes, keep=True) == "ram" and placed(nbytes, nbytes, keep=True) == "disk"
    assert placed(2 * nbytes, 0, dtype=torch.float32) == "disk"  # twice as large as its file
    assert placed(0, 2 * nbytes) == "resident" and placed(0, nbytes) == "disk"


def test_models_place_the_encoder_and_describe_it(plain, tmp_path):
    want = states(TextEncoder.load(plain))
    parts = SimpleNamespace(text_encoder=plain, tokenizer=None)
    models = Models(parts, loading=Loading(encoder=Placement("disk")))
    encoder = models.text_encoder()
    assert_same(states(encoder), want)
    assert encoder.placed.placement.rung == "disk" and Models(parts).text_encoder().placed.placement.rung == "resident"
    assert models.infos["text_encoder"].approximate is None
    parts = SimpleNamespace(text_encoder=written(plain, "int8_convrot", tmp_path), tokenizer=plain.parent)
    info = Models(parts).describe_encoder(open_weights(parts.text_encoder))
    assert "encoder/int8-convrot" in info.paths and sum(info.formats.values()) == 7 * LAYERS and info.approximate


def test_the_peak_is_counted_from_the_run_itself():
    """The released widths, one layer, a small picture; and that more rows take more."""
    config = replace(TextEncoderConfig(), layers=1, vision_depth=1, deepstack=(0,))
    layer = 2 * sum(value.numel() for value in build_module(config).language_model.layers.parameters())
    none, stages = bench_text.encode_peak(config, 0, (64, 64), 64)
    assert 2 * layer < none < 2 * layer * 1.02 and stages["tower"] == 0
    if import_qwen()[1] < (5,):
        with pytest.raises(MissingDependency, match="transformers 5 or newer"):
            bench_text.encode_peak(config, 1, (512, 512), 64)
        return
    one, stages = bench_text.encode_peak(config, 1, (512, 512), 64)
    assert none < one == max(stages.values()) and 1.1e9 < stages["tower"] < 1.4e9
