"""Damaged files: 500 seeded corruptions of headers and payload sizes end in an error that names the file, or load the
very same model; nothing crashes, hangs, or leaves a model in part."""

from __future__ import annotations

import json
import random
import struct

import pytest
import torch
from safetensors.torch import save_file

from h3_runtime.checkpoint.gguf_file import GGUFFile, open_weights
from h3_runtime.checkpoint.load import load_dit
from h3_runtime.checkpoint.reader import full_sha256
from h3_runtime.errors import CheckpointError
from h3_runtime.inspection import inspect_file

from .checkpoint_fixtures import GOLDEN, assert_refused, golden
from .quantised_fixtures import words, write_gguf

ROUNDS = {"int8": 150, "pruned": 100, "fp8": 100, "gguf": 150}
LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Kind -> (bytes, where the header ends) of small checkpoints of every container."""
    folder = tmp_path_factory.mktemp("whole")
    found = {}
    for kind, name in (("int8", "e_int8_convrot"), ("pruned", "e_pruned_int8_convrot"), ("fp8", "e_fp8_e4m3fn")):
        data = (GOLDEN / f"{name}.safetensors").read_bytes()
        found[kind] = (data, 8 + struct.unpack("<Q", data[:8])[0])
    given = golden("b_dit_comfy")
    types = {f"blocks.{i}.{leaf}.weight": "Q8_0" for i in range(2) for leaf in LINEARS}
    data = write_gguf(folder / "d.gguf", given, types, {"general.architecture": "minimax_h3"}).read_bytes()
    found["gguf"] = (data, min(entry.start for entry in GGUFFile(folder / "d.gguf").header.values()))
    return found


def damaged(data: bytes, header: int, chance: random.Random) -> bytes:
    """One corruption: bits or bytes of the header, its length, or bytes taken out of or put into the file."""
    kind = chance.choice(("bit", "byte", "bytes", "length", "cut", "drop", "insert", "swap", "number"))
    made = bytearray(data)
    place = chance.randrange(header)
    if kind == "bit":
        made[place] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        made[place] = chance.randrange(256)
    elif kind == "bytes":
        for _ in range(chance.randrange(2, 30)):
            made[chance.randrange(header)] = chance.randrange(256)
    elif kind == "length":
        at = chance.choice((0, 8, 16))
        made[at : at + 8] = struct.pack("<Q", chance.choice((0, 1, 2**63, 2**40, chance.randrange(2 * header))))
    elif kind == "cut":
        del made[chance.randrange(len(data)) :]
    elif kind == "drop":
        del made[place : place + chance.randrange(1, 64)]
    elif kind == "insert":
        made[place:place] = chance.randbytes(chance.randrange(1, 64))
    elif kind == "swap":
        other = chance.randrange(header)
        made[place : place + 8], made[other : other + 8] = made[other : other + 8], made[place : place + 8]
    else:
        digits = [i for i in range(header) if 48 <= made[i] < 58] or [place]
        made[chance.choice(digits)] = 48 + chance.randrange(10)
    return bytes(made)


@pytest.mark.parametrize("kind", ROUNDS)
def test_damage_is_named_or_harmless(kind, files, tmp_path):
    data, header = files[kind]
    suffix = "gguf" if kind == "gguf" else "safetensors"
    path = tmp_path / f"whole.{suffix}"
    path.write_bytes(data)
    want = load_dit(path)[0].state_dict()
    refused = 0
    for seed in range(ROUNDS[kind]):
        path = tmp_path / f"d{seed}.{suffix}"
        path.write_bytes(damaged(data, header, random.Random(f"{kind} {seed}")))
        try:
            got = load_dit(path)[0].state_dict()
        except CheckpointError as error:
            assert str(path) in str(error), (seed, error)
            refused += 1
        else:
            assert set(got) == set(want), seed
            assert all(torch.equal(got[name], want[name]) for name in want), seed
        path.unlink()
    assert refused > ROUNDS[kind] * 0.8


# ---- what people have on their disks


def test_truncated_and_padded_files_are_named_with_sizes(files, tmp_path):
    for kind, suffix in (("int8", "safetensors"), ("gguf", "gguf")):
        data, _ = files[kind]
        whole = tmp_path / f"whole.{suffix}"
        whole.write_bytes(data)
        last = max(entry.stop for entry in open_weights(whole).header.values())
        cut = tmp_path / f"cut.{suffix}"
        cut.write_bytes(data[:-4000])
        assert_refused(load_dit, cut, "is truncated", f"{last:,} bytes expected", f"{len(data) - 4000:,} found")
        padded = tmp_path / f"padded.{suffix}"
        padded.write_bytes(data + b"\1" * 5000)
        assert any("bytes after the payload" in note for note in load_dit(padded)[1].notes)


def test_mixed_up_files_are_named(files, tmp_path):
    """A GGUF under another name is read for what it is; a safetensors file called .gguf too; a pickle never."""
    data, _ = files["gguf"]
    (tmp_path / "a.safetensors").write_bytes(data)
    assert load_dit(tmp_path / "a.safetensors")[1].formats
    (tmp_path / "b.gguf").write_bytes(files["int8"][0])
    assert load_dit(tmp_path / "b.gguf")[1].formats
    torch.save({"a": torch.ones(2)}, tmp_path / "c.gguf")
    assert_refused(load_dit, tmp_path / "c.gguf", "is a pickle")
    (tmp_path / "d.gguf.part").write_bytes(data)
    assert_refused(load_dit, tmp_path / "d.gguf.part", "unfinished download")


def header(version=3, tensors=1, pairs=0, body=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body


def info(name="a", dims=(4,), kind=0, offset=0):
    return (
        words(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


DAMAGED_GGUF = {
    "old version": (header(1), "is GGUF version 1; versions 2, 3 can be read"),
    "no tensors": (header(tensors=0), "without tensors"),
    "too many tensors": (header(tensors=2**50), "tensors do not fit"),
    "too many pairs": (header(pairs=2**50, body=bytes(64)), "key-value pairs do not fit"),
    "cut in the header": (header(body=words("x" * 100)[:40]), "is truncated"),
    "endless name": (header(body=struct.pack("<Q", 1 << 30) + bytes(64)), "a tensor's name of"),
    "name that is no text": (header(body=struct.pack("<Q", 2) + b"\xff\xff" + bytes(64)), "no UTF-8"),
    "nine axes": (header(body=words("a") + struct.pack("<I", 9) + bytes(128)), "'a' has 9 axes"),
    "impossible shape": (header(body=info(dims=(2**39, 2**39)) + bytes(64)), "impossible shape"),
    "unknown type": (header(body=info(kind=99) + bytes(64)), "has the GGUF type 99"),
    "row of part of a block": (header(body=info(dims=(33,), kind=8) + bytes(64)), "are no Q8_0 blocks"),
    "twice": (header(tensors=2, body=info() + info() + bytes(64)), "'a' appears twice"),
    "overlapping": (header(tensors=2, body=info() + info("b", offset=8) + bytes(64)), "inside 'a'"),
    "unknown value": (header(pairs=1, body=words("k") + struct.pack("<I", 77) + bytes(64)), "the unknown type 77"),
    "endless list": (
        header(pairs=1, body=words("k") + struct.pack("<IIQ", 9, 4, 2**40) + bytes(64)),
        "items of 'k' do not fit",
    ),
    "odd alignment": (
        header(pairs=1, body=words("general.alignment") + struct.pack("<II", 4, 7) + info() + bytes(64)),
        "alignment 7",
    ),
}


@pytest.mark.parametrize("case", DAMAGED_GGUF)
def test_every_fault_of_a_gguf_header_is_told(case, tmp_path):
    data, message = DAMAGED_GGUF[case]
    (tmp_path / "d.gguf").write_bytes(data)
    assert_refused(GGUFFile, tmp_path / "d.gguf", message)


def test_gguf_lists_and_words_are_kept(tmp_path):
    given = {"a": torch.arange(64.0).view(2, 32)}
    pairs = {"general.name": "H3", "sizes": [1, 2, 3], "long": list(range(40))}
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", given, {}, pairs))
    assert file.metadata == {"general.name": "H3", "sizes": "[1, 2, 3]"}
    assert torch.equal(file.read("a"), given["a"]) and file.shapes == {"a": (2, 32)}
    with pytest.raises(CheckpointError, match="has no tensor 'b'"):
        file.read("b")


def test_a_gguf_that_changes_while_it_is_read(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"a": torch.ones(2, 32)}, {})
    file = GGUFFile(path)
    path.write_bytes(path.read_bytes() + b"\0")
    assert_refused(lambda p: file.read("a"), path, "changed while it was being read")


def test_folders_with_gguf_files(files, tmp_path):
    data, _ = files["gguf"]
    assert_refused(open_weights, tmp_path, "holds no .safetensors file")
    (tmp_path / "a.gguf").write_bytes(data)
    assert load_dit(tmp_path)[1].path.endswith("a.gguf")
    (tmp_path / "b.gguf").write_bytes(data)
    assert_refused(open_weights, tmp_path, "holds 2 files")


def test_the_whole_hash_is_given_on_request(files, tmp_path):
    import hashlib

    data, _ = files["int8"]
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    rows, _ = inspect_file(path, sha256=True)
    assert [row["value"] for row in rows if row["name"] == "sha256"] == [hashlib.sha256(data).hexdigest()]
    assert full_sha256(path) == hashlib.sha256(data).hexdigest()


def test_a_marker_longer_than_any_marker(tmp_path):
    given = golden("e_int8_plain")
    given["blocks.0.mlp.fc1.comfy_quant"] = torch.full((1 << 17,), 32, dtype=torch.uint8)
    save_file(given, tmp_path / "a.safetensors")
    assert_refused(load_dit, tmp_path / "a.safetensors", "is no JSON in bytes")
    given["blocks.0.mlp.fc1.comfy_quant"] = torch.tensor(list(json.dumps([1]).encode()), dtype=torch.uint8)
    save_file(given, tmp_path / "a.safetensors")
    assert_refused(load_dit, tmp_path / "a.safetensors", "is no JSON table")
