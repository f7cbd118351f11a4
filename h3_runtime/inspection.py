"""What a weight file is, before anything is loaded; and the same file quantised.

    FILE ──inspect_file──▶ part, layout, partition, formats by layer, sizes, label, kernels here, needs, fingerprint
    DIR of a whole model ─▶ the same of each part in it, and what in it is not usable
    IN   ──quantize_file─▶ OUT, a ComfyUI file, and what was done

Only headers and the small markers of quantised layers are read, the whole file where its SHA-256 is asked for.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .checkpoint.convert import quantise_checkpoint
from .checkpoint.formats import LAYOUTS, TITLES
from .checkpoint.gguf_file import open_weights
from .checkpoint.info import CheckpointInfo, on_device
from .checkpoint.load import open_audio_vae, open_dit, open_video_vae
from .checkpoint.opening import Checkpoint, open_checkpoint
from .checkpoint.parts import PartPaths, find_parts
from .checkpoint.pieces import Online
from .checkpoint.reader import full_sha256, listed
from .checkpoint.text_layers import TextLayers, holds_text_encoder, text_path
from .errors import CheckpointError
from .fidelity import compose
from .lora.opening import LoraFile, open_lora

Results = list[dict[str, Any]]
OPENERS = {"dit": open_dit, "video_vae": open_video_vae, "audio_vae": open_audio_vae}
GIGABYTE = 1e9
LORA_SIGNS = ("lora_", ".lora", "_lora")
UNUSABLE = "not usable"  # a part of a model folder that another part does not fail for


def device_here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def inspect_file(path: str | os.PathLike, sha256: bool = False, layout: str | None = None) -> tuple[Results, list[str]]:
    """Everything known of the weights at ``path`` (file, shard, index or folder): results for JSON, lines for people.

    The folder of a whole model gives the rows of one part after another, each with its place as ``of``. CheckpointError
    says what a file is that cannot be used, with expected and found sizes where it is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a file or folder that does.")
    parts = find_parts(path) if path.is_dir() else None
    places = [] if parts is None else places_of(parts)
    if len(places) < 2 and not (places and parts.skipped):
        return _inspect_one(path, sha256, layout)
    results, lines = [], []
    for part, place in places:
        of = str(place.relative_to(path)) if place != path else place.name
        try:
            rows, said = _inspect_one(place, sha256, layout if part == "dit" else None)
        except CheckpointError as error:
            rows = [_row("part", TITLES[part]), _row(UNUSABLE, str(error))]
            said = lines_of(rows)
        results += [{**row, "of": of} for row in rows]
        lines += [f"--- {of}", *said]
    skipped = [_row("skipped", reason) for reason in parts.skipped]
    return results + skipped, lines + lines_of(skipped)


def places_of(parts: PartPaths) -> list[tuple[str, Path]]:
    """(part, its file or folder) of everything found in a model folder, DiTs first."""
    named = [(name, getattr(parts, name)) for name in ("text_encoder", "video_vae", "audio_vae")]
    return [*(("dit", dit.path) for dit in parts.dits), *((name, place) for name, place in named if place is not None)]


def _inspect_one(path: Path, sha256: bool, layout: str | None) -> tuple[Results, list[str]]:
    if looks_like_lora(path):
        lora = open_lora(path)
        results, files = describe_lora(lora), lora.source.files
    else:
        info, config, checkpoint = open_info(path, layout)
        results, files = describe_info(info, config, checkpoint), checkpoint.source.files
    if sha256:
        results += [_row("sha256", full_sha256(file), "", file.name) for file in files]
    return results, lines_of(results)


def looks_like_lora(path: Path) -> bool:
    """Whether the tensors of a single file have the names of low-rank pairs."""
    if path.is_dir() or path.suffix != ".safetensors":
        return False
    names = open_weights(path).shapes
    return any(sign in name.lower() for name in names for sign in LORA_SIGNS)


def open_info(path: Path, layout: str | None = None) -> tuple[CheckpointInfo, dict[str, Any], Checkpoint]:
    """The info of the part at ``path`` with the kernels of this machine, its sizes, and the opened part."""
    if holds_text_encoder(path):
        layers = TextLayers(text_path(path))
        return on_device(layers.info, device_here()), vars(layers.sizes), layers.checkpoint
    part = open_checkpoint(path, None, layout).format.part
    opened = OPENERS[part](path, layout=layout)
    return on_device(opened.info, device_here()), opened.module.config.to_dict(), opened.pieces.checkpoint


