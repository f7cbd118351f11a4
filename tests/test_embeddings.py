"""Prompt embeddings by name, prompt conditions in files and in the cache, and renders without a text encoder.

Oracles: transformers' own model fed with the same input rows; ComfyUI's tokenizer where COMFYUI_PATH names one.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from h3_runtime import cli
from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.checkpoint.reader import SafetensorsFile
from h3_runtime.demo.maker import make_model, make_reference_dit
from h3_runtime.demo.text_maker import make_text_encoder
from h3_runtime.errors import CheckpointError, H3Error
from h3_runtime.guides import place
from h3_runtime.media import write_image
from h3_runtime.model import Caches, Models
from h3_runtime.render import condition_text
from h3_runtime.request import Media, ReferenceRequest, RenderRequest
from h3_runtime.text.conditions import ConditionCache, load_condition, save_condition
from h3_runtime.text.embeddings import find_embedding, read_embedding, resolve_prompt
from h3_runtime.text.encoder import TextEncoder
from h3_runtime.text.presentation import EmbeddingPiece, TextPiece, present, tokenize

from .small_jobs import (
    one_thread,  # noqa: F401 (a fixture)
    relative,
)

WIDTH = 64  # of the small encoder
PROMPT = "a red ball"


def rows(seed: int, count: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def picture(seed: int, height: int = 64, width: int = 96) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 256, (1, height, width, 3), dtype=np.uint8)
    return Media(frames=pixels, name=f"picture {seed}")


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory) -> Path:
    """A folder as creators have it: subfolders, old formats, files for other models."""
    here = tmp_path_factory.mktemp("embeddings")
    (here / "styles" / "old").mkdir(parents=True)
    save_file({"anything": rows(1, 3).bfloat16()}, here / "noir.safetensors")
    save_file({"anything": rows(2, 1)[0]}, here / "styles" / "rain.safetensors")
    save_file({"anything": rows(3, 2, 32)}, here / "small.safetensors")
    torch.save({"string_to_param": {"*": rows(4, 4)}, "name": "old"}, here / "styles" / "old" / "film.pt")
    torch.save([{"a": rows(5, 2), "b": rows(6, 1, 32)}, {"c": rows(7, 1)}], here / "list.bin")
    (here / "broken.safetensors").write_bytes(b"no weights")
    return here


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("encoder")
    make_text_encoder(made, seed=3)
    return made


@pytest.fixture(scope="module")
def encoder(folder) -> TextEncoder:
    return TextEncoder.load(folder, dtype=torch.float32)


# ---- names


CASES = {  # prompt: (texts between the embeddings, names found)
    "embedding:noir": ([], ["noir"]),
    "a embedding:noir b  c\n d": (["a ", "b c d"], ["noir"]),
    "a embedding:noir, b": (["a ", ", b"], ["noir"]),
    "a\nembedding:noir,,": (["a\n", ",, "], ["noir"]),
    "embedding:noir embedding:rain end": (["end"], ["noir", "rain"]),
    "tab\tembedding:noir\tb": (["tab\t", "b"], ["noir"]),
    "a embedding:noir<lora> b": (["a ", "<lora> b"], ["noir"]),
    "a embedding:noir[1] b": (["a ", "[1] b"], ["noir"]),
    "embedding: noir b": (["b"], ["noir"]),
    "embedding:noir.safetensors, b": ([", b"], ["noir.safetensors"]),
    "embedding:styles/rain b": (["b"], ["styles/rain"]),
    "embedding:film, embedding:list": ([", "], ["film", "list"]),
    "a embedding:missing b": (["a ", "b"], []),
    "a embedding:missing, b": (["a ", ", b"], []),
    "embedding:missing": ([], []),
}
PLAIN = ["a,embedding:noir b", "(embedding:noir:0.8)", "no names at all", "embedding:", "an embedding: ", ""]


@pytest.mark.parametrize(
    "word", ["a,embedding:noir", "(embedding:noir:0.8)", "embedding", "an_embedding:", "embedding:noir"]
)
def test_a_name_that_is_not_read_is_told(encoder, word):
    said = [note for note in encoder.encode(f"a cat {word} here").notes if "weights of words are not read" in note]
    assert len(said) == (word[0] in "a(" and "noir" in word) and all(repr(word) in note for note in said)


@pytest.mark.parametrize("prompt", CASES)
def test_names_are_read_as_comfyui_reads_them(embeddings, prompt):
    texts, names = CASES[prompt]
    found = resolve_prompt(prompt, [embeddings], WIDTH)
    assert [piece.text for piece in found.pieces if isinstance(piece, TextPiece)] == texts
    assert [piece.name for piece in found.pieces if isinstance(piece, EmbeddingPiece)] == names
    assert [used.name for used in found.used] == names
    assert ("missing" in prompt) == any("was not found in" in note for note in found.notes)


@pytest.mark.parametrize("prompt", PLAIN)
def test_other_texts_stand_as_they_are(embeddings, encoder, prompt):
    assert resolve_prompt(prompt, [embeddings], WIDTH).pieces is None
    assert resolve_prompt("embedding:noir", [], WIDTH).pieces is None  # no folder, nothing to look for
    notes = encoder.encode("embedding:noir").notes
    assert any("name the folder of embeddings (--embeddings DIR)" in note for note in notes)


def test_escaped_parentheses_collapse_by_the_recipe_comfy_only(embeddings):
    assert resolve_prompt(r"a \(b\)", [], WIDTH, "comfy").read_as == ("a (b)",)
    assert resolve_prompt(r"a \(b\)", [], WIDTH).pieces is None
    assert resolve_prompt(r"\(a\) embedding:noir", [embeddings], WIDTH).read_as == (r"\(a\) ", "embedding:noir")


def test_files_are_found_in_order_and_never_outside(embeddings, tmp_path):
    assert find_embedding("noir", [embeddings]) == embeddings / "noir.safetensors"
    assert find_embedding("rain", [embeddings]) == embeddings / "styles" / "rain.safetensors"
    assert find_embedding("film.pt", [embeddings]) == embeddings / "styles" / "old" / "film.pt"
    inner = tmp_path / "inner"
    inner.mkdir()
    save_file({"x": rows(8, 1)}, tmp_path / "secret.safetensors")
    save_file({"x": rows(9, 1)}, inner / "noir.safetensors")
    assert find_embedding("noir", [inner, embeddings]) == inner / "noir.safetensors"
    for outside in ("../secret", str(tmp_path / "secret.safetensors"), "..", ".", "", "sub/../../secret", "/"):
        assert find_embedding(outside, [inner]) is None, outside
    if hasattr(os, "symlink") and sys.platform != "win32":
        (inner / "loop").symlink_to(tmp_path / "inner", target_is_directory=True)
        assert find_embedding("nothing", [inner]) is None


def test_the_tensor_that_is_taken(embeddings, tmp_path):
    assert torch.equal(read_embedding(embeddings / "noir.safetensors", WIDTH), rows(1, 3).bfloat16().float())
    assert torch.equal(read_embedding(embeddings / "styles" / "rain.safetensors", WIDTH), rows(2, 1))
    assert torch.equal(read_embedding(embeddings / "styles" / "old" / "film.pt", WIDTH), rows(4, 4))
    assert torch.equal(read_embedding(embeddings / "list.bin", WIDTH), torch.cat([rows(5, 2), rows(7, 1)]))
    keyed = {"aaa": rows(1, 1), "qwen3vl_32b": rows(2, 2), "bundle_emb.x.string_to_param.*": rows(3, 3)}
    for count, expected in ((3, rows(2, 2)), (2, rows(3, 3)), (1, rows(1, 1))):
        kept = dict(sorted(keyed.items(), key=lambda item: item[0] == "qwen3vl_32b")[:count])
        kept = (
            {"aaa": keyed["aaa"]}
            if count == 1
            else kept | ({"qwen3vl_32b": keyed["qwen3vl_32b"]} if count == 3 else {})
        )
        save_file(kept, tmp_path / "keys.safetensors")
        assert torch.equal(read_embedding(tmp_path / "keys.safetensors", WIDTH), expected)
    save_file({"bundle_emb.b.qwen3vl_32b": rows(4, 2), "zz": rows(5, 1)}, tmp_path / "keys.safetensors")
    assert torch.equal(read_embedding(tmp_path / "keys.safetensors", WIDTH), rows(4, 2))


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path("trapped"),))


def test_files_that_cannot_be_used_are_told_and_left_out(embeddings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.pt").write_bytes(pickle.dumps({"x": Trap()}))
    save_file({"x": torch.full((1, WIDTH), float("nan"))}, tmp_path / "nan.safetensors")
    save_file({"x": torch.zeros(1, WIDTH, dtype=torch.int64)}, tmp_path / "whole.safetensors")
    save_file({"x": torch.zeros(0, WIDTH)}, tmp_path / "none.safetensors")
    torch.save("text", tmp_path / "text.pt")
    for name, sentence in {
        "code": "code.pt cannot be read as weights",
        "nan": "holds NaN or infinity",
        "whole": "holds no embedding",
        "none": "holds no rows",
        "text": "holds no embedding",
        "broken": "broken.safetensors cannot be read as weights",
        "small": "small.safetensors is 32 wide and this text encoder 64: it is for another model",
    }.items():
        found = resolve_prompt(f"a embedding:{name} b", [tmp_path, embeddings], WIDTH)
        assert not found.used and found.read_as == ("a ", "b")
        assert len(found.notes) == 1 and sentence in found.notes[0], found.notes
    assert not (tmp_path / "trapped").exists()


# ---- rows into the encoder


def test_rows_replace_the_input_of_the_first_layer(encoder, embeddings):
    """The states are those of transformers' model given the same input rows instead of words; tags are text."""
    found = resolve_prompt("a red embedding:noir ball embedding:film", [embeddings], WIDTH)
    ours = encoder.encode_items("...", [], [], found.pieces)
    language, ids = encoder.module.language_model, encoder.tokenizer.encode
    words = [language.embed_tokens(torch.tensor(ids(text))) for text in ("a red ", "ball ")]
    noir, film = (piece.rows for piece in found.pieces if isinstance(piece, EmbeddingPiece))
    given = torch.cat([words[0], noir, language.embed_tokens(torch.tensor(ids("ball"))), film])[None]
    positions = torch.arange(given.shape[1]).expand(3, 1, -1)
    with torch.no_grad():
        theirs = language(inputs_embeds=given, position_ids=positions, use_cache=False).last_hidden_state[0]
    assert relative(ours.hidden, theirs) <= 1e-6
    assert ours.tags.tolist() == [1] * given.shape[1]
    plain = encoder.encode("a red ball")
    assert torch.equal(encoder.encode("a red ball").hidden, plain.hidden)  # nothing stays behind in the module
    assert len(ours.tags) == len(ids("a red ")) + 3 + len(ids("ball")) + 4


