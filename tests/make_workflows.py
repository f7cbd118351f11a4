"""Make the bundled workflows again, on the page of a real ComfyUI: `python -m tests.make_workflows [NAME ...]`

    workflow_graphs.py ─▶ real page (built, run, laid out) ─▶ workflows/NAME.json      the canvas, for people
                                                           ├▶ workflows/NAME.jpg       its picture, for the templates
                                                           ├▶ docs/workflows/NAME.jpg  the same, large
                                                           └▶ tests/workflows/NAME.json  what the page would queue

COMFYUI_PATH and COMFYUI_PYTHON as for the tests (comfy_server.py); the interpreter needs playwright.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from .comfy_server import ROOT, ComfyServer, find_checkout, find_python
from .workflow_graphs import workflows

CANVAS, API, PICTURES = ROOT / "workflows", ROOT / "tests" / "workflows", ROOT / "docs" / "workflows"
PACKAGE = "minimax-h3-runtime"
THUMBNAIL, LARGE = (640, 360), (1600, 900)
SEEN = (1650, 850)  # pixels of the canvas on a common screen


def on_page(server: ComfyServer, tasks: list[dict], folder: Path, seconds: float = 1500) -> list[dict]:
    """The results of comfy_page.py's tasks. RuntimeError with the end of its output when it fails."""
    script = Path(__file__).with_name("comfy_page.py")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [find_python(), str(script), str(server.port), str(folder)],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def version() -> str:
    return re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]


def view(canvas: dict) -> dict:
    """How the canvas is first seen: whole where its words can be read then, else its upper left."""
    corners = [(*node["pos"], *node["size"]) for node in canvas["nodes"]]
    corners += [tuple(group["bounding"]) for group in canvas["groups"]]
    left, top = (min(corner[axis] for corner in corners) for axis in (0, 1))
    right, bottom = (max(corner[axis] + corner[axis + 2] for corner in corners) for axis in (0, 1))
    whole = min(SEEN[0] / (right - left), SEEN[1] / (bottom - top))
    scale = min(1.0, whole) if whole >= 0.5 else 0.6
    return {"scale": scale, "offset": [80 / scale - left, 80 / scale - top]}


def finished(canvas: dict, identity: str, core: str) -> dict:
    """The canvas with an id that stays, the packages its nodes come from, and a view to begin with."""
    canvas = {**canvas, "id": identity, "extra": {**canvas["extra"], "ds": view(canvas)}}
    for node in canvas["nodes"]:
        ours = node["type"].startswith("H3Runtime")
        node["properties"] |= {"cnr_id": PACKAGE, "ver": version()} if ours else {"cnr_id": "comfy-core", "ver": core}
    return canvas


def write(path: Path, content: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def shrink(picture: str, path: Path, size: tuple[int, int]) -> None:
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    Image.open(picture).convert("RGB").resize(size, Image.Resampling.LANCZOS).save(path, quality=80, optimize=True)


def main(names: list[str]) -> int:
    checkout, why = find_checkout()
    if checkout is None:
        print(f"a ComfyUI is needed: {why}")
        return 1
    chosen = [workflow for workflow in workflows() if not names or any(name in workflow.name for name in names)]
    described = [workflow.described() for workflow in chosen]
    with tempfile.TemporaryDirectory() as work:
        server = ComfyServer(checkout, Path(work) / "base").start()
        try:
            core = server.get("/system_stats")["system"]["comfyui_version"]
            tasks = [{"do": "make", "spec": spec, "picture": f"{spec['name']}.png"} for spec in described]
            for spec, result in zip(described, on_page(server, tasks, Path(work))):
                if result["end"] != "execution_success":
                    why = result.get("detail") or {}
                    print(f"{spec['name']}: {result['end']} {why.get('node_type')} {why.get('exception_message', why)}")
                    return 1
                write(CANVAS / f"{spec['name']}.json", finished(result["canvas"], spec["id"], core))
                write(API / f"{spec['name']}.json", result["api"])
                shrink(result["picture"], CANVAS / f"{spec['name']}.jpg", THUMBNAIL)
                shrink(result["picture"], PICTURES / f"{spec['name']}.jpg", LARGE)
                print(f"{spec['name']}: {len(result['api'])} nodes")
        finally:
            server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
