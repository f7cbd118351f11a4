"""Whole prompt conditions kept: in a file that spares the encoder, and in a cache that spares encoding twice.

    TextCondition + ConditionRecord ──save_condition──▶ one safetensors file (hidden, tags; the record as JSON)
                                    ◀─load_condition──      └─ refuse_other: another prompt or reference is refused
    record.key ──ConditionCache──▶ states in memory, and in files of the user's cache folder

The record names everything that the states depend on: prompt, recipe, encoder and vocabulary by content, number type,
each keyframe and reference by kind, size and SHA-256 in its order, each prompt embedding by SHA-256, library versions
and the kind of device. Two records with one key give the same bits; names of files play no part in it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.kept import KeptResults, bytes_sha256
from ..checkpoint.reader import SafetensorsFile
from ..checkpoint.writer import WORDS, write_safetensors
from ..errors import CheckpointError, H3Error
from ..job import TextCondition
from .embeddings import UsedEmbedding
from .shown import Shown, labels

VERSION = 2
KIND = "h3_runtime.condition"
SUFFIX = ".h3-condition.safetensors"
MEMORY_BYTES = 512 << 20
DISK_BYTES = 2 << 30
NOT_IN_KEY = ("encoder", "approximate")


@dataclass(frozen=True)
class ConditionRecord:
    """What one condition was made from. ``items``: ``Shown.identity`` of each thing before the prompt, with its name.

    encoder: the file in words; fingerprint: of its weights; vocabulary: of its words; dtype: "stored" or "float32" as
    asked; read_as: the prompt's pieces, where it was taken apart (text/embeddings.py); made_with: library versions and
    the kind of device; approximate: why the encoder file is not the release's.
    """

    prompt: str
    recipe: str
    encoder: str
    fingerprint: str
    vocabulary: str
    dtype: str
    made_with: tuple[tuple[str, str], ...] = ()
    items: tuple[dict[str, Any], ...] = ()
    embeddings: tuple[UsedEmbedding, ...] = ()
    read_as: tuple[str, ...] | None = None
    approximate: str | None = None

    @property
    def key(self) -> str:
        """SHA-256 over everything that decides the states."""
        fields = {name: value for name, value in self.to_dict().items() if name not in NOT_IN_KEY}
        fields["items"] = [_without_name(item) for item in self.items]
        fields["embeddings"] = [[e.name, e.sha256, e.rows] for e in self.embeddings]
        return hashlib.sha256(json.dumps([VERSION, fields], sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return json.loads(json.dumps({**asdict(self), "made_with": dict(self.made_with)}))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ConditionRecord:
        """The inverse of ``to_dict``; KeyError or TypeError for anything else."""
        given = dict(values)
        given["made_with"] = tuple(sorted(given["made_with"].items()))
        given["items"] = tuple(dict(item) for item in given["items"])
        given["embeddings"] = tuple(UsedEmbedding(**entry) for entry in given["embeddings"])
        given["read_as"] = None if given["read_as"] is None else tuple(given["read_as"])
        return cls(**given)


@dataclass(frozen=True)
class MadeCondition:
    """States with the record of what they were made from.

    source: encoded just now, out of the cache, or out of a file the user named. other_encoder: the model folder has
    another encoder than the one that made them.
    """

    text: TextCondition
    record: ConditionRecord
    source: str = "encoded"  # encoded, cache or file
    other_encoder: bool = False


def describe_shown(shown: Sequence[Shown]) -> tuple[dict[str, Any], ...]:
    """The ``items`` of a record."""
    return tuple({**thing.identity(), "name": thing.name} for thing in shown)


def save_condition(path: str | os.PathLike, made: MadeCondition) -> Path:
    """Write states, tags and record as one safetensors file, atomically. CheckpointError when the place refuses."""
    path = Path(path)
    tensors = {"hidden": made.text.hidden, "tags": made.text.tags}
    entries = {name: (WORDS[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    about = {"version": VERSION, "record": made.record.to_dict(), "notes": made.text.notes, "source": made.text.source}
    about["sha256"] = bytes_sha256(*tensors.values())
    write_safetensors(path, entries, tensors.items(), {KIND: json.dumps(about, ensure_ascii=False)})
    return path


def load_condition(path: str | os.PathLike) -> MadeCondition:
    """Read a file of ``save_condition``. CheckpointError for one that is damaged or something else."""
    file = SafetensorsFile(path)
    name = Path(path).name
    if KIND not in (file.metadata or {}):
        raise CheckpointError(f"{name} holds no prompt condition of this runtime: make one with: embed save")
    try:
        about = json.loads(file.metadata[KIND])
        if about["version"] != VERSION:
            raise CheckpointError(
                f"{name} has version {about['version']} of its form, this runtime {VERSION}: save it again"
            )
        record = ConditionRecord.from_dict(about["record"])
        notes, source, digest = tuple(about["notes"]), str(about["source"]), about["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, H3Error):
            raise
        raise CheckpointError(f"{name} has a damaged record ({error!r}): save it again") from error
    if set(file.shapes) != {"hidden", "tags"}:
        raise CheckpointError(
            f"{name} holds {', '.join(sorted(file.shapes))}: hidden and tags are needed; save it again"
        )
    text = TextCondition(file.read("hidden"), file.read("tags"), notes, source)
    if bytes_sha256(text.hidden, text.tags) != digest:
        raise CheckpointError(f"{name} is damaged: it holds other bytes than were written; save it again")
    return MadeCondition(text, record, "file")


def refuse_other(made: MadeCondition, file: str, prompt: str, recipe: str, shown: Sequence[Shown]) -> None:
    """H3Error where a condition was made for another prompt, recipe, keyframe or reference than the request's."""
    record = made.record
    if prompt != record.prompt:
        raise H3Error(f"{file} was made for the prompt {_short(record.prompt)}: give that prompt, or none")
    if recipe != record.recipe:
        raise H3Error(f"{file} was made by the recipe {record.recipe}: add --recipe {record.recipe}, or encode again")
    had, have = record.items, describe_shown(shown)
    if [item["kind"] for item in had] != [item["kind"] for item in have]:
        raise H3Error(
            f"{file} was made with {_things(had)} and this request has {_things(have)}, in this order: give the same "
            "keyframes and references, or encode again"
        )
    for old, new, names in zip(had, have, labels(shown)):
        if _without_name(old) != _without_name(new):
            change = f"it is {_size(new)}, not {_size(old)}" if old["size"] != new["size"] else "its content differs"
            raise H3Error(
                f"{new['name']} is not the {old['kind']} that {file} was made with as {names[-1]} ({old['name']}; "
                f"{change}): give the same one at the same size and length, or encode again"
            )


