"""References and recipes: the reference's own steps on the same media, limits, order, notes, every pairing.

Oracles: diffusers' blocks (setup, text encoder, reference encoder, layout, noise, loop) on the same small weights;
ComfyUI's own nodes for the recipe ``comfy`` where COMFYUI_PATH names one.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from h3_runtime import cli, geometry, references
from h3_runtime.demo.maker import REFERENCE_DIT, make_model, make_reference_dit
from h3_runtime.demo.text_maker import make_text_encoder
from h3_runtime.errors import H3Error
from h3_runtime.guides import place
from h3_runtime.job import RenderJob, TextCondition
from h3_runtime.layout import audio_to_rows
from h3_runtime.media import write_image
from h3_runtime.references import clip_canvas, resample_slots
from h3_runtime.render import condition_text, encode
from h3_runtime.request import GuideRequest, Media, ReferenceRequest, RenderRequest
from h3_runtime.sampler import sample
from h3_runtime.text import vision
from h3_runtime.text.shown import Shown, labels, lint_names, present_shown

from .reference_blocks import SmallParts, run_steps, write_lossless
from .small_jobs import (
    one_thread,  # noqa: F401 (a fixture)
    relative,
)

TOLERANCE = 1e-5
PROMPT = "Use <Picture 1>. He says: <d>[English] Hello there</d> as in <Audio 1>, moving like <Video 1>."
SHORT_EDGE, IMAGE_SHORT_EDGE = 64, 192  # in place of 768 and 2048: the rules are the same, the cost is not
REF2VA_ENCODE = [
    "MiniMaxH3Ref2VASetupStep",
    "MiniMaxH3Ref2VATextEncoderStep",
    "MiniMaxH3Ref2VAReferenceEncoderStep",
]
REF2VA_RENDER = [
    *REF2VA_ENCODE,
    "MiniMaxH3Ref2VAPrepareLayoutStep",
    "MiniMaxH3PrepareConditionLatentsStep",
    "MiniMaxH3PrepareLatentsStep",
    "MiniMaxH3Ref2VAPrepareLatentsStep",
    "MiniMaxH3SetTimestepsStep",
    "MiniMaxH3Ref2VADenoiseStep",
    "MiniMaxH3AfterDenoiseStep",
]


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def samples(seed: int, channels: int, count: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((channels, count)) * 3000).astype(np.int16)


def still(count: int, height: int = 8, width: int = 8) -> np.ndarray:
    """Many frames that take the memory of one."""
    return np.broadcast_to(np.zeros((1, height, width, 3), np.uint8), (count, height, width, 3))


def ref(kind: str, sound: bool = True, fps: float | None = None, **media) -> ReferenceRequest:
    return ReferenceRequest(kind, Media(**media), sound, fps)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> SmallParts:
    folder = tmp_path_factory.mktemp("encoder")
    make_text_encoder(folder, seed=3)
    return SmallParts(folder)


@pytest.fixture
def small_sizes(monkeypatch):
    """Both sides by the same rules at a twelfth of the released edges."""

    def shrink(small: SmallParts | None = None):
        area = SHORT_EDGE * 112
        monkeypatch.setattr(geometry, "SHORT_EDGE", SHORT_EDGE)
        monkeypatch.setattr(geometry, "MAX_AREA", area)
        monkeypatch.setattr(references, "IMAGE_SHORT_EDGE", IMAGE_SHORT_EDGE)
        if small is not None:
            small.resize_by(SHORT_EDGE, area, IMAGE_SHORT_EDGE)

    return shrink


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Real files: pictures, lossless clips at 30 and 25 fps with and without sound, sounds of other rates."""
    here = tmp_path_factory.mktemp("media")
    write_image(here / "wide.png", noise(1, 500, 900))
    write_image(here / "tall.png", noise(2, 90, 70))
    write_image(here / "square.png", noise(3, 192, 192))
    write_lossless(here / "talk.mkv", noise(4, 72, 40, 64), 30, samples(5, 1, 44100 * 2))
    write_lossless(here / "silent.mkv", noise(6, 60, 48, 48), 25)
    write_lossless(here / "short.mkv", noise(8, 49, 32, 64), 24, samples(9, 2, 30000), 48000)
    for name, channels, rate in (("stereo.wav", 2, 48000), ("mono.wav", 1, 22050)):
        with wave.open(str(here / name), "wb") as file:
            file.setnchannels(channels), file.setsampwidth(2), file.setframerate(rate)
            file.writeframes(np.ascontiguousarray(samples(7, channels, rate).T).astype("<i2").tobytes())
    return here


