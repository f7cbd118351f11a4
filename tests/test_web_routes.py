"""What the page is told, without a page: labels and plans of a graph before it runs, and what the routes refuse."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from h3_runtime.demo.maker import make_model

from .comfy_graphs import full_graphs, minimal_graphs, node, prompted, sampler
from .sparse_shards import write_shards

ROOT = Path(__file__).resolve().parents[1]


def told(pack, graph: dict, **sizes) -> dict:
    return pack.routes.answer({"graph": graph, **sizes})


def title(pack, graph: dict, name: str) -> str:
    label = told(pack, graph)["labels"][name]
    return label.get("error") or label["fidelity"]["title"]


def rendered(**widgets) -> dict:
    """A render that has nothing to compare against the trained sizes: the default canvas, 49 steps."""
    graph = {**prompted(), "empty": node("H3RuntimeEmptyLatent"), "sampler": sampler(steps=49, **widgets)}
    graph["save"] = node("H3RuntimeDecodeAndSave", latent=["sampler", 0], video_vae=["vaes", 0], audio_vae=["vaes", 1])
    return graph


def with_widgets(graph: dict, name: str, **widgets) -> dict:
    changed = {**graph[name], "inputs": {**graph[name]["inputs"], **widgets}}
    return {**graph, name: changed}


# ---- labels


def test_the_defaults_are_lossless_from_the_loader_to_the_file(pack):
    labels = told(pack, rendered())["labels"]
    assert {name: label["fidelity"]["label"] for name, label in labels.items()} == dict.fromkeys(
        ("model", "clip", "vaes", "prompt", "sampler", "save"), "LOSSLESS"
    )
    assert labels["sampler"]["fidelity"]["title"] == "LOSSLESS (fp32 compute)" and not labels["sampler"]["assumed"]


@pytest.mark.parametrize(
    "name, widgets, words",
    [
        ("model", {"quantise": "int8_convrot"}, "was quantised while loading"),
        ("model", {"quantise": "fp8"}, "was quantised while loading"),
        ("sampler", {"steps": 20}, "a forward count other than"),
        ("sampler", {"video_shift": 6.0}, "shifts other than"),
    ],
)
def test_a_widget_that_costs_exactness_changes_every_label_after_it(pack, name, widgets, words):
    labels = told(pack, with_widgets(rendered(), name, **widgets))["labels"]
    for changed in (name, "sampler", "save"):
        fidelity = labels[changed]["fidelity"]
        assert fidelity["label"] == "APPROXIMATE", changed
        assert any(words in part["reason"] for part in fidelity["parts"] if part["label"] == "APPROXIMATE")
    assert labels["prompt"]["fidelity"]["label"] == labels["vaes"]["fidelity"]["label"] == "LOSSLESS"


def test_every_loader_that_quantises_says_so_where_its_part_is_used(pack):
    encoder = told(pack, with_widgets(rendered(), "clip", quantise="int8"))["labels"]
    assert {name for name, label in encoder.items() if label["fidelity"]["label"] == "APPROXIMATE"} == {
        "clip", "prompt", "sampler", "save",
    }  # fmt: skip
    vaes = told(pack, with_widgets(rendered(), "vaes", quantise="int8"))["labels"]
    assert {name for name, label in vaes.items() if label["fidelity"]["label"] == "APPROXIMATE"} == {"vaes", "save"}


def test_a_model_that_is_quantised_later_and_other_tiles_say_so(pack):
    graph = rendered()
    graph |= {
        "fewer": node("H3RuntimeQuantise", model=["model", 0], quantise="int8"),
        "second": with_model(graph["sampler"], "fewer"),
        "images": node("H3RuntimeDecodeVideo", latent=["sampler", 0], video_vae=["vaes", 0], tile=128),
        "file": node("H3RuntimeSaveVideo", images=["images", 0], latent=["sampler", 0]),
        "theirs": node("H3RuntimeDecodeVideo", latent=["sampler", 0], video_vae=["other", 0], tile=128),
        "other": node("VAELoader", vae_name="x"),
    }
    labels = told(pack, graph)["labels"]
    shown = {name: label["fidelity"]["label"] for name, label in labels.items()}
    assert [name for name, label in shown.items() if label == "APPROXIMATE"] == ["fewer", "second", "images", "file"]
    for name, path in (("fewer", "dit/int8"), ("images", "video-vae/other-tile"), ("file", "video-vae/other-tile")):
        assert path in {part["name"] for part in labels[name]["fidelity"]["parts"]}, name


def with_model(step: dict, name: str) -> dict:
    return {**step, "inputs": {**step["inputs"], "model": [name, 0]}}


@pytest.mark.parametrize("place", ["resident", "ram", "disk"])
def test_placement_never_changes_a_label(pack, place):
    assert title(pack, with_widgets(rendered(), "model", place=place), "sampler") == "LOSSLESS (fp32 compute)"


def test_what_is_beyond_the_reference_stands_beside_the_label(pack):
    graph = {
        **rendered(),
        "media": node("H3RuntimeSampleMedia", width=96, height=64, frames=22),
        "guided": node("H3RuntimeAddGuide", positive=["prompt", 0], latent=["empty", 0], frame=60, strength=0.5,
                       video_vae=["vaes", 0], image=["media", 0]),
        "encoded": node("H3RuntimeEncodeClip", video_vae=["vaes", 0], audio_vae=["vaes", 1], images=["media", 1]),
        "masked": node("H3RuntimeNoiseMasks", latent=["encoded", 0], mask=["media", 3]),
    }  # fmt: skip
    graph["sampler"] = sampler("guided", "masked", steps=49, denoise=0.5, stop_step=30)
    fidelity = told(pack, graph)["labels"]["sampler"]["fidelity"]
    assert fidelity["label"] == "LOSSLESS"
    assert fidelity["beyond_the_reference"] == [
        "guides in the middle",
        "guide strength",
        "masks",
        "denoise strength",
        "start and stop",
        "22 frames (0.9 s; trained 124 to 362)",
        "size 96x64",
    ]
    assert told(pack, graph)["labels"]["guided"]["fidelity"]["beyond_the_reference"] == [
        "guides in the middle",
        "guide strength",
    ]


def test_the_recipe_of_pictures_and_another_programs_prompt_are_told(pack):
    graph = full_graphs()["guides"]
    assert title(pack, graph, "framed").startswith("APPROXIMATE")
    plain = with_widgets(with_widgets(graph, "framed", recipe="reference"), "guided", recipe="comfy")
    assert title(pack, plain, "framed") == "LOSSLESS (fp32 compute)"
    assert title(pack, plain, "guided").startswith("APPROXIMATE")
    foreign = {**rendered(), "clip": node("CLIPLoader", clip_name="qwen.safetensors", type="minimax")}
    parts = told(pack, foreign)["labels"]["sampler"]["fidelity"]["parts"]
    assert ["condition/foreign"] == [part["name"] for part in parts if part["label"] != "LOSSLESS"]
    assert not [part for part in parts if part["name"].startswith("encoder/")]


def test_what_no_sampler_of_ours_made_has_no_label(pack):
    graph = {**rendered(), "sampler": node("KSampler", latent_image=["empty", 0], seed=1)}
    label = told(pack, graph)["labels"]["save"]
    assert label["fidelity"] is None and "carries no label" in label["assumed"][-1]


def test_every_node_with_a_label_is_in_the_graphs_of_the_tests(pack):
    """What the page shows of them is compared with Python's there, so a new one has to be added."""
    graphs = [*minimal_graphs().values(), *full_graphs().values()]
    used = {step["class_type"] for graph in graphs for step in graph.values()}
    needs_a_file, needs_a_server = {"H3RuntimeLoadLora", "H3RuntimeLoadPrompt"}, {"H3RuntimeRemoteRender"}
    assert set(pack.routes.node_lists()["labelled"]) - used == needs_a_file | needs_a_server
    for graph in graphs:
        answer = told(pack, graph)
        assert not [(name, told_) for name, told_ in answer["labels"].items() if "error" in told_]
        assert not [(name, told_) for name, told_ in answer["plans"].items() if "error" in told_]


