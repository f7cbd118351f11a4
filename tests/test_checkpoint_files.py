"""Damaged, partial and foreign weight files, shards, and what reading costs."""

import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from h3_runtime.checkpoint.load import canonical_tensors, load_dit, load_video_vae
from h3_runtime.checkpoint.opening import open_checkpoint
from h3_runtime.checkpoint.reader import SafetensorsFile, ShardedFolder, fingerprint, full_sha256, open_source
from h3_runtime.demo.maker import make_model
from h3_runtime.errors import CheckpointError
from h3_runtime.text.encoder import open_weights
from tests.checkpoint_fixtures import (
    GOLDEN,
    assert_refused,
    assert_same,
    golden,
    mark_filled,
    write_file,
    write_raw,
    write_sharded,
)

# ---------------------------------------------------------------- damaged files


def test_truncated_trailing_and_zeroed_tail(tmp_path):
    good = (GOLDEN / "b_dit_comfy.safetensors").read_bytes()
    size = len(good)
    short = tmp_path / "short.safetensors"
    short.write_bytes(good[:-16])
    message = f"is truncated: {size:,} bytes expected, {size - 16:,} found (16 missing)"
    for loader in (load_dit, load_video_vae, canonical_tensors, open_source):  # the same verdict whoever asks
        assert_refused(loader, short, message)
    long = tmp_path / "long.safetensors"
    long.write_bytes(good + bytes(16))
    module, info = load_dit(long)
    assert_same(module.state_dict(), golden("b_dit_comfy"))
    assert any("16 bytes after the payload" in note for note in info.notes)
    # zeros in place of data cannot be told from zeros; the fingerprint can
    tail = tmp_path / "tail.safetensors"
    tail.write_bytes(good[:-16] + bytes(16))
    whole = tmp_path / "whole.safetensors"
    whole.write_bytes(good)
    assert fingerprint([tail]) != fingerprint([whole]) == fingerprint([GOLDEN / "b_dit_comfy.safetensors"])
    header = 8 + struct.unpack("<Q", good[:8])[0]
    short.write_bytes(good[: header - 10])
    assert_refused(load_dit, short, f"{header:,} bytes expected for the header alone, {header - 10:,} found")


