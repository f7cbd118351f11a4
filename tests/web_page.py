"""ComfyUI's page in a headless Chromium, driven step by step: the parts of this package that run there.

    python web_page.py < {"url", "out", "block": [pattern], "steps": [[name, argument], ...]} > {"answers", "console"}

Runs with the interpreter that has playwright (COMFYUI_PYTHON), apart from the tests. Exit status 3 with a sentence on
stderr where there is no browser. Steps are the functions named ``step_*``; each answer is what its step returns.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SETTLE_SECONDS = 30
OPEN_SECONDS = 2  # after which the page has opened its first, empty workflow
NO_BROWSER = 3
OURS = "/extensions/minimax-h3-runtime"

# What a page says of our strips, of the graph, and of what would be saved and sent. The functions live in the page.
JAVASCRIPT = """
window.h3 = {
  app: () => window.comfyAPI.app.app,
  node: (id) => h3.app().graph.getNodeById(Number(id)),
  strip: (id, name) => h3.node(id)?.widgets?.find((widget) => widget.name === name)?.element ?? null,
  badge: (id) => {
    const strip = h3.strip(id, "h3_runtime_label");
    if (!strip) return null;
    const pills = [...strip.children];
    return {title: strip.dataset.title, source: strip.dataset.source, text: strip.innerText ?? strip.textContent,
            words: pills.map((pill) => pill.textContent), html: strip.innerHTML,
            colour: pills.map((pill) => getComputedStyle(pill).backgroundColor)[0]};
  },
  plan: (id) => {
    const strip = h3.strip(id, "h3_runtime_plan");
    if (!strip) return null;
    return {state: strip.dataset.state, text: strip.textContent, html: strip.innerHTML,
            numbers: [...strip.querySelectorAll(".cell")].map((cell) => Number(cell.dataset.gib)),
            stages: [...strip.querySelectorAll(".stage")].map((cell) => cell.textContent),
            widths: [...strip.querySelectorAll(".track div")].map((bar) => parseFloat(bar.style.width))};
  },
};
"""


def find_browser() -> str | None:
    named = os.environ.get("H3_CHROMIUM")
    return named or next((found for name in BROWSERS if (found := shutil.which(name))), None)


class Page:
    def __init__(self, page, out: Path):
        self.page, self.out, self.console = page, out, []
        page.on("console", lambda message: self.console.append([message.type, message.text]))
        page.on("pageerror", lambda error: self.console.append(["pageerror", str(error)]))
        self.requests: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))

    def until(self, expression: str, argument=None, seconds: float = SETTLE_SECONDS):
        """The first value of ``expression`` that is true; an error with the last one where none is in time."""
        end, value = time.monotonic() + seconds, None
        while time.monotonic() < end:
            value = self.page.evaluate(expression, argument)
            if value:
                return value
            time.sleep(0.1)
        raise TimeoutError(f"{expression} of {argument!r} stayed {value!r}")

    def step_open(self, url: str):
        self.page.goto(url)
        self.until("() => Boolean(window.LiteGraph?.registered_node_types?.KSampler)")
        self.until("() => window.comfyAPI.app.app.isGraphReady !== false && Boolean(window.comfyAPI.app.app.graph)")
        time.sleep(OPEN_SECONDS)
        self.page.evaluate(JAVASCRIPT)
        self.page.evaluate("() => { document.querySelectorAll('.p-dialog-mask').forEach((e) => e.remove()); }")

    def step_setting(self, given: list):
        self.page.evaluate("([id, value]) => h3.app().extensionManager.setting.set(id, value)", given)

    def step_load(self, graph: dict):
        """A graph in the API's form, laid out by the page."""
        self.page.evaluate("(graph) => h3.app().loadApiJson(graph, 'test')", graph)
        time.sleep(0.5)

    def step_load_workflow(self, workflow: dict):
        self.page.evaluate("(workflow) => h3.app().loadGraphData(workflow)", workflow)
        time.sleep(0.5)

    def step_settled(self, ids: list):
        """Wait until what is shown is of the graph as it stands; the badges and bars of ``ids`` are the answer."""
        self.until(f"async () => (await import('{OURS}/forecast.js')).isSettled()")
        return self.step_read(ids)

    def step_read(self, ids: list):
        return self.page.evaluate("(ids) => ids.map((id) => [h3.badge(id), h3.plan(id)])", ids)

    def step_set(self, given: list):
        """[id, widget, value], as a hand on the widget does it."""
        self.page.evaluate(
            """([id, name, value]) => {
              const node = h3.node(id), widget = node.widgets.find((widget) => widget.name === name);
              widget.value = value;
              widget.callback?.(value, h3.app().canvas, node);
              h3.app().graph.setDirtyCanvas(true, true);
            }""",
            given,
        )

    def step_evaluate(self, expression: str):
        return self.page.evaluate(expression)

    def step_saved(self, _):
        """The workflow as it would be saved."""
        return self.page.evaluate("() => JSON.parse(JSON.stringify(h3.app().graph.serialize()))")

    def step_prompt(self, _):
        """The prompt as it would be sent."""
        return self.page.evaluate("async () => (await h3.app().graphToPrompt()).output")

    def step_run(self, seconds: float):
        self.page.evaluate(
            """() => { window.h3done = null;
              const api = window.comfyAPI.api.api;
              for (const event of ['execution_success', 'execution_error'])
                api.addEventListener(event, () => { window.h3done ??= event; }, {once: true});
              return h3.app().queuePrompt(0);
            }"""
        )
        return self.until("() => window.h3done", seconds=seconds)

    def step_hover(self, given: list):
        """[id, widget]: the note that opens over a strip."""
        box = self.page.evaluate(
            "([id, name]) => { const box = h3.strip(id, name).getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; }",
            given,
        )
        self.page.mouse.move(0, 0)
        self.page.mouse.move(*box)
        time.sleep(0.3)
        return self.page.evaluate(
            "() => { const note = document.getElementById('h3-runtime-note');"
            " return {hidden: note.hidden, text: note.innerText, html: note.innerHTML}; }"
        )

    def step_away(self, _):
        self.page.mouse.move(2, 2)
        time.sleep(0.2)

    def step_look_at(self, ids: list):
        """Bring these nodes into view at a size at which text can be read."""
        self.page.evaluate(
            """(ids) => { const nodes = ids.map(h3.node), canvas = h3.app().canvas, scale = 1;
              const left = Math.min(...nodes.map((n) => n.pos[0])), top = Math.min(...nodes.map((n) => n.pos[1]));
              canvas.ds.scale = scale; canvas.ds.offset = [120 - left, 140 - top]; canvas.setDirty(true, true); }""",
            ids,
        )
        time.sleep(0.8)

    def step_shot(self, given):
        """A picture of the page, or of [name, x, y, width, height] of it."""
        name, *box = [given] if isinstance(given, str) else given
        clip = {"clip": dict(zip(("x", "y", "width", "height"), box))} if box else {}
        self.page.screenshot(path=str(self.out / f"{name}.png"), **clip)

    def step_boxes(self, id_: str):
        """Where our strips and the node lie on the page, to see that nothing overlaps."""
        return self.page.evaluate(
            """(id) => { const node = h3.node(id);
              const box = (e) => { const b = e.getBoundingClientRect(); return [b.x, b.y, b.right, b.bottom]; };
              return node.widgets.filter((w) => w.element).map((w) => [w.name, ...box(w.element)]); }""",
            id_,
        )

    def step_requests(self, _):
        return self.requests


def main() -> int:
    asked = json.load(sys.stdin)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("playwright is not installed", file=sys.stderr)
        return NO_BROWSER
    browser_path = find_browser()
    if browser_path is None:
        print("no Chromium was found", file=sys.stderr)
        return NO_BROWSER
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = Page(browser.new_page(viewport={"width": 1500, "height": 1000}), Path(asked["out"]))
        answers = []
        for pattern in asked.get("block", ()):
            page.page.route(pattern, lambda route: route.abort())
        try:
            page.step_open(asked["url"])
            for name, argument in asked["steps"]:
                answers.append(getattr(page, f"step_{name}")(argument))
        finally:
            json.dump({"answers": answers, "console": page.console}, sys.stdout)
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
