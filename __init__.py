"""The door through which ComfyUI loads this folder as a custom node.

    ComfyUI ── runs this file under a path-like name ──> comfy_entrypoint() ──> extension ──> list of node classes

Anywhere else (pytest imports this file as a package) it defines nothing. The runtime itself is ``h3_runtime``.
"""

import logging
from pathlib import Path

_log = logging.getLogger("h3_runtime")

# The host serves this folder to its page; naming one that does not exist would be logged as an error at each start.
if (Path(__file__).parent / "web").is_dir():
    WEB_DIRECTORY = "./web"

try:
    from comfy_api.latest import ComfyExtension
except ImportError as missing:
    # No NODE_CLASS_MAPPINGS as a fallback: the host would look at it first and never call comfy_entrypoint.
    _log.warning("MiniMax-H3 Runtime adds no nodes: comfy_api.latest is missing (%s); it needs ComfyUI 0.30.", missing)
else:

    class H3RuntimeExtension(ComfyExtension):
        """Lists the nodes of this package; the host asks once at start."""

        async def on_load(self) -> None:
            from .nodes.host import follow_flags
            from .nodes.routes import add_routes

            follow_flags()
            add_routes()

        async def get_node_list(self) -> list:
            from .nodes import node_classes

            return node_classes()

    async def comfy_entrypoint() -> ComfyExtension:
        return H3RuntimeExtension()
