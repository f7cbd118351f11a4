"""The figures of a comparison: held against other libraries' values, and each distortion found by its own figure."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from h3_runtime.compare import pictures, sounds
from h3_runtime.compare.flags import label_flags
from h3_runtime.compare.measured import IDENTICAL, NOT_MEASURED, shown
from h3_runtime.compare.report import Comparison, compare_sides, results
from h3_runtime.compare.sources import Side, side_of_frames
from h3_runtime.compare.verdict import METRICS, judge, parse_thresholds
from h3_runtime.errors import H3Error

from . import compare_oracles
from .drawn_media import drawn_media

GOLDEN = json.loads(compare_oracles.FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def media():
    return drawn_media(96, 64, 22)


def measured(media, frames=None, sound="same", a_frames=None, a_sound="same") -> Comparison:
    """B made of ``frames`` and ``sound`` against A made of the sample media."""
    given = [media.clip if a_frames is None else a_frames, media.clip if frames is None else frames]
    waves = [media.sound if isinstance(wave, str) else wave for wave in (a_sound, sound)]
    return compare_sides(*(side_of_frames(f, w, name) for f, w, name in zip(given, waves, "ab")))


def kinds(made: Comparison) -> set[str]:
    return {f"{flag['side']} {flag['kind']}" for flag in made.data["flags"]}


# ---- against other libraries


@pytest.mark.parametrize("name", compare_oracles.SIZES)
def test_pictures_agree_with_torchmetrics_and_scikit_image(name):
    a, b = compare_oracles.pictures(name)
    expected = GOLDEN[name]
    assert pictures.psnr(a, b) == pytest.approx(expected["psnr"], abs=1e-3)
    assert pictures.psnr(a, b) == pytest.approx(expected["psnr_skimage"], abs=1e-3)
    assert pictures.ssim(a, b) == pytest.approx(expected["ssim"], abs=1e-3)
    ours = pictures.ms_ssim(a, b)
    assert ours is None if "ms_ssim" not in expected else ours == pytest.approx(expected["ms_ssim"], abs=1e-3)


@pytest.mark.parametrize("name", ["short", "long"])
@pytest.mark.parametrize("block", [sounds.BLOCK, 4096])
def test_sounds_agree_with_auraloss_in_any_blocks(name, block, monkeypatch):
    monkeypatch.setattr(sounds, "BLOCK", block)
    assert sounds.mr_stft(*compare_oracles.sounds(name)) == pytest.approx(GOLDEN[name]["mr_stft"], abs=1e-3)


def test_figures_of_a_sound_do_not_depend_on_its_blocks(monkeypatch):
    a, b = compare_oracles.sounds("long")
    whole = sounds.measure(a[None], torch.roll(b, 21)[None])
    monkeypatch.setattr(sounds, "BLOCK", 8192)
    for name, value in sounds.measure(a[None], torch.roll(b, 21)[None])[0].items():
        assert value == pytest.approx(whole[0][name], rel=1e-4), name


def test_known_values_of_single_figures():
    time = torch.arange(32000) / 32000
    tone = 0.5 * torch.sin(2 * math.pi * 1000 * time)
    figures = sounds.measure(tone[None], (tone * 0.5)[None])[0]
    assert figures["snr"] == pytest.approx(20 * math.log10(2), abs=1e-3)
    assert figures["rms_ratio"] == pytest.approx(0.5, abs=1e-6)
    assert figures["spectral_cosine"] == pytest.approx(1, abs=1e-5)
    hiss = torch.randn(32000, generator=torch.Generator().manual_seed(0)) * 0.1
    assert sounds.log_spectral_distance(hiss, hiss * 10 ** (-6 / 20)) == pytest.approx(6, abs=1e-3)


def test_ms_ssim_needs_161_pixels():
    a, b = (torch.rand(1, 3, 161, 161, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert 0 <= pictures.ms_ssim(a, b) < 0.2 and pictures.ms_ssim(a, a) == pytest.approx(1, abs=1e-5)
    assert pictures.ms_ssim(a[..., :160, :], b[..., :160, :]) is None


# ---- each distortion is found by its own figure


def test_nothing_differs(media):
    made = measured(media)
    assert made.data["identical"] and made.data["picture"]["psnr"] == IDENTICAL and not made.data["flags"]
    assert made.data["picture"]["ssim"] == 1 and made.data["picture"]["worst_frame"] == IDENTICAL
    assert all(channel["snr"] == IDENTICAL for channel in made.data["sound"]["channels"].values())


def blurred(clip: np.ndarray) -> np.ndarray:
    pixels = torch.from_numpy(clip).permute(0, 3, 1, 2).float()
    return F.avg_pool2d(pixels, 5, 1, 2, count_include_pad=False).round().byte().permute(0, 2, 3, 1).numpy()


def late(sound: torch.Tensor, samples: int) -> torch.Tensor:
    return F.pad(sound, (samples, 0))[:, : sound.shape[1]]


def test_blur(media):
    made = measured(media, blurred(media.clip))
    assert kinds(made) == {"B softer"} and made.data["picture"]["sharpness"] < 0.8
    assert kinds(measured(media, a_frames=blurred(media.clip))) == {"B harsher"}


def test_a_shift_by_one_frame(media):
    made = measured(media, np.concatenate([media.clip[:1], media.clip[:-1]]), late(media.sound, 1333))
    assert made.data["picture"]["frame_lag"] == 1 and "B frame shift" in kinds(made)
    assert made.data["sound"]["channels"]["left"]["lag"] == 1333
    assert abs(made.data["sound"]["sync_shift_seconds"]) < 1e-3 and "B sound off the picture" not in kinds(made)
    alone = measured(media, np.concatenate([media.clip[1:], media.clip[-1:]]))
    assert alone.data["picture"]["frame_lag"] == -1 and "B sound off the picture" in kinds(alone)


@pytest.mark.parametrize("samples", [3, -5])
def test_a_lag_of_a_few_samples(media, samples):
    moved = late(media.sound, samples) if samples > 0 else F.pad(media.sound, (0, -samples))[:, -samples:]
    made = measured(media, sound=moved)
    assert {channel["lag"] for channel in made.data["sound"]["channels"].values()} == {samples}
    assert kinds(made) == {"B sound lag"}


def test_sounds_of_two_seeds_have_no_lag():
    one, two = (torch.randn(2, 32000, generator=torch.Generator().manual_seed(seed)) * 0.1 for seed in (0, 1))
    figures = sounds.measure(one, two)[0]
    assert figures["lag"].startswith("not measured: the sounds are too unlike") and figures["correlation"] < 0.1


def test_clipping(media):
    made = measured(media, sound=(media.sound * 6).clamp(-1, 1))
    assert kinds(made) == {"B clipping"} and made.data["sound"]["facts"]["B"]["clipped_peaks"] > 100
    assert not kinds(measured(media, sound=media.sound * 3.9)), "loud but whole"


def test_silence_in_whole_in_part_and_of_one_channel(media):
    made = measured(media, sound=torch.zeros_like(media.sound))
    assert kinds(made) == {"B silent"}
    assert str(made.data["sound"]["channels"]["left"]["lag"]).startswith(NOT_MEASURED)
    gap, one = media.sound.clone(), media.sound.clone()
    gap[:, 16000:28000] = 0
    one[1] = 0
    assert kinds(measured(media, sound=gap)) == {"B silent stretch"}
    assert kinds(measured(media, sound=one)) == {"B silent channel"}


def test_a_dropped_and_a_repeated_frame(media):
    made = measured(media, np.concatenate([media.clip[:9], media.clip[10:], media.clip[-1:]]))
    assert kinds(made) == {"B dropped frames"}
    assert any(f"lacks 1 frame near A's frame {at}" in made.data["flags"][0]["text"] for at in (9, 10))
    short = measured(media, np.concatenate([media.clip[:9], media.clip[10:]]))
    assert kinds(short) == {"B dropped frames", "B length"} and short.data["frames"] == 21
    again = measured(media, np.concatenate([media.clip[:9], media.clip[8:-1]]))
    assert kinds(again) == {"B repeated frames"}


def test_frozen_black_and_broken(media):
    assert "B frozen picture" in kinds(measured(media, np.repeat(media.clip[:1], 22, axis=0)))
    part = media.clip.copy()
    part[5:20] = part[5]
    assert "B frozen picture" in kinds(measured(media, part))
    assert kinds(measured(media, np.zeros_like(media.clip))) == {"B black picture"}
    part = media.clip.copy()
    part[5] = 3
    assert "B black frames" in kinds(measured(media, part))
    broken = media.sound.clone()
    broken[0, 77] = math.nan
    assert kinds(measured(media, sound=broken)) == {"B non-finite sound"}
    assert kinds(measured(media, sound=None)) == {"B no sound"}
    assert kinds(measured(media, a_sound=None, sound=None)) == {"A no sound", "B no sound"}


def test_noise_alone_raises_no_flag(media):
    noise = np.random.default_rng(0).integers(-3, 4, media.clip.shape)
    hiss = torch.randn(media.sound.shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    made = measured(media, np.clip(media.clip + noise, 0, 255).astype(np.uint8), media.sound + hiss)
    assert not kinds(made) and 38 < made.data["picture"]["psnr"] < 45


def test_a_still_clip_has_no_lag():
    still = np.full((20, 32, 32, 3), 90, np.uint8)
    noisy = still + np.random.default_rng(1).integers(0, 5, still.shape).astype(np.uint8)
    made = compare_sides(side_of_frames(still, None, "a"), side_of_frames(noisy, None, "b"))
    assert made.data["picture"]["frame_lag"] == 0 and not {"B frame shift", "B dropped frames"} & kinds(made)


@pytest.mark.parametrize(("cost", "lag"), [(0.9, 0), (0.3, 2)])
def test_a_lag_must_halve_the_difference(cost, lag):
    rows = [[1.0] * (2 * pictures.REACH + 1) for _ in range(80)]
    for row in rows:
        row[pictures.REACH + 2] = cost
    assert pictures.frame_lags(rows) == [lag] * 80


def test_an_accelerator_that_changed_nothing(media):
    def side(name: str, *parts: str) -> Side:
        told = [{"name": part, "label": "APPROXIMATE" if "int8" in part else "LOSSLESS"} for part in parts]
        return side_of_frames(media.clip, media.sound, name, {"fidelity": {"parts": told}})

    plain, quick = side("a", "dit/stored"), side("b", "dit/stored", "kernel/int8")
    made = compare_sides(plain, quick)
    assert kinds(made) == {"B unchanged output"} and "kernel/int8" in made.data["flags"][0]["text"]
    assert not label_flags(plain, side("b", "dit/stored", "resume/state"), True, 0), (
        "a LOSSLESS path may change nothing"
    )
    assert not label_flags(plain, quick, False, 0)


# ---- figures and thresholds


def test_the_first_frame_stands_apart(media):
    frames = media.clip.copy()
    frames[0] = 255 - frames[0]
    picture = measured(media, frames).data["picture"]
    assert picture["psnr_rest"] == IDENTICAL and picture["psnr_first"] < 15
    assert picture["psnr_min"] == picture["psnr_first"] and picture["worst_frame"] == 0
    assert picture["psnr"] == pytest.approx(picture["psnr_first"] + 10 * math.log10(22), abs=1e-3)


def test_thresholds_are_judged_by_the_worst_channel():
    picture = {"psnr": 31.0, "ssim": "not measured: why", "frame_lag": -2, "sharpness": 0.9}
    sound = [{"snr": 40.0, "lag": 3}, {"snr": 20.0, "lag": 0}]
    asked = parse_thresholds(["psnr=30 ssim=0.9", "snr=25,lag=3", "frame_lag=1", "sharpness=1.2"])
    made = judge(picture, sound, asked)
    assert {check["metric"]: check["result"] for check in made["checks"]} == {
        "psnr": "met", "ssim": "not measured", "snr": "not met", "lag": "met", "frame_lag": "not met",
        "sharpness": "met",
    }  # fmt: skip
    assert made["passed"] is False and "right" in made["checks"][2]["demand"]
    assert judge(picture, sound, {})["passed"] is None
    assert judge({"psnr": IDENTICAL}, [], {"psnr": 90})["passed"] is True
    assert judge(picture, [], {"snr": 10})["checks"][0]["result"] == "not measured", "no sound does not pass"


@pytest.mark.parametrize("text", ["beauty=3", "psnr", "psnr=high", "psnr=nan", "worst_frame=3", "=3"])
def test_thresholds_that_cannot_be_read(text):
    with pytest.raises(H3Error, match="threshold"):
        parse_thresholds([text])


def test_no_figure_is_a_number_that_is_none(media):
    made = measured(media, sound=None)
    rows = {row["name"]: row["value"] for row in results(made)}
    assert rows["picture/ms_ssim"].startswith("not measured: it needs 161 px")
    assert rows["sound"] == "not measured: B has no sound"
    json.dumps(made.data, allow_nan=False)
    assert shown(None) == NOT_MEASURED and shown(1.0) == "1.0000" and shown(28.411, "dB") == "28.41 dB"
    assert set(made.data["picture"]) <= set(METRICS)


def test_clips_that_cannot_be_compared(media):
    small = side_of_frames(media.clip[:, ::2, ::2], None, "small")
    whole = side_of_frames(media.clip, None, "whole")
    with pytest.raises(H3Error, match="A is 96x64 and B is 48x32") as caught:
        compare_sides(whole, small)
    assert "\n" not in str(caught.value)
    made = compare_sides(whole, small, resize=True)
    assert made.data["size"] == [96, 64] and "resized from 48x32" in made.data["notes"][0]
    changing = Side("changing", lambda: iter([media.clip[0], media.clip[1, ::2, ::2]]))
    with pytest.raises(H3Error, match="B frame 1 is 48x32 and those before are 96x64"):
        compare_sides(whole, changing)
    with pytest.raises(H3Error, match="has no frame"):
        compare_sides(whole, side_of_frames(media.clip[:0], None, "empty"))


def test_frames_are_streamed():
    """A clip that never stands in memory: every frame is made when it is asked for, and few are alive at once."""
    alive, most = set(), 0

    class Frame(np.ndarray):
        pass

    def frames():
        nonlocal most
        import weakref

        for index in range(60):
            frame = np.full((16, 16, 3), index % 200 + 20, np.uint8).view(Frame)
            key = id(frame)
            alive.add(key)
            weakref.finalize(frame, alive.discard, key)
            most = max(most, len(alive))
            yield frame

    made = compare_sides(Side("a", frames), Side("b", frames))
    assert made.data["frames"] == 60 and most < 10