SETS = {
    "all kinds": [
        ("audio", "stereo.wav"),
        ("image", "wide.png"),
        ("video", "silent.mkv"),
        ("video", "talk.mkv"),
        ("image", "tall.png"),
    ],
    "a short soundtrack": [("video", "short.mkv"), ("audio", "mono.wav")],
    "one awkward picture": [("image", "square.png")],
}


def their_references(folder: Path, kinds):
    from diffusers.modular_pipelines import minimax_h3

    classes = {
        "image": minimax_h3.MiniMaxH3ImageReference,
        "video": minimax_h3.MiniMaxH3VideoReference,
        "audio": minimax_h3.MiniMaxH3AudioReference,
    }
    return [classes[kind].from_file(str(folder / name)) for kind, name in kinds]


def our_request(folder: Path, kinds, **options) -> RenderRequest:
    asked = tuple(ref(kind, path=str(folder / name)) for kind, name in kinds)
    given = {"size": (96, 64), "frames": 39, "num_forwards": 3, "seed": 3, **options}
    return RenderRequest(given.pop("prompt", PROMPT), references=asked, **given)


# ---- whole renders and presentations against the reference


@pytest.mark.parametrize("name", SETS)
def test_a_render_from_files_equals_the_references_steps(small, small_sizes, folder, name):
    """Files in, latent out: pixels, samples, prompt rows, latents, and the finished latent."""
    small_sizes(small)
    request = our_request(folder, SETS[name])
    theirs = run_steps(
        small, REF2VA_RENDER, references=their_references(folder, SETS[name]), height=64, width=96, num_frames=39,
        prompt=PROMPT, generator=torch.Generator().manual_seed(3), num_inference_steps=4,
    )  # fmt: skip
    placement = place(request)
    made = condition_text(request, placement, small.models)
    assert torch.equal(made.text.tags, theirs.get("text_token_tags"))
    assert relative(made.text.hidden, theirs.get("prompt_embeds")[0]) <= TOLERANCE
    for ours, normalised in zip(placement.references, theirs.get("normalized_references")):
        if ours.kind == "image":
            assert np.array_equal(ours.frames[0], np.array(normalised.image))
        elif ours.frames is not None:
            assert np.array_equal(ours.frames, normalised.frames[: len(ours.frames)])
        if ours.audio is not None:
            assert ours.audio.shape == normalised.audio.shape
            assert (ours.audio - normalised.audio).abs().max() <= 1e-6
    job = encode(request, placement, small.models, made.text)
    assert job.task == "ref2va" and job.references[0].name == SETS[name][0][1]
    pictures = [reference.video for reference in job.references if reference.video is not None]
    sounds = [audio_to_rows(reference.audio) for reference in job.references if reference.audio is not None]
    for ours, latents in ((pictures, "condition_latents"), (sounds, "audio_condition_latents")):
        assert len(ours) == len(theirs.get(latents))
        for one, other in zip(ours, theirs.get(latents)):
            assert relative(one, other) <= TOLERANCE
    result = sample(small.dit, job)
    assert relative(result.latent.video, theirs.get("latents")) <= TOLERANCE
    assert relative(result.latent.audio, theirs.get("audio_latents").permute(1, 0, 2)[None]) <= TOLERANCE


KEYFRAMES = {"192x192": (noise(11, 192, 192),), "500x900": (noise(12, 500, 900), noise(13, 500, 900)), "none": ()}


