"""Run by an interpreter that has playwright: the real page of a running ComfyUI, in headless Chromium.

    python comfy_page.py PORT FOLDER < tasks.json ─▶ one JSON line: a result per task

A task is {"do": "make" | "open" | "drop" | "templates" | "fail", ...}; each gets a page of its own. Pictures of the
page go into FOLDER. CHROMIUM names the browser where playwright has none of its own.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Error, Page, sync_playwright

PORT, FOLDER = sys.argv[1], Path(sys.argv[2])
HERE = Path(__file__).resolve().parent
READY = """() => window.app?.vueAppReady && window.LiteGraph?.registered_node_types.H3RuntimeSampler
    && document.querySelector('canvas')"""
RUN = """() => new Promise(done => {
    const api = app.api, ends = ['execution_success', 'execution_error', 'execution_interrupted']
    for (const end of ends) api.addEventListener(end, event => done([end, event.detail]), { once: true })
    window.h3Cached = []
    api.addEventListener('execution_cached', event => { window.h3Cached = event.detail.nodes }, { once: true })
    app.queuePrompt(0, 1).then(sent => { if (!sent) done(['refused', {}]) })
})"""
MISSING = """() => (app.rootGraph ?? app.graph)._nodes.map(node => node.type)
    .filter(type => !LiteGraph.registered_node_types[type])"""
TOLD = """() => (app.rootGraph ?? app.graph)._nodes
    .filter(node => node.widgets?.some(one => one.name === '$$node-text-preview' && one.value))
    .map(node => node.type)"""
PLAIN = {
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,
    "Comfy.TutorialCompleted": True,
    "Comfy.VueNodes.Enabled": False,  # the server keeps settings: a task that asks for the newer nodes names them
}
NEWER = {"Comfy.VueNodes.Enabled": True}
SIZE = {"width": 2400, "height": 1350}


class Told:
    """What the page printed as an error, with the address of the script."""

    def __init__(self, page: Page):
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        page.on("console", self._console)

    def _console(self, message) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} ({(message.location or {}).get('url', '')})")


def settings(page: Page, given: dict) -> None:
    for name, value in given.items():
        page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])


def opened(browser, task: dict) -> tuple[Page, Told]:
    page = browser.new_page(viewport=task.get("size", SIZE), device_scale_factor=task.get("scale", 1))
    told = Told(page)
    page.goto(f"http://127.0.0.1:{PORT}/")
    page.wait_for_function(READY, timeout=90_000)
    settings(page, {**PLAIN, **task.get("settings", {})})
    page.add_script_tag(path=str(HERE / "canvas.js"))
    page.wait_for_timeout(500)
    page.keyboard.press("Escape")
    told.errors.clear()
    return page, told


def picture(page: Page, task: dict) -> str | None:
    """The page as it is, the whole graph in view."""
    if "picture" not in task:
        return None
    page.evaluate("() => h3.fit()")
    page.wait_for_timeout(1500)
    path = FOLDER / task["picture"]
    page.screenshot(path=str(path))
    return str(path)


def ran(page: Page, seconds: float = 300) -> tuple[str, dict]:
    page.set_default_timeout(seconds * 1000)
    end, detail = page.evaluate(RUN)
    page.wait_for_timeout(3000)  # until what came back is on the page: players, viewers, texts
    return end, detail


def free(page: Page) -> None:
    """Have the server forget its results: nodes show their texts only when they run."""
    page.evaluate(
        "() => app.api.fetchApi('/free', {method: 'POST', body: JSON.stringify({free_memory: true}),"
        " headers: {'Content-Type': 'application/json'}})"
    )
    page.wait_for_timeout(700)


def make(page: Page, told: Told, task: dict) -> dict:
    """Build a described workflow, run it to see how far its nodes grow, lay it out and read it."""
    spec = task["spec"]
    page.evaluate("spec => { h3.build(spec); h3.arrange(spec, {}) }", spec)
    grown, shown = task.get("grown"), None
    if grown is None:
        free(page)
        end, detail = ran(page)
        if end != "execution_success":
            return {"end": end, "detail": detail}
        page.wait_for_timeout(4000)  # the clip's player comes late
        grown = page.evaluate("() => { app.canvas.draw(true, true); return h3.sizes() }")
        drawn = in_newer_nodes(page)
        if "end" in drawn:
            return drawn
        grown = {name: [max(one) for one in zip(grown[name], drawn[name])] for name in grown}
        lay_out(page, spec, grown)
        shown = picture(page, task)
    page.evaluate("spec => { app.nodeOutputs = {}; h3.build(spec) }", spec)
    lay_out(page, spec, grown)
    return {"end": "execution_success", "grown": grown, "picture": shown, **page.evaluate("() => h3.read()")}


def in_newer_nodes(page: Page) -> dict:
    """How large every node is after a run in the page's newer rendering; the end of the run where it failed."""
    settings(page, NEWER)
    free(page)
    end, detail = ran(page)
    if end != "execution_success":
        return {"end": end, "detail": detail}
    page.evaluate("() => h3.fit()")
    page.wait_for_timeout(2500)
    drawn = page.evaluate("() => h3.drawn()")
    settings(page, {name: PLAIN[name] for name in NEWER})
    page.wait_for_timeout(1000)
    return drawn


