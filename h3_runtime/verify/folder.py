"""A folder of reference vectors: its index, its files, the models of its weight files, and how two values compare.

    FOLDER/index.json   files: bytes, sha256  ──checked before first use──▶  tensors(case), model(file)
                        cases: id, group, file, config, prefix, inputs, outputs, tolerance
                               a weight file has an entry of its own, without inputs and outputs

``conventions`` in the index, and the README beside it, say what every word means.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint.load import CheckpointInfo, canonical_tensors, load_audio_vae, load_dit, load_video_vae
from ..checkpoint.reader import SafetensorsFile, listed
from ..errors import H3Error

INDEX = "index.json"
NEEDED = ("id", "group", "file", "config", "prefix", "inputs", "outputs", "tolerance")
EXACT = "exact"
COMFYUI_WORD = "comfy"  # last part of a weight file's name: its layout
OFFICIAL_WORDS = ("raw", "official")  # DiT files with these have q, k, v rows interleaved by head

Case = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


class Golden:
    """The folder. H3Error when it, its index or the entry of a case cannot be used."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.index = _read_index(self.folder)
        self.cases: list[Case] = self.index["cases"]
        self._files: dict[str, SafetensorsFile] = {}
        self._models: dict[tuple[str, torch.dtype], tuple[nn.Module, CheckpointInfo]] = {}

    def file(self, name: str) -> SafetensorsFile:
        """The file ``name``, once its size and SHA-256 are those of the index; H3Error names it when they are not."""
        if name not in self._files:
            path = self.folder / name
            if Path(name).name != name or not path.is_file():
                raise H3Error(f"{name} is not in {self.folder}: copy the folder again")
            told = self.index.get("files", {}).get(name, {})
            size = path.stat().st_size
            if told.get("bytes", size) != size:
                raise H3Error(f"{name} has {size:,} bytes, the index says {told['bytes']:,}: copy the folder again")
            if "sha256" in told and hashlib.sha256(path.read_bytes()).hexdigest() != told["sha256"]:
                raise H3Error(f"{name} is not the file of the index (its SHA-256 differs): copy the folder again")
            self._files[name] = SafetensorsFile(path)
        return self._files[name]

    def tensors(self, case: Case) -> dict[str, Tensor]:
        """All inputs and outputs of ``case`` by name."""
        file = self.file(case["file"])
        return {name: file.read(case["prefix"] + name) for name in (*case["inputs"], *case["outputs"])}

    def weight_cases(self, group: str) -> list[Case]:
        """The entries of ``group`` that stand for a weight file."""
        return [case for case in self.cases if case["group"] == group and is_weights(case)]

    def weight_files(self, pattern: str) -> list[str]:
        """The weight files that ``pattern`` (a glob) names, in the order of the index."""
        files = [c["file"] for c in self.cases if is_weights(c) and fnmatch.fnmatchcase(c["file"], pattern)]
        if not files:
            raise H3Error(f"no weight file in {self.folder / INDEX} matches {pattern}: copy the folder again")
        return files

    def model(self, name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, CheckpointInfo]:
        """The model of the weight file ``name``, loaded strictly; a DiT also in bfloat16 with its float32 islands."""
        if (name, dtype) not in self._models:
            group, place = self._weights(name)
            if group == "vae":
                self._models[name, dtype] = load_video_vae(**place)
            elif group == "audio_vae":
                self._models[name, dtype] = load_audio_vae(**place)
            else:
                self._models[name, dtype] = load_dit(**place, dtype=dtype)
        return self._models[name, dtype]

    def canonical(self, name: str) -> dict[str, Tensor]:
        """The tensors of the weight file ``name`` under our names, as stored."""
        return canonical_tensors(**self._weights(name)[1])

    def _weights(self, name: str) -> tuple[str, dict[str, Any]]:
        """The group of a weight file, and what loading it takes: path, layout, settings that no shape tells."""
        case = next(case for case in self.cases if is_weights(case) and case["file"] == name)
        interleaved = case["group"] == "dit" and layout_word(case) in OFFICIAL_WORDS
        layout = "official" if interleaved else None
        return case["group"], {"path": self.file(name).path, "layout": layout, "config": case["config"]}

    def vae(self, group: str) -> nn.Module:
        """The VAE of ``group``: the ComfyUI file where there is one (weight cases prove that the others equal it)."""
        cases = self.weight_cases(group)
        if not cases:
            raise H3Error(f"{self.folder / INDEX} names no weight file in group {group}: copy the folder again")
        comfyui = [case for case in cases if layout_word(case) == COMFYUI_WORD]
        return self.model((comfyui or cases)[0]["file"])[0]

    def comfyui_twin(self, case: Case) -> Case | None:
        """The entry of the ComfyUI file with the same weights as ``case`` (itself if it is that one)."""
        stem = Path(case["file"]).stem.rpartition("_")[0]
        twins = [c for c in self.weight_cases(case["group"]) if Path(c["file"]).stem == f"{stem}_{COMFYUI_WORD}"]
        return twins[0] if twins else None


