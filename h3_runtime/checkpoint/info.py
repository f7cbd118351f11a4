"""What a checkpoint is, in words and counts: for a render's label, a report, and ``inspect``.

Pieces (a part, and how each piece of it is made) ──describe──▶ CheckpointInfo: layout, partition, formats by layer,
                                                                kernels on this device, what it needs, registry
                                                                entries, why it is approximate
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ..errors import CheckpointError
from ..fidelity import REGISTRY
from ..quant import kernels
from ..quant.gguf import DECODERS
from .formats import TITLES
from .opening import Checkpoint
from .pieces import Pieces
from .quantised import GGUF, StoredLayer
from .reader import fingerprint, listed

# ComfyUI's word for a layer's format -> the registry's
WORDS = {
    "int8_tensorwise": "int8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
    "convrot_w4a4": "convrot-w4a4",
    "asym_w4a8_int8": "asym-w4a8",
    GGUF: "gguf",
}
PART_WORDS = {"dit": "dit", "video_vae": "video-vae", "audio_vae": "audio-vae", "text_encoder": "encoder"}
INT8, FLOAT8, BLOCK_FLOAT, IN_GGUF = kernels.OPS
OPERATIONS = {"int8": INT8, "int8-convrot": INT8, "convrot-w4a4": INT8, "asym-w4a8": INT8, "fp8": FLOAT8}
OPERATIONS |= {"nvfp4": BLOCK_FLOAT, "mxfp8": BLOCK_FLOAT, "gguf": IN_GGUF}
CURVE_PATH = "dit/pruned-curve"


@dataclass(frozen=True)
class CheckpointInfo:
    """What was loaded. ``dtypes`` counts tensors by stored number type; ``approximate`` says why a render from these
    weights cannot be exact (None: it can).

    ``fingerprint`` is that of the files, and of what is quantised while loading. ``formats`` counts quantised layers by
    format as stored, ``online`` those quantised while loading; ``kernels`` tells per operation what computes it and
    why; ``needs`` names what must be installed and is not; ``paths`` are the entries of the fidelity registry that
    these weights bring into a render.
    """

    path: str
    format: str
    part: str
    partition: str  # fl2va, ref2va or unknown (VAEs: unknown)
    dtypes: dict[str, int]
    nbytes: int
    fingerprint: str
    notes: tuple[str, ...] = ()
    approximate: str | None = None
    formats: dict[str, int] = field(default_factory=dict)
    online: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @property
    def quantisation(self) -> str:
        """All quantised formats with their layer counts, for a fingerprint or a report ("" for none)."""
        stored = [f"{count} {title}" for title, count in sorted(self.formats.items())]
        online = [f"{count} {title} (while loading)" for title, count in sorted(self.online.items())]
        return ", ".join(stored + online)


def registry_word(layer: StoredLayer) -> str:
    """The registry's word for a layer's format: int8-convrot, fp8, nvfp4, gguf ..."""
    return "int8-convrot" if layer.title.startswith("int8_convrot") else WORDS[layer.format]


def describe(pieces: Pieces, notes: Iterable[str], reasons: list[str], partition: str) -> CheckpointInfo:
    """The info of an opened part, kernels not yet chosen (``on_device``). ``reasons``: why its plain tensors are not
    the released ones. CheckpointError for a format that has no place in the fidelity registry for this part."""
    checkpoint = pieces.checkpoint
    source, part = checkpoint.source, checkpoint.format.part
    formats = Counter(layer.title for layer in checkpoint.layers.values())
    online = Counter(pieces.online.values())
    words = dict.fromkeys(registry_word(layer) for layer in checkpoint.layers.values())
    words |= dict.fromkeys(method.replace("_", "-") for method in online)
    paths = [f"{PART_WORDS[part]}/{word}" for word in words]
    unknown = [path for path in paths if path not in REGISTRY]
    if unknown:
        raise CheckpointError(
            f"{source.path} holds a {TITLES[part]} in {listed(formats or online)}, which is not offered for this part; "
            "use a bf16, fp32 or INT8 file."
        )
    if reasons:
        paths.append(f"{PART_WORDS[part]}/file-approximate")
    curve = part == "dit" and "adaln_t_table" in checkpoint.recipes
    paths += [CURVE_PATH] if curve else []
    names = stored_tensors(checkpoint)
    return CheckpointInfo(
        path=str(source.path),
        format=checkpoint.format.name,
        part=part,
        partition=partition,
        dtypes=dict(Counter(source.dtypes[name] for name in names)),
        nbytes=sum(source.nbytes(name) for name in names),
        fingerprint=fingerprint(source.files) + _online_mark(pieces.online),
        notes=(*checkpoint.notes, *notes),
        approximate=_why(checkpoint, formats, online, reasons, curve),
        formats=dict(formats),
        online=dict(online),
        needs=_needs(checkpoint),
        paths=tuple(paths),
    )


def _online_mark(online: Mapping[str, str]) -> str:
    """What quantising while loading adds to a fingerprint, "" for nothing: the methods, and which linears by hash."""
    if not online:
        return ""
    digest = hashlib.sha256(json.dumps(sorted(online.items())).encode()).hexdigest()
    return f"+{'+'.join(sorted(set(online.values())))}:{digest[:16]}"


def stored_tensors(checkpoint: Checkpoint) -> list[str]:
    """The stored names of everything that belongs to this part, markers of quantised layers not among them."""
    names = [checkpoint.prefix + stored for name in checkpoint.plain for stored in checkpoint.recipes[name].sources]
    return names + [stored for layer in checkpoint.layers.values() for stored in layer.roles.values()]


def on_device(info: CheckpointInfo, device: str | torch.device) -> CheckpointInfo:
    """``info`` with the kernels that compute its quantised layers on ``device``, and their registry entries."""
    own = [path for path in info.paths if not path.startswith("kernel/")]
    operations = dict.fromkeys(OPERATIONS[word] for path in own if (word := path.split("/")[1]) in OPERATIONS)
    made = [kernels.choice(operation, device) for operation in operations]
    told = {choice.op: f"{choice.backend}: {choice.reason}" for choice in made}
    return replace(info, kernels=told, paths=(*own, *map(kernel_path, made)))


def kernel_path(choice: kernels.KernelChoice) -> str:
    """The registry entry of a kernel choice."""
    backend = choice.backend.split("/")[0].removeprefix("torch._").replace("_", "-")
    return f"kernel/{choice.op.removesuffix(' linear').replace(' ', '-')}-{backend}"


def _why(checkpoint: Checkpoint, formats: Counter, online: Counter, reasons: list[str], curve: bool) -> str | None:
    said = list(reasons)
    if formats:
        said.append("holds " + listed(f"{count} layers in {title}" for title, count in sorted(formats.items())))
    if online:
        kinds = listed(f"{count} linears to {kind}" for kind, count in online.items())
        said.append(f"was quantised while loading: {kinds}")
    said += ["has its AdaLN pruned to a curve"] if curve else []
    part, name = TITLES[checkpoint.format.part], checkpoint.source.path.name
    return f"the {part} file {name} {'; '.join(said)}" if said else None


def _needs(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Packages that decoding this checkpoint takes and that are not installed."""
    types = {layer.marker["type"] for layer in checkpoint.layers.values() if layer.format == GGUF}
    foreign = sorted(types - set(DECODERS))
    if foreign and importlib.util.find_spec("gguf") is None:
        return (f"the package gguf, to decode {listed(foreign)}: pip install gguf",)
    return ()
