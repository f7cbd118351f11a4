"""What nodes are made of, without a host: parts, jobs, clips continued and joined, masks drawn, latents judged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from h3_runtime import graph
from h3_runtime.checkpoint.convert import quantise_checkpoint
from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.checkpoint.pieces import Online
from h3_runtime.demo.maker import make_model, make_reference_dit
from h3_runtime.demo.media import SCENE, sample_media
from h3_runtime.errors import CheckpointError, H3Error
from h3_runtime.extend import MEETING_FRAMES, clip_frames, continue_clip, join_clips
from h3_runtime.geometry import Canvas, audio_latents, audio_samples, latent_frames
from h3_runtime.graph import GraphModels, Origin, Part, PastMedia, Watcher, condition_shown, encode_media, run_job
from h3_runtime.job import AVLatent, Guide, Masks, Reference, RenderJob, TextCondition
from h3_runtime.lora import Lora
from h3_runtime.manifest import make_manifest
from h3_runtime.mask_picture import ANEW, KEPT, draw_masks
from h3_runtime.media import Mp4Writer, read_clip
from h3_runtime.media.join import Take, join_files
from h3_runtime.memory.probe import Card, Host
from h3_runtime.memory.rows import RenderSizes
from h3_runtime.model import Loading, Models
from h3_runtime.recovery import RecoveryFolder
from h3_runtime.render import render_request
from h3_runtime.request import GuideRequest, Media, RenderRequest, SoundMask
from h3_runtime.soundness import judge_latent
from h3_runtime.text.encoder import open_weights

from .small_jobs import clip, differ, job, one_thread, same, small_dit  # noqa: F401  (one_thread is a fixture)

CANVAS = Canvas.fit(22, (96, 64))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    make_reference_dit(folder)
    return folder


def part(model, kind: str, file: str | None = None) -> Part:
    return Part.open(kind, model / f"{file or kind}.safetensors", "float32")


def picture() -> np.ndarray:
    return sample_media(96, 64, 22).clip[:1]


# ---- parts


def test_a_part_is_checked_when_chosen_and_read_when_used(model):
    dit = part(model, "dit")
    assert (dit.partition, dit.loaded, dit.info) == ("fl2va", False, None)
    assert dit.size == (model / "dit.safetensors").stat().st_size
    dit.load()
    assert dit.loaded and dit.info.format == "comfyui"
    dit.release()
    assert not dit.loaded
    with pytest.raises(CheckpointError):
        Part.open("video_vae", model / "dit.safetensors")
    with pytest.raises(H3Error, match="as stored"):
        Part.open("dit", model / "dit.safetensors", "half")


def test_a_part_is_quantised_while_it_loads(model):
    """An encoder and a VAE as the loaders make them; what reads them in a graph says so."""
    asked = {"text_encoder": "text=int8", "video_vae": "video_vae=int8_convrot", "dit": "dit=fp8"}
    parts = {}
    for kind, quantise in asked.items():
        parts[kind] = Part.open(kind, model / f"{kind}.safetensors", loading=Loading(quantise=quantise))
        parts[kind].load()
    assert parts["text_encoder"].info.online == {"int8": 21} and parts["video_vae"].info.online == {"int8_convrot": 12}
    assert parts["dit"].info.online == {"fp8": 16}
    together = GraphModels(text_encoder=parts["text_encoder"])
    seen = together.describe_encoder(open_weights(model / "text_encoder.safetensors"))
    assert seen.fingerprint == parts["text_encoder"].info.fingerprint and seen.approximate
    plain = Part.open("video_vae", model / "video_vae.safetensors")
    dit = Part.open("dit", model / "dit.safetensors")
    sizes = RenderSizes(CANVAS)
    held = [
        graph.plan_sizes(dit, sizes, graph.weights_of_parts(dit, [vae]), 12.0, 16.0).stage("video decode").vram
        for vae in (parts["video_vae"], plain)
    ]
    assert held[0] != held[1]
    stored = model / "stored.safetensors"
    quantise_checkpoint(model / "text_encoder.safetensors", stored, Online("int8"))
    with pytest.raises(H3Error, match="quantised already"):
        Part.open("text_encoder", stored, loading=Loading(quantise="text=int8"), vocabulary=model)
    stored.unlink()


def test_a_part_whose_partition_is_wrong_refuses_before_it_is_read(model):
    dit, references = part(model, "dit"), part(model, "dit", "dit_ref2va")
    assert references.partition == "ref2va"
    text = TextCondition(torch.randn(3, 64), torch.ones(3, dtype=torch.int64))
    asked = RenderJob(CANVAS, text, references=(Reference("image", torch.zeros(1, 24, 1, 4, 6)),))
    with pytest.raises(H3Error, match=r"Ref2VA weights, and dit\.safetensors holds FL2VA"):
        dit.check(asked)
    with pytest.raises(H3Error, match=r"FL2VA weights, and dit_ref2va\.safetensors holds Ref2VA"):
        references.check(RenderJob(CANVAS, text))
    with pytest.raises(H3Error, match=r"40 wide and dit\.safetensors reads 64"):
        dit.check(job())
    assert not dit.loaded and not references.loaded


def test_a_graph_renders_what_the_command_line_renders(model, tmp_path):
    """Part by part, through media in memory, guide by guide: the bits of render_request, and the same manifest."""
    frames = picture()
    request = RenderRequest(
        "a red ball",
        (96, 64),
        frames=22,
        first_frame=Media(frames=frames, name="first frame"),
        guides=(GuideRequest(Media(frames=frames, name="guide"), frame=9, strength=0.5),),
        seed=5,
        num_forwards=2,
    )
    models = Models(find_parts(model), torch.float32, keep=True)
    whole = render_request(request, models)
    given = {kind: part(model, kind) for kind in ("text_encoder", "video_vae", "audio_vae")}
    together = GraphModels(**given)
    keyed, framed = encode_media(replace(request, guides=()), together)
    _, guided = encode_media(replace(request, first_frame=None), GraphModels(video_vae=given["video_vae"]))
    made = condition_shown(request, keyed.shown, together)
    asked = replace(
        framed,
        text=made.text,
        guides=(*framed.guides, *guided.guides),
        seed=5,
        num_forwards=2,
        request=request,
    )
    dit = part(model, "dit")
    result = run_job(dit, asked, request, Origin(dict(together.infos), made), recovery=RecoveryFolder(tmp_path))
    assert same(result.latent, whole.latent)
    assert result.fidelity.title == whole.fidelity.title
    given["audio_vae"].load()  # as the node does that decodes
    finished = graph.with_parts(result, (given["video_vae"], given["audio_vae"]))
    ours, theirs = make_manifest(finished), make_manifest(whole)
    for side in (ours, theirs):
        side["fidelity"].pop("parts")
    assert ours["request"] == theirs["request"] and ours["models"].keys() == theirs["models"].keys()
    again = run_job(dit, asked, request, Origin(dict(together.infos), made), recovery=RecoveryFolder(tmp_path))
    assert same(again.latent, whole.latent) and again.dit_calls == 0
    assert any("taken up after forward 2 of 2" in note for note in again.notes)


def test_an_approximate_encoder_or_vae_of_the_conditions_is_in_the_label(model):
    """In a graph other parts than the DiT's own ``Models`` made the conditions: their files count all the same."""
    dit, given = part(model, "dit"), GraphModels(text_encoder=part(model, "text_encoder"))
    request = RenderRequest("a ball", size=(96, 64), frames=22, num_forwards=1)
    made = condition_shown(request, (), given)
    asked = RenderJob(CANVAS, made.text, num_forwards=1, request=request)
    told = {}
    for path in ("encoder/int8", "video-vae/file-approximate"):
        part_word = "text_encoder" if path.startswith("encoder") else "video_vae"
        other = replace(given.infos["text_encoder"], part=part_word, paths=(path,), approximate="that file is rounded")
        told[path] = run_job(dit, asked, request, Origin({**given.infos, part_word: other}, made)).fidelity
        (cause,) = [p for p in told[path].parts if p.name == path]
        assert cause.reason == "that file is rounded"
    plain = run_job(dit, asked, request, Origin(dict(given.infos), made)).fidelity
    assert not [p for p in plain.parts if p.name in told]