def test_a_chain_of_accelerations_is_labelled_as_it_will_be(pack):
    last = node("H3RuntimeAccelerate", accelerator="second-order", acceleration=["first", 0])
    chain = {"first": node("H3RuntimeAccelerate", accelerator="forecast"), "last": last}
    (first,) = pack.run("H3RuntimeAccelerate", accelerator="forecast")
    (both,) = pack.run("H3RuntimeAccelerate", accelerator="second-order", acceleration=first)
    for name, made in (("first", first), ("last", both)):
        assert told(pack, chain)["labels"][name]["fidelity"] == made.fidelity.to_dict(), name


# ---- plans


def test_the_bar_and_the_memory_plan_node_say_the_same(pack):
    graph = {**minimal_graphs()["render"]}
    graph["plan"] = node(
        "H3RuntimeMemoryPlan", model=["model", 0], latent=["empty", 0], positive=["prompt", 0],
        video_vae=["vaes", 0], audio_vae=["vaes", 1], steps=2, vram_gib=24.0, ram_gib=64.0,
    )  # fmt: skip
    outputs = pack.walk({name: step for name, step in graph.items() if name not in ("sampler", "save")})
    (said,) = outputs["plan"]
    shown = told(pack, graph, vram_gib=24.0, ram_gib=64.0)["plans"]["sampler"]
    assert shown["state"] == "fits" and shown["card"] == "a card of 24 GiB"
    for line in shown["lines"]:
        if line.startswith(("card:", "denoise peak", "denoise:", "modulation")):
            assert line in said
    for name, stage in {stage["name"]: stage for stage in shown["stages"]}.items():
        row = re.search(rf"^{name}  +(.*)$", said, re.MULTILINE)
        if row:  # the text stage is gone once the prompt is encoded
            for where in ("card", "host"):
                value = stage[where]
                assert f"{value:.2f} GiB" in row[0] or f"{value:.1f} GiB" in row[0], (name, where, value, row[0])


