"""LoRAs on a DiT: merged and beside agree, stacks and strengths, quantised bases, taking out, AdaLN on pruned bases."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from h3_runtime.errors import CheckpointError, H3Error
from h3_runtime.lora import Lora, LoraLinear, apply, fit_projection, grid_from_checkpoint, grid_of, plan
from h3_runtime.lora.adaln import GRID_FILE, GRID_NAME
from h3_runtime.lora.applying import linears
from h3_runtime.models.attention import dense_attention, rotary_table
from h3_runtime.models.dit import DiT, DiTConfig, ForwardContext, Run
from tests.lora_fixtures import (
    ADALN,
    BACKBONE,
    CONFIG,
    EXPRESSIONS,
    INNER,
    expected,
    furthest,
    make_delta,
    make_dit,
    merged,
    native,
    one_pair,
    ranks,
    write,
)


@pytest.fixture(scope="module")
def dit():
    return make_dit()


@pytest.fixture(scope="module")
def delta(dit):
    return make_delta(dit)


# ---- applying


def velocity(dit):
    """Everything of the DiT that reads a linear: text rows, tables, a block, heads. Float32 [n, 96]."""
    generator = torch.Generator().manual_seed(5)
    text = dit.refine_text(torch.randn(4, CONFIG.text_dim, generator=generator))
    rows = torch.empty(10, CONFIG.hidden, dtype=dit.dtype)
    rows[:4] = text
    dit.embed_video(torch.randn(6, 96, generator=generator), rows[4:])
    embedding = dit.time_embedding(torch.tensor([0.25, 0.5]))
    pairs = torch.tensor([0, 1])
    runs = (Run(0, 4, 1), Run(4, 10, 0))
    rotary = rotary_table(torch.randn(10, 3, generator=generator, dtype=torch.float64), dit.rope.inv_freq, dit.dtype)
    context = ForwardContext(0, runs, rotary, dense_attention, lambda index: dit.block_table(index, embedding, pairs))
    for index, block in enumerate(dit.blocks):
        rows = block(index, rows, context)
    return dit.run_heads(rows, dit.final_table(embedding), (Run(4, 10, 0),), video=True)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_beside_equals_merged(tmp_path, delta, dtype, limit):
    base = make_dit(dtype)
    plain = velocity(base)
    path = write(tmp_path / "b.safetensors", EXPRESSIONS["b"][2](delta))
    other = write(tmp_path / "e.safetensors", EXPRESSIONS["e"][2](delta))
    results = {}
    for mode in ("merge", "side"):
        dit = copy.deepcopy(base)
        applied = apply(dit, plan(dit, [Lora(path, 0.75), Lora(other, -0.5)]), mode)
        assert len(applied.merged if mode == "merge" else applied.side) == len(delta)
        results[mode] = velocity(dit)
    size = results["merge"].norm()
    assert (results["merge"] - results["side"]).norm() < limit * size
    assert (plain - results["merge"]).norm() > 0.05 * size


@pytest.mark.parametrize("rows", [4096, 50])
def test_stacked_with_strengths(tmp_path, monkeypatch, dit, delta, rows):
    """Also where a weight is merged in several pieces, whose ends fall inside q, k and v."""
    monkeypatch.setattr("h3_runtime.lora.applying.MERGE_ROWS", rows)
    one = write(tmp_path / "a.safetensors", EXPRESSIONS["a"][2](delta))
    two = write(tmp_path / "c.safetensors", EXPRESSIONS["c"][2](delta))
    some = {name: pairs for name, pairs in delta.items() if name.endswith("fc1")}
    three = write(tmp_path / "d.safetensors", native(some, "{m}.lora_{ab}.weight"))
    weights = merged(dit, Lora(one, 0.5), Lora(two, 0.25), Lora(three, -2.0))
    wanted = expected(dit, delta, 0.75)
    for name in some:
        wanted[name] = expected(dit, some, -1.25)[name]
    assert furthest(weights, wanted) < 1e-6


def test_rounded_once(tmp_path, delta):
    """bf16: the sum of the LoRAs is rounded onto the weight once, not one after the other."""
    base = make_dit(torch.bfloat16)
    path = write(tmp_path / "a.safetensors", EXPRESSIONS["a"][2](delta))
    weights = merged(base, Lora(path, 0.3), Lora(path, 0.4))
    rounded = {name: pairs for name, pairs in delta.items() if name in (*BACKBONE, *ADALN)}
    for name, pairs in rounded.items():
        weight = base.get_submodule(name).weight
        wanted = (weight.float() + 0.7 * torch.cat([b @ a for a, b in pairs])).to(weight.dtype)
        off = (weights[name] != wanted).float().mean()
        assert weights[name].dtype == torch.bfloat16 and off < 0.01, name  # ties of the float32 sum


def test_strength_zero(tmp_path, dit, delta):
    path = write(tmp_path / "a.safetensors", EXPRESSIONS["a"][2](delta))
    weights = merged(dit, Lora(path, 0.0))
    assert all(torch.equal(weights[name], module.weight) for name, module in linears(dit).items())
    other = copy.deepcopy(dit)
    applied = apply(other, plan(other, [Lora(path, 0.0)]), "side")
    assert applied.side == () and applied.nbytes == 0
    with pytest.raises(H3Error, match="strength is nan"):
        Lora(path, math.nan)


def test_rows_and_prepare_are_the_same_branch(tmp_path, dit, delta):
    """Fused and split pairs on one module: any range of rows equals that range of the whole, prepared or not."""
    dit = copy.deepcopy(dit)
    fused_file = write(
        tmp_path / "f.safetensors",
        {
            "blocks.0.attn.qkv_proj.lora_A.weight": torch.randn(4, 64),
            "blocks.0.attn.qkv_proj.lora_B.weight": torch.randn(3 * INNER, 4),
        },
    )
    split = write(tmp_path / "c.safetensors", EXPRESSIONS["c"][2](delta))
    apply(dit, plan(dit, [Lora(fused_file), Lora(split)]), "side")
    linear = dit.blocks[0].attn.qkv_proj
    assert isinstance(linear, LoraLinear) and len(linear.branches) == 4
    x = torch.randn(2, 5, 64)
    whole, ready = linear(x), linear.prepare(x)
    for start, stop in ((0, 3 * INNER), (0, 32), (INNER - 7, INNER + 9), (2 * INNER, 3 * INNER), (100, 250)):
        for given in (x, ready):
            assert torch.allclose(linear.rows(given, start, stop), whole[..., start:stop], atol=1e-5)
    assert linear.weight.dtype == torch.float32 and (linear.in_features, linear.out_features) == (64, 3 * INNER)


class Int8Linear(torch.nn.Module):
    """A quantised linear as an outside part: no float weight; ``prepare`` must be handed on."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))
        self.bias = linear.bias
        self.prepared = 0

    def prepare(self, x):
        self.prepared += 1
        return ("ready", x)

    def forward(self, x):
        return F.linear(x, self.weight * self.scale, self.bias)

    def rows(self, x, start, stop):
        x = x[1] if isinstance(x, tuple) else x
        return F.linear(x, (self.weight * self.scale)[start:stop])


