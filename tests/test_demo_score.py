"""The small model that the package carries: its measures can fail, and it reaches what its card says on a few prompts.

the world's own clips pass every measure; clips of another scene do not
4 held prompts rendered, one edit, the files' sizes and layouts
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.demo import score
from h3_runtime.demo.carried import CARRIED_MODEL, FEW_STEP_LORA
from h3_runtime.demo.measure import judge_picture, judge_sound, psnr
from h3_runtime.demo.world import COLOURS, MOTIONS, SHAPES, TONES, Scene, held_scenes


def test_the_worlds_own_clips_pass():
    for scene in held_scenes(12, seed=5):
        picture, sound = judge_picture(scene.frames(96, 96, 22), scene), judge_sound(scene.sound(22), scene)
        assert all(picture.values()) and all(sound.values()), (scene, picture, sound)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("colour", {"colour": "blue"}),
        ("shape", {"shape": "square"}),
        ("direction", {"motion": "left"}),
        ("direction", {"motion": "stays"}),
        ("pitch", {"tone": "high"}),
        ("side", {"motion": "left"}),
    ],
)
def test_another_scene_does_not_pass(what, other):
    asked = Scene("red", "circle", "right", tone="low")
    shown = replace(asked, **other)
    verdict = {**judge_picture(shown.frames(96, 96, 22), asked), **judge_sound(shown.sound(22), asked)}
    assert verdict[what] is False or not verdict[what]


def test_an_empty_or_silent_clip_passes_nothing():
    grey = np.full((22, 64, 64, 3), 128, np.uint8)
    assert not any(judge_picture(grey, Scene()).values())
    assert not any(judge_sound(torch.zeros(2, 29_333), Scene()).values())


def test_every_word_is_drawn():
    scenes = held_scenes(400, seed=6)
    for field, values in (("colour", COLOURS), ("shape", SHAPES), ("motion", MOTIONS), ("tone", TONES)):
        assert {getattr(scene, field) for scene in scenes} == set(values)


def test_psnr():
    black, grey = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 51, np.uint8)
    assert psnr(black, black) == float("inf") and psnr(black, grey) == pytest.approx(13.98, abs=0.01)


# ---- the carried files


def test_the_files_are_whole_and_small():
    parts = find_parts(CARRIED_MODEL)
    assert parts.dit and parts.video_vae and parts.audio_vae and parts.text_encoder and parts.tokenizer
    assert not parts.skipped
    for task in ("t2va", "fl2va", "ref2va"):
        assert parts.dit_for(task).path == CARRIED_MODEL / "dit.safetensors"
    assert FEW_STEP_LORA.is_file() and (CARRIED_MODEL / "CARD.md").is_file()
    assert sum(file.stat().st_size for file in CARRIED_MODEL.rglob("*") if file.is_file()) <= 16_000_000


@pytest.fixture(scope="module")
def renderer():
    return score.Renderer(forwards=12)


def test_held_prompts_are_followed(renderer):
    lines = {line.name: line for line in score.score_prompts(renderer, held_scenes(4))}
    for what in ("colour", "shape", "direction", "pitch", "side"):
        assert lines[f"prompts/{what}"].value >= 75, [str(line) for line in lines.values()]


def test_codecs(renderer):
    for line in score.score_codecs(renderer, held_scenes(2, seed=7)):
        assert line.passed, str(line)