@pytest.mark.parametrize("size", KEYFRAMES)
def test_keyframes_and_plain_prompts_are_presented_as_by_the_reference(small, size):
    """fl2va with pictures that the processor must resize, and t2va."""
    pictures = KEYFRAMES[size]
    step = "MiniMaxH3FL2VATextEncoderStep" if pictures else "MiniMaxH3TextEncoderStep"
    theirs = run_steps(small, [step], prompt=PROMPT, keyframes=[Image.fromarray(picture) for picture in pictures])
    shown = [Shown("picture", "key", picture[None], keyframe=True) for picture in pictures]
    ours = small.encoder.encode_items(PROMPT, *present_shown(shown))
    assert torch.equal(ours.tags, theirs.get("text_token_tags"))
    assert relative(ours.hidden, theirs.get("prompt_embeds")[0]) <= TOLERANCE


def test_a_placed_keyframe_pair_is_presented_as_by_the_reference(small, folder):
    first, last = (Media(str(folder / name)) for name in ("wide.png", "square.png"))
    request = RenderRequest(PROMPT, (192, 160), frames=22, first_frame=first, last_frame=last)
    theirs = run_steps(
        small, ["MiniMaxH3ResizeStep", "MiniMaxH3FL2VATextEncoderStep", "MiniMaxH3KeyframeVaeEncoderStep"],
        prompt=PROMPT, image=Image.open(first.path), last_image=Image.open(last.path), height=160, width=192,
    )  # fmt: skip
    placement = place(request)
    made = condition_text(request, placement, small.models)
    assert relative(made.text.hidden, theirs.get("prompt_embeds")[0]) <= TOLERANCE
    job = encode(request, placement, small.models, made.text)
    for guide, latent in zip(job.guides, theirs.get("condition_latents")):
        assert relative(guide.video, latent) <= TOLERANCE


