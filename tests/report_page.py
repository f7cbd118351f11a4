"""A report's page in a headless Chromium without network: run by the interpreter that has playwright.

    python report_page.py report.html [PICTURE.png]  ─▶  {"light": {...}, "dark": {...}}: what it showed and asked for

Exit status 3 with a sentence on stderr where there is no browser. With a picture's name, each look is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

NO_BROWSER = 3
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
READY = "Boolean(window.viewer) && viewer.videos.every((video) => video.readyState >= 2)"
PLAYING = "viewer.videos.every((video) => !video.paused && video.currentTime > 0.2)"
STATE = """({frame: viewer.state.frame, mode: viewer.state.mode, muted: viewer.videos.map((video) => video.muted),
  sizes: viewer.videos.map((video) => [video.videoWidth, video.videoHeight])})"""


def until(shown, expression: str, seconds: float = 30) -> None:
    """Wait until it is true. Not by the page's own polling, which needs the eval that the page forbids."""
    end = time.monotonic() + seconds
    while not shown.evaluate(expression):
        if time.monotonic() > end:
            raise TimeoutError(f"{expression} did not become true")
        time.sleep(0.05)


def visit(browser, page: Path, scheme: str, picture: str | None) -> dict:
    """Open the page, use it by its keys, and tell its state after each."""
    context = browser.new_context(color_scheme=scheme, offline=True, viewport={"width": 1200, "height": 1000})
    shown, wrong, asked, states = context.new_page(), [], [], {}
    shown.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    shown.on("pageerror", lambda error: wrong.append(str(error)))
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto(page.resolve().as_uri())
    until(shown, READY)
    for keys in ("End", "Home", "ArrowRight", "d", "2", "s", "1", "w"):
        shown.keyboard.press(keys)
        states[keys] = shown.evaluate(STATE)
    shown.keyboard.press(" ")
    until(shown, PLAYING)
    states["playing"] = shown.evaluate(STATE)
    shown.keyboard.press(" ")
    paper = "getComputedStyle(document.body).backgroundColor"
    told = {"states": states, "wrong": wrong, "asked": asked, "paper": shown.evaluate(paper)}
    if picture is not None:
        shown.screenshot(path=picture.replace(".png", f"_{scheme}.png"), full_page=True)
    shown.keyboard.press("t")
    told["other_paper"] = shown.evaluate(paper)
    context.close()
    return told


def main() -> int:
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        print("playwright is not installed", file=sys.stderr)
        return NO_BROWSER
    found = os.environ.get("H3_CHROMIUM") or next((path for name in BROWSERS if (path := shutil.which(name))), None)
    with sync_playwright() as running:
        try:
            browser = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error as error:
            print(str(error).splitlines()[0], file=sys.stderr)
            return NO_BROWSER
        picture = sys.argv[2] if len(sys.argv) > 2 else None
        told = {scheme: visit(browser, Path(sys.argv[1]), scheme, picture) for scheme in ("light", "dark")}
        browser.close()
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