def test_rows_stand_beside_pictures(encoder, embeddings):
    found = resolve_prompt("embedding:noir x", [embeddings], WIDTH)
    presented = tokenize(present(found.pieces), encoder.tokenizer)
    assert presented.inserted[0][0] == 0 and not presented.is_empty
    shown = encoder.encode("x", [np.zeros((256, 256, 3), np.uint8)])
    from h3_runtime.text.shown import Shown, present_shown

    items, inputs = present_shown([Shown("picture", "p", np.zeros((1, 256, 256, 3), np.uint8))])
    both = encoder.encode_items("x", items, inputs, found.pieces)
    before = len(shown.tags) - len(encoder.tokenizer.encode("x"))
    assert torch.equal(both.hidden[:before], shown.hidden[:before])
    assert len(both.tags) == len(shown.tags) + 3 and both.tags[before:].tolist() == [1] * 4


# ---- conditions in a file


@pytest.fixture
def models(folder):
    """``models(**options)``: Models of the small encoder that count how often its weights are asked for."""

    class Counting(Models):
        loads = 0

        def text_encoder(self):
            self.loads += 1
            return super().text_encoder()

    return lambda **options: Counting(find_parts(folder), torch.float32, **options)


def ask(**changes) -> RenderRequest:
    given = {"prompt": PROMPT, "size": (96, 64), "frames": 22, "recipe": "comfy", **changes}
    return RenderRequest(given.pop("prompt"), **given)