@pytest.mark.parametrize("count", [25, 26, 31])
def test_a_clip_past_its_pixel_budget_is_presented_as_by_the_reference(small, monkeypatch, count):
    """The released budget holds 25 sampled frames of 1344x768 and shrinks 26; here both sides have a small one."""
    clip = noise(14, 12 * (count - 1) + 1, 96, 160)
    budget = (4_096, 25_165_824 * 96 * 160 // (768 * 1344))
    monkeypatch.setattr(vision, "CLIP_PIXELS", budget)
    processor = small.components.processor.video_processor
    before, processor.size = processor.size, {"shortest_edge": budget[0], "longest_edge": budget[1]}
    try:
        blocks = small.blocks
        normalised = [blocks.MiniMaxH3VideoReference(frames=clip)]
        theirs = run_steps(
            small, ["MiniMaxH3Ref2VATextEncoderStep"], prompt=PROMPT, normalized_references=normalised
        )  # fmt: skip
    finally:
        processor.size = before
    indices, times = references.sample_clip(len(clip))
    items, inputs = present_shown([Shown("clip", "c", clip[list(indices)], times)])
    assert inputs[0].grid == (-(-count // 2), *((6, 10) if count == 25 else inputs[0].grid[1:]))
    assert (inputs[0].grid[1:] == (6, 10)) == (count == 25)
    ours = small.encoder.encode_items(PROMPT, items, inputs)
    assert torch.equal(ours.tags, theirs.get("text_token_tags"))
    assert relative(ours.hidden, theirs.get("prompt_embeds")[0]) <= TOLERANCE


def test_rates_and_canvases_are_the_references():
    pytest.importorskip("diffusers")
    from diffusers.modular_pipelines.minimax_h3 import before_encoder

    setup = before_encoder.MiniMaxH3Ref2VASetupStep
    for count, fps in ((60, 30.0), (60, 25.0), (48, 12.0), (75, 29.97), (100, 60.0), (57, 23.976), (50, 24.0)):
        frames = np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, 3)
        theirs = setup._normalize_video_condition(frames, fps, 1000, 1, 1, 4, 24.0)
        assert theirs[:, 0, 0, 0].tolist() == resample_slots(count, fps), fps
    for width, height in ((1920, 1080), (640, 480), (500, 900), (300, 1200), (1344, 768), (90, 70), (333, 111)):
        frames = np.zeros((1, height, width, 3), np.uint8)
        theirs = setup._normalize_video_condition(frames, 24.0, 1, 32, 768, 768 * 1344, 24.0)
        assert clip_canvas("c", width, height, "reference") == (theirs.shape[2], theirs.shape[1])


def test_released_edges():
    assert references.IMAGE_SHORT_EDGE == 2048
    picture = place(RenderRequest("", (96, 64), frames=22, references=(ref("image", frames=still(1, 30, 40)),)))
    assert picture.references[0].frames.shape == (1, 2048, 2720, 3)
    assert clip_canvas("c", 16, 9, "reference") == (1344, 768)


# ---- what is refused, before any weights


CLIP, SOUND, PICTURE = {"frames": still(60)}, {"audio": torch.zeros(2, 8000)}, {"frames": still(1)}
LIMITS = {
    "10 pictures": ([("image", PICTURE)] * 10, "10 image references were given: at most 9"),
    "4 clips": ([("video", CLIP)] * 4, "4 video references were given: at most 3"),
    "4 sounds": ([("image", PICTURE)] + [("audio", SOUND)] * 4, "4 audio references were given: at most 3"),
    "13 in all": ([("image", PICTURE)] * 9 + [("video", CLIP)] * 2 + [("audio", SOUND)] * 2, "at most 12 in all"),
    "sound alone": ([("audio", SOUND)] * 2, "cannot be the only reference"),
    "another kind": ([("text", PICTURE)], "give image, video or audio"),
    "short clip": ([("video", {"frames": still(47)})], r"is 1\.96 s: clips of 2 to 15 s"),
    "long clip": ([("video", {"frames": still(363)})], "is longer than 15 s: clips of 2 to 15 s"),
    "together": ([("video", {"frames": still(150)})] * 3, r"last 6\.25 \+ 6\.25 \+ 6\.25 s: 15 s together"),
    "too wide": ([("image", {"frames": still(1, 8, 33)})], "is 33x8: pictures and clips must be within 1:4 and 4:1"),
    "too tall clip": ([("video", {"frames": still(60, 33, 8)})], "is 8x33"),
    "clip as picture": ([("image", CLIP)], "is a clip of 60 frames: give one picture"),
    "sound as picture": ([("image", SOUND)], "is sound: give one picture"),
    "picture as clip": ([("video", PICTURE)], r"is 0\.04 s"),
    "sound as clip": ([("video", SOUND)], "is sound: give it as a sound reference"),
    "picture as sound": ([("image", PICTURE), ("audio", PICTURE)], "holds no sound"),
    "float pixels": ([("image", {"frames": np.zeros((1, 8, 8, 3))})], "give uint8"),
    "mono sound": ([("image", PICTURE), ("audio", {"audio": torch.zeros(1, 800)})], "give .2, samples. at 32000 Hz"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits(case, small_sizes):
    small_sizes()
    kinds, sentence = LIMITS[case]
    with pytest.raises(H3Error, match=sentence):
        place(RenderRequest("", (96, 64), frames=39, references=tuple(ref(kind, **media) for kind, media in kinds)))


def test_what_stands_inside_the_limits_is_taken(small_sizes):
    small_sizes()
    kinds = [("image", PICTURE)] * 6 + [("video", {"frames": still(120)})] * 3 + [("audio", SOUND)] * 3
    placed = place(RenderRequest("", (96, 64), frames=39, references=tuple(ref(k, **m) for k, m in kinds)))
    assert [reference.kind for reference in placed.references] == [k for k, _ in kinds] and placed.task == "ref2va"
    assert all(len(reference.frames) == 39 for reference in placed.references[6:9])
    longest = place(RenderRequest("", (96, 64), frames=39, references=(ref("video", frames=still(362)),)))
    assert longest.references[0].frames.shape[0] == 39


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("image", "talk.mkv", "is a file of a clip: give it as --ref-video"),
        ("image", "mono.wav", "is a file of sound: give it as --ref-audio"),
        ("video", "wide.png", "is a file of a picture: give it as --ref-image"),
        ("video", "mono.wav", "is a file of sound: give it as --ref-audio"),
        ("audio", "wide.png", "is a picture: give it as --ref-image"),
        ("audio", "silent.mkv", "holds no sound"),
    ],
)
def test_files_of_another_kind(folder, kind, name, sentence):
    others = [ref("image", frames=still(1))]
    with pytest.raises(H3Error, match=sentence):
        place(RenderRequest("", (96, 64), frames=39, references=(*others, ref(kind, path=str(folder / name)))))


def test_rates_belong_to_frames_in_memory(folder, small_sizes):
    small_sizes()
    placed = place(RenderRequest("", (96, 64), frames=39, references=(ref("video", frames=still(60), fps=30),)))
    assert any("30 fps clip of 60 frames put on 48 at 24 fps" in note for note in placed.notes)
    for bad in ({"path": str(folder / "talk.mkv"), "fps": 30}, {"frames": still(60), "fps": 0}):
        with pytest.raises(H3Error, match=r"only frames in memory|give 1 to 1000"):
            ref("video", **bad)
    with pytest.raises(H3Error, match="render at least 22 frames"):
        place(RenderRequest("", (96, 64), frames=5, references=(ref("video", frames=still(60)),)))
    with pytest.raises(H3Error, match="recipe 'other' is unknown: choose reference or comfy"):
        RenderRequest("", recipe="other")


# ---- notes


def test_every_change_is_told(folder, small_sizes):
    small_sizes()
    kinds = [("image", "wide.png"), ("video", "talk.mkv"), ("video", "silent.mkv"), ("audio", "stereo.wav")]
    request = our_request(folder, kinds, frames=22)
    silent = replace(request.references[1], sound=False)
    placed = place(replace(request, references=(*request.references, silent)))
    notes = "\n".join(placed.notes)
    for sentence in (
        "wide.png (900x500) was resized to 352x192",
        "talk.mkv: 30 fps clip of 72 frames resampled to 58 frames at 24 fps",
        "talk.mkv (64x40) was resized to 96x64",
        "talk.mkv: 22 of 58 frames are used (0.917 of 2.417 s",
        "talk.mkv: mono sound repeated on both channels",
        "talk.mkv: sound resampled from 44100 to 32000 Hz",
        "talk.mkv: sound cut to the render's 0.917 s",
        "silent.mkv has no sound",
        "stereo.wav: sound resampled from 48000 to 32000 Hz",
        "stereo.wav: sound cut from 1.000 s to the render's 0.917 s",
        "talk.mkv: its sound is left out, as asked",
        "<Picture 1> = wide.png, <Audio 1> <Video 1> = talk.mkv, <Video 2> = silent.mkv, <Audio 2> = stereo.wav",
    ):
        assert sentence in notes, sentence
    assert [reference.kind for reference in placed.references] == ["image", "video_audio", "video", "audio", "video"]
    used = place(our_request(folder, [("image", "tall.png"), ("audio", "talk.mkv")]))
    assert any("only its sound is used, its picture is not" in note for note in used.notes)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a <Picture 1> b <Picture 2> c <Audio 1> d <Video 1>", []),
        ("<Picture 1>, <Picture 2> and <Audio 1>", []),  # a clip with sound is named by either label
        ("<Picture 2> <Video 1>", ["first is not named in the prompt: write <Picture 1>"]),
        ("<Picture 1> <Picture 2>", ["clip is not named in the prompt: write <Audio 1> or <Video 1>"]),
        (
            "<Picture 1> <Picture 2> <Video 1> <Picture 3> <Audio 2>",
            ["<Picture 3> at character 35 stands for nothing: this request has 2 picture(s)", "<Audio 2> at character"],
        ),
        ("<picture 1> < Picture 2 > <Video 1>", ["is not the label: write <Picture 1>", "write <Picture 2> exactly"]),
    ],
)
def test_the_prompt_and_the_labels_are_compared(prompt, expected):
    picture, clip = np.zeros((1, 8, 8, 3), np.uint8), np.zeros((4, 8, 8, 3), np.uint8)
    shown = [
        Shown("picture", "first", picture),
        Shown("picture", "second", picture),
        Shown("clip with sound", "clip", clip),
    ]
    notes = lint_names(prompt, shown)
    assert len(notes) == len(expected), notes
    for note, part in zip(notes, expected):
        assert part in note


