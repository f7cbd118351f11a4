"""Rendering on a server: the same request, sent to an engine that the user runs elsewhere.

    name ─settings─▶ Server (engine, origin, key) ──────────────┐
    RenderRequest ─refuse, place─▶ Shipment ─check─▶ Submissions ┴─run─▶ job, poll, clip ─check─▶ RemoteResult

Nothing distributed is built here and no port is opened. The engines stand in the table below, one file each.
"""

from .base import Engine, State, Submission, Told
from .sglang import SGLang
from .vllm_omni import VllmOmni

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (SGLang(), VllmOmni())}

__all__ = ["ENGINES", "Engine", "SGLang", "State", "Submission", "Told", "VllmOmni"]