def reference(seed: int, *size: int) -> tuple[ReferenceRequest, ...]:
    return (ReferenceRequest("image", picture(seed, *size)),)


def made_by(models: Models, request: RenderRequest):
    return condition_text(request, place(request), models)


def test_a_saved_condition_comes_back_bit_for_bit(models, tmp_path, embeddings):
    voice = ReferenceRequest("audio", Media(audio=torch.zeros(2, 900), name="voice"))
    request = ask(prompt="x embedding:noir", references=(*reference(1), voice), first_frame=picture(2))
    made = made_by(models(embedding_folders=[embeddings]), request)
    back = load_condition(save_condition(tmp_path / "c.safetensors", made))
    assert torch.equal(back.text.hidden, made.text.hidden) and torch.equal(back.text.tags, made.text.tags)
    assert back.record == made.record and back.record.key == made.record.key and back.source == "file"
    assert [item["kind"] for item in back.record.items] == ["picture", "picture", "sound"]
    assert [item["name"] for item in back.record.items] == ["picture 2", "picture 1", "voice"]
    assert back.record.embeddings[0].rows == 3 and back.record.embeddings[0].file == "noir.safetensors"
    loaded = models()
    again = made_by(loaded, replace(request, embeds=Media(str(tmp_path / "c.safetensors"))))
    assert torch.equal(again.text.hidden, made.text.hidden) and loaded.loads == 0


