"""``embedding:name`` in a prompt: learned rows that take the place of words before the encoder's first layer.

    "a street, embedding:noir, rain" ──resolve_prompt──▶ "a street, " | 64 rows of noir.safetensors | ", rain"

Which texts are names, where files are looked for and which tensor of a file is taken follow ComfyUI, so that a prompt
written for it means the same here:

    a name stands at the start of the prompt or after white space, and ends at white space, < or [
    name, name.safetensors, name.pt, name.bin, in the folder and all folders below; never outside it
    not found: once more without the commas at the ends; still not found: a note, and the name is left out
    what follows a name has its white space narrowed to single spaces, up to the next name
    the tensor: string_to_param's first; a list's rows of the right width; qwen3vl_32b; bundle_emb...; else the first

Old .pt and .bin files are read by ``torch.load(weights_only=True)``: a file that holds code is refused, not run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reader import full_sha256
from ..errors import H3Error
from .presentation import EmbeddingPiece, TextPiece

MARK = "embedding:"
SUFFIXES = ("", ".safetensors", ".pt", ".bin")
ENCODER_KEY = "qwen3vl_32b"
BUNDLE = "bundle_emb."


@dataclass(frozen=True)
class UsedEmbedding:
    """One name that was found: the base name and hash of its file, and how many rows it put in."""

    name: str
    file: str
    sha256: str
    rows: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ResolvedPrompt:
    """A prompt taken apart. ``pieces`` None: it names no embedding and stands as it is."""

    pieces: tuple[TextPiece | EmbeddingPiece, ...] | None
    used: tuple[UsedEmbedding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def read_as(self) -> tuple[str, ...] | None:
        """The pieces in words: what of the prompt reached the encoder as text, and where an embedding stands."""
        if self.pieces is None:
            return None
        return tuple(p.text if isinstance(p, TextPiece) else f"{MARK}{p.name}" for p in self.pieces)


def names_embeddings(prompt: str) -> bool:
    """Whether the prompt holds ``embedding:`` where a name can stand."""
    return any(piece.startswith(MARK) and piece[len(MARK) :].split() for piece in _cut_at_marks(prompt))


def resolve_prompt(
    prompt: str, folders: Sequence[str | os.PathLike], width: int, recipe: str = "reference"
) -> ResolvedPrompt:
    """Take ``prompt`` apart at its embeddings; ``width`` is the encoder's ``text_dim``.

    Without a folder nothing is looked for and the prompt stays as it is. A missing, unreadable or ill-fitting file is a
    note with its reason, as a creator may still want the clip. The recipe ``comfy`` reads ``\\(`` and ``\\)`` as plain
    parentheses, which ComfyUI does to every prompt.
    """
    plain = prompt.replace("\\)", ")").replace("\\(", "(") if recipe == "comfy" else prompt
    if not folders or not names_embeddings(plain):
        return ResolvedPrompt(None if plain == prompt else (TextPiece(plain),))
    pieces: list[TextPiece | EmbeddingPiece] = []
    used, notes = [], []
    for text in _cut_at_marks(plain):
        words = text[len(MARK) :].split() if text.startswith(MARK) else []
        if not words:
            pieces.append(TextPiece(text))
            continue
        name, after = _split_name(words)
        path, name, comma = _look_for(name, folders)
        after = f"{comma} {after}" if comma else after
        if path is None:
            notes.append(f"embedding '{name}' was not found in {_listed(folders)} and is left out of the prompt")
        else:
            try:
                rows = read_embedding(path, width)
                pieces.append(EmbeddingPiece(name, rows))
                used.append(UsedEmbedding(name, path.name, full_sha256(path), len(rows)))
                notes.append(f"embedding '{name}': {len(rows)} rows of {width} from {path.name}")
            except H3Error as error:
                notes.append(f"embedding '{name}' is left out of the prompt: {error}")
        if after:
            pieces.append(TextPiece(after))
    return ResolvedPrompt(tuple(pieces), tuple(used), tuple(notes))


def find_embedding(name: str, folders: Sequence[str | os.PathLike]) -> Path | None:
    """The file that ``name`` stands for, or None. Each folder is searched before its subfolders, these in order.

    A name may hold a path below the folder; one that leads outside it finds nothing.
    """
    for folder in _all_folders(folders):
        path = Path(os.path.abspath(folder / name))
        if path == folder or not path.is_relative_to(folder):
            continue
        for suffix in SUFFIXES:
            candidate = path.with_name(path.name + suffix)
            if candidate.is_file():
                return candidate
    return None


def read_embedding(path: Path, width: int) -> Tensor:
    """float32 [n, width] of an embedding file. H3Error for one that is damaged, holds code, or has another width."""
    stored = _stored(path)
    tensor = _choose(stored, width)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim < 1:
        raise H3Error(f"{path.name} holds no embedding: a tensor [rows, {width}] is needed")
    if tensor.shape[-1] != width:
        raise H3Error(f"{path.name} is {tensor.shape[-1]} wide and this text encoder {width}: it is for another model")
    rows = tensor.detach().to(torch.float32).reshape(-1, width).contiguous()
    if not len(rows) or not bool(torch.isfinite(rows).all()):
        raise H3Error(f"{path.name} holds {'no rows' if not len(rows) else 'NaN or infinity'}: get the file again")
    return rows


def _cut_at_marks(prompt: str) -> list[str]:
    """The prompt cut before each ``embedding:`` that follows white space; empty parts left out."""
    first, *others = re.split(rf"(?<=\s){MARK}", prompt)
    return [part for part in (first, *(MARK + other for other in others)) if part]


def _split_name(words: list[str]) -> tuple[str, str]:
    """(name, the text after it) of the words that follow a mark."""
    name, after = words[0], " ".join(words[1:])
    end = re.search(r"[<\[]", name)
    if end:
        after = name[end.start() :] + (f" {after}" if after else "")
        name = name[: end.start()]
    return name, after


def _look_for(name: str, folders: Sequence[str | os.PathLike]) -> tuple[Path | None, str, str]:
    """(file or None, the name that was meant, the commas that are text after it)."""
    path = find_embedding(name, folders)
    bare = name.strip(",")
    if path is not None or bare == name:
        return path, name, ""
    return find_embedding(bare, folders), bare, name[len(bare) :]


def _all_folders(folders: Sequence[str | os.PathLike]) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in folders:
        for root, below, _ in os.walk(os.path.abspath(folder), followlinks=True):
            real = Path(os.path.realpath(root))
            if real in seen:  # a link that leads back up would never end
                below.clear()
                continue
            seen.add(real)
            below.sort()
            yield Path(root)


def _stored(path: Path) -> Any:
    try:
        if path.suffix.lower() == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path), device="cpu")
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # damaged files end in errors of many kinds, all of them the file's
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise H3Error(f"{path.name} cannot be read as weights ({reason}): get the file again") from error


def _choose(stored: Any, width: int) -> Any:
    """The tensor of a loaded file that ComfyUI would take."""
    if isinstance(stored, Tensor):
        return stored
    if isinstance(stored, Mapping) and isinstance(stored.get("string_to_param"), Mapping):
        return next(iter(stored["string_to_param"].values()), None)
    if isinstance(stored, list):
        values = [v for entry in stored if isinstance(entry, Mapping) for v in entry.values() if isinstance(v, Tensor)]
        fitting = [value.reshape(-1, width) for value in values if value.ndim and value.shape[-1] == width]
        return torch.cat(fitting) if fitting else next(iter(values), None)
    if not isinstance(stored, Mapping):
        return None
    if ENCODER_KEY in stored:
        return stored[ENCODER_KEY]
    for ending in (".string_to_param.*", f".{ENCODER_KEY}"):
        bundled = [value for key, value in stored.items() if key.startswith(BUNDLE) and key.endswith(ending)]
        if bundled:
            return torch.cat([value.reshape(-1, value.shape[-1]) for value in bundled])
    return next(iter(stored.values()), None)


def _listed(folders: Sequence[str | os.PathLike]) -> str:
    return ", ".join(Path(folder).name or str(folder) for folder in folders)