def test_a_download_that_was_reserved_and_never_filled(tmp_path):
    """Full size, good header, zeros for data: whoever opens it says so, before anything is read."""
    make_model(tmp_path)
    vae = tmp_path / "video_vae.safetensors"
    encoder, whole = tmp_path / "text_encoder.safetensors", vae.read_bytes()
    load_video_vae(vae)
    size = len(whole)
    assert size > 1 << 20
    for begin, end, words in (
        (size - (1 << 16), size, "ends in zeros"),
        (size // 3, size // 3 * 2, "is zeros from about byte"),
        (size // 2, size, "ends in zeros"),
    ):
        vae.write_bytes(whole[:begin] + bytes(end - begin) + whole[end:])
        for opened in (load_video_vae, open_checkpoint):
            with pytest.raises(CheckpointError, match=rf"{words}.*full size \({size:,} bytes\).*download it again"):
                opened(vae)
    with open(encoder, "r+b") as stream:
        stream.seek(-(1 << 16), 2)
        stream.write(bytes(1 << 16))
    with pytest.raises(CheckpointError, match="ends in zeros"):
        open_weights(encoder)
    vae.write_bytes(whole[: size // 2] + bytes(1 << 12) + whole[size // 2 + (1 << 12) :])
    load_video_vae(vae)  # a weight of zeros in its middle is no sign of a download


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("empty.safetensors", b"", "is empty (0 bytes)"),
        ("page.safetensors", b"\n<!DOCTYPE html><html>", "is a web page"),
        ("lfs.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        ("zip.safetensors", b"PK\x03\x04" + bytes(100), "is a pickle"),
        ("model.pt", b"\x80\x02}q\x00." + bytes(100), "is a pickle"),
        ("model.gguf", b"GGUF\x03\x00\x00\x00" + bytes(100), "is a GGUF file"),
        ("zeros.safetensors", bytes(10_000), "begins with zeros"),
        ("noise.safetensors", bytes(range(1, 200)), "is not a safetensors file"),
        ("short.safetensors", b"\x10", "is not a safetensors file"),
    ],
)
def test_files_that_are_something_else(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    assert_refused(load_dit, path, message)


def test_unfinished_downloads_and_absent_files(tmp_path):
    good = (GOLDEN / "b_dit_comfy.safetensors").read_bytes()
    partial = tmp_path / "dit.safetensors.incomplete"
    partial.write_bytes(good)
    assert_refused(load_dit, partial, "is an unfinished download (.incomplete)")
    reserved = tmp_path / "dit.safetensors"
    reserved.write_bytes(good)
    (tmp_path / "dit.safetensors.aria2").write_bytes(b"")
    assert_refused(load_dit, reserved, "is still being downloaded")
    assert_refused(load_dit, tmp_path / "none.safetensors", "does not exist")
    (tmp_path / "folder").mkdir()
    assert_refused(load_dit, tmp_path / "folder", "holds no .safetensors file")


def test_a_header_length_that_looks_like_a_pickle_is_still_read(tmp_path):
    header = json.dumps({"x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}).encode().ljust(0x280)
    path = write_raw(tmp_path / "x.safetensors", header, b"abc")
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert SafetensorsFile(path).read("x").tolist() == [97, 98, 99]


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header, message",
    [
        (b"{not json}", "Expecting property name"),
        (b'{"a": "\xff"}', "utf-8"),
        (b"{" + b'"a":{' * 60000, "recursion"),
        (b'{"a": 1' + b"0" * 10000 + b"}", "digits"),
        ({"a": [1]}, "must have dtype, shape and data_offsets"),
        ({"a": {**ENTRY, "more": 1}}, "must have dtype, shape and data_offsets"),
        ({"a": {**ENTRY, "dtype": "F33"}}, "unknown dtype 'F33'"),
        ({"a": {**ENTRY, "dtype": ["F32"]}}, "unknown dtype"),
        ({"a": {**ENTRY, "shape": [-2]}}, "impossible shape"),
        ({"a": {**ENTRY, "shape": [2.0]}}, "impossible shape"),
        ({"a": {**ENTRY, "shape": [True, 2]}}, "impossible shape"),
        ({"a": {**ENTRY, "shape": [1 << 61, 1 << 61]}}, "takes"),
        ({"a": {**ENTRY, "shape": [3]}}, "takes 12 bytes, its offsets span 8"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, "takes 8 bytes, its offsets span -8"),
        ({"a": {**ENTRY, "data_offsets": [0, 8, 8]}}, "impossible shape or offsets"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, "begins at byte"),
        ({"a": ENTRY, "b": ENTRY}, "begins at byte"),
        ({"__metadata__": {"a": 1}, "a": ENTRY}, "__metadata__ must map words to words"),
        ({"__metadata__": "a", "a": ENTRY}, "__metadata__ must map words to words"),
        (b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2), "'a' appears twice"),
    ],
)
def test_damaged_headers(tmp_path, header, message):
    path = write_raw(tmp_path / "x.safetensors", header, bytes(64))
    with pytest.raises(CheckpointError) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value) and message in str(error.value)


def test_corrupted_headers_never_crash_nor_load_half(tmp_path):
    """200 seeded corruptions: a CheckpointError that names the file, or exactly the right model."""
    good = (GOLDEN / "b_dit_comfy.safetensors").read_bytes()
    length = struct.unpack("<Q", good[:8])[0]
    want = golden("b_dit_comfy")
    path = tmp_path / "dit.safetensors"
    refused = 0
    for seed in range(200):
        draw = random.Random(seed)
        data = bytearray(good)
        start = draw.randrange(8 + length)
        kind = seed % 4
        if kind == 0:  # one byte, anywhere up to the end of the header
            data[start] = draw.randrange(256)
        elif kind == 1:  # one digit for another
            digits = [i for i in range(8, 8 + length) if 48 <= data[i] < 58]
            data[draw.choice(digits)] = draw.choice(b"0123456789")
        elif kind == 2:  # a run of noise
            data[start : start + 8] = draw.randbytes(8)
        else:  # bytes taken out
            del data[start : start + draw.randrange(1, 9)]
        path.write_bytes(data)
        try:
            module, _ = load_dit(path)
        except CheckpointError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert_same(module.state_dict(), want)
    assert refused > 150


# ---------------------------------------------------------------- shards


def test_shards_must_match_their_index(tmp_path):
    folder = write_sharded(tmp_path / "dit", golden("b_dit_raw"), "model")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())

    def with_map(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))

    weight_map = dict(content["weight_map"])
    with_map(weight_map | {"blocks.0.ghost": "model-00001-of-00003.safetensors"})
    assert_refused(load_dit, folder, "listed but not in their shard: blocks.0.ghost (model-00001-of-00003.safetensors)")
    moved = next(iter(weight_map))
    with_map({name: shard for name, shard in weight_map.items() if name != moved})
    assert_refused(load_dit, folder, f"in a shard but not listed there: {moved}")
    with_map(weight_map | {moved: "../elsewhere.safetensors"})
    assert_refused(load_dit, folder, "points outside its folder")
    for broken in ("[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": "a"}', "[" * 60000):
        index.write_text(broken)
        assert_refused(load_dit, folder, "download it again")
    with_map(weight_map)
    second = folder / "model-00002-of-00003.safetensors"
    data = second.read_bytes()
    second.write_bytes(data[:-2])
    assert_refused(lambda path: load_dit(path.parent), second, "is truncated")
    second.unlink()
    assert_refused(load_dit, folder, "1 of 3 shards are missing: model-00002-of-00003.safetensors")
    index.unlink()
    assert_refused(load_dit, folder, "holds shards", "no .safetensors.index.json")


def test_missing_tensor_in_shards_and_two_indexes(tmp_path):
    tensors = golden("b_dit_raw")
    del tensors["blocks.0.mlp.fc2.weight"]
    folder = write_sharded(tmp_path / "dit", tensors, "model")
    assert_refused(load_dit, folder, "missing blocks.0.mlp.fc2.weight")
    shutil.copy(folder / "model.safetensors.index.json", folder / "other.safetensors.index.json")
    assert_refused(load_dit, folder, "holds 2 shard indexes")
    two = tmp_path / "two"
    write_file(two / "a.safetensors", golden("b_dit_comfy"))
    write_file(two / "b.safetensors", golden("b_dit_comfy"))
    assert_refused(load_dit, two, "holds 2 files (a.safetensors, b.safetensors); name the one")


# ---------------------------------------------------------------- reading


def test_reader_api(tmp_path):
    tensors = {
        "half": torch.randn(3, 5).half(),
        "scalar": torch.tensor(4.5),
        "none": torch.empty(0, 7),
        "bytes": torch.arange(6, dtype=torch.int8).view(2, 3),
    }
    path = write_file(tmp_path / "x.safetensors", tensors, metadata={"a": "b"})
    file = SafetensorsFile(path)
    assert file.metadata == {"a": "b"} and file.notes == () and file.files == (path,)
    assert file.shapes["half"] == (3, 5) and file.dtypes["half"] == "F16" and file.nbytes("half") == 30
    assert file.where("half") == f"{path}: half"
    assert_same({name: file.read(name) for name in file.shapes}, tensors)
    out = torch.zeros(3, 5, dtype=torch.float16)
    assert file.read("half", out) is out and torch.equal(out, tensors["half"])
    with pytest.raises(CheckpointError, match="has no tensor 'other'"):
        file.read("other")
    with pytest.raises(AssertionError):
        file.read("half", torch.zeros(5, 3, dtype=torch.float16))
    folder = ShardedFolder(write_sharded(tmp_path / "s", tensors, "model", count=2))
    assert folder.sharded and len(folder.files) == 2
    assert_same({name: folder.read(name) for name in folder.shapes}, tensors)
    assert folder.where("bytes").endswith("safetensors: bytes") and folder.nbytes("bytes") == 6


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path):
    path = write_file(tmp_path / "x.safetensors", {"a": torch.ones(4)})
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        file.read("a")