def lay_out(page: Page, spec: dict, grown: dict) -> None:
    page.evaluate("([spec, grown]) => { h3.arrange(spec, grown); h3.lookAtNotes() }", [spec, grown])
    page.wait_for_timeout(1000)
    page.evaluate("() => h3.fitNotes()")


def run_open(page: Page, task: dict, canvas: dict) -> dict:
    page.evaluate("canvas => app.loadGraphData(canvas)", canvas)
    page.wait_for_timeout(500)
    before = page.evaluate("() => h3.read()")
    missing = page.evaluate(MISSING)
    free(page)
    end, detail = ran(page)
    again = None
    if task.get("twice"):
        page.wait_for_timeout(2500)  # the clips' players come late, and are no input (web/player.js)
        ran(page)
        again = page.evaluate("() => window.h3Cached")
    shown = picture(page, task)
    return {
        "end": end,
        "detail": detail,
        "missing": missing,
        "api": before["api"],
        "canvas": before["canvas"],
        "cached": again,
        "faults": page.evaluate("() => h3.faults()"),
        "told": page.evaluate(TOLD),
        "drawn faults": page.evaluate("() => LiteGraph.vueNodesMode ? h3.faults(true) : []"),
        "picture": shown,
    }


def open_file(page: Page, told: Told, task: dict) -> dict:
    """Load a canvas file, run it, look at it. ``template``: fetched as the page's template browser does."""
    canvas = task.get("canvas")
    if canvas is None:
        canvas = page.evaluate("path => fetch(path).then(answer => answer.json())", task["template"])
    return {**run_open(page, task, canvas), "errors": told.errors}


def templates(page: Page, told: Told, task: dict) -> dict:
    """What the page's template browser shows of this package."""
    page.evaluate("() => app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.wait_for_timeout(2500)
    page.get_by_text(task["package"], exact=True).first.click()
    page.wait_for_timeout(2500)
    words = page.locator("body").inner_text()
    shown = None
    if "picture" in task:
        shown = str(FOLDER / task["picture"])
        page.screenshot(path=shown)
    return {"words": words, "picture": shown, "errors": told.errors}


DROP = """async ([data, name]) => {
    const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0))
    const file = new File([bytes], name, { type: 'video/mp4' })
    const carried = new DataTransfer()
    carried.items.add(file)
    const target = app.canvas.canvas
    for (const kind of ['dragenter', 'dragover', 'drop']) {
        target.dispatchEvent(new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true,
            clientX: 600, clientY: 500 }))
    }
}"""


def drop(page: Page, told: Told, task: dict) -> dict:
    """Drop a file on an empty canvas."""
    page.evaluate("() => (app.rootGraph ?? app.graph).clear()")
    path = Path(task["file"])
    page.evaluate(DROP, [base64.b64encode(path.read_bytes()).decode(), path.name])
    try:
        page.wait_for_function("() => (app.rootGraph ?? app.graph)._nodes.length > 1", timeout=15_000)
    except Error:
        pass
    page.wait_for_timeout(500)
    return {**page.evaluate("() => h3.read()"), "errors": told.errors, "picture": picture(page, task)}


def fail(page: Page, told: Told, task: dict) -> dict:
    """Load a canvas, change widgets, run into the error and look at it."""
    page.evaluate("canvas => app.loadGraphData(canvas)", task["canvas"])
    page.evaluate(
        """changes => { for (const [type, widget, value] of changes) {
            const node = app.graph._nodes.find(one => one.type === type)
            node.widgets.find(one => one.name === widget).value = value } }""",
        task["changes"],
    )
    end, detail = ran(page)
    page.wait_for_timeout(1000)
    return {"end": end, "detail": detail, "words": page.locator("body").inner_text(), "picture": picture(page, task)}


DO = {"make": make, "open": open_file, "drop": drop, "templates": templates, "fail": fail}


def main() -> None:
    tasks, results = json.load(sys.stdin), []
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        options = {"executable_path": chromium} if chromium else {}
        browser = play.chromium.launch(args=["--no-sandbox", "--mute-audio"], **options)
        for task in tasks:
            page, told = opened(browser, task)
            try:
                results.append(DO[task["do"]](page, told, task))
            except Error as error:
                results.append({"end": "page error", "detail": str(error), "errors": told.errors})
            page.close()
        browser.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
