"""Sockets: the host's types, ours where it has none, and the shapes that travel on them.

MODEL's place      H3_MODEL: a Part of the runtime (graph.py); the host's own MODEL is refused by name
H3_ACCELERATION    the runtime's Acceleration: accelerators, solver, few-step settings
CLIP, VAE          the host's types; our objects answer its calls (stand_ins.py)
LATENT             {"samples": NestedTensor(video, audio)}; what we know of it rides under the key ``h3_runtime``
everything else    the host's types as they are
"""

from __future__ import annotations

from pathlib import Path

import torch
from comfy_api.latest import io
from torch import Tensor

from . import host

CATEGORY = "H3 Runtime"
LOADER = "H3 Load Model"
GONE = "{} is gone: press R and choose another file"

H3Model = io.Custom("H3_MODEL")
H3Acceleration = io.Custom("H3_ACCELERATION")

__all__ = [
    "CATEGORY",
    "LOADER",
    "H3Acceleration",
    "H3Model",
    "Node",
    "Pair",
    "SavedFileNode",
    "io",
    "make_pair",
    "streams_of",
    "video_of_file",
]


class Node(io.ComfyNode):
    """A node of ours: what every one of them does the same way."""

    @classmethod
    def report(cls, notes, *outputs, ui: dict | None = None, label=None, sound: bool = True):
        """The node's outputs, with ``notes`` shown on it as text and handed to the page (``h3_notes``), like its
        ``label`` (a Fidelity: ``h3_label`` its title, ``h3_fidelity`` its parts with their reasons).

        ``sound`` False: something is wrong with the result though it is there; the page shows it so.
        """
        notes = [note for note in dict.fromkeys(notes) if note]
        shown = {"h3_notes": notes, "h3_sound": [sound], **(ui or {})}
        if label is not None:
            shown |= {"h3_label": [label.title], "h3_fidelity": [label.to_dict()]}
        lines = ([label.title] if label else []) + notes
        if lines:
            host.show_text(cls, "\n".join(lines))
        for note in notes:
            host.log.info("H3 %s: %s", cls.__name__.removesuffix("Clone"), note)
        return io.NodeOutput(*outputs, ui=shown)


class SavedFileNode(Node):
    """A node that reads one file which a node of ours saved: its inputs have ``saved_input`` as ``file``."""

    @classmethod
    def validate_inputs(cls, file=None):
        return True if file is None or host.saved_file(file) else GONE.format(file)

    @classmethod
    def fingerprint_inputs(cls, file=None):
        return "" if file is None else host.stamp(host.saved_file(file))

    @staticmethod
    def saved_input(*suffixes: str):
        return io.Combo.Input(
            "file",
            options=[name for suffix in suffixes for name in host.saved_files(suffix)] or ["none saved yet"],
            tooltip="A file of the input folder, or one that was saved in the output folder.",
        )

    @staticmethod
    def saved_output():
        """The output of a node that saves: what ``file`` of the node that loads takes, so that both run in one go."""
        return io.Combo.Output("file", display_name="file", tooltip="The saved file, for the node that loads it.")

    @staticmethod
    def opened(file: str) -> Path:
        """Where ``file`` lies; H3Error when it is gone since it was chosen."""
        from ..h3_runtime import H3Error

        path = host.saved_file(file)
        if path is None:
            raise H3Error(GONE.format(file))
        return path


def wrong_type(input_types: dict[str, str], wanted: dict[str, str], cures: dict[str, str]) -> bool | str:
    """For ``validate_inputs(input_types)``, which takes the host's type check over: True, or one sentence.

    ``wanted`` is id -> type for every input that can be linked; ``cures`` the sentences for some.
    """
    for name, given in input_types.items():
        expected = wanted.get(name.split(".")[0])
        if expected is None or given in ("*", expected) or set(given.split(",")) & set(expected.split(",")):
            continue
        return cures.get(name, f"the input {name} takes {expected}, and {given} was connected")
    return True


class Pair:
    """Two tensors in one, for hosts whose NestedTensor cannot hold them: the same few calls."""

    is_nested = True

    def __init__(self, tensors):
        self.tensors = list(tensors)

    def unbind(self) -> list[Tensor]:
        return self.tensors

    def to(self, *args, **options) -> Pair:
        return Pair([tensor.to(*args, **options) for tensor in self.tensors])

    @property
    def shape(self):
        return self.tensors[0].shape

    @property
    def device(self):
        return self.tensors[0].device

    @property
    def dtype(self):
        return self.tensors[0].dtype


def make_pair(video: Tensor, audio: Tensor):
    """The host's NestedTensor of both streams."""
    try:
        from comfy.nested_tensor import NestedTensor

        made = NestedTensor((video, audio))
        if len(made.unbind()) == 2:
            return made
    except (ImportError, TypeError, AttributeError):
        pass
    return Pair((video, audio))


def streams_of(value) -> list[Tensor]:
    """The tensors of a nested or plain one; each as a tensor of its own outside the host's inference mode."""
    tensors = value.unbind() if getattr(value, "is_nested", False) and not isinstance(value, Tensor) else [value]
    return [tensor.detach().to("cpu", copy=True) if isinstance(tensor, Tensor) else tensor for tensor in tensors]


def samples_of(latent) -> list[Tensor]:
    """The streams of a LATENT. H3Error for what is none."""
    from ..h3_runtime import H3Error

    streams = streams_of(latent.get("samples")) if isinstance(latent, dict) else []
    if not streams or not all(isinstance(stream, Tensor) and stream.ndim for stream in streams):
        raise H3Error("no latent came over this wire: connect H3 Empty Latent, an encoded clip or a sampler")
    return streams


def video_of_file(path):
    """A VIDEO of a finished file; the path itself where the host has no such type."""
    try:
        from comfy_api.latest import InputImpl

        return InputImpl.VideoFromFile(str(path))
    except (ImportError, AttributeError):
        return str(path)


def intermediate(tensor: Tensor) -> Tensor:
    """Where the host keeps what travels between nodes."""
    return tensor.to(host.management.intermediate_device())


def plain_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)