def test_no_handle_outlives_a_load(tmp_path):
    path = write_file(tmp_path / "dit.safetensors", golden("b_dit_comfy"))
    module, _ = load_dit(path)
    descriptors = Path("/proc/self/fd")
    if descriptors.exists():
        held = [os.readlink(link) for link in descriptors.iterdir() if link.is_symlink() and link.exists()]
        assert str(path) not in held
        assert str(path) not in Path("/proc/self/maps").read_text()
    path.rename(tmp_path / "renamed.safetensors")  # Windows refuses while a handle is open
    (tmp_path / "renamed.safetensors").unlink()
    assert_same(module.state_dict(), golden("b_dit_comfy"))


def test_fingerprint_and_full_hash(tmp_path):
    path = write_file(tmp_path / "x.safetensors", {"a": torch.arange(1000)})
    copy = tmp_path / "renamed.safetensors"
    shutil.copy(path, copy)
    first = fingerprint([path])
    assert first == fingerprint([copy]) and first.startswith(f"{path.stat().st_size}-")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    os.utime(copy, ns=(1, 1))
    assert fingerprint([copy]) != first
    assert fingerprint([path, copy]) == fingerprint([copy, path]) != first
    assert full_sha256(path) != full_sha256(copy) and len(full_sha256(path)) == 64