def test_a_watcher_sees_every_step_and_may_stop_the_run(model):
    text = TextCondition(torch.randn(3, 64), torch.ones(3, dtype=torch.int64))
    asked = RenderJob(CANVAS, text, num_forwards=3, request=RenderRequest("x"))
    dit, seen, told, polled = part(model, "dit"), [], [], []
    watcher = Watcher(lambda *step: told.append(step[:2]), lambda: polled.append(1), lambda clip: seen.append(clip()))
    result = run_job(dit, asked, asked.request, Origin(), watcher)
    assert told == [(1, 3), (2, 3), (3, 3)] and len(polled) == 12
    assert [tuple(shown.shape) for shown in seen] == [(1, 24, 7, 4, 6)] * 3
    torch.testing.assert_close(seen[-1], result.latent.video)

    class Cancelled(BaseException):
        pass

    def cancel():
        raise Cancelled

    with pytest.raises(Cancelled):
        run_job(dit, asked, asked.request, Origin(), Watcher(poll=cancel))


def test_what_another_program_made_is_in_the_label(model):
    text = TextCondition(torch.randn(3, 64), torch.ones(3, dtype=torch.int64))
    asked = RenderJob(CANVAS, text, num_forwards=2, request=RenderRequest("x"))
    result = run_job(part(model, "dit"), asked, asked.request, Origin(foreign=("guide at frame 3",)))
    reasons = {p.name: p.reason for p in result.fidelity.parts}
    assert "the prompt, guide at frame 3" in reasons["condition/foreign"]
    assert not [name for name in reasons if name.startswith("encoder/")]


