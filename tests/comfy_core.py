"""Run by ComfyUI's interpreter, in its folder: what ComfyUI's own H3 gives before and after the package has worked.

    python comfy_core.py PACKAGE WORK MODEL ─▶ one JSON line: {"before": {...}, "imported": {...}, "after": {...} ...}

Each holds: hashes of the functions of the modules that a custom node is tempted to change, torch's switches, and the
hash of a clip that ComfyUI's own sampler made with its own model code.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import sys
from pathlib import Path

PACKAGE, WORK, MODEL = (Path(argument) for argument in sys.argv[1:4])
sys.argv[1:] = ["--cpu", "--base-directory", str(WORK)]
sys.path.insert(0, str(Path.cwd()))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.ldm.minimax.model  # noqa: E402
import comfy.model_base  # noqa: E402
import comfy.model_management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.nested_tensor  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.samplers  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402

import nodes  # noqa: E402

WATCHED = ("comfy.model_base", "comfy.samplers", "comfy.sample", "comfy.ldm.minimax", "comfy.ldm.modules.attention")
WATCHED += (
    "comfy.model_management",
    "comfy.model_patcher",
    "comfy.ops",
    "comfy.sd",
    "comfy.utils",
    "comfy.nested_tensor",
)
WATCHED += ("comfy.latent_formats", "comfy.supported_models", "execution", "folder_paths", "nodes", "latent_preview")
TENSOR = ("torch.nn.functional", "torch.nn.modules.linear", "torch.nn.modules.module", "torch._tensor")


def functions_of(module) -> dict[str, str]:
    """{name: hash of its code} of the module's functions and methods, whoever wrote them."""
    hashes = {}
    for name, value in sorted(vars(module).items()):
        inside = vars(value).items() if inspect.isclass(value) and value.__module__ == module.__name__ else ()
        for path, member in [(name, value), *((f"{name}.{field}", member) for field, member in inside)]:
            member = getattr(member, "__func__", member)
            code = getattr(member, "__code__", None)
            if code is not None:
                told = (code.co_code, code.co_filename, code.co_firstlineno, repr(member.__defaults__))
                hashes[path] = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
            elif callable(member):
                hashes[path] = f"{type(member).__name__} {id(member)}"
    return hashes


def all_functions() -> dict[str, dict[str, str]]:
    watched = {name for name in sys.modules if any(name == top or name.startswith(top + ".") for top in WATCHED)}
    return {name: functions_of(sys.modules[name]) for name in sorted(watched | set(TENSOR))}


def switches() -> dict[str, str]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "threads": str(torch.get_num_threads()),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "float32 products": torch.get_float32_matmul_precision(),
        "tf32": f"{cuda.matmul.allow_tf32} {cudnn.allow_tf32} {cudnn.benchmark} {cudnn.deterministic}",
        "attention": f"{cuda.flash_sdp_enabled()} {cuda.mem_efficient_sdp_enabled()} {cuda.math_sdp_enabled()}",
        "gradients": str(torch.is_grad_enabled()),
        "random state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16],
    }


def core_clip() -> str:
    """ComfyUI's own model code and sampler on the small model: two steps of euler."""
    made = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 7, 64, generator=made)
    prompt = [[rows, {"minimax_token_tags": torch.ones(7, dtype=torch.long)}]]
    empty = comfy.nested_tensor.NestedTensor((torch.zeros(1, 24, 7, 4, 6), torch.zeros(1, 32, 2, 37)))
    model = comfy.sd.load_diffusion_model(str(MODEL))
    with torch.inference_mode():
        noise = comfy.sample.prepare_noise(empty, 1)
        done = comfy.sample.sample(model, noise, 2, 1.0, "euler", "simple", prompt, prompt, empty, seed=1)
    return hashlib.sha256(b"".join(part.float().numpy().tobytes() for part in done.unbind())).hexdigest()


def state() -> dict:
    torch.manual_seed(5)
    return {"switches": switches(), "clip": core_clip(), "functions": all_functions()}


def run_ours() -> list[list[int]]:
    """A render by our nodes, as ComfyUI's executor runs them. Returns the shapes of its two streams."""

    def ran(name: str, **inputs) -> tuple:
        with torch.inference_mode():
            return tuple(nodes.NODE_CLASS_MAPPINGS[name].execute(**inputs).args)

    carried = "small carried model"
    (model,) = ran("H3RuntimeLoadModel", model=carried)
    (clip,) = ran("H3RuntimeLoadTextEncoder", text_encoder=carried)
    video_vae, audio_vae = ran("H3RuntimeLoadVaes", video_vae=carried, audio_vae=carried)
    (positive,) = ran("H3RuntimeEncodePrompt", clip=clip, prompt="a disc under a sky")
    latent = ran("H3RuntimeEmptyLatent", width=96, height=64, frames=22)[0]
    done = ran("H3RuntimeSampler", model=model, positive=positive, latent=latent, seed=1, steps=2, resume=False)[0]
    ran("H3RuntimeDecodeVideo", latent=done, video_vae=video_vae)
    ran("H3RuntimeDecodeSound", latent=done, audio_vae=audio_vae)
    return [list(part.shape) for part in done["samples"].unbind()]


def main() -> None:
    before = state()
    loaded = asyncio.run(nodes.load_custom_node(str(PACKAGE)))
    imported = {"functions": all_functions(), "switches": {}}
    torch.manual_seed(5)
    imported["switches"] = switches()
    shapes = run_ours()
    print(json.dumps({"loaded": loaded, "before": before, "imported": imported, "after": state(), "ran": shapes}))


if __name__ == "__main__":
    main()
