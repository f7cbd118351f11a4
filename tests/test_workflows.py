"""The bundled workflows without a ComfyUI: canvas file against API form, what a user must not meet, order of inputs.

workflows/NAME.json (canvas) ◀── the same nodes, widget values and links ──▶ tests/workflows/NAME.json (as queued)
node_inputs.json: every node's inputs and outputs in their order ──▶ saved workflows keep their values
"""

from __future__ import annotations

import importlib
import inspect
import json
import re

import pytest

from h3_runtime.demo.world import COLOURS, MOTION_WORDS, SHAPES, TONES

from .make_workflows import API, CANVAS, PACKAGE, PICTURES
from .workflow_graphs import workflows

NAMES = [workflow.name for workflow in workflows()]
RECORD = API.parent / "node_inputs.json"
OF_COMFYUI = {"MiniMaxH3ImageToVideo", "MiniMaxH3AddGuide", "VAEDecode", "VAEDecodeAudio", "PreviewImage"}
AFTER_SEED = "control_after_generate"  # a widget of the page alone: its value stands after the seed's


def read(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def canvas_of(name: str) -> dict:
    return read(CANVAS / f"{name}.json")


MUTED = {"13-here-lossless-against-a-server": 2}  # the server's side and the comparison, until there is a server


def nodes_of(name: str) -> list[dict]:
    """The nodes that run."""
    return [node for node in canvas_of(name)["nodes"] if not node["type"].endswith("Note") and node["mode"] == 0]


def test_every_file_is_described_and_every_description_has_its_files():
    for folder, suffix in ((CANVAS, ".json"), (CANVAS, ".jpg"), (API, ".json"), (PICTURES, ".jpg")):
        assert all(re.fullmatch(r"\d\d-[a-z0-9-]+", name) for name in NAMES), "names for any file system and address"
        assert sorted(path.stem for path in folder.glob(f"*{suffix}")) == sorted(NAMES), f"{folder.name}/*{suffix}"


@pytest.mark.parametrize("page", ["workflows.md", "workflows.zh.md"])
def test_every_workflow_has_its_section_and_picture(page):
    words = (PICTURES.parent / page).read_text(encoding="utf-8")
    assert [title[:2] for title in re.findall(r"^## (.+)$", words, re.MULTILINE)] == [name[:2] for name in NAMES]
    assert re.findall(r"!\[.*\]\(workflows/(.+)\.jpg\)", words) == NAMES


# ---- canvas and API form


def widget_values(node: dict) -> dict:
    """{name: value} of a node on the canvas. Its values stand in the order of the inputs that have a widget."""
    names = []
    for slot in node["inputs"]:
        if "widget" in slot:
            names += [slot["widget"]["name"]] + [AFTER_SEED] * (slot["name"] == "seed")
    values = node.get("widgets_values") or []
    assert len(names) == len(values), f"{node['type']}: {len(values)} values for {names}"
    return dict(zip(names, values))


def as_queued(name: str) -> dict:
    """What the canvas file says, in the API's form."""
    canvas = canvas_of(name)
    links = {link[0]: [str(link[1]), link[2]] for link in canvas["links"]}
    made = {}
    for node in nodes_of(name):
        inputs = {key: value for key, value in widget_values(node).items() if key != AFTER_SEED}
        inputs |= {slot["name"]: links[slot["link"]] for slot in node["inputs"] if slot.get("link") is not None}
        made[str(node["id"])] = (node["type"], inputs)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_the_canvas_is_what_is_queued(name):
    queued = {key: (step["class_type"], step["inputs"]) for key, step in read(API / f"{name}.json").items()}
    assert as_queued(name) == queued


@pytest.mark.parametrize("workflow", workflows(), ids=NAMES)
def test_the_canvas_is_what_is_described(workflow):
    described, queued = workflow.described(), read(API / f"{workflow.name}.json")
    boxes = [box for box in described["nodes"] if not (box["type"].endswith("Note") or box.get("muted"))]
    assert [box["type"] for box in boxes] == [step["class_type"] for step in queued.values()]
    ids = dict(zip((box["name"] for box in boxes), queued))
    for box, step in zip(boxes, queued.values()):
        given = {key: value for key, value in box["widgets"].items() if key not in (AFTER_SEED, *box["links"])}
        assert {key: step["inputs"][key] for key in given} == given, box["name"]
        linked = {key: value[0] for key, value in step["inputs"].items() if isinstance(value, list)}
        assert linked == {key: ids[source] for key, (source, _) in box["links"].items()}, box["name"]
    assert canvas_of(workflow.name)["id"] == described["id"]
    notes = [box["widgets"]["text"] for box in described["nodes"] if box["type"] == "MarkdownNote"]
    kept = [node["widgets_values"][0] for node in canvas_of(workflow.name)["nodes"] if node["type"] == "MarkdownNote"]
    assert kept == notes
    assert "`" not in notes[0], "the page's newer nodes show code in notes as blue on blue"


# ---- what a user must not meet


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_anywhere_and_runs_with_nothing(name):
    canvas, nodes = canvas_of(name), nodes_of(name)
    types = [node["type"] for node in nodes]
    assert {one for one in types if not one.startswith("H3Runtime")} <= OF_COMFYUI
    assert types.count("H3RuntimeLoadModel") == ("H3RuntimeSampler" in types), "one loader serves all samplers"
    assert types.count("H3RuntimeLoadVaes") == 1
    assert sum(node["mode"] != 0 for node in canvas["nodes"]) == MUTED.get(name, 0), "muted or bypassed"
    assert any(node["type"] == "MarkdownNote" for node in canvas["nodes"]) and len(canvas["groups"]) >= 4
    for node in nodes:
        ours = node["type"].startswith("H3Runtime")
        assert node["properties"]["cnr_id"] == (PACKAGE if ours else "comfy-core") and node["properties"]["ver"]
    values = [value for node in nodes for value in widget_values(node).values() if isinstance(value, str)]
    assert not [value for value in values if re.search(r"\.(png|mp4|wav|safetensors|gguf)\b", value)]
    seeds = [widget_values(node) for node in nodes if node["type"] == "H3RuntimeSampler"]
    assert all(one[AFTER_SEED] == "fixed" for one in seeds), "queued twice, nothing may run again"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_lies_over_anything(name):
    canvas = canvas_of(name)
    areas = [(node["title"] if "title" in node else node["type"], *frame(node, 30)) for node in canvas["nodes"]]
    for index, (one, *a) in enumerate(areas):
        for other, *b in areas[index + 1 :]:
            assert not crosses(a, b), f"{one} lies over {other}"
    frames = [(group["title"], *group["bounding"]) for group in canvas["groups"]]
    frames = [(title, x, y, x + width, y + height) for title, x, y, width, height in frames]
    for index, (one, *a) in enumerate(frames):
        for other, *b in frames[index + 1 :]:
            assert not crosses(a, b), f"the frame {one} lies over {other}"
        for node, *b in areas:
            inside = a[0] <= b[0] and a[1] <= b[1] and b[2] <= a[2] and b[3] <= a[3]
            assert inside or not crosses(a, b), f"{node} sticks out of {one}"


def frame(node: dict, title: int) -> tuple[float, ...]:
    x, y = node["pos"]
    width, height = node["size"]
    return x, y - title, x + width, y + height


def crosses(a, b) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("name", NAMES)
def test_the_note_says_what_a_user_asks(name):
    (words,) = [node["widgets_values"][0] for node in canvas_of(name)["nodes"] if node["type"] == "MarkdownNote"]
    assert words.startswith(f"# {name[:2]} ")
    pickers = {"H3RuntimeLoadModel": "*H3 Load Model*", "H3RuntimeLoadVaes": "*H3 Load VAEs*"}
    pickers |= {"H3RuntimeLoadTextEncoder": "*H3 Load Text Encoder*", "H3RuntimeLoadLora": "*H3 Load LoRA*"}
    types = {node["type"] for node in nodes_of(name)}
    for said in ("**Run**", "Real weights.", "The label.", *(pickers[kind] for kind in types & set(pickers))):
        assert said in words
    if "H3RuntimeSampleMedia" in {node["type"] for node in nodes_of(name)}:
        assert "*Load Image*" in words or "*Load Video*" in words


@pytest.mark.parametrize("name", NAMES)
def test_the_words_are_of_the_world_that_the_small_model_knows(name):
    values = [value for node in nodes_of(name) for key, value in widget_values(node).items() if key == "prompt"]
    for prompt in values:
        assert read_scene(prompt.replace("in the colour of <Picture 1>", "").strip()), prompt


def read_scene(prompt: str) -> bool:
    """Whether ``prompt`` is a sentence of the small world."""
    colours, shapes, tones = "|".join(COLOURS), "|".join(SHAPES), "|".join(TONES)
    motions = "|".join(words for words in MOTION_WORDS.values() if "{" not in words)
    sound = rf"({tones}) (tone|beeps|tone, then a beep)"
    return bool(re.fullmatch(rf"a (({colours}) )?({shapes}) +({motions})( on the (left|right))?, {sound}", prompt))


# ---- order of inputs and outputs: a saved canvas holds values by their place


def order_of(schema) -> dict:
    """Inputs as the page lists them, required ones first, and outputs."""
    return {
        "required": [field.id for field in schema.inputs if not field.optional],
        "optional": [field.id for field in schema.inputs if field.optional],
        "outputs": [output.display_name for output in schema.outputs],
    }


def test_inputs_and_outputs_are_only_ever_added_at_the_end(pack):
    record = read(RECORD)
    schemas = [node.define_schema() for node in importlib.import_module(f"{pack.name}.nodes").node_classes()]
    now = {schema.node_id: order_of(schema) for schema in schemas}
    assert set(record) <= set(now), "a node that saved workflows use is gone"
    for node, kept in record.items():
        assert now[node]["required"] == kept["required"], f"{node}: old graphs do not have a new required input"
        for part in ("optional", "outputs"):
            there = now[node][part]
            assert there[: len(kept[part])] == kept[part], f"{node}: {part} changed places; new ones go to the end"
    assert record == now, "new nodes, inputs and outputs are added to node_inputs.json, at the end"


def test_the_hosts_questions_about_inputs_take_every_input(pack):
    """``fingerprint_inputs`` is called with all of a node's inputs: one that it does not take makes the host warn and
    run the node, and all that follows, at every queueing."""
    asked = 0
    for node in importlib.import_module(f"{pack.name}.nodes").node_classes():
        owner = next(base for base in node.__mro__ if "fingerprint_inputs" in vars(base))
        if owner.__module__.startswith(pack.name):
            asked += 1
            inputs = {field.id: None for field in node.define_schema().inputs}
            inspect.signature(node.fingerprint_inputs).bind(**inputs)
    assert asked >= 5