def test_branches_share_one_dit_and_carry_their_own_loras(model, tmp_path):
    file = tmp_path / "lora.safetensors"
    name = "diffusion_model.blocks.0.attn.out_proj"
    save_file({f"{name}.lora_down.weight": torch.randn(2, 256), f"{name}.lora_up.weight": torch.randn(192, 2)}, file)
    text = TextCondition(torch.randn(3, 64), torch.ones(3, dtype=torch.int64))
    asked = RenderJob(CANVAS, text, num_forwards=2, request=RenderRequest("x"))
    base = part(model, "dit")
    with_lora = base.with_lora(Lora(file))
    plain = run_job(base, asked, asked.request)
    changed = run_job(with_lora, asked, asked.request)
    assert differ(plain.latent, changed.latent)
    assert "dit/lora" in [p.name for p in changed.fidelity.parts]
    assert any("1 of 1 applied" in note for note in changed.notes)
    assert same(run_job(base, asked, asked.request).latent, plain.latent)
    assert base.models is with_lora.models and with_lora.root is base


def test_the_plan_places_a_dit_on_a_card_and_keeps_it_while_it_fits(model, monkeypatch):
    monkeypatch.setattr(graph, "probe_card", lambda device: Card.given(24))
    dit = part(model, "dit")
    dit.place("cuda")
    text = TextCondition(torch.randn(3, 64), torch.ones(3, dtype=torch.int64))
    said = graph.settle_placement(dit, RenderJob(CANVAS, text))
    assert said[0].startswith("the plan: resident") and dit.models.loading.placement is not None
    rows = dit.planned_rows
    assert rows == CANVAS.rows_video + CANVAS.rows_audio + 3
    monkeypatch.setattr(Part, "loaded", property(lambda self: True))
    assert graph.settle_placement(dit, RenderJob(CANVAS, text)) == []
    longer = RenderJob(Canvas.fit(39, (96, 64)), text)
    assert graph.settle_placement(dit, longer) and dit.planned_rows > rows
    monkeypatch.setattr(graph, "probe_card", lambda device: Card.given(0.7))
    with pytest.raises(H3Error, match="needs"):
        graph.settle_placement(dit, RenderJob(Canvas.fit(362, (1344, 768)), text))


def test_a_render_beyond_the_machines_memory_is_refused_before_it_begins(model, monkeypatch):
    dit = part(model, "dit")
    long = RenderJob(Canvas.fit(362, (1344, 768)), TextCondition(torch.randn(3, 64), torch.ones(3, dtype=torch.int64)))
    assert graph.settle_placement(dit, long) == []
    monkeypatch.setattr(graph, "probe_host", lambda: Host.given(0.5))
    with pytest.raises(H3Error, match=r"362 frames at 1344x768 needs .* GiB are free"):
        graph.settle_placement(dit, long)
    assert not dit.loaded


def test_a_vae_that_is_not_connected_is_named():
    request = RenderRequest("", (96, 64), frames=22, first_frame=Media(frames=picture(), name="first frame"))
    with pytest.raises(H3Error, match="a video vae is needed here"):
        encode_media(request, GraphModels())


def test_past_media_keep_name_and_hash():
    media = PastMedia(name="cat.png", digest="ab" * 32)
    assert (media.name, media.sha256, media.path) == ("cat.png", "ab" * 32, None)


# ---- longer clips


