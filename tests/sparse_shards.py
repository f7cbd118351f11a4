"""The official DiT's shards at their true size, as sparse files: real headers, payload of holes that read as zeros.

    python -m tests.sparse_shards FOLDER [METHODS] [BLOCKS]     write them, read block by block; tell the cost

A file system that keeps holes needs no room for 66 GB of them.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path

from h3_runtime.checkpoint.load import open_dit
from h3_runtime.checkpoint.pieces import Online
from h3_runtime.models.dit import DiT, DiTConfig

from .checkpoint_fixtures import mark_filled

SHARDS = 13
PAYLOAD = 66_280_430_144  # bytes, by the published index
TENSORS = 535
FULL = Online("int8_convrot", adaln=True)  # what the public full file quantises


def shapes() -> dict[str, tuple[int, ...]]:
    import torch

    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DiT(DiTConfig()).state_dict().items()}


def write_shards(folder: Path) -> Path:
    """Thirteen shards and their index; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = list(shapes().items()), {}
    share = -(-len(names) // SHARDS)
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        header, position = {}, 0
        for name, shape in names[shard * share : (shard + 1) * share]:
            word, size = ("F32", 4) if name.startswith(DiT.float32_islands) else ("BF16", 2)
            for length in shape:
                size *= length
            header[name] = {"dtype": word, "shape": list(shape), "data_offsets": [position, position + size]}
            position += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + position)
        mark_filled(folder / file)
    index = {"metadata": {"total_size": PAYLOAD}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def read_blocks(folder: Path, method: str | None, blocks: int) -> dict[str, float]:
    """Read ``blocks`` blocks one after the other, dropping each; seconds, bytes read, and peak host memory in bytes."""
    import resource

    opened = open_dit(folder, quantise=method)
    began, read = time.perf_counter(), 0
    for index in range(blocks):
        prefix = f"blocks.{index}."
        held = dict(opened.pieces.read(prefix))
        read += sum(2 * size for name, size in _sizes(opened).items() if name.startswith(prefix))
        assert len(held) == 10, sorted(held)
        del held
    seconds = time.perf_counter() - began
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes
    return {
        "blocks": blocks,
        "seconds": seconds,
        "gigabytes_read": read / 1e9,
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9,
    }


def _sizes(opened) -> dict[str, int]:
    sizes = {}
    for name, recipe in opened.pieces.checkpoint.recipes.items():
        count = 1
        for length in recipe.shape:
            count *= length
        sizes[name] = count
    return sizes


if __name__ == "__main__":
    place, asked, count = Path(sys.argv[1]), (sys.argv[2:] or ["bf16"])[0], int((sys.argv[3:] or ["50"])[0])
    if not (place / "model.safetensors.index.json").exists():
        write_shards(place)
    told = {method: read_blocks(place, None if method == "bf16" else method, count) for method in asked.split(",")}
    print(json.dumps(told))
