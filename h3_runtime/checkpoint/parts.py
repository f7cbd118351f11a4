"""Where the parts of a model lie in a folder, whatever its layout.

    official          FL2VA/{transformer, text_encoder, tokenizer, video_vae/source, audio_vae}, Ref2VA/{...}
    diffusers         transformer, transformer_ref, vae, audio_vae, text_encoder, tokenizer
    ComfyUI models/   diffusion_models/**, text_encoders/**, vae/**, or all files in one folder
    ours              dit.safetensors, video_vae.safetensors, audio_vae.safetensors, text_encoder/, vocab.json

Weights are recognised by their tensors, not by what the files are called; only headers are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, H3Error
from .formats import FORMATS
from .gguf_file import open_weights
from .opening import BOTH, find_partition, sort_names
from .reader import listed
from .text_layout import is_text_encoder


@dataclass(frozen=True)
class DiTPath:
    path: Path
    partition: str


@dataclass(frozen=True)
class PartPaths:
    """The parts found in a model folder; None where there is none. ``skipped`` says what was found and not usable."""

    dits: tuple[DiTPath, ...]
    video_vae: Path | None
    audio_vae: Path | None
    text_encoder: Path | None
    tokenizer: Path | None
    skipped: tuple[str, ...] = ()

    @property
    def dit(self) -> Path | None:
        """The first DiT; ``dit_for`` chooses by task."""
        return self.dits[0].path if self.dits else None

    def dit_for(self, task: str) -> DiTPath:
        """The DiT for a task (t2va and fl2va need fl2va weights, ref2va its own). H3Error when none or several fit."""
        needed = "ref2va" if task == "ref2va" else "fl2va"
        for partition in (needed, BOTH, "unknown"):
            fitting = [dit for dit in self.dits if dit.partition == partition]
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                raise H3Error(
                    f"{len(fitting)} DiTs fit the task {task} ({listed(str(d.path) for d in fitting)}); name one: "
                    "--dit FILE (for plan: --weights FILE)."
                )
        found = listed(f"{dit.path} ({dit.partition})" for dit in self.dits) or "none"
        reasons = f" Not usable: {listed(self.skipped)}" if self.skipped else ""
        raise H3Error(f"the task {task} needs {needed} weights; DiTs found: {found}.{reasons}")


COMPONENT_FOLDERS = (
    "transformer",
    "transformer_ref",
    "vae",
    "video_vae",
    "video_vae/source",
    "audio_vae",
    "text_encoder",
)
COMFYUI_FOLDERS = ("diffusion_models", "unet", "checkpoints", "text_encoders", "clip", "vae")
TOKENIZER_FOLDERS = ("tokenizer", "", "text_encoder", "processor")
COMFYUI_TOKENIZER = "comfy/text_encoders/qwen25_tokenizer"  # beside the models folder


def find_parts(model_dir: str | os.PathLike) -> PartPaths:
    """The parts in a model folder of any layout: official, diffusers, ComfyUI (``models/`` or one folder), our own.

    Parts are recognised by their tensors, whatever files are called; a damaged one is skipped with the reason. Of
    several VAEs the largest (highest precision) is taken and the others named. H3Error when it is not a folder.
    """
    root = Path(model_dir)
    if not root.is_dir():
        raise H3Error(f"the model folder {root} {'is a file' if root.exists() else 'does not exist'}; give a folder.")
    found: dict[str, list[Path]] = {"video_vae": [], "audio_vae": [], "text_encoder": []}
    dits: list[DiTPath] = []
    skipped: list[str] = []
    for path, is_copy_place in _candidates(root):
        try:
            part, partition = _recognise(path)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        if part == "dit":
            # the official repository holds every DiT twice, as diffusers and as official folder
            if not (is_copy_place and any(dit.partition == partition != "unknown" for dit in dits)):
                dits.append(DiTPath(path, partition))
        elif part:
            found[part].append(path)
    for part in ("video_vae", "audio_vae", "text_encoder"):
        if part != "text_encoder":
            found[part].sort(key=_bytes_at, reverse=True)
        skipped += [f"{path} ({part}): {found[part][0]} is used" for path in found[part][1:]]
    first = {part: paths[0] if paths else None for part, paths in found.items()}
    encoder = first["text_encoder"]
    if encoder and encoder.is_file() and encoder.parent.name == "text_encoder":
        encoder = encoder.parent
    return PartPaths(
        tuple(dits), first["video_vae"], first["audio_vae"], encoder, _find_tokenizer(root), tuple(skipped)
    )


def _candidates(root: Path) -> Iterator[tuple[Path, bool]]:
    """Weights in the known places of ``root``, shards as their folder; True for a place that repeats another's DiT."""
    seen: set[Path] = set()
    places = [(root, False)]
    places += [(root / name, False) for name in COMPONENT_FOLDERS]
    for partition in ("FL2VA", "Ref2VA"):
        places += [(root / partition / name, True) for name in COMPONENT_FOLDERS]
    for name in COMFYUI_FOLDERS:
        places += [(folder, False) for folder in (root / name, *sorted((root / name).rglob("*/")))]
    for folder, is_copy_place in places:
        if not folder.is_dir():
            continue
        indexes = sorted(folder.glob("*.safetensors.index.json"))
        shards: set[str] = set()
        for index in indexes:
            listing = index.read_bytes()  # a damaged index is reported when its candidate is opened
            shards |= {file.name for file in folder.glob("*.safetensors") if file.name.encode() in listing}
        files = [file for file in sorted(folder.glob("*.safetensors")) if file.name not in shards]
        files += sorted(folder.glob("*.gguf"))
        for path in [folder] if len(indexes) == 1 else indexes:
            if path not in seen:
                yield path, is_copy_place
        for path in files:
            if path not in seen:
                yield path, is_copy_place
        seen |= {folder, *indexes, *files}


def _recognise(path: Path) -> tuple[str | None, str]:
    """Which part lies at ``path`` (None: no part of this model), and a DiT's partition."""
    source = open_weights(path)
    if is_text_encoder(source.shapes):
        return "text_encoder", "unknown"
    header = sort_names(source).header
    part = next((format.part for format in FORMATS if format.detect(header) is None), None)
    return part, find_partition(source)[0] if part == "dit" else "unknown"


def _bytes_at(path: Path) -> int:
    return sum(file.stat().st_size for file in open_weights(path).files)


def _find_tokenizer(root: Path) -> Path | None:
    """The first known folder with vocab.json and merges.txt, else with tokenizer.json."""
    places = [root / partition / name for partition in ("", "FL2VA", "Ref2VA") for name in TOKENIZER_FOLDERS]
    places += [root / name for name in ("text_encoders", "clip")] + [root.parent / COMFYUI_TOKENIZER]
    for files in (("vocab.json", "merges.txt"), ("tokenizer.json",)):
        for folder in places:
            if all((folder / file).is_file() for file in files):
                return folder
    return None