def test_quantised_linears_get_a_branch(tmp_path, dit, delta):
    dit = copy.deepcopy(dit)
    quantised = [name for name in BACKBONE if name.startswith("blocks.")]
    for name in quantised:
        parent, _, leaf = name.rpartition(".")
        setattr(dit.get_submodule(parent), leaf, Int8Linear(dit.get_submodule(name)))
    before = {name: dit.get_submodule(name) for name in quantised}
    path = write(tmp_path / "a.safetensors", EXPRESSIONS["a"][2](delta))
    made = plan(dit, [Lora(path)])
    applied = apply(dit, made, "merge", keep=True)
    assert set(applied.side) == set(quantised) and set(applied.merged) == set(delta) - set(quantised)
    x = torch.randn(3, 64)
    linear = dit.blocks[0].attn.qkv_proj
    wanted = before["blocks.0.attn.qkv_proj"](x)
    wanted = wanted + x @ torch.cat([b @ a for a, b in delta["blocks.0.attn.qkv_proj"]]).T
    assert torch.allclose(linear(x), wanted, atol=1e-5)
    assert torch.allclose(linear.rows(linear.prepare(x), 30, 130), wanted[:, 30:130], atol=1e-5)
    assert linear.base.prepared == 1
    assert velocity(dit).isfinite().all()
    held = sum(t.numel() * 4 for n in quantised for pair in delta[n] for t in pair)
    assert applied.nbytes == held  # the zeros of block-diagonal factors are not kept
    assert made.nbytes >= held
    applied.remove()
    assert all(dit.get_submodule(name) is module for name, module in before.items())


def test_weights_that_are_not_in_memory_get_a_branch(tmp_path, dit, delta):
    dit = copy.deepcopy(dit)
    dit.blocks[0].mlp.to("meta")
    path = write(tmp_path / "a.safetensors", EXPRESSIONS["a"][2](delta))
    applied = apply(dit, plan(dit, [Lora(path)]), "merge")
    assert applied.side == ("blocks.0.mlp.fc1", "blocks.0.mlp.fc2")
    assert not dit.blocks[0].mlp.fc1.branches[0].a.is_meta