def test_a_large_files_first_and_last_page_are_in_its_fingerprint(tmp_path):
    size = 80 << 20
    header = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    found = set()
    for offset in (None, 200, size - 1):
        path = write_raw(tmp_path / "big.safetensors", header)
        with open(path, "r+b") as file:
            start = file.seek(0, 2)
            file.truncate(start + size)
            if offset is not None:
                file.seek(start + offset)
                file.write(b"x")
        os.utime(path, ns=(len(found), len(found)))
        found.add(fingerprint([path]))
    assert len(found) == 3


MEMORY_SCRIPT = """
import sys
from pathlib import Path
import psutil, torch
from h3_runtime.checkpoint.load import load_dit
from h3_runtime.checkpoint.reader import open_source

def peak():
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "darwin":
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text()  # ru_maxrss would count the process that started this one
    return 1024 * int(status.split("VmHWM:")[1].split()[0])

load_dit(sys.argv[1])  # whatever a first load brings into the process
start = psutil.Process().memory_info().rss
before = peak() - start
source = open_source(sys.argv[2])
for name in source.shapes:
    source.read(name)
one_by_one = peak() - start
module, info = load_dit(sys.argv[2])
print(before, one_by_one, peak() - start, info.nbytes)
"""


def test_peak_host_memory_is_what_stays_plus_one_tensor(tmp_path):
    """A sparse DiT of 300 MB in the layout that needs the most work: read one by one, then loaded."""
    hidden, ffn, blocks = 1024, 4096, 9
    shapes = {name: tuple(tensor.shape) for name, tensor in golden("b_dit_diffusers").items()}
    sizes = {64: hidden, 128: 2 * hidden, 256: 2 * ffn, 1152: 18 * hidden, 96: 96, 48: 48, 32: 32, 16: 16}
    header, position = {}, 0
    for name, shape in shapes.items():
        if name.startswith("transformer_blocks.1."):
            continue
        wide = [hidden, ffn] if "ff.net.2" in name else [sizes[n] for n in shape]
        for copy in range(blocks if name.startswith("transformer_blocks.0.") else 1):
            count = 2 * math.prod(wide)
            entry = {"dtype": "BF16", "shape": wide, "data_offsets": [position, position + count]}
            header[name.replace("transformer_blocks.0.", f"transformer_blocks.{copy}.")] = entry
            position += count
    path = write_raw(tmp_path / "dit.safetensors", header)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + position)
    mark_filled(path)
    assert position > 280e6
    largest = max(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    # tensors of the real size (over 32 MB) are given back when freed; glibc keeps small ones unless told otherwise
    environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(GOLDEN / "b_dit_comfy.safetensors"), str(path)],
        capture_output=True,
        text=True,
        cwd=root,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    before, one_by_one, loaded, payload = map(int, run.stdout.split())
    megabytes = [round(n / 1e6) for n in (before, one_by_one, loaded, payload, largest)]
    print("MB above the start: imports {}, one by one {}, loaded {}; payload {}, largest tensor {}".format(*megabytes))
    assert payload == position
    assert one_by_one < max(before, 3 * largest) + 20e6
    # a machine short of memory may have taken back pages of the payload: then the peak says less, never more
    assert 0.9 * payload < loaded < max(before, payload + 3 * largest) + 20e6