@pytest.mark.parametrize("vram, state", [(96.0, "fits"), (24.0, "tight"), (6.0, "no")])
def test_fits_tight_and_too_much_for_the_released_size(pack, vram, state):
    """The official shards at their true size, as holes: 66 GB of weights, of which a card holds all, some or none."""
    folder = pack.base / "models" / "diffusion_models" / "official"
    if not folder.exists():
        write_shards(folder)
    big = with_widgets(rendered(), "empty", width=1344, height=768, frames=362)
    big = with_widgets(big, "model", model="official/model-00001-of-00013.safetensors")
    plan = told(pack, big, vram_gib=vram, ram_gib=128.0)["plans"]["sampler"]
    assert plan["state"] == state, plan.get("error")
    assert plan["streamed"] == (state != "fits") and bool(plan["refusal"]) == (state == "no")
    if state == "no":
        assert re.search(r"\(denoise\); this card has 5.5 GiB free: \d+ frames fit, or \d+x\d+", plan["refusal"])
    assert plan["peak_card"] == max(stage["card"] for stage in plan["stages"])
    assert [stage["name"] for stage in plan["stages"]] == ["text", "denoise", "video decode", "sound decode"]


def test_without_a_card_the_plan_is_of_main_memory(pack):
    plan = told(pack, rendered())["plans"]["sampler"]
    assert plan["card"] == "" and plan["free_card"] == plan["peak_card"] == 0
    assert 0 < plan["peak_host"] < plan["free_host"]


def test_what_is_known_when_the_graph_runs_is_said(pack):
    graph = {**rendered(), "number": node("SomeMath", a=3)}
    graph = with_widgets(graph, "empty", width=["number", 0], height=512)
    assert "width" in title(pack, graph, "sampler")  # width 0 and height 512: refused by the sentence of the node
    graph = with_widgets(graph, "empty", width=0, height=0, frames=["number", 0])
    assumed = told(pack, graph)["plans"]["sampler"]["assumed"]
    assert assumed == ["frames comes out of another node when the graph runs: nothing is assumed"]
    graph["number"] = node("PrimitiveInt", value=39)
    answer = told(pack, graph)
    assert not answer["plans"]["sampler"]["assumed"] and "39 frames" in answer["labels"]["sampler"]["fidelity"]["title"]


def test_parts_that_the_graph_lacks_are_assumed_as_released(pack):
    graph = {name: step for name, step in rendered().items() if name not in ("vaes", "save")}
    assert not told(pack, graph)["plans"]["sampler"]["assumed"], "the carried model knows its other parts"