def test_remove_gives_the_bits_back(tmp_path, delta):
    base = make_dit(torch.bfloat16)
    stored = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    path = write(tmp_path / "a.safetensors", EXPRESSIONS["a"][2](delta))
    for mode in ("side", "merge"):
        dit = copy.deepcopy(base)
        before = {name: module.weight for name, module in linears(dit).items()}
        applied = apply(dit, plan(dit, [Lora(path, 0.9)]), mode, keep=True)
        with pytest.raises(H3Error, match="applied to this DiT already"):
            plan(dit, [Lora(path)])
        assert not torch.equal(velocity(dit), velocity(base))
        applied.remove()
        applied.remove()
        assert {name: module.weight for name, module in linears(dit).items()}.keys() == before.keys()
        assert all(linears(dit)[name].weight is weight for name, weight in before.items())
        assert dit.state_dict().keys() == stored.keys()
        assert all(torch.equal(tensor, stored[name]) for name, tensor in dit.state_dict().items())
        assert plan(dit, [Lora(path)]).applied
    dit = copy.deepcopy(base)
    applied = apply(dit, plan(dit, [Lora(path)]), "merge")
    with pytest.raises(H3Error, match=r"not kept.*keep=True or mode='side'"):
        applied.remove()


def test_side_branches_move_with_the_model_and_leave_its_state_alone(tmp_path, dit, delta):
    dit = copy.deepcopy(dit)
    path = write(tmp_path / "a.safetensors", EXPRESSIONS["a"][2](delta))
    made = plan(dit, [Lora(path)])
    names = {name for name, _ in dit.named_parameters()}
    applied = apply(dit, made, "side")
    assert {name.replace(".base.", ".") for name in dit.state_dict()} == {*names, "rope.inv_freq"}
    buffers = sum(b.nbytes for n, b in dit.named_buffers() if n != "rope.inv_freq")
    assert buffers == applied.nbytes
    dit.to(torch.float64)
    assert all(branch.a.dtype == torch.float64 for branch in dit.blocks[0].attn.qkv_proj.branches)


def test_a_damaged_factor_leaves_the_base_alone(tmp_path, dit, delta):
    tensors = EXPRESSIONS["a"][2](delta)
    tensors["final_layer.video_out.lora_B.weight"] = torch.full((96, ranks()["final_layer.video_out"]), math.nan)
    path = write(tmp_path / "a.safetensors", tensors)
    for mode in ("merge", "side"):
        other = copy.deepcopy(dit)
        with pytest.raises(CheckpointError, match=r"final_layer.video_out.lora_B.weight holds NaN"):
            apply(other, plan(other, [Lora(path)]), mode)
        assert other.state_dict().keys() == dit.state_dict().keys()
        assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), dit.state_dict().values()))
        assert plan(other, [Lora(path)]).applied
    with pytest.raises(H3Error, match="LoRA mode is 'mix'"):
        apply(dit, plan(dit, [Lora(path)]), "mix")


# ---- AdaLN on a pruned base

WIDTH, POINTS = 5, 33


def curve_of(dit):
    """A pruned twin of ``dit``: the curve is what of SiLU(time embedding) five directions hold, plus a constant."""
    grid = grid_of(dit.time_embedder, POINTS)
    mean = grid.mean(0)
    u, s, v = torch.linalg.svd((grid - mean).double(), full_matrices=False)
    state = {name: tensor for name, tensor in dit.state_dict().items() if not name.startswith("time_embedder.")}
    state["adaln_t_table"] = (u[:, :WIDTH] * s[:WIDTH]).float()
    for name in ADALN:
        weight = state[f"{name}.weight"]
        state[f"{name}.bias"] = state[f"{name}.bias"] + weight @ mean
        state[f"{name}.weight"] = weight @ v[:WIDTH].T.float()
    pruned = DiT(DiTConfig.from_shapes({name: tuple(tensor.shape) for name, tensor in state.items()}))
    pruned.load_state_dict(state)
    return pruned.requires_grad_(False), grid


def test_projection_is_least_squares():
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(40, 4, generator=generator)
    matrix, constant = torch.randn(4, 9, generator=generator), torch.randn(9, generator=generator)
    exact = fit_projection(table, table @ matrix + constant)
    assert torch.allclose(exact.matrix, matrix, atol=1e-5) and torch.allclose(exact.constant, constant, atol=1e-5)
    assert exact.residual < 1e-6
    grid = torch.randn(40, 9, generator=generator)
    fit = fit_projection(table, grid)
    left = grid - table @ fit.matrix - fit.constant
    assert (table.T @ left).abs().max() < 1e-4 and left.sum(0).abs().max() < 1e-4  # normal equations
    assert fit.residual == pytest.approx((left.norm() / (grid - grid.mean(0)).norm()).item(), rel=1e-5)
    doubled = torch.cat((table, table, torch.ones(40, 1)), 1)  # a curve without full rank
    again = fit_projection(doubled, table @ matrix + constant)
    assert torch.allclose(doubled @ again.matrix + again.constant, table @ matrix + constant, atol=1e-4)
    for bad in (torch.ones(41, 9), torch.full((40, 9), math.nan)):
        with pytest.raises(H3Error):
            fit_projection(table, bad)