def layer_formats(checkpoint: Checkpoint) -> dict[str, str]:
    """Format of every quantised layer, and of the plain layers that stand where others are quantised."""
    found = {name: layer.title for name, layer in checkpoint.layers.items()}
    places = {_place(name) for name in found}
    for name in checkpoint.plain:
        if name.endswith(".weight") and _place(name.removesuffix(".weight")) in places:
            found[name.removesuffix(".weight")] = checkpoint.stored_as(name)
    return found


def _place(name: str) -> str:
    """The name with every number taken for any: blocks.*.mlp.fc1."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def describe_info(info: CheckpointInfo, config: dict[str, Any], checkpoint: Checkpoint) -> Results:
    """The rows of a part of the model."""
    fidelity = compose(info.paths)
    rows = [
        _row("file", Path(info.path).name),
        _row("part", TITLES[info.part]),
        _row("layout", LAYOUTS.get(info.format, info.format)),
    ]
    if info.part == "dit":
        rows.append(_row("partition", info.partition))
    rows += [_row("format", title, "", f"{count} layers") for title, count in sorted(info.formats.items())]
    rows += [_row("stored", kind, "", f"{count} tensors") for kind, count in sorted(info.dtypes.items())]
    rows.append(_row("bytes", info.nbytes, "bytes", f"{info.nbytes / GIGABYTE:.2f} GB of weights"))
    rows += [_row("sizes", config), _row("layers", layer_formats(checkpoint))]
    why = info.approximate or "nothing in it departs from the released weights"
    rows.append(_row("label", str(fidelity.label), "label", why))
    rows += [_row("path", part.name, "", _with_mark(part)) for part in fidelity.parts]
    rows += [_row("kernel", f"{op}: {told}") for op, told in info.kernels.items()]
    rows += [_row("needs", need) for need in needs(info)]
    rows.append(_row("fingerprint", info.fingerprint))
    return rows + [_row("note", note) for note in info.notes]


def _with_mark(part) -> str:
    unproven = part.unproven()
    return f"{part.label}: {part.reason}" + (f" (UNPROVEN HERE: {unproven})" if unproven else "")


def needs(info: CheckpointInfo) -> list[str]:
    """What must be there to use the file: memory to hold it whole, packages."""
    found = [f"{info.nbytes / GIGABYTE:.2f} GB of memory to hold it whole; its largest layer alone when it is streamed"]
    if info.part == "dit" and info.partition == "unknown":
        found.append("the name of its partition, fl2va (text, keyframes) or ref2va (references): nothing tells it")
    return found + list(info.needs)


def describe_lora(lora: LoraFile) -> Results:
    """The rows of a LoRA."""
    told = lora.describe()
    rows = [_row("part", "LoRA"), _row("layout", told["layout"], "", told["layout_means"])]
    for name, value in told.items():
        if name in ("notes", "problems"):
            rows += [_row(name.removesuffix("s"), said) for said in value]
        elif name not in ("path", "kind", "layout", "layout_means") and value not in (None, [], {}):
            rows.append(_row(name, value, "bytes" if name == "bytes" else ""))
    return rows


def _row(name: str, value: Any, unit: str = "", detail: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, **({"detail": detail} if detail else {})}


def lines_of(rows: Results) -> list[str]:
    """The rows for people: sizes in one line, layers by place and format."""
    lines = []
    for row in rows:
        if row["name"] == "layers":
            counts = Counter((_place(name), title) for name, title in row["value"].items())
            lines += [f"layers: {place}: {title} x {count}" for (place, title), count in sorted(counts.items())]
        elif isinstance(row["value"], dict):
            lines.append(f"{row['name']}: " + ", ".join(f"{name} {value}" for name, value in row["value"].items()))
        else:
            detail = f" ({row['detail']})" if "detail" in row else ""
            value = f"{row['value']:,}" if row["unit"] == "bytes" else row["value"]
            lines.append(f"{row['name']}: {value}{detail}")
    return lines


def quantize_file(
    path: str | os.PathLike,
    out: str | os.PathLike,
    method: str,
    exclude: Sequence[str] = (),
    adaln: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Results, list[str]]:
    """Write ``path`` quantised to ``out``; see ``quantise_checkpoint``."""
    began = time.perf_counter()
    made = quantise_checkpoint(path, out, Online(method, tuple(exclude), adaln), progress)
    rows = [
        _row("written", str(made.path), "path"),
        _row("part", TITLES[made.part]),
        _row("method", method),
        _row("linears", len(made.linears), "layers", listed(made.linears[:3]) + " ..."),
        _row("tensors", made.tensors, "tensors"),
        _row("bytes_before", made.bytes_before, "bytes"),
        _row("bytes", made.bytes_after, "bytes"),
        _row("seconds", round(time.perf_counter() - began, 3), "s"),
    ]
    if made.part == "dit":
        rows.append(_row("partition", made.partition))
    return rows, lines_of(rows)
