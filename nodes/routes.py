"""What the page may ask of this package: three read-only routes, everything checked, no path from the page is opened.

GET  /h3_runtime/nodes                          ─▶ {labelled: [node ids], planned: [node ids]}
GET  /h3_runtime/compare_viewer.js              ─▶ the A/B viewer, which report.html holds too
POST /h3_runtime/forecast {graph, vram_gib, ram_gib} ─▶ {labels: {id: ...}, plans: {id: ...}}     (foresee.py)

A file is named only by a choice that the node's own list offers now. What is malformed is refused with status 400 and
a sentence; a graph that cannot run is no error of the page's: its nodes get the sentence instead of a label.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any

from . import host
from .widgets import widgets_of, wrong_value

PREFIX = "/h3_runtime"
MOST_NODES = 5000
LONGEST = 200_000  # characters of a text
OURS = "H3Runtime"
MOST_GIB = 1 << 14


class Refused(ValueError):
    """A request that is malformed; its sentence is the answer."""


def node_lists() -> dict[str, list[str]]:
    from .foresee import LABELS, SAMPLER

    return {"labelled": sorted(LABELS), "planned": [SAMPLER]}


def answer(body: Any) -> dict:
    """The answer to a forecast's body. Refused for one that is malformed."""
    from .foresee import forecast

    if not isinstance(body, dict):
        raise Refused(f"the body is {_kind(body)}: send an object with graph")
    unknown = sorted(map(str, set(body) - {"graph", "vram_gib", "ram_gib"}))
    if unknown:
        raise Refused(f"{unknown[0][:40]!r} is not known here: send graph, vram_gib and ram_gib")
    graph = checked_graph(body.get("graph"))
    sizes = [_checked_gib(name, body.get(name, 0)) for name in ("vram_gib", "ram_gib")]
    return forecast(graph, wrong_widgets(graph), *sizes)


def checked_graph(graph: Any) -> dict[str, dict]:
    """The graph as {id: {class_type, inputs}}, plain values and links only; links to nowhere are left out."""
    if not isinstance(graph, dict):
        raise Refused(f"graph is {_kind(graph)}: send {{id: {{class_type, inputs}}}}")
    if len(graph) > MOST_NODES:
        raise Refused(f"the graph has {len(graph)} nodes: at most {MOST_NODES} are read")
    made = {}
    for node, found in graph.items():
        if not isinstance(found, dict) or not isinstance(found.get("class_type"), str):
            raise Refused(f"node {str(node)[:40]!r} has no class_type: send {{class_type, inputs}}")
        inputs = found.get("inputs")
        if not isinstance(inputs, dict):
            raise Refused(f"node {str(node)[:40]!r} has no inputs: send an object, empty where there are none")
        kept = {}
        for name, value in inputs.items():
            if not _plain(value):
                raise Refused(
                    f"{name[:40]!r} of node {str(node)[:40]!r} is {_kind(value)}: plain values and links "
                    "[id, output] are read"
                )
            if not isinstance(value, list) or value[0] in graph:
                kept[name] = value
        made[node] = {"class_type": found["class_type"], "inputs": kept}
    return made


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int and 0 <= value[1] < 1000
    if isinstance(value, str):
        return len(value) <= LONGEST
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 1 << 64)


def _checked_gib(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST_GIB:
        raise Refused(f"{name} is {str(value)[:40]!r}: give gibibytes from 0 (this machine) to {MOST_GIB}")
    return float(value)


def _kind(value: Any) -> str:
    words = {dict: "an object", list: "a list", str: "a text", type(None): "missing", bool: "true or false"}
    return words.get(type(value), "a number")


# --- the widgets of our nodes, against their own schema --------------------------------------------------------------


def wrong_widgets(graph: dict[str, dict]) -> dict[str, str]:
    """Nodes of ours whose widgets hold what the node would refuse: id -> one sentence."""
    schemas = schemas_of({found["class_type"] for found in graph.values() if found["class_type"].startswith(OURS)})
    wrong = {}
    for node, found in graph.items():
        schema = schemas.get(found["class_type"])
        if schema is None and found["class_type"].startswith(OURS):
            wrong[node] = "this node is not known to the H3 Runtime that runs here: update it or the workflow"
        for name, field in () if schema is None else widgets_of(schema.inputs, found["inputs"]):
            value = found["inputs"].get(name)
            if value is None or isinstance(value, list):
                continue
            sentence = wrong_value(name, field, value)
            if sentence:
                wrong[node] = f"{schema.display_name}: {sentence}"
                break
    return wrong


def schemas_of(ids: set[str]) -> dict[str, Any]:
    from . import node_classes

    made = (node.define_schema() for node in node_classes())
    return {schema.node_id: schema for schema in made if schema.node_id in ids}


# --- the host's server -----------------------------------------------------------------------------------------------


def add_routes() -> None:
    """Offer the routes on the host's server; without them the nodes work and the page shows no labels."""
    try:
        from aiohttp import web
        from server import PromptServer

        routes = PromptServer.instance.routes
    except Exception as error:
        host.log.warning(
            "H3 Runtime shows no labels, plans and A/B viewer on the page: this ComfyUI offers no routes (%s)", error
        )
        return
    one_at_a_time = asyncio.Lock()

    @routes.get(f"{PREFIX}/nodes")
    async def nodes(request):
        return web.json_response(node_lists())

    @routes.get(f"{PREFIX}/compare_viewer.js")
    async def viewer(request):
        from ..h3_runtime import viewer_source

        return web.Response(text=viewer_source(), content_type="text/javascript")

    @routes.post(f"{PREFIX}/forecast")
    async def foresee(request):
        try:
            body = await request.json()
        except (ValueError, LookupError, RecursionError):  # no JSON, an unknown charset, lists in lists without end
            return web.json_response({"error": "the body is no JSON: send an object with graph"}, status=400)
        async with one_at_a_time:
            try:
                made = await asyncio.get_running_loop().run_in_executor(None, partial(answer, body))
            except Refused as refused:
                return web.json_response({"error": str(refused)}, status=400)
        return web.json_response(made)
