"""Counts, sizes and doors: what frames, canvas, schedule and job accept, and one clear sentence for all they do not.

value ──▶ door ──▶ accepted: the number a table or a formula of its own says
              └──▶ refused:  H3Error whose sentence holds the value, what is allowed, the cure
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from h3_runtime.errors import H3Error, NonFiniteError
from h3_runtime.geometry import (
    Canvas,
    audio_latents,
    audio_samples,
    floor_frames,
    frame_groups,
    latent_frames,
    pixel_frames,
    snap_frames,
)
from h3_runtime.job import AVLatent, Guide, Masks, Reference, RenderJob, TextCondition, overlaps
from h3_runtime.schedule import plan_schedule, sigma_grid

LENGTHS = range(5, 363, 17)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text(rows: int = 3, seed: int = 0) -> TextCondition:
    return TextCondition(draw(rows, 8, seed=seed), torch.ones(rows, dtype=torch.int64))


def latent(frames: int = 7, height: int = 4, width: int = 6, sound: int = 37, seed: int = 0) -> AVLatent:
    return AVLatent(draw(1, 24, frames, height, width, seed=seed), draw(1, 32, 2, sound, seed=seed + 1))


def picture(frames: int = 1, height: int = 4, width: int = 6, seed: int = 3) -> torch.Tensor:
    return draw(1, 24, frames, height, width, seed=seed)


def sound(length: int, seed: int = 4) -> torch.Tensor:
    return draw(1, 32, 2, length, seed=seed)


def job(**changes) -> RenderJob:
    """A small job: 96x64, 22 frames (7 latents of 4x6 cells, 37 of sound)."""
    return RenderJob(**{"canvas": Canvas(96, 64, 22), "text": text(), "num_forwards": 4, **changes})


# ---- frames, latents, samples


def test_frames_are_raised_to_the_next_length():
    allowed = [17 * k + 5 for k in range(30)]
    assert [snap_frames(n) for n in range(1, 401)] == [min(a for a in allowed if a >= n) for n in range(1, 401)]
    assert [snap_frames(n) for n in LENGTHS] == list(LENGTHS)
    assert (snap_frames(361), snap_frames(363), snap_frames(np.int64(125))) == (362, 379, 141)
    assert [floor_frames(n) for n in (1, 4, 5, 21, 22, 361)] == [1, 1, 5, 5, 22, 345]


def test_raised_frames_are_told():
    assert any("361" in note and "362" in note for note in Canvas.fit(361).notes)
    assert any("363" in note and "379" in note for note in Canvas.fit(363).notes)
    assert Canvas.fit(362).notes == () and Canvas.fit(124).notes == ()
    assert any("trained range" in note for note in Canvas.fit(107).notes)
    assert any("trained range" in note for note in Canvas.fit(379).notes)


def test_counts_follow_from_the_length():
    for frames in (*LENGTHS, 379, 2000 // 17 * 17 + 5):
        count = latent_frames(frames)
        groups = frame_groups(count)
        assert count == (frames - 5) // 17 * 5 + 2 and pixel_frames(count) == frames
        assert [i for group in groups for i in group] == list(range(frames))
        assert [len(group) for group in groups] == ([1, 4, 4, 4, 4] * count)[:count]
        assert audio_latents(frames) == round(Fraction(frames, 24) * 40)
        assert audio_samples(frames) == round(Fraction(frames, 24) * 32000)
        assert Canvas(96, 64, frames).seconds == frames / 24
    assert (latent_frames(1), pixel_frames(1)) == (1, 1)
    assert (latent_frames(362), audio_latents(362), audio_samples(362)) == (107, 603, 482667)
    assert (latent_frames(124), audio_latents(124), audio_samples(124)) == (37, 207, 165333)


def test_sound_does_not_drift_over_forty_clips():
    for frames in LENGTHS:
        drift = 40 * audio_samples(frames) - Fraction(40 * frames, 24) * 32000
        assert abs(drift) < 800, frames  # less than one audio latent


# ---- canvas


@pytest.mark.parametrize(
    ("ratio", "size"),
    [
        ((21, 9), (1536, 672)),
        ((16, 9), (1344, 768)),
        ((4, 3), (1024, 768)),
        ((1, 1), (768, 768)),
        ((3, 4), (768, 1024)),
        ((9, 16), (768, 1344)),
        ((5, 9), (768, 1376)),
        ((4, 1), (2016, 512)),
        ((1, 4), (512, 2016)),
        (0.25, (512, 2016)),
        ([16, 9], (1344, 768)),
    ],
)
def test_official_ratios(ratio, size):
    canvas = Canvas.fit(124, ratio=ratio)
    assert (canvas.width, canvas.height) == size
    assert any(f"{size[0]}x{size[1]}" in note for note in canvas.notes)


def test_canvas_is_the_references():
    place = pytest.importorskip("diffusers.modular_pipelines.minimax_h3.modular_pipeline")
    shapes = [(w, h) for w in range(9, 130, 7) for h in range(9, 130, 7) if 0.25 <= w / h <= 4]
    assert len(shapes) > 200
    for width, height in shapes:
        canvas = Canvas.fit(124, ratio=(width, height))
        assert (canvas.height, canvas.width) == place.resolve_canvas_size(width, height, 32, 768, 768 * 1344)
    for frames in range(1, 401):
        aligned = place.align_num_frames(frames, 17, 5)
        assert snap_frames(frames) == aligned
        assert latent_frames(aligned) == place.video_latent_num_frames(aligned, 17, 5)
        assert audio_latents(aligned) == place.audio_latent_num_frames(aligned)


def test_sizes_and_megapixels():
    assert (Canvas.fit(5).width, Canvas.fit(5).height) == (1344, 768)
    for edge in range(32, 2049, 32):
        assert Canvas.fit(5, size=(edge, 64)).width == edge
    for megapixels in (0.05, 0.5, 1.0, 2.0):
        canvas = Canvas.fit(124, ratio=(16, 9), megapixels=megapixels)
        assert canvas.width % 32 == 0 == canvas.height % 32
        assert canvas.width * canvas.height == pytest.approx(megapixels * 1e6, rel=0.15)


CANVAS_DOORS = [
    *[({"frames": bad}, ["frames", "at least 1"]) for bad in (0, -5, True, 5.5, 22.0, "22", None, math.nan, math.inf)],
    ({"size": (592, 1056)}, ["width 592", "576 and 608"]),
    ({"size": (480, 1000)}, ["height 1000", "992 and 1024"]),
    ({"size": (400, 720)}, ["width 400", "384 and 416"]),
    ({"size": (33, 64)}, ["width 33", "32 and 64"]),
    *[({"size": (bad, 64)}, ["width", "multiple of 32"]) for bad in (0, -32, 31, True, 64.0, "64", None)],
    *[({"size": bad}, ["size", "width and height"]) for bad in ((64,), (64, 64, 64), 64, "64x64")],
    *[
        ({"ratio": bad}, ["ratio", "1:4..4:1"])
        for bad in ((17, 4), (4, 17), (16, 0), (0, 9), (-16, -9), (16,), 0, -1.0, 4.01, 0.249, math.nan, True, "16:9")
    ],
    *[
        ({"megapixels": bad}, ["megapixels", "0.001 to 64"])
        for bad in (0, -1, 65, math.nan, math.inf, True, "1", 0.0001)
    ],
    ({"size": (64, 64), "ratio": (1, 1)}, ["64x64", "one of them"]),
    ({"size": (64, 64), "megapixels": 1.0}, ["64x64", "one of them"]),
]


@pytest.mark.parametrize(("asked", "words"), CANVAS_DOORS, ids=str)
def test_canvas_doors(asked, words):
    refused(lambda: Canvas.fit(**{"frames": 22, **asked}), words)


def refused(make, words, kind=H3Error):
    """``make`` raises ``kind`` with one sentence that holds all ``words``."""
    with pytest.raises(kind) as caught:
        make()
    sentence = str(caught.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence and len(sentence) > 25


# ---- schedule


def test_denoise_is_the_end_of_a_longer_grid():
    for forwards in (1, 4, 8, 20, 49):
        for denoise in (1, 1.0, 0.95, 0.75, 0.5, 0.3, 0.1):
            plan = plan_schedule(forwards, denoise)
            total = round(forwards / denoise)
            assert plan.video == tuple(sigma_grid(total + 1, 12.0).tolist()[-forwards - 1 :])
            assert plan.audio == tuple(sigma_grid(total + 1, 3.0).tolist()[-forwards - 1 :])
            assert len(plan.video) == len(plan.audio) == plan.num_forwards + 1 == forwards + 1
            assert (plan.video[0] == 1.0) == (plan.audio[0] == 1.0) == (total == forwards)
            assert plan.reaches_zero


def test_start_and_stop_index_the_cut():
    cut = plan_schedule(8, 0.5)
    for start in range(8):
        for stop in range(start + 1, 9):
            part = plan_schedule(8, 0.5, start, stop)
            assert (part.video, part.audio) == (cut.video, cut.audio)
            assert (part.start, part.stop, part.num_forwards) == (start, stop, stop - start)
            assert part.reaches_zero == (stop == 8)


SCHEDULE_DOORS = [
    *[({"num_forwards": bad}, ["steps", "1 to 1000"]) for bad in (0, -1, 1001, True, 4.0, "4", None, math.nan)],
    *[
        ({"denoise": bad}, ["denoise", "at most 1"])
        for bad in (0, -0.5, 1.01, 0.0, math.nan, math.inf, True, False, "0.5", None)
    ],
    *[({"denoise": bad}, ["denoise", "raise denoise"]) for bad in (1e-5, 1e-300, 5e-324)],
    *[
        ({"start": a, "stop": b}, ["start", "stop", "4 forwards"])
        for a, b in ((-1, 4), (4, 4), (3, 2), (0, 0), (0, 5), (0.0, 4), (0, 2.5), (True, 4), (0, True), ("0", 4))
    ],
    *[
        ({name: bad}, [name.replace("_", " "), "at most 1000"])
        for name in ("video_shift", "audio_shift")
        for bad in (0, -3, 1001, math.nan, math.inf, True, "12", None)
    ],
    ({"num_forwards": 1000, "denoise": 0.1, "video_shift": 1000.0}, ["collapses", "lower the shift"]),
]


@pytest.mark.parametrize(("asked", "words"), SCHEDULE_DOORS, ids=str)
def test_schedule_doors(asked, words):
    refused(lambda: plan_schedule(**{"num_forwards": 4, **asked}), words)
    refused(lambda: job(source=latent(), **asked), words)


# ---- parts of a job


NAN = torch.full((1, 24, 1, 4, 6), math.nan)
VIDEO_LATENTS = [
    (picture().half(), ["float16", "float32"]),
    (picture().double(), ["float64", "float32"]),
    (picture()[0], ["[24, 1, 4, 6]", "[1, 24, t, h, w]"]),
    (picture().expand(2, -1, -1, -1, -1), ["[2, 24, 1, 4, 6]"]),
    (draw(1, 32, 1, 4, 6), ["[1, 32, 1, 4, 6]", "sound latent"]),
    (draw(1, 16, 1, 4, 6), ["[1, 16, 1, 4, 6]"]),
    (draw(1, 24, 0, 4, 6), ["[1, 24, 0, 4, 6]"]),
    (draw(1, 24, 1, 0, 6), ["[1, 24, 1, 0, 6]"]),
    (draw(1, 24, 1, 3, 6), ["3x6", "even"]),
    (draw(1, 24, 1, 4, 5), ["4x5", "even"]),
    (NAN, ["NaN"]),
    (-NAN / 0, ["NaN or infinity"]),
]
AUDIO_LATENTS = [
    (sound(4).half(), ["float16", "float32"]),
    (draw(1, 24, 2, 4), ["[1, 24, 2, 4]", "video latent"]),
    (draw(1, 32, 1, 4), ["[1, 32, 1, 4]", "[1, 32, 2, a]"]),
    (draw(1, 32, 2, 0), ["[1, 32, 2, 0]"]),
    (draw(32, 2, 4), ["[32, 2, 4]"]),
    (draw(2, 32, 2, 4), ["[2, 32, 2, 4]"]),
    (sound(4) * math.inf, ["NaN or infinity"]),
]


@pytest.mark.parametrize(("bad", "words"), VIDEO_LATENTS, ids=lambda v: "" if isinstance(v, torch.Tensor) else str(v))
def test_video_latents_are_checked(bad, words):
    refused(lambda: AVLatent(bad, sound(37)), ["video latent", *words])
    refused(lambda: Guide(0, video=bad, name="cat.png"), ["cat.png", *words])
    refused(lambda: Reference("image", video=bad, name="dog.png"), ["dog.png", *words])


@pytest.mark.parametrize(("bad", "words"), AUDIO_LATENTS, ids=lambda v: "" if isinstance(v, torch.Tensor) else str(v))
def test_audio_latents_are_checked(bad, words):
    refused(lambda: AVLatent(picture(7), bad), ["audio latent", *words])
    refused(lambda: Guide(0, audio=bad, name="rain.wav"), ["rain.wav", *words])
    refused(lambda: Reference("audio", audio=bad, name="voice.wav"), ["voice.wav", *words])


def test_non_finite_values_have_their_own_error():
    refused(lambda: Guide(0, video=NAN), ["NaN"], NonFiniteError)
    refused(lambda: TextCondition(torch.full((2, 8), math.nan), torch.ones(2, dtype=torch.int64)), [], NonFiniteError)
    refused(lambda: Masks.make(torch.full((7, 4, 6), math.nan)), ["keep"], NonFiniteError)


ONES = torch.ones(3, dtype=torch.int64)
TEXT_DOORS = [
    ((draw(3, 8)[None], ONES), ["[1, 3, 8]"]),
    ((draw(0, 8), ONES[:0]), ["[0, 8]"]),
    ((torch.ones(3, 8, dtype=torch.int64), ONES), ["int64", "floating"]),
    ((draw(3, 8), ONES[:2]), ["[2]", "per text row"]),
    ((draw(3, 8), ONES.float()), ["float32", "int64"]),
    ((draw(3, 8), ONES * 3), ["0..2"]),
    ((draw(3, 8), -ONES), ["0..2"]),
]


@pytest.mark.parametrize(("parts", "words"), TEXT_DOORS, ids=str)
def test_text_doors(parts, words):
    refused(lambda: TextCondition(*parts), words)


@pytest.mark.parametrize("strength", [0, -0.1, 1.01, math.nan, math.inf, True, "1", None])
def test_guide_strength_door(strength):
    refused(lambda: Guide(0, video=picture(), strength=strength, name="cat.png"), ["cat.png", "at most 1"])


@pytest.mark.parametrize("frame", [2.5, 3.0, True, "3", None])
def test_guide_frame_door(frame):
    refused(lambda: Guide(frame, video=picture(), name="cat.png"), ["cat.png", "whole number"])


def test_part_doors():
    refused(lambda: Guide(0, name="cat.png"), ["cat.png", "neither", "at least one"])
    refused(lambda: Reference("picture", video=picture()), ["'picture'", "video_audio"])
    for kind in ("image", "video", "video_audio"):
        refused(lambda kind=kind: Reference(kind, audio=sound(3)), [kind, "lacks a picture"])
    refused(lambda: Reference("audio", video=picture(), audio=sound(3)), ["has a picture"])
    for kind in ("image", "video"):
        refused(lambda kind=kind: Reference(kind, video=picture(), audio=sound(3)), [kind, "has sound"])
    refused(lambda: Reference("video_audio", video=picture(2)), ["lacks sound"])
    refused(lambda: Reference("image", video=picture(2)), ["2 latent frames", "one"])


# ---- the job


GUIDES = [
    (Guide(-1, video=picture()), ["frame -1", "0 to 21"]),
    (Guide(22, video=picture()), ["frame 22", "0 to 21", "0.917 s"]),
    (Guide(0, video=picture(1, 6, 4)), ["64x96", "96x64", "encode"]),
    (Guide(0, video=picture(1, 2, 6)), ["96x32", "encode"]),
    (Guide(1, video=picture(7)), ["22 frames", "frame 1", "21 are left"]),
    (Guide(18, video=picture(2)), ["5 frames", "4 are left"]),
    (Guide(0, video=picture(12)), ["39 frames", "22 are left"]),
    (Guide(0, audio=sound(38)), ["38 latents", "37 are left"]),
    (Guide(12, audio=sound(18)), ["18 latents", "frame 12", "17 are left"]),
]


@pytest.mark.parametrize(("guide", "words"), GUIDES, ids=lambda v: str(v) if isinstance(v, list) else "")
def test_guides_that_do_not_fit(guide, words):
    refused(lambda: job(guides=(replace(guide, name="cat.png"),)), ["cat.png", *words])


def test_guides_that_just_fit():
    for frame, frames in ((0, 7), (17, 2), (21, 1), (4, 1)):
        assert job(guides=(Guide(frame, video=picture(frames)),)).task == "fl2va"
    for frame, length in ((0, 37), (12, 17), (21, 2)):
        assert job(guides=(Guide(frame, audio=sound(length)),)).task == "fl2va"
    short = Canvas(96, 64, 5)  # 6,667 samples are padded to 9 hops, one more than the target's 8 latents
    assert short.audio_t == 8 and job(canvas=short, guides=(Guide(0, audio=sound(9)),))


@pytest.mark.parametrize("seed", [-1, 2**64, True, 1.0, "1", None])
def test_seed_door(seed):
    refused(lambda: job(seed=seed), ["seed", "2^64 - 1"])


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, np.int64(7)])
def test_seeds_that_generate(seed):
    torch.Generator().manual_seed(int(job(seed=seed).seed))


def test_job_doors():
    wrong = [latent(frames=2), latent(height=6), latent(width=4), latent(sound=36)]
    for clip in wrong:
        refused(lambda clip=clip: job(source=clip), ["source", "[7, 4, 6]", "37", "96x64", "22 frames"])
        refused(lambda clip=clip: job(state=clip, start=2), ["state", "[7, 4, 6]", "37"])
    refused(lambda: job(state=latent()), ["start 0", "above 0"])
    refused(lambda: job(start=2), ["start 2", "source clip"])
    refused(lambda: job(denoise=0.5), ["denoise 0.5", "source clip"])
    refused(lambda: job(masks=Masks.make(torch.zeros(7, 4, 6))), ["mask", "source clip"])
    refused(lambda: job(masks=Masks.make(torch.zeros(7, 4, 6)), state=latent(), start=1), ["mask", "source clip"])
    for solver in ("heun", "", None):
        refused(lambda solver=solver: job(solver=solver), ["solver", "euler"])
    assert job(denoise=0.95).schedule.video[0] == 1.0  # 4 / 0.95 rounds to 4: nothing of a source would be seen
    assert job(denoise=0.5, state=latent(), start=1).source is None


MASK_DOORS = [
    ({"video": torch.zeros(2, 4, 6)}, ["[2, 4, 6]", "[7, 4, 6]"]),
    ({"video": torch.zeros(7, 2, 3)}, ["[7, 2, 3]"]),
    ({"video": torch.zeros(1, 7, 4, 6)}, ["[1, 7, 4, 6]"]),
    ({"audio": torch.zeros(2, 36)}, ["[2, 36]", "[2, 37]"]),
    ({"audio": torch.zeros(37)}, ["[37]"]),
    ({"video": torch.zeros(7, 4, 6, dtype=torch.int64)}, ["int64", "float32"]),
    ({"audio": torch.zeros(2, 37).double()}, ["float64", "float32"]),
    ({"video": torch.full((7, 4, 6), 1.5)}, ["1.5", "0 (keep) to 1"]),
    ({"audio": torch.full((2, 37), -0.5)}, ["-0.5"]),
    ({"audio": torch.full((2, 37), math.inf)}, ["NaN or infinity"]),
]


@pytest.mark.parametrize(("parts", "words"), MASK_DOORS, ids=lambda v: str(v) if isinstance(v, list) else "")
def test_mask_doors(parts, words):
    refused(lambda: job(masks=Masks(**parts), source=latent()), ["mask", *words])


def test_masks_are_made_from_any_number_type():
    for kind in (torch.bool, torch.uint8, torch.float16, torch.float64):
        cells = torch.zeros(7, 4, 6).to(kind)
        made = Masks.make(cells, torch.ones(2, 37).to(kind))
        assert made.video.dtype == torch.float32 and made.audio is None
        assert job(masks=made, source=latent()).masks is made
    for bad in (1.01, -0.01):
        refused(lambda bad=bad: Masks.make(torch.full((7, 4, 6), bad)), [f"{bad}", "0 (keep) to 1"])


def test_task():
    guide, reference = Guide(3, video=picture()), Reference("image", video=picture(1, 2, 4))
    assert [
        job().task,
        job(guides=(guide,)).task,
        job(references=(reference,)).task,
        job(guides=(guide,), references=(reference,)).task,
    ] == ["t2va", "fl2va", "ref2va", "ref2va"]


# ---- fingerprint


def full_job(**changes) -> RenderJob:
    """A job that has every part, each made anew."""
    parts = {
        "guides": (Guide(4, picture(), sound(3), 0.5, False, "cat"), Guide(0, picture(seed=8), keyframe=True)),
        "references": (Reference("video_audio", picture(2, 2, 4), sound(5), "dog"), Reference("audio", None, sound(2))),
        "masks": Masks(torch.full((7, 4, 6), 0.5), torch.full((2, 37), 0.25)),
        "source": latent(seed=5),
        "state": latent(seed=6),
        "start": 1,
        "stop": 3,
        "accelerators": (("none", ()),),
    }
    return job(**{**parts, **changes})


CONDITIONS = ("guides", "references")


def changed_jobs() -> dict[str, RenderJob]:
    """For every field that decides the output, and every one inside it, a job that differs from full_job there."""
    base = full_job()
    guide, other = base.guides
    reference, voice = base.references
    top = {
        "seed": 1,
        "num_forwards": 5,
        "start": 2,
        "stop": 4,
        "denoise": 0.5,
        "video_shift": 11.0,
        "audio_shift": 3.5,
        "accelerators": (("none", (1,)),),
        "state": latent(seed=7),
    }
    jobs = {name: full_job(**{name: value}) for name, value in top.items()}
    inner = {
        "text": {"hidden": draw(3, 8, seed=1), "tags": torch.tensor([1, 0, 1])},
        "masks": {"video": torch.full((7, 4, 6), 0.25), "audio": None},
        "source": {"video": picture(7), "audio": sound(37)},
    }
    for name, parts in inner.items():
        jobs |= {
            f"{name}.{key}": full_job(**{name: replace(getattr(base, name), **{key: parts[key]})}) for key in parts
        }
    guide_parts = {"frame_index": 5, "video": picture(seed=9), "audio": None, "strength": 0.6}
    guide_parts["keyframe"] = True
    for key, value in guide_parts.items():
        jobs[f"guides.{key}"] = full_job(guides=(replace(guide, **{key: value}), other))
    reference_parts = {"video": picture(2, 2, 4, seed=9), "audio": sound(5, seed=9)}
    for key, value in reference_parts.items():
        jobs[f"references.{key}"] = full_job(references=(replace(reference, **{key: value}), voice))
    jobs["references.kind"] = full_job(references=(Reference("video", reference.video, None, "dog"), voice))
    jobs["guides order"] = full_job(guides=(other, guide))
    jobs["references order"] = full_job(references=(voice, reference))
    plain = {"masks": None, "source": None, "state": None, "start": 0, "guides": (), "references": ()}
    jobs["canvas.num_frames"] = full_job(**plain, canvas=Canvas(96, 64, 39))
    jobs["canvas.width"] = full_job(**plain, canvas=Canvas(64, 64, 22))
    jobs["canvas.height"] = full_job(**plain, canvas=Canvas(96, 96, 22))
    jobs["guides"] = full_job(guides=())
    jobs["masks, source, state"] = full_job(**plain)
    return jobs


def test_every_field_decides_the_fingerprint():
    jobs = {"none": full_job(), **changed_jobs()}
    prints = {name: made.fingerprint() for name, made in jobs.items()}
    assert len(set(prints.values())) == len(prints)
    covered = {name.split(".")[0].split(" ")[0] for name in jobs}
    assert covered >= {spec.name for spec in fields(RenderJob)} - {"request", "solver"}  # one solver is built
    for name, kind in (("guides", Guide), ("references", Reference), ("masks", Masks), ("source", AVLatent)):
        assert {f"{name}.{spec.name}" for spec in fields(kind) if spec.name != "name"} <= set(jobs)
    digest = full_job()
    object.__setattr__(digest, "solver", "other")
    assert digest.fingerprint() != prints["none"]


def test_equal_jobs_have_one_fingerprint():
    assert full_job().fingerprint() == full_job().fingerprint()
    same = job(seed=np.int64(7), denoise=1, video_shift=12, audio_shift=np.float64(3.0))
    assert same.fingerprint() == job(seed=7, denoise=1.0, video_shift=12.0, audio_shift=3.0).fingerprint()
    told = replace(text(), notes=("a note",), source="an encoder")
    canvas = Canvas(96, 64, 22, ("a note",))
    assert job(text=told, canvas=canvas, request="anything").fingerprint() == job().fingerprint()
    strided = replace(text(), hidden=text().hidden.T.contiguous().T)
    assert job(text=strided).fingerprint() == job().fingerprint()
    renamed = {kind: tuple(replace(one, name="other") for one in getattr(full_job(), kind)) for kind in CONDITIONS}
    assert full_job(**renamed).fingerprint() == full_job().fingerprint()


def test_fingerprint_takes_the_models_in():
    made = job()
    prints = {made.fingerprint(*extra) for extra in ((), ("a",), ("b",), ("a", "b"), ("ab",), ("b", "a"))}
    assert len(prints) == 6
    half = replace(text(), hidden=text().hidden.bfloat16())
    assert job(text=half).fingerprint() != made.fingerprint()


def test_guides_that_hold_the_same_moment_are_told():
    def guide(name, frame, frames=0, sound=0):
        video = None if not frames else torch.zeros(1, 24, 1 if frames == 1 else latent_frames(frames), 4, 6)
        return Guide(frame, video, torch.zeros(1, 32, 2, sound) if sound else None, name=name).held

    walk, still, late = guide("walk", 0, 22, 37), guide("still", 21, 1), guide("late", 22, 1)
    assert (
        overlaps([walk, still, late])
        == overlaps([late, still, walk])
        == ["walk and still both hold frame 21: the model is shown both"]
    )
    voice, noise = guide("voice", 10, sound=20), guide("noise", 21, sound=1)
    assert overlaps([voice, still, guide("next", 22, 22, 37), guide("noise", 60, sound=1)]) == []
    assert overlaps([voice, walk, noise]) == [
        "walk and voice both hold sound at frames 10 to 21: the model is shown both",
        "walk and noise both hold sound at frame 21: the model is shown both",
        "voice and noise both hold sound at frame 21: the model is shown both",
    ]
