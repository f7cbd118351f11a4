"""A soundtrack that is kept is the creator's own, sample by sample: lips are driven by it, and it comes back unchanged.

source clip ─encoded─▶ mask 0 ─▶ latent kept ─decoded─▶ [samples of the source where kept | new sound elsewhere]
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h3_runtime import cli
from h3_runtime.demo.maker import make_model
from h3_runtime.demo.media import sample_media
from h3_runtime.media import Mp4Writer, put_back, read_audio
from h3_runtime.media.sound import JOINT

HOP = 800


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def noise(length: int, seed: int) -> torch.Tensor:
    return torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) - 0.5


# ---- the joint


def test_kept_latents_are_the_originals_samples_and_new_ones_touch_them_in_five_milliseconds():
    decoded, original = noise(7 * HOP - 13, 1), noise(7 * HOP, 2)
    kept = torch.tensor([[1, 1, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0]]).bool()
    sound, note = put_back(decoded, original, kept)
    assert sound.shape == decoded.shape and "0.175 s of it" in note
    for ear in range(2):
        share = (sound[ear] - decoded[ear]) / (original[ear, : 7 * HOP - 13] - decoded[ear])
        for cell, keeps in enumerate(kept[ear]):
            here = slice(cell * HOP, min((cell + 1) * HOP, sound.shape[1]))
            if keeps:
                assert torch.equal(sound[ear, here], original[ear, here])
            else:
                inner = slice(here.start + JOINT, here.stop - JOINT)
                assert torch.equal(sound[ear, inner], decoded[ear, inner])
                assert (sound[ear, here] != original[ear, here]).all() and (-1e-3 <= share[here]).all()
    middle = share_at(sound, decoded, original, 0, 2 * HOP + JOINT // 2)
    assert 0.45 < middle < 0.55, "half-way through the joint both sounds are there"


def share_at(sound, decoded, original, ear: int, at: int) -> float:
    return ((sound[ear, at] - decoded[ear, at]) / (original[ear, at] - decoded[ear, at])).item()


def test_nothing_kept_changes_nothing_and_a_short_original_is_silence_after_its_end():
    decoded = noise(3 * HOP, 1)
    assert put_back(decoded, noise(3 * HOP, 2), torch.zeros(2, 3).bool()) == (decoded, None)
    sound, note = put_back(decoded, noise(HOP, 2), torch.ones(2, 3).bool())
    assert "all of it" in note and not sound[:, HOP:].any() and sound[:, :HOP].any()


# ---- the command line


def test_a_kept_soundtrack_comes_back_unchanged(model, tmp_path, capsys):
    media = sample_media(96, 64, 22)
    source, out = tmp_path / "source.mp4", tmp_path / "out.mp4"
    with Mp4Writer(source, 96, 64, 22, media.sound) as writer:
        writer.write(media.clip)
    edit = [
        "render",
        "--model",
        model,
        "--prompt",
        "x",
        "--source",
        source,
        "--steps",
        1,
        "--keep-frames",
        "--out",
        out,
    ]
    assert cli.main([*map(str, edit), "--no-recovery", "--audio-mask", "0.5-0.7"]) == 0
    assert "(0.725 s of it) the source's own samples stand" in capsys.readouterr().out
    before, after = read_audio(source), read_audio(tmp_path / "out.kept.mkv")
    assert before.shape == after.shape
    apart = (before - after).abs()
    assert apart[:, :16_000].max() < 1e-6 and apart[:, 22_400:].max() < 1e-6, "24 bits of FLAC, no coder of speech"
    assert apart[:, 16_000 + JOINT : 22_400 - JOINT].max() > 1e-3, "made anew"

    assert cli.main([*map(str, edit), "--no-recovery", "--mask", "keep"]) == 0
    assert "own samples stand" not in capsys.readouterr().out
    assert (before - read_audio(tmp_path / "out.kept.mkv")).abs()[:, :16_000].max() > 1e-3, "all of it was made anew"
