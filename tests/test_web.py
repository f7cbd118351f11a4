"""The badge and the plan bar on ComfyUI's own page, in a headless Chromium, against what Python says.

COMFYUI_PYTHON has to have playwright and the machine a Chromium; COMFYUI_FRONTEND may name the static folder of another
comfyui-frontend-package. Each session of the page is one call of web_page.py; its answers are shared by the tests.

    python -m tests.test_web FOLDER      writes docs/badge.png and docs/plan_bar.png anew, by way of FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .comfy_graphs import full_graphs, minimal_graphs, node
from .comfy_server import ROOT, ComfyServer, find_checkout, find_python
from .sparse_shards import write_shards

pytestmark = pytest.mark.needs("browser")
CHECKOUT, WHY = find_checkout()
LABEL, PLAN = "h3_runtime_label", "h3_runtime_plan"
NO_BROWSER = 3
HOSTILE = "<img src=x onerror=h3pwned=1>&quot;.safetensors"
SHARD = "official/model-00001-of-00013.safetensors"
SHOWN = {"encode": "pictures", "video decode": "picture", "sound decode": "sound"}
STRIPPED = ["**/extensions/minimax-h3-runtime/**"]


def numbered(graph: dict, first: int = 1) -> tuple[dict, dict[str, str]]:
    """The graph under numbers from ``first`` on, as the page wants it, and the number of each name. No two graphs of
    a visit share a number: the page keeps a widget's value under it."""
    ids = {name: str(number) for number, name in enumerate(graph, start=first)}
    made = {}
    for name, step in graph.items():
        inputs = {k: [ids[v[0]], v[1]] if isinstance(v, list) else v for k, v in step["inputs"].items()}
        made[ids[name]] = {**step, "inputs": inputs, "_meta": {"title": name}}
    return made, ids