@pytest.mark.parametrize("frames", (5, 22, 56, 124, 362))
@pytest.mark.parametrize("overlap", (1, 22, 60, 1000))
def test_a_continuation_begins_with_the_very_latents_of_the_end(frames, overlap):
    canvas = Canvas.fit(frames, (96, 64))
    before = clip(canvas)
    made = continue_clip(before, 100, overlap)
    kept = latent_frames(made.overlap)
    assert made.begins % MEETING_FRAMES == 0 and made.begins + made.overlap == frames
    assert made.overlap >= min(overlap, frames) and made.canvas.num_frames - made.overlap >= 100
    assert torch.equal(made.source.video[:, :, :kept], before.video[:, :, -kept:])
    heard = before.audio.shape[3] - audio_latents(made.begins)
    assert torch.equal(made.source.audio[..., :heard], before.audio[..., -heard:])
    assert made.masks.video[:kept].eq(0).all() and made.masks.video[kept:].eq(1).all()
    assert made.masks.audio[:, :heard].eq(0).all() and made.masks.audio[:, heard:].eq(1).all()
    joined = join_clips(before, made.source, made.begins)
    assert clip_frames(joined) == made.begins + made.canvas.num_frames


def test_forty_clips_later_picture_and_sound_are_still_together():
    joined = last = clip(Canvas.fit(56, (32, 32)))
    for number in range(40):
        made = continue_clip(last, 40, 5)
        last = clip(made.canvas, seed=number)
        joined = join_clips(joined, last, clip_frames(joined) - made.overlap)
    frames = clip_frames(joined)
    assert frames > 40 * 40
    assert abs(joined.audio.shape[3] - frames / 24 * 40) < 1


@pytest.mark.parametrize("begins", (17, 153, -51))
def test_a_join_elsewhere_is_refused(begins):
    canvas = Canvas.fit(124, (96, 64))
    with pytest.raises(H3Error, match="it can begin at 0, 51, 102"):
        join_clips(clip(canvas), clip(canvas), begins)


def test_what_cannot_be_continued_is_refused():
    canvas = Canvas.fit(22, (96, 64))
    with pytest.raises(H3Error, match="at least 1"):
        continue_clip(clip(canvas), 0, 5)
    with pytest.raises(H3Error, match="at least 1"):
        continue_clip(clip(canvas), 5, 0)
    with pytest.raises(H3Error, match="37 are needed"):
        continue_clip(AVLatent(clip(canvas).video, torch.zeros(1, 32, 2, 36)), 5, 5)
    with pytest.raises(H3Error, match="5k"):
        continue_clip(AVLatent(torch.zeros(1, 24, 4, 4, 6), torch.zeros(1, 32, 2, 36)), 5, 5)
    with pytest.raises(H3Error, match="only clips of one size"):
        join_clips(clip(canvas), clip(Canvas.fit(22, (64, 64))), 0)


# ---- files joined


def write(path, frames: int, size=(64, 32), sound: bool = True, fps: int = 24):
    media = sample_media(*size, frames)
    with Mp4Writer(path, *size, audio=media.sound if sound else None) as writer:
        writer.write(media.clip[:frames])
    return path


def test_files_are_joined_at_frame_boundaries(tmp_path):
    files = [write(tmp_path / "a.mp4", 22), write(tmp_path / "b.mp4", 39), write(tmp_path / "c.mp4", 22, sound=False)]
    told = []
    takes = [Take(files[0]), Take(files[1], 0.5, 20), Take(files[2])]
    path, frames, notes = join_files(takes, tmp_path / "all.mp4", {"tag": "kept"}, lambda *at: told.append(at))
    assert (frames, told) == (64, [(1, 3), (2, 3), (3, 3)])
    assert [note for note in notes if "c.mp4 has no sound" in note]
    joined = read_clip(path)
    assert len(joined.frames) == 64 and joined.audio.shape[1] == audio_samples(64)
    assert joined.audio[:, audio_samples(42) + 2048 :].abs().max() < 0.02, "the last clip is silent"
    apart = np.concatenate([read_clip(files[0]).frames, read_clip(files[1]).frames[12:32], read_clip(files[2]).frames])
    assert np.abs(joined.frames.astype(int) - apart).mean() < 3


def test_files_of_two_sizes_are_refused(tmp_path):
    files = [write(tmp_path / "a.mp4", 5), write(tmp_path / "b.mp4", 5, (32, 32))]
    with pytest.raises(H3Error, match=r"b\.mp4 is 32x32 and a\.mp4 64x32"):
        join_files([Take(file) for file in files], tmp_path / "all.mp4")
    assert not (tmp_path / "all.mp4").exists()
    with pytest.raises(H3Error, match="at least one"):
        join_files([], tmp_path / "all.mp4")


# ---- masks drawn


def shade(pixel) -> float:
    return (int(pixel[0]) - KEPT[0]) / (ANEW[0] - KEPT[0])