OTHERS = {
    "prompt": (ask(prompt="a blue ball", references=reference(1)), "was made for the prompt 'a red ball'"),
    "recipe": (ask(references=reference(1), recipe="reference"), "was made by the recipe comfy: add --recipe comfy"),
    "content": (ask(references=reference(2)), "picture 2 is not the picture .* its content differs"),
    "size": (ask(references=reference(1, 32, 96)), "it is 96x32, not 96x64"),
    "none": (ask(), "made with picture picture 1 and this request has neither keyframe nor reference"),
    "more": (ask(references=reference(1) * 2), "this request has picture picture 1, picture picture 1"),
    "a sound more": (
        ask(references=(*reference(1), ReferenceRequest("audio", Media(audio=torch.zeros(2, 800))))),
        "sound in memory, in this order",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_prompts_and_references_are_refused(models, tmp_path, case, monkeypatch):
    monkeypatch.setattr(references_module(), "IMAGE_SHORT_EDGE", 64)
    saved = save_condition(tmp_path / "c.safetensors", made_by(models(), ask(references=reference(1))))
    request, sentence = OTHERS[case]
    with pytest.raises(H3Error, match=sentence):
        place(replace(request, embeds=Media(str(saved))))


def references_module():
    from h3_runtime import references

    return references


def test_damaged_and_foreign_files_are_named(models, tmp_path):
    saved = save_condition(tmp_path / "c.safetensors", made_by(models(), ask()))
    tensors, metadata = load_file(saved), SafetensorsFile(saved).metadata
    about = json.loads(metadata["h3_runtime.condition"])
    bad = {
        "no record": ({}, tensors, "holds no prompt condition of this runtime"),
        "not json": ({"h3_runtime.condition": "{"}, tensors, "has a damaged record"),
        "version": ({"h3_runtime.condition": json.dumps({**about, "version": 9})}, tensors, "has version 9"),
        "lacks": ({"h3_runtime.condition": json.dumps({**about, "record": {}})}, tensors, "has a damaged record"),
        "tensor": (metadata, {"hidden": tensors["hidden"]}, "hidden and tags are needed"),
        "tags": (metadata, {**tensors, "tags": tensors["tags"][1:]}, "one int64 tag per text row"),
        "nan": (metadata, {**tensors, "hidden": tensors["hidden"] * float("nan")}, "NaN or infinity"),
    }
    for words, held, sentence in bad.values():
        save_file(held, tmp_path / "bad.safetensors", words or None)
        with pytest.raises(H3Error, match=sentence):
            load_condition(tmp_path / "bad.safetensors")
    with pytest.raises(CheckpointError):
        save_condition(tmp_path / "nowhere" / "c.safetensors", load_condition(saved))


# ---- the cache


def test_a_new_seed_never_encodes_and_a_changed_input_always_does(models, tmp_path, embeddings):
    """Everything the states depend on, changed one at a time; then the same again by a new process's cache."""
    base = ask(prompt="x embedding:noir", references=reference(1), first_frame=picture(5))
    changed = [
        replace(base, prompt="y embedding:noir"),
        replace(base, prompt="x embedding:rain"),
        replace(base, references=reference(2)),
        replace(base, references=reference(1, 32, 96)),
        replace(base, references=(*reference(1), *reference(2))),
        replace(base, references=(*reference(2), *reference(1))),
        replace(base, first_frame=picture(6)),
        replace(base, size=(64, 64)),
        replace(base, recipe="reference", references=()),
        replace(base, references=(*reference(1), ReferenceRequest("audio", Media(audio=torch.zeros(2, 900))))),
        replace(base, references=(*reference(1), ReferenceRequest("audio", Media(audio=torch.ones(2, 900))))),
    ]
    ours = models(caches=Caches(conditions=ConditionCache(tmp_path / "kept")), embedding_folders=[embeddings])
    made_by(ours, base)
    for seed in (1, 2):
        assert made_by(ours, replace(base, seed=seed, num_forwards=9, denoise=1.0)).source == "cache"
    assert ours.loads == 1 and ours.caches.conditions.hits == 2
    for count, request in enumerate(changed):
        assert made_by(ours, request).source == "encoded", count
    assert ours.loads == 1 + len(changed)
    later = models(caches=Caches(conditions=ConditionCache(tmp_path / "kept")), embedding_folders=[embeddings])
    assert all(made_by(later, request).source == "cache" for request in (base, *changed)) and later.loads == 0
    assert torch.equal(made_by(later, base).text.hidden, made_by(ours, base).text.hidden)


def test_other_weights_words_types_and_embedding_files_encode_anew(folder, models, tmp_path, embeddings):
    shutil.copytree(embeddings, tmp_path / "embeddings")
    shutil.copytree(folder, tmp_path / "model")
    make_text_encoder(tmp_path / "other", seed=4)
    kept = ConditionCache(tmp_path / "kept")
    request = ask(prompt="x embedding:noir")

    def source(parts: Path, dtype=torch.float32, folders=(tmp_path / "embeddings",)) -> str:
        return made_by(
            Models(find_parts(parts), dtype, caches=Caches(conditions=kept), embedding_folders=folders), request
        ).source

    assert source(folder) == "encoded" and source(tmp_path / "model") == "cache"  # a copy is the same encoder
    assert source(folder, dtype=None) == "encoded"
    assert source(tmp_path / "other") == "encoded"
    assert source(folder, folders=()) == "encoded"
    save_file({"x": rows(20, 3)}, tmp_path / "embeddings" / "noir.safetensors")
    assert source(folder) == "encoded"
    (tmp_path / "embeddings" / "noir.safetensors").unlink()
    assert source(folder) == "encoded" and source(folder) == "cache"
    merges = tmp_path / "model" / "merges.txt"
    merges.write_text("\n".join(merges.read_text("utf-8").splitlines()[:-1]) + "\n", encoding="utf-8")
    assert source(tmp_path / "model") == "encoded"


def test_the_cache_is_bounded_and_forgets_damaged_files(models, tmp_path):
    cache = ConditionCache(tmp_path / "kept", memory_bytes=1, disk_bytes=5000)
    ours = models(caches=Caches(conditions=cache))
    for word in ("one", "two", "three", "four"):
        made_by(ours, ask(prompt=word))
    files = list((tmp_path / "kept").iterdir())
    assert 1 <= len(files) < 4 and sum(file.stat().st_size for file in files) <= 5000
    assert made_by(ours, ask(prompt="four")).source == "cache"
    for file in files:  # one bit of the states, in a file that opens
        states = SafetensorsFile(file).header["hidden"]
        whole = bytearray(file.read_bytes())
        whole[states.start + 1] ^= 1
        file.write_bytes(whole)
    with pytest.raises(CheckpointError, match="damaged: it holds other bytes"):
        load_condition(files[0])
    fresh = models(caches=Caches(conditions=ConditionCache(tmp_path / "kept")))
    assert made_by(fresh, ask(prompt="four")).source == "encoded"
    (tmp_path / "file").write_text("in the way")
    blocked = models(caches=Caches(conditions=ConditionCache(tmp_path / "file")))
    notes = made_by(blocked, ask()).text.notes
    assert any("could not be kept" in note for note in notes)


# ---- the command line


@pytest.fixture(scope="module")
def model(tmp_path_factory, embeddings) -> Path:
    made = make_model(tmp_path_factory.mktemp("model"))
    make_reference_dit(made)
    shutil.copytree(embeddings, made / "embeddings")
    return made


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("H3_RECOVERY", str(tmp_path / "recovery"))
    monkeypatch.setenv("H3_CONDITIONS", str(tmp_path / "conditions"))

    def run(*arguments):
        status = cli.main([*map(str, arguments), "--json"])
        captured = capsys.readouterr()
        found = json.loads(captured.out)["results"] if captured.out else []
        return status, {row["name"]: row for row in found}, captured.err

    return run


def test_save_show_and_render_without_an_encoder(command, model, tmp_path, monkeypatch):
    write_image(tmp_path / "p.png", picture(1).frames[0])
    write_image(tmp_path / "q.png", picture(2).frames[0])
    shown = ["--size", "96x64", "--frames", 22, "--ref-image", tmp_path / "p.png", "--recipe", "comfy"]
    saved = tmp_path / "c.safetensors"
    prompt = "<Picture 1> embedding:noir, rain"
    status, found, words = command(
        "embed", "save", "--model", model, "--dtype", "float32", "--prompt", prompt, *shown, "--out", saved
    )
    assert status == 0 and "embedding 'noir': 3 rows of 64 from noir.safetensors" in words
    status, found, words = command("embed", "show", saved)
    assert status == 0 and found["prompt"]["value"] == prompt and found["record"]["recipe"] == "comfy"
    assert "1. picture p.png 96x64, 1 frame(s) seen" in words and "embedding noir: 3 rows" in words

    render = ["render", "--model", model, "--dtype", "float32", "--steps", 1, *shown]
    status, whole, words = command(*render, "--prompt", prompt, "--out", tmp_path / "whole.mp4")
    assert status == 0 and "prompt embeddings" in whole["label"]["value"], words
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("text_encoder*", "vocab*", "merges*", "embeddings"))
    monkeypatch.setattr("h3_runtime.model.TextEncoder.load", lambda *a, **k: pytest.fail("the encoder was loaded"))
    lone = ["render", "--model", bare, "--dtype", "float32", "--steps", 1, *shown, "--embeds", saved]
    status, loaded, words = command(*lone, "--out", tmp_path / "o.mp4")
    assert status == 0, words
    assert loaded["latent"]["value"] == whole["latent"]["value"]
    assert "the prompt's states come from c.safetensors" in words
    manifest = json.loads((tmp_path / "o.json").read_text())
    assert manifest["request"]["embeds"]["name"] == "c.safetensors" and manifest["request"]["prompt"] == prompt
    assert manifest["models"]["text_encoder"]["fingerprint"] == manifest["conditioning"]["fingerprint"]
    status, again, words = command(
        "render", "--model", bare, "--dtype", "float32", "--from", tmp_path / "o.mp4", "--out", tmp_path / "again.mp4"
    )
    assert status == 0 and "differs: nothing" in words and again["latent"]["value"] == whole["latent"]["value"]

    other = [tmp_path / "q.png" if argument == tmp_path / "p.png" else argument for argument in lone]
    status, _, words = command(*other, "--out", tmp_path / "x.mp4")
    assert status == 2 and "q.png is not the picture that c.safetensors was made with as <Picture 1>" in words
    status, _, words = command(*lone, "--prompt", "another", "--out", tmp_path / "x.mp4")
    assert status == 2 and "was made for the prompt" in words
    status, _, words = command("render", "--model", bare, "--prompt", "x", "--out", tmp_path / "x.mp4")
    assert status == 2 and "no text encoder was found" in words
    narrow = load_condition(saved)
    narrow = replace(narrow, text=replace(narrow.text, hidden=narrow.text.hidden[:, :40].contiguous()))
    save_condition(saved, narrow)
    status, _, words = command(*lone, "--out", tmp_path / "x.mp4")
    assert status == 2 and "is 40 wide and this DiT reads 64" in words


def test_a_new_seed_in_a_new_run_does_not_encode(command, model, tmp_path, monkeypatch):
    render = ["render", "--model", model, "--dtype", "float32", "--steps", 1, "--size", "64x32", "--frames", 5]
    render += ["--prompt", PROMPT]
    status, first, _ = command(*render, "--out", tmp_path / "a.mp4")
    monkeypatch.setattr("h3_runtime.model.TextEncoder.load", lambda *a, **k: pytest.fail("the encoder was loaded"))
    status, second, words = command(*render, "--seed", 1, "--out", tmp_path / "b.mp4")
    assert status == 0, words
    assert second["latent"]["value"] != first["latent"]["value"]
    assert json.loads((tmp_path / "b.report.json").read_text())["stats"]["condition"] == "cache"
    with pytest.raises(pytest.fail.Exception):
        command(*render, "--no-prompt-cache", "--out", tmp_path / "c.mp4")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["embed", "save", "--model", "{model}", "--out", "{tmp}/c.safetensors"], "no prompt was given"),
        (["embed", "save", "--model", "{model}", "--prompt", "x", "--out", "{tmp}/c.pt"], "must end in .safetensors"),
        (["embed", "save", "--model", "{model}", "--prompt", "x", "--out", "."], "'.' is no file name"),
        (
            ["embed", "save", "--model={model}", "--prompt=x", "--out={tmp}/c.safetensors", "--quantise=int8"],
            "quantising dit has no effect on a prompt's states",
        ),
        (["embed", "save", "--model", "{model}", "--prompt", "x", "--out", "{tmp}/no/c.safetensors"], "does not exist"),
        (["embed", "show", "{model}/dit.safetensors"], "holds no prompt condition of this runtime"),
        (["embed", "show", "{tmp}/none.safetensors"], "none.safetensors"),
        (
            ["render", "--model", "{model}", "--embeds", "{model}/dit.safetensors", "--out", "{tmp}/o.mp4"],
            "holds no prompt condition",
        ),
        (
            ["render", "--model", "{model}", "--prompt", "x", "--embeddings", "{tmp}/none", "--out", "{tmp}/o.mp4"],
            "is not a folder: give the one that holds the embedding files",
        ),
    ],
)
def test_bad_arguments_are_one_sentence(command, model, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.setattr("h3_runtime.model.TextEncoder.load", lambda *a, **k: pytest.fail("the encoder was loaded"))
    status, found, words = command(*(a.format(model=model, tmp=tmp_path) for a in arguments))
    errors = [line for line in words.splitlines() if line.startswith("error: ")]
    assert status == 2 and not found and len(errors) == 1 and sentence in errors[0], words


# ---- ComfyUI's own tokenizer


@pytest.mark.needs("comfyui")
def test_comfyui_splits_prompts_the_same(tmp_path, incomplete):
    home = os.environ.get("COMFYUI_PATH")
    if not home:
        incomplete("prompt embeddings against ComfyUI", "COMFYUI_PATH names no ComfyUI", needs="comfyui")
    from h3_runtime.text.tokenizer import Tokenizer

    folder = tmp_path / "embeddings"
    (folder / "styles").mkdir(parents=True)
    sizes = {"noir": 3, "rain": 2, "film": 4, "list": 1}
    for index, (name, count) in enumerate(sizes.items()):
        save_file(
            {"x": rows(index, count, 5120)}, folder / ("styles" if name == "rain" else "") / f"{name}.safetensors"
        )
    prompts = [p for p in (*CASES, *PLAIN) if not p.strip().endswith("embedding:")] + [r"\(a\) embedding:rain \(b\)"]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    script = Path(__file__).parent / "comfyui_prompts.py"
    done = subprocess.run([sys.executable, script, home, tmp_path], capture_output=True, text=True, timeout=300)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        incomplete("prompt embeddings against ComfyUI", f"ComfyUI does not start here ({reason})", needs="comfyui")
    theirs = json.loads((tmp_path / "entries.json").read_text())
    tokenizer = Tokenizer.find(comfy=home)
    for prompt, entries in zip(prompts, theirs):
        found = resolve_prompt(prompt, [folder], 5120, "comfy")
        presented = tokenize(present(prompt if found.pieces is None else found.pieces), tokenizer)
        ours = presented.ids.tolist()
        for first, inserted in presented.inserted:
            ours[first : first + len(inserted)] = [round(row.sum().item(), 3) for row in inserted]
        assert ours == entries, prompt


def test_a_place_that_takes_no_condition_is_refused_before_the_encoding(tmp_path, monkeypatch):
    from h3_runtime import embed

    monkeypatch.setattr(embed, "condition_text", lambda *a: pytest.fail("the prompt was encoded"))
    out = tmp_path / "c.safetensors"
    out.mkdir()
    with pytest.raises(H3Error, match=r"c\.safetensors cannot be written"):
        embed.save_prompt(None, SimpleNamespace(parts=SimpleNamespace(text_encoder=None)), out)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]