class Session:
    """One visit to the page: ``step`` notes what to do, ``go`` does it all; ``of(key)`` is a step's answer."""

    def __init__(self, server: ComfyServer, out: Path, block=()):
        self.server, self.out, self.block = server, out, list(block)
        self.steps, self.keys = [], []

    def step(self, name: str, argument=None, key: str | None = None) -> None:
        self.steps.append([name, argument])
        self.keys.append(key)

    def go(self) -> Session:
        asked = {"url": f"http://127.0.0.1:{self.server.port}", "out": str(self.out), "block": self.block}
        done = subprocess.run(
            [find_python(), str(ROOT / "tests" / "web_page.py")],
            input=json.dumps({**asked, "steps": self.steps}),
            capture_output=True,
            text=True,
            timeout=400,
        )
        if done.returncode == NO_BROWSER:
            pytest.skip(f"needs browser: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr[-3000:]
        told = json.loads(done.stdout)
        self.console, self.answers = told["console"], dict(zip(self.keys, told["answers"]))
        return self

    def of(self, key: str):
        return self.answers[key]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if CHECKOUT is None:
        pytest.skip(f"needs comfyui: {WHY}")
    running = started(tmp_path_factory.mktemp("web"))
    yield running
    running.kill()


def started(base: Path) -> ComfyServer:
    options = ["--front-end-root", os.environ["COMFYUI_FRONTEND"]] if os.environ.get("COMFYUI_FRONTEND") else []
    try:
        made = ComfyServer(CHECKOUT, base, *options)
        models = base / "models" / "diffusion_models"
        write_shards(models / "official")
        if sys.platform != "win32":  # where such a name cannot be
            (models / HOSTILE).write_bytes(b"")
        (base / "user" / "default").mkdir(parents=True, exist_ok=True)
        settings = base / "user" / "default" / "comfy.settings.json"
        settings.write_text(json.dumps({"Comfy.TutorialCompleted": True}), encoding="utf-8")
        return made.start()
    except RuntimeError as error:
        pytest.skip(f"needs comfyui: it does not start here ({error})")


COMPARED = {
    **{name: graph for name, graph in minimal_graphs().items() if name != "files"},
    "guides": {**full_graphs()["guides"], "empty": node("H3RuntimeEmptyLatent", width=96, height=64, frames=39)},
}
NUMBERED = {name: numbered(graph, 100 * place) for place, (name, graph) in enumerate(COMPARED.items(), start=1)}
RENDER, IDS = numbered(minimal_graphs()["render"], 5000)

# Reroute, primitive, bypass, mute and subgraph, made on the page.
TWISTED = """async () => {
  const app = h3.app(), graph = app.graph;
  const add = (type) => { const made = LiteGraph.createNode(type); graph.add(made); return made; };
  const find = (type) => graph.nodes.find((n) => n.comfyClass === type);
  const slot = (node, name) => node.inputs.findIndex((input) => input.name === name);
  const sampler = find('H3RuntimeSampler'), empty = find('H3RuntimeEmptyLatent');
  const reroute = add('Reroute');
  empty.connect(0, reroute, 0); reroute.connect(0, sampler, slot(sampler, 'latent'));
  const primitive = add('PrimitiveNode');
  primitive.connect(0, sampler, slot(sampler, 'steps'));
  primitive.widgets[0].value = 7;
  find('H3RuntimeAddGuide').mode = 4;
  find('H3RuntimeDecodeSound').mode = 2;
  let subgraph = false;
  if (graph.convertToSubgraph) {
    const prompt = find('H3RuntimeFirstLastFrame');
    graph.convertToSubgraph(new Set([prompt, find('H3RuntimeAddGuide')]));
    subgraph = true;
  }
  await new Promise((done) => setTimeout(done, 500));
  const { readGraph } = await import('/extensions/minimax-h3-runtime/graph.js');
  return { subgraph, ours: readGraph(app.rootGraph ?? app.graph).graph, theirs: (await app.graphToPrompt()).output };
}"""


@pytest.fixture(scope="module")
def visit(server, stripped, tmp_path_factory) -> Session:
    """The long visit: every graph, changes, hovering, a run, in the canvas renderer."""
    page = Session(server, tmp_path_factory.mktemp("shots"))
    page.step("setting", ["Comfy.VueNodes.Enabled", False])
    for name, (made, ids) in NUMBERED.items():
        page.step("load", made)
        page.step("settled", list(ids.values()), name)
    page.step("load_workflow", stripped.of("saved"))
    page.step("settled", [IDS["sampler"]])
    page.step("saved", key="saved")
    page.step("load", RENDER)
    page.step("settled", list(IDS.values()), "before")
    page.step("prompt", key="prompt")
    page.step("boxes", IDS["sampler"], "boxes")
    page.step("look_at", [IDS["sampler"]])
    page.step("hover", [IDS["sampler"], LABEL], "hover label")
    page.step("shot", "hover")
    page.step("hover", [IDS["sampler"], PLAN], "hover plan")
    page.step("away")
    page.step("run", 120, "run")
    page.step("settled", [IDS["sampler"], IDS["save"]], "ran")
    other = {"label": "EXACT MATH", "title": "EXACT MATH <b>x</b>", "beyond_the_reference": [], "parts": []}
    event = json.dumps({"node": IDS["sampler"], "output": {"h3_fidelity": [other]}})
    page.step("evaluate", f"() => {{ window.comfyAPI.api.api.dispatchCustomEvent('executed', {event}); }}")
    page.step("read", [IDS["sampler"]], "differs")
    page.step("hover", [IDS["sampler"], LABEL], "hover differs")
    page.step("away")
    page.step("set", [IDS["model"], "quantise", "int8_convrot"])
    page.step("settled", list(IDS.values()), "quantised")
    page.step("set", [IDS["model"], "quantise", "no"])
    page.step("set", [IDS["model"], "model", SHARD])
    for name in ("width", "height", "frames"):
        page.step("set", [IDS["empty"], name, {"width": 1344, "height": 768, "frames": 362}[name]])
    page.step("setting", ["H3Runtime.Plan.RamGiB", 128])
    for vram in (96, 24, 6):
        page.step("setting", ["H3Runtime.Plan.CardGiB", vram])
        page.step("settled", [IDS["sampler"]], f"card {vram}")
    page.step("hover", [IDS["sampler"], PLAN], "hover no")
    page.step("setting", ["H3Runtime.Plan.CardGiB", 0])
    page.step("setting", ["H3Runtime.Plan.RamGiB", 0])
    page.step("set", [IDS["model"], "model", HOSTILE])
    page.step("settled", [IDS["model"], IDS["sampler"]], "hostile")
    page.step("look_at", [IDS["model"]])
    page.step("hover", [IDS["model"], LABEL], "hover hostile")
    page.step("evaluate", "() => window.h3pwned ?? null", "pwned")
    page.step("load", numbered(minimal_graphs()["frames"], 6000)[0])
    page.step("evaluate", TWISTED, "twisted")
    page.step("requests", key="requests")
    return page.go()


@pytest.fixture(scope="module")
def stripped(server, tmp_path_factory) -> Session:
    """The same page without our files."""
    page = Session(server, tmp_path_factory.mktemp("stripped"), STRIPPED)
    page.step("setting", ["Comfy.VueNodes.Enabled", False])
    page.step("load", RENDER)
    page.step("saved", key="saved")
    page.step("prompt", key="prompt")
    page.step("requests", key="requests")
    return page.go()


def forecast(server, graph: dict, **sizes) -> dict:
    return server.request("/h3_runtime/forecast", {"graph": graph, **sizes})


def badges(answer: list, ids: dict[str, str]) -> dict[str, dict | None]:
    return {name: pair[0] for name, pair in zip(ids, answer)}


@pytest.mark.parametrize("name", COMPARED)
def test_every_badge_and_bar_says_what_python_says(server, visit, name):
    made, ids = NUMBERED[name]
    told, shown = forecast(server, made), visit.of(name)
    for (node_name, number), (badge, plan) in zip(ids.items(), shown):
        assert (badge is not None) == (number in told["labels"]), node_name
        assert (plan is not None) == (number in told["plans"]), node_name
        if badge is not None:
            fidelity = told["labels"][number]["fidelity"]
            assert badge["source"] == "foreseen" and badge["title"] == (fidelity["title"] if fidelity else "")
            assert badge["words"][0] == (fidelity["label"] if fidelity else "no label")
            assert ("+ BEYOND THE REFERENCE" in badge["words"]) == bool(fidelity and fidelity["beyond_the_reference"])
        if plan is not None:
            stages = told["plans"][number]["stages"]
            assert plan["stages"] == [SHOWN.get(stage["name"], stage["name"]) for stage in stages]
            assert plan["numbers"] == pytest.approx([stage["host"] for stage in stages], rel=0.02)


@pytest.mark.parametrize("name", [name for name in COMPARED if name != "guides"])
def test_what_was_foreseen_is_what_the_run_says(server, name):
    told, done = forecast(server, COMPARED[name]), server.run(COMPARED[name])
    assert done.status == "success", done.error
    compared = 0
    for node_name, output in done.outputs.items():
        for title in output.get("h3_label", ()):
            compared += 1
            assert told["labels"][node_name]["fidelity"]["title"] == title, node_name
            assert {part["name"] for part in told["labels"][node_name]["fidelity"]["parts"]} == {
                part["name"] for part in output["h3_fidelity"][0]["parts"]
            }, node_name
    assert compared or name == "compare", "only clips of no render have no label"


def test_labels_follow_the_widgets(visit):
    before, after = (badges(visit.of(key), IDS) for key in ("before", "quantised"))
    assert before["model"]["words"] == ["LOSSLESS"] and after["model"]["words"] == ["APPROXIMATE"]
    assert before["model"]["colour"] != after["model"]["colour"]
    assert after["clip"] == before["clip"] and after["sampler"]["source"] == "foreseen", (
        "the run's label is of the past"
    )


def test_reasons_on_hover(visit):
    label, plan = visit.of("hover label"), visit.of("hover plan")
    assert not label["hidden"] and "a forward count other than the release's 49" in label["text"]
    assert label["text"].startswith("APPROXIMATE (fp32 compute) + BEYOND THE REFERENCE: 22 frames")
    assert plan["text"].startswith("no card here") and "in all, loading left out" in plan["text"]


def test_after_a_run_the_results_label_stands(visit):
    assert visit.of("run") == "execution_success"
    before = badges(visit.of("before"), IDS)
    for name, (badge, _) in zip(("sampler", "save"), visit.of("ran")):
        assert badge["source"] == "run" and badge["title"] == before[name]["title"] and "≠" not in badge["text"]
    ((badge, _),) = visit.of("differs")
    assert badge["words"] == ["≠ EXACT MATH"] and badge["source"] == "run"
    note = visit.of("hover differs")
    assert "The run gave another label than was foreseen: APPROXIMATE" in note["text"]
    assert "<b>x</b>" in note["text"] and "&lt;b&gt;x&lt;/b&gt;" in note["html"]


@pytest.mark.parametrize("vram, state", [(96, "fits"), (24, "tight"), (6, "no")])
def test_the_bar_shows_the_plan_against_the_card(server, visit, vram, state):
    graph = json.loads(json.dumps(RENDER))
    graph[IDS["model"]]["inputs"]["model"] = SHARD
    graph[IDS["empty"]]["inputs"] |= {"width": 1344, "height": 768, "frames": 362}
    told = forecast(server, graph, vram_gib=vram, ram_gib=128)["plans"][IDS["sampler"]]
    ((_, plan),) = visit.of(f"card {vram}")
    assert plan["state"] == told["state"] == state
    numbers = [stage[where] for stage in told["stages"] for where in ("card", "host")]
    assert plan["numbers"] == pytest.approx(numbers)
    free = [told["free_card"], told["free_host"]] * len(told["stages"])
    assert plan["widths"] == pytest.approx([min(100, 100 * used / of) for used, of in zip(numbers, free)], rel=1e-3)
    if state == "no":
        for sentence in (told["refusal"], *told["notes"]):
            assert sentence in visit.of("hover no")["text"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs os: such a file name cannot be")
def test_hostile_names_are_shown_as_text(visit):
    (model, _), (_, plan) = visit.of("hostile")
    assert model["words"] == ["not known yet"] and plan["state"] == "unknown"
    note = visit.of("hover hostile")
    assert "onerror" in note["text"] and "<img" not in note["html"] and "<img" not in plan["html"]
    assert visit.of("pwned") is None


def test_nothing_overlaps(visit):
    boxes = {name: box for name, *box in visit.of("boxes")}
    label, plan = boxes[LABEL], boxes[PLAN]
    assert label[3] <= plan[1] and label[3] - label[1] >= 14 and plan[3] - plan[1] >= 90


def test_neither_the_file_nor_the_prompt_knows_of_the_page(visit, stripped):
    assert visit.of("prompt") == stripped.of("prompt")
    nowhere = {"extra": None, "id": None}  # where the view stands; a file without an id is given one
    assert {**visit.of("saved"), **nowhere} == {**stripped.of("saved"), **nowhere}


def test_the_graph_is_read_as_it_would_be_queued(visit):
    told = visit.of("twisted")
    ours, theirs = told["ours"], told["theirs"]
    assert told["subgraph"] and any(":" in number for number in theirs)
    assert set(ours) == set(theirs)
    for number, step in theirs.items():
        assert ours[number]["class_type"] == step["class_type"]
        assert ours[number]["inputs"] == step["inputs"], step["class_type"]
    (sampler,) = [step for step in ours.values() if step["class_type"] == "H3RuntimeSampler"]
    assert sampler["inputs"]["steps"] == 7


def test_the_console_is_quiet_and_nobody_else_is_asked(visit, stripped):
    usual = {text for _, text in stripped.console}
    more = [[kind, text] for kind, text in visit.console if kind in ("error", "warning", "pageerror")]
    assert not [said for said in more if said[1] not in usual and "404" not in said[1]]
    hosts = {url.split("/")[2] for url in visit.of("requests") if "h3_runtime" in url or "minimax-h3" in url}
    assert hosts == {f"127.0.0.1:{visit.server.port}"}
    others = {url.split("/")[2] for url in visit.of("requests") if url.startswith("http")}
    assert others <= {url.split("/")[2] for url in stripped.of("requests") if url.startswith("http")} | hosts


def test_routes_on_the_real_server(server):
    lists = server.get("/h3_runtime/nodes")
    assert "H3RuntimeSampler" in lists["labelled"] and lists["planned"] == ["H3RuntimeSampler"]
    assert "graph is missing" in server.request("/h3_runtime/forecast", {"vram_gib": 4})["error"]
    told = forecast(server, {"1": node("H3RuntimeLoadModel", model="../../secret.safetensors")})
    assert "not among its choices" in told["labels"]["1"]["error"]


def test_nodes_2_shows_the_same(server, tmp_path_factory):
    page = Session(server, tmp_path_factory.mktemp("vue"))
    page.step("setting", ["Comfy.VueNodes.Enabled", True])
    page.step("load", RENDER)
    page.step("settled", list(IDS.values()), "shown")
    page.step("look_at", [IDS["sampler"]])
    page.step("hover", [IDS["sampler"], LABEL], "hover")
    page.step("set", [IDS["sampler"], "steps", 49])
    page.step("settled", [IDS["sampler"]], "changed")
    page.step("saved", key="saved")
    page.step("setting", ["Comfy.VueNodes.Enabled", False])
    page.go()
    told = forecast(server, RENDER)["labels"]
    for number, (badge, _) in zip(IDS.values(), page.of("shown")):
        assert (badge or {}).get("title") == (told[number]["fidelity"]["title"] if number in told else None)
    assert "a forward count other than" in page.of("hover")["text"]
    ((badge, plan),) = page.of("changed")
    assert badge["words"][0] == "LOSSLESS" and plan["state"] == "fits"
    values = [saved["widgets_values"] for saved in page.of("saved")["nodes"] if saved["type"] == "H3RuntimeSampler"]
    assert len(values[0]) == 10


def main(folder: Path) -> None:
    """The pictures of the documentation."""
    server = started(folder)
    try:
        page = Session(server, ROOT / "docs")
        page.step("setting", ["Comfy.VueNodes.Enabled", False])
        page.step("load", RENDER)
        page.step("set", [IDS["model"], "model", SHARD])
        for name, value in {"width": 1344, "height": 768, "frames": 362}.items():
            page.step("set", [IDS["empty"], name, value])
        page.step("set", [IDS["sampler"], "steps", 49])
        page.step("setting", ["H3Runtime.Plan.RamGiB", 64])
        page.step("setting", ["H3Runtime.Plan.CardGiB", 24])
        page.step("settled", [IDS["sampler"]])
        page.step("look_at", [IDS["sampler"]])
        page.step("hover", [IDS["sampler"], PLAN])
        page.step("shot", ["plan_bar", 90, 90, 520, 720])
        page.step("set", [IDS["model"], "quantise", "int8_convrot"])
        page.step("settled", [IDS["model"]])
        page.step("look_at", [IDS["model"]])
        page.step("hover", [IDS["model"], LABEL])
        page.step("shot", ["badge", 90, 90, 620, 420])
        page.step("setting", ["H3Runtime.Plan.RamGiB", 0])
        page.step("setting", ["H3Runtime.Plan.CardGiB", 0])
        page.go()
    finally:
        server.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
