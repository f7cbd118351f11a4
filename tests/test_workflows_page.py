"""The bundled workflows on the real page of a real ComfyUI, in headless Chromium.

    templates of the page ─▶ every workflow loaded, queued, finished, queued again ─▶ its mp4 dropped back
    pictures of each after its run and of an error ─▶ the folder that H3_PICTURES names (looked at by people)

Needs what the server tests need, and playwright in ComfyUI's interpreter. FRONTEND names another build of the page.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

from .comfy_server import ComfyServer, find_checkout, find_python
from .make_workflows import API, CANVAS, PACKAGE, on_page
from .workflow_graphs import workflows

pytestmark = [pytest.mark.needs("comfyui"), pytest.mark.needs("browser")]
NAMES = [workflow.name for workflow in workflows()]
TEXT = "02-text-to-video-lossless"
NEWER = {"Comfy.VueNodes.Enabled": True}

CHECKOUT, WHY = find_checkout()
if CHECKOUT is None:
    pytest.skip(f"needs comfyui: {WHY}", allow_module_level=True)
if subprocess.run([find_python(), "-c", "import playwright.sync_api"], capture_output=True).returncode:
    pytest.skip(f"needs browser: {find_python()} has no playwright", allow_module_level=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    page = os.environ.get("FRONTEND")
    # The host's default cache lets results go when other programs fill the memory: then they would rightly run again.
    options = ["--cache-classic", *(["--front-end-root", page] if page else [])]
    try:
        running = ComfyServer(CHECKOUT, tmp_path_factory.mktemp("page"), *options).start()
    except RuntimeError as error:
        pytest.skip(f"needs comfyui: it does not start here ({error})")
    yield running
    running.kill()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    named = os.environ.get("H3_PICTURES")
    return Path(named) if named else tmp_path_factory.mktemp("pictures")


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def queued(name: str) -> dict:
    return read(API / f"{name}.json")


def bare(api: dict, kept: dict) -> dict:
    """Node types, widget values and links of an API form; without the widgets that nodes got since ``kept`` was made,
    which stand at their defaults."""
    found = {}
    for key, step in api.items():
        old = kept.get(key, step)["inputs"]
        links = {name: value for name, value in step["inputs"].items() if isinstance(value, list)}
        found[key] = (step["class_type"], {name: step["inputs"].get(name) for name in old} | links)
    return found


def as_kept(name: str) -> dict:
    return bare(queued(name), queued(name))


def ours(errors: list[str]) -> list[str]:
    """Errors that this package caused: uncaught ones, and those that name it."""
    return [error for error in errors if error.startswith("uncaught") or PACKAGE in error or "H3Runtime" in error]


@pytest.fixture(scope="module")
def opened(server, pictures):
    """opened(name): a workflow through the page's own address of it, loaded, run, and run again; once per name."""

    @functools.cache
    def done(name: str) -> dict:
        address = f"/api/workflow_templates/{PACKAGE}/{name}.json"
        asked = {"do": "open", "template": address, "picture": f"{name}.png", "twice": True}
        return on_page(server, [asked], pictures)[0]

    return done


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_runs(opened, name):
    done = opened(name)
    assert done["end"] == "execution_success", done
    assert done["missing"] == [] and ours(done["errors"]) == []
    assert bare(done["api"], queued(name)) == as_kept(name), "the page queues what the test without a page runs"
    assert done["faults"] == [], "after its run nothing lies over anything"
    assert "H3RuntimeLoadVaes" in done["told"], "what nodes say of the run stays on them (web/told.js)"


@pytest.mark.parametrize("name", NAMES)
def test_queued_again_nothing_runs_again(opened, name):
    assert set(opened(name)["cached"]) == set(queued(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_keeps_every_value(opened, name):
    there = {node["id"]: node.get("widgets_values") or [] for node in opened(name)["canvas"]["nodes"]}
    for node in read(CANVAS / f"{name}.json")["nodes"]:
        kept = node.get("widgets_values") or []
        assert there[node["id"]][: len(kept)] == kept, node["type"]


def test_a_saved_clip_dropped_on_the_canvas_brings_its_workflow_back(server, opened, pictures):
    first = opened(TEXT)
    clip = server.output / "h3" / "text_00001_.mp4"
    (done,) = on_page(server, [{"do": "drop", "file": str(clip), "picture": "dropped.png"}], pictures)
    assert bare(done["api"], queued(TEXT)) == as_kept(TEXT) and ours(done["errors"]) == []
    here, there = ([node["pos"] for node in one["nodes"]] for one in (done["canvas"], first["canvas"]))
    assert here == there


def test_the_new_nodes_of_the_page_show_them_too(server, pictures):
    asked = [
        {"do": "open", "canvas": read(CANVAS / f"{name}.json"), "picture": f"{name}-new.png", "settings": NEWER}
        for name in NAMES
    ]
    for name, done in zip(NAMES, on_page(server, asked, pictures)):
        assert done["end"] == "execution_success" and ours(done["errors"]) == [], done
        assert bare(done["api"], queued(name)) == as_kept(name)
        assert done["drawn faults"] == [], f"{name}: nothing lies over anything"


def test_the_template_list_names_them(server, pictures):
    asked = {"do": "templates", "package": PACKAGE, "picture": "templates.png"}
    (done,) = on_page(server, [asked], pictures)
    for name in NAMES:
        assert name in done["words"], f"{name} is not listed"
    assert ours(done["errors"]) == []


def test_an_error_is_one_sentence_on_its_node(server, pictures):
    changes = [["H3RuntimeEmptyLatent", "height", 0]]
    asked = {"do": "fail", "canvas": read(CANVAS / f"{TEXT}.json"), "changes": changes, "picture": "error.png"}
    (done,) = on_page(server, [asked], pictures)
    assert done["end"] == "execution_error"
    assert done["detail"]["exception_message"].strip() == (
        "width is 128 and height 0: give both, or 0 for both to use the ratio"
    )
    assert "height 0: give both" in done["words"], "the sentence is not on the page"