def test_the_picture_shows_the_tokens_that_are_made_anew():
    cells = torch.zeros(7, 4, 6)
    cells[2, 3, 5] = 1  # one cell of latent 2: the token at its bottom right
    drawn = draw_masks(CANVAS, Masks.make(cells, torch.zeros(2, 37)))
    white = (drawn == np.array(ANEW)).all(-1).sum()
    one = draw_masks(CANVAS, Masks.make(torch.zeros(7, 4, 6), torch.zeros(2, 37)))
    assert white > 100 and (one == np.array(ANEW)).all(-1).sum() < white / 20
    everything = draw_masks(CANVAS, None)
    assert (everything == np.array(ANEW)).all(-1).mean() > 0.1
    assert drawn.shape[1] == 1024 and drawn.dtype == np.uint8


def test_seconds_are_where_they_are_drawn():
    canvas = Canvas.fit(56, (96, 64))
    sound = SoundMask.parse("1-2").latents(canvas.audio_t)
    drawn = draw_masks(canvas, Masks.make(torch.zeros(17, 4, 6), sound))
    row = drawn[-60]  # a line through the bars of the right ear
    levels = np.array([shade(pixel) for pixel in row[8:1016]])
    lit = np.flatnonzero(levels > 0.9) / len(levels) * canvas.audio_t / 40
    assert abs(lit.min() - 1.0) < 0.03 and abs(lit.max() - 2.0) < 0.03


# ---- latents judged


def smooth(canvas: Canvas) -> AVLatent:
    video = torch.nn.functional.interpolate(torch.randn(1, 24, 3, 2, 2), size=(7, 4, 6), mode="trilinear") * 2
    audio = torch.nn.functional.interpolate(torch.randn(1, 32, 2, 5), size=(2, 37), mode="bilinear") * 2
    return AVLatent(video, audio)


def test_a_clip_is_sound_and_what_cannot_be_one_is_told():
    good = smooth(CANVAS)
    assert judge_latent(good) == []
    noise = AVLatent(torch.randn(1, 24, 12, 16, 16), torch.randn(1, 32, 2, 300))
    assert [line.split(":")[0] for line in judge_latent(noise)] == [
        "the picture latent is pure noise",
        "the sound latent is pure noise",
    ]
    zeros = AVLatent(torch.zeros_like(good.video), good.audio)
    assert "empty (all zeros)" in judge_latent(zeros)[0]
    assert "the constant 2" in judge_latent(AVLatent(torch.full_like(good.video, 2.0), good.audio))[0]
    assert "far beyond" in judge_latent(AVLatent(good.video, good.audio * 100))[0]


def test_the_small_models_own_clips_are_not_called_noise(model):
    text = TextCondition(torch.randn(9, 64), torch.ones(9, dtype=torch.int64))
    asked = RenderJob(CANVAS, text, num_forwards=2, request=RenderRequest("x"))
    assert judge_latent(run_job(part(model, "dit"), asked, asked.request).latent) == []


# ---- media to try things with


def test_sample_media_fit_together_and_repeat():
    media = sample_media(96, 64, 20)
    assert media.clip.shape == (22, 64, 96, 3) and media.picture.shape == (64, 96, 3)
    assert media.mask.shape == (22, 64, 96) and media.sound.shape == (2, audio_samples(22))
    assert 0.02 < media.mask.mean() < 0.3 and media.sound.abs().max() <= 0.3
    again = sample_media(96, 64, 20)
    assert (media.clip == again.clip).all() and torch.equal(media.sound, again.sound)
    assert (media.clip[0] != media.clip[-1]).any() and not torch.equal(media.sound[0], media.sound[1])


def test_sample_media_are_of_the_world_that_the_carried_model_knows():
    media = sample_media(128, 128, 22)
    assert (media.clip == SCENE.frames(128, 128, 22)).all() and torch.equal(media.sound, SCENE.sound(22))
    assert SCENE.prompt == "a red circle moves left to right, low tone", "the bundled workflows' words"
    coloured = torch.from_numpy((media.clip != 128).any(-1))
    assert (media.mask[coloured] == 1).all(), "all of the shape can be made anew"
    assert set(media.mask.unique().tolist()) == {0.0, 1.0} and media.mask.sum() < 2.5 * coloured.sum()


def test_guides_of_several_nodes_are_one_job_whatever_their_order():
    guides = [Guide(at, torch.randn(1, 24, 1, 4, 6), name=str(at)) for at in (2, 7, 12)]
    one = job(guides=tuple(guides))
    assert one.fingerprint() == job(guides=tuple(guides)).fingerprint()
    assert one.fingerprint() != job(guides=tuple(reversed(guides))).fingerprint(), "the order is settled by the caller"
    assert small_dit() is not None