def test_keyframes_are_numbered_before_references_and_need_no_name(folder, small_sizes):
    small_sizes()
    request = our_request(folder, [("image", "wide.png")], prompt="only <Picture 2>")
    placed = place(replace(request, first_frame=Media(str(folder / "square.png"))))
    assert labels(placed.shown) == [("<Picture 1>",), ("<Picture 2>",)]
    assert [thing.name for thing in placed.shown] == ["square.png", "wide.png"] and placed.task == "ref2va"
    assert not any("not named" in note for note in placed.notes)
    alone = place(replace(request, references=(), prompt="<Picture 1>"))
    assert any("<Picture 1> at character 1 stands for nothing: this request has no picture" in n for n in alone.notes)


# ---- order, and every pairing


def test_order_matters(small, small_sizes, folder):
    small_sizes()
    kinds = [("image", "wide.png"), ("image", "tall.png")]
    latents, rows = [], []
    for order in (kinds, kinds[::-1], kinds):
        request = our_request(folder, order, frames=22, num_forwards=1)
        placement = place(request)
        made = condition_text(request, placement, small.models)
        rows.append(made.text.hidden)
        latents.append(sample(small.dit, encode(request, placement, small.models, made.text)).latent)
    assert torch.equal(latents[0].video, latents[2].video) and not torch.equal(latents[0].video, latents[1].video)
    assert not torch.equal(latents[0].audio, latents[1].audio)
    assert rows[0].shape != rows[1].shape or not torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("frames", [5, 39, 124])
