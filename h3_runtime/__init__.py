"""MiniMax-H3 Runtime: joint video and sound, exact to the reference.

Names are imported when first used, so that importing the package costs nothing and needs no torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "AVLatent": "job",
    "Canvas": "geometry",
    "Guide": "job",
    "GuideRequest": "request",
    "H3Error": "errors",
    "Masks": "job",
    "Media": "request",
    "Models": "render",
    "PackedLayout": "layout",
    "Reference": "job",
    "RenderJob": "job",
    "RenderRequest": "request",
    "RenderResult": "render",
    "SoundMask": "request",
    "TextCondition": "job",
    "find_parts": "checkpoint.parts",
    "render_request": "render",
    "sample": "sampler",
    "save_clip": "save",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