class Value(NamedTuple):
    """What the runtime computed under the name of an output. ``want`` and ``tolerance`` None: those of the case, and
    skipped where the case stores no such output. ``variant`` tells the weight file where several are run."""

    name: str
    got: Tensor
    variant: str = ""
    want: Tensor | None = None
    tolerance: Any = None

    @property
    def label(self) -> str:
        return f"{self.name} [{self.variant}]" if self.variant else self.name


def is_weights(case: Case) -> bool:
    """Whether ``case`` is a weight file's own entry: nothing goes in, nothing comes out."""
    return not case["inputs"] and not case["outputs"]


def layout_word(case: Case) -> str:
    """comfy, raw or diffusers: the last part of a weight file's name."""
    return Path(case["file"]).stem.rpartition("_")[2]


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise H3Error(f"{folder} has no {INDEX}: give a folder of reference vectors, such as tests/golden")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        cases = index["cases"]
        lacking = [f"{case.get('id', i)}: {key}" for i, case in enumerate(cases) for key in NEEDED if key not in case]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise H3Error(f"{path} is no index of reference vectors ({error!r}): copy the folder again") from None
    if lacking or not cases:
        found = f"entries without {listed(lacking)}" if lacking else "no case"
        raise H3Error(f"{path} has {found}: copy the folder again")
    return index


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputResult:
    """One compared value. ``max_abs`` and ``rel_l2`` are NaN where the shapes differ or numbers are not finite."""

    name: str
    passed: bool
    max_abs: float
    rel_l2: float
    note: str = ""


def compare(name: str, got: Tensor, want: Tensor, tolerance: Any) -> OutputResult:
    """``got`` against ``want`` at ``tolerance``, in float64.

    "exact": equal; {"atol", "rtol"}: every element within atol + rtol * |want|; {"rel_l2"}: |got - want| / |want|.
    All bounds that are given must hold. H3Error for a tolerance that sets none.
    """
    bounds = _bounds(name, tolerance)
    if got.shape != want.shape:
        return OutputResult(name, False, math.nan, math.nan, f"shape {list(got.shape)}, wanted {list(want.shape)}")
    theirs = want.double()
    error = (got.detach().cpu().double() - theirs).abs()
    max_abs = error.max().item() if error.numel() else 0.0
    if not math.isfinite(max_abs):
        return OutputResult(name, False, math.nan, math.nan, "NaN or infinity")
    length = theirs.norm().item()
    rel_l2 = error.norm().item() / length if length else (math.inf if max_abs else 0.0)
    if bounds is None:
        return OutputResult(name, max_abs == 0, max_abs, rel_l2)
    passed = rel_l2 <= bounds.get("rel_l2", math.inf)
    if "atol" in bounds or "rtol" in bounds:
        limit = bounds.get("atol", 0.0) + bounds.get("rtol", 0.0) * theirs.abs()
        passed = passed and bool((error <= limit).all())
    return OutputResult(name, passed, max_abs, rel_l2)


def _bounds(name: str, tolerance: Any) -> dict[str, float] | None:
    """None for "exact", else the bounds; H3Error when ``tolerance`` is neither."""
    if tolerance == EXACT:
        return None
    good = isinstance(tolerance, dict) and tolerance and set(tolerance) <= {"atol", "rtol", "rel_l2"}
    if not good or not all(isinstance(v, (int, float)) and 0 <= v < math.inf for v in tolerance.values()):
        raise H3Error(f'{name} has the tolerance {tolerance!r}: give "exact", atol and rtol, or rel_l2')
    return tolerance