@pytest.mark.parametrize("mode", ["merge", "side"])
def test_adaln_pairs_are_projected(tmp_path, dit, delta, mode):
    """On the curve, the projected pair gives what the full pair gives on the time embedding, as far as the fit goes."""
    pruned, grid = curve_of(dit)
    path = write(tmp_path / "a.safetensors", EXPRESSIONS["a"][2](delta))
    adaln_only = native({name: delta[name] for name in ADALN}, "{m}.lora_{ab}.weight")
    write(tmp_path / GRID_FILE, {GRID_NAME: grid})
    base = {name: pruned.get_submodule(name)(pruned.adaln_t_table) for name in ADALN}
    made = plan(pruned, [Lora(path, 0.5)])
    assert made.describe()["projected"] == 3 and made.projection.residual < 1e-4
    assert any("projected onto the base's curve by h3_silu" in note for note in made.notes)
    assert [row.reason for row in made.skipped] == ["a pruned base has no time embedder"]
    applied = apply(pruned, made, mode, keep=True)
    fitted = pruned.adaln_t_table @ made.projection.matrix + made.projection.constant
    for name in ADALN:
        ((a, b),) = delta[name]
        got = pruned.get_submodule(name)(pruned.adaln_t_table) - base[name]
        assert torch.allclose(got, 0.5 * fitted @ a.T @ b.T, atol=1e-5)
        wanted = 0.5 * grid @ a.T @ b.T
        assert (got - wanted).norm() < 1e-4 * wanted.norm()
    whole = copy.deepcopy(dit)
    apply(whole, plan(whole, [Lora(write(tmp_path / "b.safetensors", adaln_only), 0.5)]), mode)
    times, pairs = torch.tensor([0.0, 0.25, 0.75]), torch.arange(9)
    tables = [d.block_table(1, d.time_embedding(times), pairs) for d in (whole, pruned, dit)]
    assert (tables[1] - tables[0]).norm() < 1e-4 * (tables[0] - tables[2]).norm()
    applied.remove()
    assert all(torch.equal(pruned.get_submodule(name)(pruned.adaln_t_table), base[name]) for name in ADALN)


def test_adaln_pairs_without_a_grid_are_skipped_and_counted(tmp_path, dit, delta):
    pruned, grid = curve_of(dit)
    path = write(tmp_path / "a.safetensors", EXPRESSIONS["a"][2](delta))
    made = plan(pruned, [Lora(path)])
    assert len(made.applied) == len(delta) - 4 and len(made.skipped) == 4 and made.partial
    assert f"{len(delta) - 4} of {len(delta)} applied; 4 skipped: AdaLN pair of the full model" in made.summary(0)
    assert GRID_FILE in made.summary(0)
    assert plan(pruned, [Lora(path)], grid=grid).projection is not None
    with pytest.raises(H3Error, match="same number of rows"):
        plan(pruned, [Lora(path)], grid=grid[:-1])
    narrow = plan(pruned, [Lora(path)], grid=grid[:, :-1])
    assert [row.name for row in narrow.mismatched] == ADALN


def test_adaln_pairs_of_a_pruned_base(tmp_path, dit):
    pruned, _ = curve_of(dit)
    name = ADALN[0]
    a, b = torch.randn(2, WIDTH), torch.randn(3 * 6 * 64, 2)
    tensors = one_pair(2) | {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    path = write(tmp_path / "x.safetensors", tensors)
    weight = merged(pruned, Lora(path))[name]
    assert torch.allclose(weight, pruned.get_submodule(name).weight + b @ a, atol=1e-5)
    made = plan(dit, [Lora(path)])
    (left,) = made.skipped
    assert left.reason == f"made for an AdaLN of width {WIDTH} (a pruned base), and this base has {CONFIG.time_dim}"


def test_grid_from_a_full_checkpoint(tmp_path, dit):
    path = write(tmp_path / "dit.safetensors", dit.state_dict())
    grid = grid_from_checkpoint(path, POINTS)
    assert torch.equal(grid, grid_of(dit.time_embedder, POINTS))
    assert torch.allclose(grid[-1], dit.time_embedding(torch.tensor([1.0]))[0], atol=1e-6)
    assert torch.allclose(grid[8], dit.time_embedding(torch.tensor([0.25]))[0], atol=1e-6)
    with pytest.raises(H3Error, match="2 or more"):
        grid_of(dit.time_embedder, 1)
