"""The benches run end to end at tiny sizes, count right, and the memory of a full-size forward keeps its targets."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from h3_runtime import bench
from h3_runtime.checkpoint.load import load_dit
from h3_runtime.errors import MissingDependency
from h3_runtime.geometry import Canvas
from h3_runtime.memory.measure import LiveBytes
from h3_runtime.models.dit import DiTConfig

from .small_jobs import CONFIG, one_thread  # noqa: F401 (a fixture)

TINY = bench.StepCase(CONFIG, text=5, audio=8, video=(2, 4, 6))


def by_name(results: bench.Results) -> dict[str, dict]:
    assert all({"name", "value", "unit"} <= set(result) for result in results)
    assert len({result["name"] for result in results}) == len(results)
    return {result["name"]: result for result in results}


# ---- step


def test_step_measures_the_same_computation_three_times():
    pytest.importorskip("diffusers")
    results = by_name(bench.bench_step(TINY, repeat=3))
    for dtype, bound in (("fp32", 1e-6), ("bf16", 0.02)):
        names = ("ours_to_floor", "ours_to_diffusers", "diffusers_to_floor", "ours", "diffusers", "floor", "rel_l2")
        assert {name for name in results if name.startswith(dtype, 5)} == {f"step/{dtype}/{name}" for name in names}
        ratio = results[f"step/{dtype}/ours_to_diffusers"]
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"] and ratio["unit"] == "ratio"
        assert results[f"step/{dtype}/ours"]["rows"] == 5 + 16 + 12
        assert 0 < results[f"step/{dtype}/rel_l2"]["value"] <= bound


def test_the_case_is_the_stated_one():
    case = bench.StepCase()
    assert (case.config.layers, case.config.hidden, case.config.heads, case.config.ffn) == (8, 1024, 11, 2752)
    assert case.layout().num_rows == 4080 and len(case.layout().target_audio) == 128 and len(case.layout().text) == 256


def test_turns_are_medians_of_ratios_inside_a_round():
    clock = itertools.count()
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in ("ours", "diffusers", "floor")}
    seconds = bench.take_turns(runs, 4, lambda: next(clock))
    assert seconds == {name: [1, 1, 1, 1] for name in runs}
    rounds = [order[start : start + 3] for start in range(0, 15, 3)]  # the first one is thrown away
    assert all(sorted(names) == sorted(runs) for names in rounds)
    assert {names[0] for names in rounds[1:]} == set(runs)

    seconds = {"ours": [2.0, 30.0, 6.0], "diffusers": [4.0, 30.0, 6.0], "floor": [1.0, 10.0, 5.0]}
    results = by_name(bench._step_results("step/fp32", seconds, 0.5, 7))
    assert results["step/fp32/ours_to_floor"]["value"] == 2.0  # of 2, 3 and 1.2; not 6 / 5
    assert results["step/fp32/ours_to_diffusers"]["value"] == 1.0
    assert results["step/fp32/ours"]["value"] == 6.0


def test_without_diffusers_the_step_is_measured_alone(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingDependency, match=r"diffusers 0.42 or newer is not installed.*pip install"):
        bench.import_reference()
    results = bench.bench_step(TINY, repeat=1, dtypes=("fp32",))
    assert set(by_name(results)) == {"step/fp32/ours_to_floor", "step/fp32/ours", "step/fp32/floor"}
    assert "not installed" in results[0]["note"]
    memory = bench.bench_memory((5,), CONFIG, (96, 64), 5)
    assert all("diffusers_block" not in result for result in memory)


# ---- memory


def test_live_bytes_counts_storages_once_and_lets_them_go():
    with LiveBytes() as live:
        a = torch.empty(100)  # 400 bytes
        b = a.view(10, 10)[2:]
        c = torch.empty(50, dtype=torch.bfloat16)  # 100
        assert live.now["cpu"] == live.peak["cpu"] == 500
        del a
        assert live.now["cpu"] == 500  # b still holds it
        del b
        assert (live.now["cpu"], live.peak["cpu"]) == (100, 500)
        c.mul_(2).add_(1)
        assert (live.now["cpu"], live.peak["cpu"]) == (100, 500)
        d = c.float() + 1  # 200 for the cast, 200 for the sum
        assert (live.now["cpu"], live.peak["cpu"]) == (300, 500)
    assert d.shape == (50,)
    held = LiveBytes()
    held.hold((c,), counted=False)
    held.hold((c, d))
    assert held.now["cpu"] == 200


def test_peak_is_that_of_one_block_and_grows_with_rows():
    layers = [
        by_name(bench.bench_memory((22,), DiTConfig(**{**CONFIG.to_dict(), "layers": n}), (96, 64), 5, reference=False))
        for n in (1, 4)
    ]
    assert {name: result["value"] for name, result in layers[0].items()} == {
        name: result["value"] for name, result in layers[1].items()
    }
    more = by_name(bench.bench_memory((39,), CONFIG, (96, 64), 5, masks=(False,), reference=False))
    assert set(layers[0]) == {"peak/22", "peak/22/mask"} and set(more) == {"peak/39"}
    assert more["peak/39"]["value"] > layers[0]["peak/22"]["value"] > 0


def test_the_gradient_mask_has_256_levels():
    mask = bench.gradient_mask(Canvas.fit(124, (1344, 768)))
    assert mask.video.unique().tolist() == mask.audio.unique().tolist() == [k / 256 for k in range(1, 257)]
    assert len(mask.video_tokens.unique()) == 256


@pytest.mark.parametrize(("frames", "rows"), [(124, 38222), (362, 109574)])
def test_a_full_size_forward_keeps_its_peak(frames, rows):
    """With the mask, whose forward holds all that the plain one does and its table rows besides."""
    (result,) = bench.bench_memory((frames,), masks=(True,), reference=False)
    assert (result["name"], result["tables"]) == (f"peak/{frames}/mask", "by forward")
    assert (result["rows"], result["unit"], result["target"]) == (rows, "GiB", bench.PEAK_TARGETS_GIB[frames])
    hidden = rows * 5376 * 2 / bench.GIB
    assert 3 * hidden < result["value"] <= result["target"]


# ---- load


def test_loading_is_weighed(tmp_path):
    results = by_name(bench.bench_load(CONFIG, tmp_path))
    assert set(results) == {
        f"load/{kind}{what}" for kind in ("single", "sharded") for what in ("", "/weights", "/resident", "/beyond")
    }
    assert results["load/single"]["format"] == "comfyui" and results["load/sharded"]["format"] == "official"
    weights = sum(
        tensor.numel() * tensor.element_size() for tensor in bench.make_dit(CONFIG, torch.bfloat16).parameters()
    )
    assert results["load/sharded/weights"]["value"] * bench.GIB == pytest.approx(weights, rel=0.01)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shards", [1, 3])
def test_the_checkpoint_made_for_it_is_whole(tmp_path, shards):
    path = bench.write_checkpoint(tmp_path, CONFIG, shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    dit, info = load_dit(path)
    assert dit.config == CONFIG and info.part == "dit" and dit.dtype == torch.bfloat16
    assert dit.video_patch_proj.weight.dtype == torch.float32


# ---- words


def test_lines_say_everything():
    lines = bench.format_lines(
        [
            {"name": "peak/124", "value": 1.6674, "unit": "GiB", "rows": 38222, "target": 2.5},
            {"name": "step/fp32/rel_l2", "value": 3.2e-7, "unit": "relative L2"},
        ]
    )
    assert lines == [
        "peak/124          1.667 GiB  (rows 38222, target 2.50)",
        "step/fp32/rel_l2  3.2e-07 relative L2",
    ]
    assert bench.format_lines([]) == []