class ConditionCache(KeptResults[MadeCondition]):
    """Conditions by the key of their record; the last ones in memory, and with ``folder`` in files too."""

    suffix, words = SUFFIX, "the prompt's states"

    def __init__(
        self, folder: str | Path | None = None, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES
    ):
        super().__init__(folder, memory_bytes, disk_bytes)

    def get(self, record: ConditionRecord) -> MadeCondition | None:
        """The condition of exactly this record, or None. A damaged file counts as none and leaves."""
        made = self.look_up(record.key)
        return None if made is None else MadeCondition(made.text, record, "cache")  # with this request's file names

    def put(self, made: MadeCondition) -> str | None:
        """Keep a condition; a sentence when the folder refuses it, which costs no more than another encode."""
        return self.keep(made.record.key, made)

    def write(self, path: Path, key: str, result: MadeCondition) -> None:
        save_condition(path, result)

    def read(self, path: Path, key: str) -> MadeCondition | None:
        made = load_condition(path)
        return made if made.record.key == key else None

    def nbytes(self, result: MadeCondition) -> int:
        return result.text.hidden.nbytes + result.text.tags.nbytes


def _without_name(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "name"}


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _size(item: Mapping[str, Any]) -> str:
    if not item["size"]:
        return "a sound"
    width, height, count = item["size"]
    return f"{width}x{height}" + (f" with {count} frames seen" if count > 1 else "")


def _things(items: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{item['kind']} {item['name']}" for item in items) or "neither keyframe nor reference"