def test_weights_that_are_loaded_now_count_as_free(pack):
    """Ours leave before they are loaded anew: after a render a plan must not say that it no longer fits."""
    import sys

    management = sys.modules["comfy.model_management"]
    part = type("Part", (), {"loaded": True, "in_host_memory": True, "info": type("Info", (), {"nbytes": 3 << 30})})
    loaded_model = type("Loaded", (), {"model": type("Patcher", (), {"part": part})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(management, "current_loaded_models", [loaded_model], raising=False)
        assert pack.host.freed_for(pack.host.compute_device()) == (0, 3 << 30)
        patch.setattr(part, "loaded", False)
        assert pack.host.freed_for(pack.host.compute_device()) == (0, 0)


# ---- what is refused


@pytest.mark.parametrize(
    "body, words",
    [
        (None, "the body is missing"),
        ([1], "the body is a list"),
        ({}, "graph is missing"),
        ({"graph": []}, "graph is a list"),
        ({"graph": {}, "path": "/etc/passwd"}, "'path' is not known here"),
        ({"graph": {"1": 5}}, "node '1' has no class_type"),
        ({"graph": {"1": {"class_type": 5, "inputs": {}}}}, "node '1' has no class_type"),
        ({"graph": {"1": {"class_type": "A", "inputs": []}}}, "node '1' has no inputs"),
        ({"graph": {"1": {"class_type": "A", "inputs": {"a": {}}}}}, "'a' of node '1' is an object"),
        ({"graph": {"1": {"class_type": "A", "inputs": {"a": [1, 2, 3]}}}}, "'a' of node '1' is a list"),
        ({"graph": {"1": {"class_type": "A", "inputs": {"a": float("inf")}}}}, "'a' of node '1' is a number"),
        ({"graph": {"1": {"class_type": "A", "inputs": {"a": 1 << 70}}}}, "'a' of node '1' is a number"),
        ({"graph": {"1": {"class_type": "A", "inputs": {"a": "x" * 200_001}}}}, "'a' of node '1' is a text"),
        ({"graph": {}, "vram_gib": -1}, "vram_gib is '-1'"),
        ({"graph": {}, "ram_gib": "64"}, "ram_gib is '64'"),
        ({"graph": {}, "ram_gib": float("nan")}, "ram_gib is 'nan'"),
        ({"graph": {}, "ram_gib": True}, "ram_gib is 'True'"),
        ({"graph": {str(i): {} for i in range(5001)}}, "the graph has 5001 nodes"),
    ],
)
def test_a_malformed_request_is_refused_in_a_sentence(pack, body, words):
    with pytest.raises(pack.routes.Refused) as refused:
        pack.routes.answer(body)
    assert words in str(refused.value) and len(str(refused.value)) < 200


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "C:\\x.safetensors", "<img src=x>.safetensors"])
def test_no_file_is_opened_that_the_node_does_not_offer(pack, name, monkeypatch):
    opened = []
    for kind in ("open_part", "find_file", "stamp"):
        where = pack.load if kind == "open_part" else pack.host
        monkeypatch.setattr(where, kind, lambda *given, **more: opened.append(given))
    for loader, widget in (("model", "model"), ("clip", "text_encoder"), ("vaes", "video_vae")):
        graph = with_widgets(rendered(), loader, **{widget: name})
        sentence = pack.routes.wrong_widgets(pack.routes.checked_graph(graph))[loader]
        assert name[:20] in sentence.replace("\\\\", "\\") and "not among its choices" in sentence
        assert told(pack, {loader: graph[loader]})["labels"][loader]["error"] == sentence
    saved = {"latent": node("H3RuntimeLoadLatent", file=name), "prompt": node("H3RuntimeLoadPrompt", file=name)}
    saved["sampler"] = sampler("prompt", "latent")
    assert "error" in told(pack, saved)["labels"]["sampler"]
    assert not opened


@pytest.mark.parametrize(
    "name, widgets, words",
    [
        ("sampler", {"steps": 0}, "H3 Sampler: steps is '0': give a number from 1 to 1000"),
        ("sampler", {"steps": 2.5}, "H3 Sampler: steps is '2.5': give a number"),
        ("sampler", {"resume": "yes"}, "H3 Sampler: resume is 'yes': it is on or off"),
        ("model", {"quantise": "int3"}, "H3 Load Model: quantise is 'int3', which is not among its choices"),
        ("sampler", {"model": 5}, "H3 Sampler: model is '5': it is an input to connect"),
        ("prompt", {"prompt": 7}, "H3 Encode Prompt: prompt is '7': it is a text"),
        ("empty", {"width": 100, "height": 64}, "width 100 is not a multiple of 32"),
    ],
)
def test_a_graph_that_cannot_run_has_a_sentence_for_a_label(pack, name, widgets, words):
    answer = told(pack, with_widgets(rendered(), name, **widgets))
    assert words in answer["labels"]["sampler"]["error"] and words in answer["plans"]["sampler"]["error"]


@pytest.mark.parametrize(
    "widgets, words",
    [
        ({"accelerator": "warp"}, "accelerator is 'warp', which is not among its choices"),
        ({"accelerator": "forecast", "accelerator.degree": "far"}, "accelerator.degree is 'far': give a number"),
        ({"accelerator": "preset", "accelerator.preset": "best"}, "accelerator.preset is 'best', which is not among"),
        ({"accelerator": "second-order"}, ""),
        ({"accelerator": "preset", "accelerator.preset": "lossless", "accelerator.degree": "of another choice"}, ""),
    ],
)
def test_options_below_a_choice_are_checked_as_the_choice_has_them(pack, widgets, words):
    wrong = pack.routes.wrong_widgets({"fast": node("H3RuntimeAccelerate", **widgets)})
    assert words in wrong.get("fast", "") and bool(wrong) == bool(words)


