"""66 GB of official shards, as sparse files of their true shapes: read block by block they take little host memory, in
bf16 and quantised while reading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from h3_runtime.checkpoint.load import open_dit
from h3_runtime.checkpoint.reader import ShardedFolder

from . import sparse_shards

LIMIT = 4.0  # GB of host memory, the interpreter and torch included


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse") / "FL2VA" / "transformer"
    sparse_shards.write_shards(folder)
    first = min(folder.glob("*.safetensors"))
    if getattr(first.stat(), "st_blocks", 1 << 30) * 512 > first.stat().st_size // 100:
        for file in folder.glob("*.safetensors"):
            file.unlink()
        pytest.skip("needs os: this file system keeps no holes, and 66 GB would be written")
    return folder


def test_the_shards_are_of_the_published_size(shards):
    source = ShardedFolder(shards)
    assert len(source.files) == sparse_shards.SHARDS and len(source.shapes) == sparse_shards.TENSORS
    assert sum(source.nbytes(name) for name in source.shapes) == sparse_shards.PAYLOAD
    opened = open_dit(shards, quantise="int8_convrot")
    assert opened.info.online == {"int8_convrot": 200} and opened.info.partition == "fl2va"
    adaln = open_dit(shards, quantise=sparse_shards.FULL)
    assert adaln.info.online == {"int8_convrot": 250}


def test_blocks_are_read_in_little_memory(shards):
    if sys.platform == "win32":
        pytest.skip("needs os: peak memory of a process is told by POSIX systems")
    command = [sys.executable, "-m", "tests.sparse_shards", str(shards), "bf16,int8_convrot", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=300)
    assert done.returncode == 0, done.stderr
    for method, told in json.loads(done.stdout).items():
        assert told["gigabytes_read"] > 1.2 and told["peak_gigabytes"] < LIMIT, (method, told)