def test_every_pairing_of_conditions_renders(small, small_sizes, frames):
    """A picture guide, a sound guide, a reference sound and a reference clip with sound, each there or not."""
    small_sizes()
    text = TextCondition(torch.randn(4, small.encoder.text_dim), torch.ones(4, dtype=torch.int64))
    guides = (
        GuideRequest(Media(frames=noise(1, 22, 32, 64), name="picture guide"), frame=0),
        GuideRequest(Media(audio=torch.randn(2, 9000) * 0.1, name="sound guide"), frame=0),
    )
    others = (
        ref("audio", audio=torch.randn(2, 200000) * 0.1),
        ref("video", frames=noise(2, 50, 32, 64), audio=torch.randn(2, 70001) * 0.1),
    )
    for chosen in itertools.product((False, True), repeat=4):
        held = tuple(guide for guide, there in zip(guides, chosen[:2]) if there)
        asked = (ref("image", frames=noise(3, 1, 32, 32)), *(r for r, there in zip(others, chosen[2:]) if there))
        request = RenderRequest(
            "", (64, 32), frames=frames, guides=held, references=asked, num_forwards=1, recipe="comfy"
        )
        job: RenderJob = encode(request, place(request), small.models, text)
        result = sample(small.dit, job)
        assert result.finished and result.latent.fits(job.canvas), (frames, chosen)
        assert len(job.guides) == sum(chosen[:2]) and len(job.references) == 1 + sum(chosen[2:])


# ---- the recipe comfy