def test_a_circle_an_unknown_node_and_other_weights_end_in_a_sentence(pack):
    circle = {**rendered(), "masked": node("H3RuntimeNoiseMasks", latent=["again", 0])}
    circle |= {"again": node("H3RuntimeNoiseMasks", latent=["masked", 0]), "sampler": sampler(latent="masked")}
    assert "circle" in title(pack, circle, "sampler")
    loras = {"a": node("H3RuntimeLoadLora", model=["b", 0]), "b": node("H3RuntimeLoadLora", model=["a", 0])}
    looped = {**rendered(), **loras, "sampler": node("H3RuntimeSampler", model=["a", 0])}
    assert "circle" in title(pack, looped, "sampler")
    odd = {**rendered(), "odd": node("H3RuntimeNotThere", x=1)}
    assert "update" in pack.routes.wrong_widgets(odd)["odd"] and "odd" not in told(pack, odd)["labels"]
    make_model(pack.base / "models" / "diffusion_models")  # of FL2VA weights, as its file says
    references = with_widgets(minimal_graphs()["references"], "model", model="dit.safetensors")
    assert "Ref2VA weights are needed here" in title(pack, references, "sampler")


# ---- the page's files


def test_the_pages_files_are_plain_modules_that_ask_nobody_else():
    files = sorted((ROOT / "web").iterdir())
    assert [file.name for file in files] == [
        "badge.js", "compare.js", "forecast.js", "graph.js", "plan_bar.js", "player.js", "strip.js",
        "told.js", "words.js",
    ]  # fmt: skip
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 250, file.name
        assert not re.search(r"https?://|\binnerHTML\b|\beval\(|new Function|insertAdjacentHTML|document\.write", text)
        assert not re.search(r"LOSSLESS:\s*[\"']the|other than the release", text), "reasons come from Python"
        for source in re.findall(r"from \"([^\"]+)\"", text):
            assert source in ("../../scripts/api.js", "../../scripts/app.js") or (file.parent / source).is_file()


def test_both_languages_have_the_same_words():
    text = (ROOT / "web" / "words.js").read_text(encoding="utf-8")
    english, chinese = (
        re.findall(r"^  (?:(\w+)|\"([^\"]+)\"): \"(.+)\",$", block, re.MULTILINE)
        for block in re.search(
            r"const EN = \{(.*?)^\};.*?const ZH = \{(.*?)^\};", text, re.MULTILINE | re.DOTALL
        ).groups()
    )
    assert [entry[:2] for entry in english] == [entry[:2] for entry in chinese] and len(english) > 20
    assert all(re.search(r"[\u4e00-\u9fff]", entry[2]) for entry in chinese)
    asked = set()
    for file in (ROOT / "web").glob("*.js"):
        asked |= set(re.findall(r"\btold\.(\w+)", file.read_text(encoding="utf-8")))
    assert asked <= {entry[0] for entry in english}


def test_a_graph_that_takes_too_long_is_cut_off_and_says_so(pack, monkeypatch):
    monkeypatch.setattr(pack.foresee, "LONGEST_SECONDS", -1)
    answer = told(pack, rendered())
    assert len(answer["labels"]) == 6 and set(answer["plans"]) == {"sampler"}
    assert all("not foreseen" in label["error"] for label in [*answer["labels"].values(), *answer["plans"].values()])


@pytest.mark.parametrize("body", [b"[" * 200_000, b"{", b"\xff"])
@pytest.mark.parametrize("charset", ["utf-8", "no-such-charset"])
def test_a_body_that_cannot_be_read_is_refused(pack, monkeypatch, body, charset):
    """The route as the host's server calls it, with aiohttp's own reading of a body: bytes, charset, JSON."""
    routes, served = SimpleNamespace(get=lambda path: lambda call: call), {}
    routes.post = lambda path: lambda call: served.setdefault(path, call)
    server = SimpleNamespace(PromptServer=SimpleNamespace(instance=SimpleNamespace(routes=routes)))
    said = SimpleNamespace(web=SimpleNamespace(json_response=lambda data, status=200: (status, data)))
    monkeypatch.setitem(sys.modules, "server", server)
    monkeypatch.setitem(sys.modules, "aiohttp", said)
    pack.routes.add_routes()

    class Request:
        async def json(self):
            return json.loads(body.decode(charset))

    status, answer = asyncio.run(served["/h3_runtime/forecast"](Request()))
    assert status == 400 and "no JSON" in answer["error"]
