"""Latents of pictures, clips and sounds are encoded once: a new seed reads no VAE, whatever changed always does."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from h3_runtime import cli, references
from h3_runtime.checkpoint.info import CheckpointInfo
from h3_runtime.checkpoint.kept import user_cache
from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.demo.maker import make_model, make_reference_dit
from h3_runtime.encodings import SUFFIX, Encode, LatentCache, MediaOrigin, encode_each
from h3_runtime.graph import GraphModels, Part, encode_media
from h3_runtime.guides import place
from h3_runtime.job import TextCondition
from h3_runtime.media import write_image
from h3_runtime.model import Caches, Models
from h3_runtime.models.audio_vae import AudioVAE
from h3_runtime.models.video_vae import VideoVAE
from h3_runtime.render import encode
from h3_runtime.request import GuideRequest, Media, ReferenceRequest, RenderRequest
from h3_runtime.unfinished import part_path

from .small_jobs import one_thread  # noqa: F401 (a fixture)

VAE = CheckpointInfo("vae", "comfyui", "video_vae", "unknown", {}, 0, "fingerprint")
TEXT = TextCondition(torch.zeros(1, 64), torch.ones(1, dtype=torch.int64))


def picture(seed: int, width: int = 96, height: int = 64, frames: int = 1) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return Media(frames=pixels, name=f"picture {seed}")


def sound(seed: int, count: int = 3000) -> torch.Tensor:
    return torch.rand(2, count, generator=torch.Generator().manual_seed(seed)) - 0.5


def shown(seed: int, **options) -> ReferenceRequest:
    return ReferenceRequest("image", picture(seed, **options))


def voice(seed: int) -> ReferenceRequest:
    return ReferenceRequest("audio", Media(audio=sound(seed), name=f"voice {seed}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_model(tmp_path_factory.mktemp("model"))
    make_reference_dit(made)
    return made


@pytest.fixture
def counts(monkeypatch):
    """How often each VAE encoded."""
    counted = Counter()
    for kind, name in ((VideoVAE, "encode_condition"), (VideoVAE, "encode_mean"), (AudioVAE, "encode")):
        own = getattr(kind, name)

        def encoded(self, *given, own=own, name=name, **named):
            counted[name] += 1
            return own(self, *given, **named)

        monkeypatch.setattr(kind, name, encoded)
    monkeypatch.setattr(references, "IMAGE_SHORT_EDGE", 32)
    return counted


def models(folder, cache: LatentCache, **options) -> Models:
    return Models(find_parts(folder), torch.float32, caches=Caches(latents=cache), **options)


def encoded(request: RenderRequest, made: Models):
    return encode(request, place(request), made, TEXT)


def latents_of(job) -> list[torch.Tensor]:
    held = [latent for item in (*job.guides, *job.references) for latent in (item.video, item.audio)]
    held += [] if job.source is None else [job.source.video, job.source.audio]
    return [latent for latent in held if latent is not None]


BASE = RenderRequest("", (64, 32), frames=5, references=(shown(1), voice(2)), first_frame=picture(3))
CHANGES = {  # what is changed, and which encodes it needs
    "another picture": (replace(BASE, references=(shown(4), voice(2))), {"encode_condition": 1}),
    "a picture of another size": (replace(BASE, references=(shown(1, width=64), voice(2))), {"encode_condition": 1}),
    "one more": (replace(BASE, references=(shown(1), shown(9), voice(2))), {"encode_condition": 1}),
    "another order": (replace(BASE, references=(voice(2), shown(1))), {}),
    "another sound": (replace(BASE, references=(shown(1), voice(5))), {"encode": 1}),
    "another keyframe": (replace(BASE, first_frame=picture(6)), {"encode_condition": 1}),
    "a guide": (replace(BASE, guides=(GuideRequest(picture(7), frame=4),)), {"encode_condition": 1}),
    "another canvas": (replace(BASE, size=(32, 32)), {"encode_condition": 1}),
    "another recipe": (replace(BASE, recipe="comfy"), {"encode_mean": 2}),
    "a source": (replace(BASE, source=picture(8, 64, 32, frames=5)), {"encode_mean": 1, "encode": 1}),
    "another prompt": (replace(BASE, prompt="x", seed=7, num_forwards=9), {}),
}


def test_a_new_seed_never_encodes_and_a_changed_input_always_does(folder, tmp_path, counts):
    first = encoded(BASE, models(folder, LatentCache(tmp_path)))
    assert counts == {"encode_condition": 2, "encode": 1}
    for seed in (1, 2):
        counts.clear()
        again = models(folder, LatentCache(tmp_path))  # another process
        job = encoded(replace(BASE, seed=seed), again)
        assert not counts and not again._loaded and again.caches.latents.hits == 3
        assert all(map(torch.equal, latents_of(job), latents_of(first))) and len(latents_of(job)) == 3
    ours, plain = (models(folder, LatentCache(place, memory_bytes=0), keep=True) for place in (tmp_path, None))
    jobs = {}
    for words, (request, needed) in CHANGES.items():
        counts.clear()
        jobs[words] = encoded(request, ours)
        assert counts == needed, words
    for words in ("another order", "a source"):
        assert all(map(torch.equal, latents_of(jobs[words]), latents_of(encoded(CHANGES[words][0], plain)))), words
    counts.clear()
    later = models(folder, LatentCache(tmp_path))
    for words, (request, _) in CHANGES.items():
        assert all(map(torch.equal, latents_of(jobs[words]), latents_of(encoded(request, later)))), words
    assert not counts and not later._loaded


def test_other_weights_encode_anew_and_a_copy_does_not(folder, tmp_path, counts):
    cache = LatentCache(tmp_path / "kept")
    encoded(BASE, models(folder, cache))
    other = shutil.copytree(folder, tmp_path / "other")
    counts.clear()
    encoded(BASE, models(other, cache))
    assert not counts
    path = find_parts(other).video_vae
    weights = load_file(path)
    name = next(name for name, value in weights.items() if name.startswith("encoder") and value.dim() == 1)
    weights[name] = weights[name] + 0.25
    save_file(weights, path)
    encoded(BASE, models(other, cache))
    assert counts == {"encode_condition": 2}


def test_versions_and_device_are_in_the_key():
    medium = np.zeros((1, 4, 4, 3), np.uint8)
    keys = {
        MediaOrigin("a", (("torch", "2"),)).key(medium, "mean"),
        MediaOrigin("b", (("torch", "2"),)).key(medium, "mean"),
        MediaOrigin("a", (("torch", "3"),)).key(medium, "mean"),
        MediaOrigin("a", (("torch", "2"),)).key(medium, "sampled"),
        MediaOrigin("a", (("torch", "2"),)).key(medium.reshape(1, 2, 8, 3), "mean"),
        MediaOrigin("a", (("torch", "2"),)).key(medium.view(np.int8), "mean"),
        MediaOrigin("a", (("torch", "2"),)).key(medium + 1, "mean"),
    }
    assert len(keys) == 7
    named = dict(MediaOrigin.of(VAE, "cpu").made_with)
    assert named["torch"] == torch.__version__ and named["device"] == "cpu" and named["runtime"]


def test_what_orders_a_processors_sums_is_in_the_key(monkeypatch):
    """Other instructions, threads or kernels of quantised layers give other bits: their results are kept apart."""
    found = [MediaOrigin.of(VAE, "cpu")]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 63)
    found.append(MediaOrigin.of(VAE, "cpu"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    found.append(MediaOrigin.of(VAE, "cpu"))
    found += [MediaOrigin.of(replace(VAE, kernels={"int8 linear": f"{way}: why"}), "cpu") for way in ("a/b", "c")]
    assert len({origin.key(np.zeros(3), "mean") for origin in found}) == 5


def refuse(made, target, rename=os.replace):
    if str(target).endswith(SUFFIX):
        raise PermissionError(13, "in use")
    rename(made, target)


@pytest.mark.parametrize("given", ["", "cache", "here/cache"])
def test_a_cache_folder_never_moves_with_the_working_folder(monkeypatch, given):
    name = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    monkeypatch.setenv(name, given)
    assert user_cache().is_absolute() and Path.home() in user_cache().parents


def test_files_are_bounded_checked_and_never_in_the_way(tmp_path, monkeypatch):
    origin, runs = MediaOrigin("a", ()), []

    def one(level: int) -> Encode:
        medium = np.full((1, 2, 2, 3), level, np.uint8)
        return Encode(medium, "mean", lambda vae: runs.append(level) or torch.full((1, 24, 1, 8, 8), float(level)))

    def ask(cache: LatentCache, *levels: int, notes=None) -> list[int]:
        runs.clear()
        given = [] if notes is None else notes
        latents = encode_each(map(one, levels), lambda: torch.nn.Identity(), cache, origin, given)
        assert [latent.mean().item() for latent in latents] == list(levels)
        return list(runs)

    cache = LatentCache(tmp_path / "kept", memory_bytes=1, disk_bytes=15_000)  # two files of 6 kB
    assert ask(cache, 1, 2, 3, 3) == [1, 2, 3]
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == 2 and sum(file.stat().st_size for file in files) <= 15_000
    assert ask(LatentCache(tmp_path / "kept"), 2, 3) == []
    damaged = bytearray(files[0].read_bytes())
    damaged[-1] ^= 1  # one bit of the latent
    files[0].write_bytes(damaged)
    files[1].write_bytes(b"no file of ours")
    assert sorted(ask(LatentCache(tmp_path / "kept"), 2, 3)) == [2, 3]
    newer = tmp_path / "kept" / files[0].name
    newer.write_bytes(files[1].read_bytes())  # another key's latent under this name
    assert len(ask(LatentCache(tmp_path / "kept"), 2, 3)) == 1
    alive = part_path(tmp_path / "kept" / f"{'0' * 32}{SUFFIX}")
    halves = [alive.with_name(re.sub(r"-\d+-\d+-", "-999999999-1-", alive.name)), alive]
    for half in halves:  # of a run that was killed, and of one that may be at work
        half.write_bytes(b"half")
    ask(LatentCache(tmp_path / "kept"), 7)
    assert [half.exists() for half in halves] == [False, True]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)  # as Windows does while another program reads the file
        LatentCache(tmp_path / "kept").keep("f" * 64, torch.zeros(2))
    assert not [path for path in (tmp_path / "kept").iterdir() if "f" * 32 in path.name]
    (tmp_path / "file").write_text("in the way")
    notes: list[str] = []
    assert ask(LatentCache(tmp_path / "file"), 1, 2, notes=notes) == [1, 2]
    assert len(notes) == 1 and "could not be kept in file" in notes[0]
    unknown = LatentCache(tmp_path / "none")
    runs.clear()
    for _ in range(2):
        encode_each([one(4)], lambda: torch.nn.Identity(), unknown, None, [])
    assert runs == [4, 4] and not (tmp_path / "none").exists()


def test_nodes_keep_latents_with_the_vae_they_were_given(folder, counts):
    """A changed prompt in a node with references runs the node again, and not the VAE."""
    parts = find_parts(folder)
    given = {kind: Part.open(kind, getattr(parts, kind)) for kind in ("video_vae", "audio_vae")}
    for prompt in ("a", "b"):
        node = GraphModels(**given)
        encode_media(replace(BASE, prompt=prompt), node)
        assert set(node.infos) == {"video_vae", "audio_vae"}
    assert counts == {"encode_condition": 2, "encode": 1}

    class Foreign:
        info = None

        def __init__(self, part):
            self.part = part

        def load(self):
            return self.part.load()

    counts.clear()
    for _ in range(2):
        encode_media(BASE, GraphModels(**{kind: Foreign(part) for kind, part in given.items()}))
    assert counts == {"encode_condition": 4, "encode": 2}


def test_a_new_seed_in_a_new_run_reads_no_vae_to_encode(folder, tmp_path, monkeypatch, capsys, counts):
    monkeypatch.setenv("H3_LATENTS", str(tmp_path / "latents"))
    write_image(tmp_path / "first.png", picture(1).frames[0])
    write_image(tmp_path / "look.png", picture(2).frames[0])
    render = ["render", "--model", folder, "--dtype", "float32", "--steps", 1, "--size", "64x32", "--frames", 5]
    render += ["--prompt", "<Picture 2>", "--ref-image", tmp_path / "look.png", "--first-frame", tmp_path / "first.png"]

    def run(*more) -> dict:
        assert cli.main([*map(str, [*render, *more]), "--json"]) == 0, capsys.readouterr().err
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)["results"]}

    first = run("--out", tmp_path / "a.mp4")
    assert counts["encode_condition"] == 2 and len(list((tmp_path / "latents").iterdir())) == 2
    second = run("--out", tmp_path / "b.mp4", "--seed", 1)
    told = [json.loads((tmp_path / f"{name}.report.json").read_text())["stats"]["media"] for name in "ab"]
    assert told == [{"kept": 0, "encoded": 2}, {"kept": 2, "encoded": 0}]
    assert counts["encode_condition"] == 2 and second["latent"]["value"] != first["latent"]["value"]
    again = run("--out", tmp_path / "c.mp4", "--no-media-cache")
    assert counts["encode_condition"] == 4 and again["latent"]["value"] == first["latent"]["value"]
    write_image(tmp_path / "look.png", picture(3).frames[0])
    run("--out", tmp_path / "d.mp4", "--seed", 1)
    assert counts["encode_condition"] == 5