def test_comfy_sizes_and_cuts(small_sizes):
    small_sizes()

    def placed(**media):
        kind = media.pop("kind", "image")
        asked = (ref("image", frames=still(1)), ref(kind, **media))
        return place(RenderRequest("", (256, 160), frames=39, references=asked, recipe="comfy")).references[1]

    assert placed(frames=still(1, 700, 1100)).frames.shape == (1, 160, 256, 3)  # down to the render's area
    assert placed(frames=still(1, 60, 75)).frames.shape == (1, 64, 64, 3)  # never enlarged
    assert placed(kind="video", frames=still(50, 40, 60)).frames.shape == (39, 32, 64, 3)  # small clips stay small
    assert placed(kind="video", frames=still(60, 100, 90)).frames.shape == (39, 64, 64, 3)
    sound = placed(kind="audio", audio=torch.zeros(2, 320001))
    assert sound.audio.shape == (2, 320001)  # not cut
    clip = placed(kind="video", frames=still(50, 40, 60)).shown
    assert clip.pixels.shape[0] == 4 and clip.timestamps == (0.25, 1.25)  # every 12th of what the VAE gets
    last, middle = Media(frames=noise(1, 1, 90, 60)), GuideRequest(Media(frames=noise(2, 1, 50, 90)), frame=9)
    held = [
        place(RenderRequest("", (96, 64), frames=22, last_frame=last, guides=(middle,), recipe=recipe)).guides[1].frames
        for recipe in ("reference", "comfy")
    ]
    assert held[0].shape == held[1].shape and not np.array_equal(*held)  # cropped before or after the resize
    ours, theirs = (
        place(RenderRequest("", (96, 64), frames=22, last_frame=last, recipe=recipe))
        for recipe in ("reference", "comfy")
    )
    assert any("stretched" in note for note in ours.notes) and any("cropped" in note for note in theirs.notes)


@pytest.mark.needs("comfyui")
def test_comfy_is_what_comfyui_hands_on(tmp_path, incomplete):
    """ComfyUI's own nodes, in their own process, give their VAEs and encoder the same pixels and samples."""
    home = os.environ.get("COMFYUI_PATH")
    if not home:
        incomplete("recipe comfy against ComfyUI's nodes", "COMFYUI_PATH names no ComfyUI", needs="comfyui")
    given = {
        "wide": torch.from_numpy(noise(1, 1, 700, 1100)),
        "small": torch.from_numpy(noise(2, 1, 60, 75)),
        "talk": torch.from_numpy(noise(3, 50, 70, 110)),
        "silent": torch.from_numpy(noise(4, 61, 200, 180)),
        "soundtrack": torch.randn(2, 50000) * 0.1,
        "voice": torch.randn(2, 90001) * 0.1,
    }
    save_file(given, tmp_path / "given.safetensors")
    script = Path(__file__).parent / "comfyui_conditions.py"
    done = subprocess.run([sys.executable, script, home, tmp_path], capture_output=True, text=True, timeout=300)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        incomplete("recipe comfy against ComfyUI's nodes", f"ComfyUI does not start here ({reason})", needs="comfyui")
    theirs = load_file(tmp_path / "handed.safetensors")
    frames = {name: value.numpy() for name, value in given.items() if value.dtype == torch.uint8}
    asked = (
        ref("image", frames=frames["wide"]),
        ref("image", frames=frames["small"]),
        ref("video", frames=frames["talk"], audio=given["soundtrack"]),
        ref("video", frames=frames["silent"]),
        ref("audio", audio=given["voice"]),
    )
    placed = place(RenderRequest("p", (256, 160), frames=39, references=asked, recipe="comfy"))
    ours = [r.frames for r in placed.references if r.frames is not None]
    ours += [thing.pixels for thing in placed.shown if thing.pixels is not None]
    wide, small = Media(frames=frames["wide"]), Media(frames=frames["small"])
    keys = place(RenderRequest("p", (256, 160), frames=39, first_frame=wide, last_frame=small, recipe="comfy"))
    lone = place(RenderRequest("p", (256, 160), frames=39, last_frame=wide, recipe="comfy"))
    ours += [guide.frames for guide in (*keys.guides, *lone.guides)]
    assert len(ours) == sum(name.startswith("pixels") for name in theirs)
    for index, pixels in enumerate(ours):
        assert np.array_equal(theirs[f"pixels{index}"].numpy(), pixels), index
    for index, reference in enumerate(r for r in placed.references if r.audio is not None):
        assert torch.equal(theirs[f"sound{index}"], reference.audio)


