"""What a node refuses before any work: numbers over a wire, prefixes, file names, and what is no latent or sound."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace

import pytest
import torch

from .comfy_graphs import CARRIED


@pytest.fixture(scope="module")
def parts(pack) -> SimpleNamespace:
    (clip,) = pack.run("H3RuntimeLoadTextEncoder", text_encoder=CARRIED)
    video_vae, audio_vae = pack.run("H3RuntimeLoadVaes", video_vae=CARRIED, audio_vae=CARRIED)
    empty, *_ = pack.run("H3RuntimeEmptyLatent", width=96, height=64, frames=22)
    _, frames, *_ = pack.run("H3RuntimeSampleMedia", width=96, height=64, frames=22)
    return SimpleNamespace(clip=clip, video_vae=video_vae, audio_vae=audio_vae, empty=empty, frames=frames)


# ---- numbers that come over a wire: the host looks at widgets only


def test_every_number_has_limits(pack):
    fields = [
        (node.__name__, name, field)
        for node in importlib.import_module(f"{pack.name}.nodes").node_classes()
        for name, field in pack.widgets.widgets_of(node.define_schema().inputs, {})
        if field.get_io_type() in pack.widgets.NUMBERS
    ]
    assert len(fields) > 20 and not [one[:2] for one in fields if one[2].min is None or one[2].max is None]


@pytest.mark.parametrize(
    "class_type, given, words",
    [
        ("H3RuntimeEmptyLatent", {"width": 10_000_000, "height": 64}, "width is '10000000': give a number from 0 to"),
        ("H3RuntimeEmptyLatent", {"seconds": torch.nan}, "seconds is 'nan': give a number from"),
        ("H3RuntimeEmptyLatent", {"megapixels": -1.0}, "megapixels is '-1.0': give a number from"),
        ("H3RuntimeSampleMedia", {"frames": 0}, "frames is '0': give a number from"),
        (
            "H3RuntimeAccelerate",
            {"accelerator": {"accelerator": "forecast", "calls": torch.nan}},
            "accelerator.calls is 'nan': give a number from",
        ),
    ],
)
def test_a_number_outside_its_widgets_limits_is_refused_before_any_work(pack, class_type, given, words):
    with pytest.raises(pack.h3.H3Error, match=re.escape(words)):
        pack.run(class_type, **given)


@pytest.mark.parametrize(
    "prefix, words",
    [
        ("../../../elsewhere", "it leads out of the output folder"),
        ("/elsewhere/clip", "it leads out of the output folder"),
        ("a\0b", "it holds a control character"),
        ("below/" + "\u4e2d" * 70, "longer than 180 bytes"),
        ("taken/clip", "its folder cannot be used"),
    ],
)
def test_a_prefix_that_is_no_name_in_the_output_folder_is_refused(pack, parts, prefix, words):
    (pack.base / "output" / "taken").write_text("a file in the folder's place")
    for class_type in ("H3RuntimeSaveVideo", "H3RuntimeSavePrompt"):
        given = (
            {"images": parts.frames}
            if class_type == "H3RuntimeSaveVideo"
            else {"positive": pack.run("H3RuntimeEncodePrompt", clip=parts.clip, prompt="a ball")[0]}
        )
        with pytest.raises(pack.h3.H3Error, match=re.escape("filename_prefix is ")) as refused:
            pack.run(class_type, filename_prefix=prefix, **given)
        assert words in str(refused.value)


@pytest.mark.parametrize("name", ["../../elsewhere", "a\0b", "x" * 5000, 7])
def test_a_name_that_stands_for_no_saved_file_is_gone(pack, monkeypatch, name):
    def stricter(given):  # as ComfyUI's own refuses what leads out of its folders
        if ".." in given:
            raise ValueError(f"Invalid file path: {given!r}")
        return str(pack.base / "input" / given)

    monkeypatch.setattr(pack.host.folder_paths, "get_annotated_filepath", stricter)
    for class_type in ("H3RuntimeLoadLatent", "H3RuntimeLoadPrompt"):
        with pytest.raises(pack.h3.H3Error, match="is gone: press R"):
            pack.run(class_type, file=name)


@pytest.mark.parametrize("latent", [None, {}, {"samples": "x"}, {"samples": torch.tensor(1.0)}])
def test_what_is_no_latent_is_refused_with_a_sentence(pack, parts, latent):
    with pytest.raises(pack.h3.H3Error, match="no latent came over this wire"):
        pack.run("H3RuntimeDecodeVideo", latent=latent, video_vae=parts.video_vae)
    with pytest.raises(pack.h3.H3Error, match="no latent came over this wire"):
        pack.run("H3RuntimeJoinLatent", picture=latent, sound=parts.empty)


@pytest.mark.parametrize(
    "audio, words",
    [
        ({"waveform": torch.zeros(0, 2, 99), "sample_rate": 32000}, "the sound has shape [0, 2, 99] at 32000 Hz"),
        ({"waveform": torch.zeros(1, 2, 99), "sample_rate": 0}, "at 0 Hz: give an AUDIO"),
        ({"waveform": torch.zeros(99), "sample_rate": 32000}, "the sound has shape [99]"),
        ({"waveform": torch.zeros(1, 2, 99)}, "at None Hz: give an AUDIO"),
        ({"waveform": torch.zeros(1, 2, 0), "sample_rate": 32000}, "a sound of 0 samples: give one that has some"),
    ],
)
def test_what_is_no_sound_is_refused_with_a_sentence(pack, parts, audio, words):
    with pytest.raises(pack.h3.H3Error, match=re.escape(words)):
        pack.run(
            "H3RuntimeEncodeClip",
            video_vae=parts.video_vae,
            audio_vae=parts.audio_vae,
            images=parts.frames,
            audio=audio,
        )
