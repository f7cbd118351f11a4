"""Run by ComfyUI's interpreter, in its folder: what its own H3 nodes give in a workflow, kept for tests without it.

    python comfy_record.py PACKAGE WORK GRAPH.json OUT.safetensors

Every output of a MiniMaxH3... node of the graph is kept: an empty LATENT as its two shapes, CONDITIONING as its rows,
tags and keyframes, under "NODE.OUTPUT.what". ``played_back`` in node_pack.py reads them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

PACKAGE, WORK, GRAPH, OUT = (Path(argument).resolve() for argument in sys.argv[1:5])
sys.argv[1:] = ["--cpu", "--base-directory", str(WORK)]
sys.path.insert(0, str(Path.cwd()))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import nodes  # noqa: E402


def tensors_of(value, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a LATENT or CONDITIONING."""
    if isinstance(value, dict):
        video, audio = value["samples"].unbind()
        assert not video.any() and not audio.any(), "only empty latents are kept, by their shapes"
        return {f"{name}.{key}": torch.tensor(one.shape) for key, one in (("video", video), ("audio", audio))}
    (rows, about), found = value[0], {}
    found |= {f"{name}.rows": rows, f"{name}.tags": about["minimax_token_tags"]}
    for number, keyframe in enumerate(about.get("minimax_keyframes", [])):
        at = f"{name}.keyframe{number}"
        found[f"{at}.frame"] = torch.tensor(keyframe["resolved_frame_index"])
        found |= {f"{at}.{key}": keyframe[key] for key in ("latent", "audio_latent") if keyframe.get(key) is not None}
    return found


def main() -> None:
    asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    asyncio.run(nodes.load_custom_node(str(PACKAGE)))
    graph, done, kept = json.loads(GRAPH.read_text(encoding="utf-8")), {}, {}

    def reach(name: str) -> tuple:
        if name not in done:
            step = graph[name]
            inputs = {
                key: reach(given[0])[given[1]] if isinstance(given, list) else given
                for key, given in step["inputs"].items()
            }
            with torch.inference_mode():
                done[name] = tuple(nodes.NODE_CLASS_MAPPINGS[step["class_type"]].execute(**inputs).args)
        return done[name]

    for name, step in graph.items():
        if step["class_type"].startswith("MiniMaxH3"):
            for slot, value in enumerate(reach(name)):
                kept |= tensors_of(value, f"{name}.{slot}")
    save_file({key: value.detach().clone().contiguous() for key, value in kept.items()}, OUT)


if __name__ == "__main__":
    main()