# ---- the command line


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The demo's small model and its second DiT, for references."""
    made = make_model(tmp_path_factory.mktemp("model"))
    make_reference_dit(made)
    return made


@pytest.fixture
def command(capsys, model, tmp_path, monkeypatch):
    monkeypatch.setenv("H3_RECOVERY", str(tmp_path / "recovery"))
    monkeypatch.setenv("H3_CONDITIONS", str(tmp_path / "conditions"))

    def run(*arguments, out="o.mp4"):
        given = ["render", "--model", model, "--dtype", "float32", "--out", tmp_path / out, "--json", *arguments]
        status = cli.main(list(map(str, given)))
        captured = capsys.readouterr()
        rows = json.loads(captured.out)["results"] if captured.out else []
        return status, {row["name"]: row["value"] for row in rows}, captured.err

    return run


def test_a_render_with_references_repeats_from_its_manifest(command, folder, tmp_path, small_sizes, monkeypatch):
    small_sizes()
    monkeypatch.setattr(references, "IMAGE_SHORT_EDGE", 64)
    asked = [
        "--size", "64x32", "--frames", 22, "--steps", 1, "--prompt", "<Picture 1> <Audio 1> <Video 1> <Audio 2>",
        "--ref-audio", folder / "mono.wav", "--ref-image", folder / "tall.png", "--ref-video", folder / "talk.mkv",
        "--ref-silent-video", folder / "silent.mkv",
    ]  # fmt: skip
    status, rows, words = command(*asked)
    assert status == 0, words
    manifest = json.loads((tmp_path / "o.json").read_text())
    described = manifest["request"]["references"]
    assert [r["name"] for r in described] == ["mono.wav", "tall.png", "talk.mkv", "silent.mkv"]
    assert [(r["kind"], r["sound"]) for r in described][2:] == [("video", True), ("video", False)]
    assert manifest["resolved"]["task"] == "ref2va" and manifest["models"]["dit"]["file"] == REFERENCE_DIT
    assert [i["kind"] for i in manifest["conditioning"]["items"]] == ["sound", "picture", "clip with sound", "clip"]
    assert "silent.mkv is not named in the prompt: write <Video 2>" in words
    assert str(folder) not in json.dumps(manifest)
    again = ["--from", tmp_path / "o.mp4", "--inputs", folder]
    status, repeated, words = command(*again, out="again.mp4")
    assert status == 0 and "differs: nothing" in words
    assert repeated["latent"] == rows["latent"]
    assert (tmp_path / "again.mp4").read_bytes() == (tmp_path / "o.mp4").read_bytes()
    status, _, words = command(*again, "--ref-image", folder / "wide.png")
    assert status == 2 and "--ref-... cannot change it" in words


def test_comfy_is_labelled_and_wrong_weights_are_refused(command, folder, model, tmp_path):
    asked = ["--size", "96x64", "--frames", 22, "--steps", 1, "--prompt", "<Picture 1>", "--ref-image"]
    asked += [folder / "tall.png"]
    status, rows, words = command(*asked, "--recipe", "comfy", "--first-frame", folder / "square.png")
    assert status == 0, words
    assert rows["label"].startswith("APPROXIMATE") and "guides with references" in rows["label"]
    assert json.loads((tmp_path / "o.json").read_text())["request"]["recipe"] == "comfy"
    for wrong in (["--dit", model / "dit.safetensors"], ["--dit", model / "none.safetensors"]):
        status, _, words = command(*asked, *wrong, out="x.mp4")
        assert status == 2 and ("the task ref2va needs ref2va weights" in words or "does not exist" in words)
    status, _, words = command(*asked[:-1], folder / "nothing.png", out="x.mp4")
    assert status == 2 and "nothing.png does not exist" in words
