"""What travels on the sockets: every shape of the host's LATENT, CONDITIONING, VAE, CLIP and media, both ways."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from .comfy_graphs import CARRIED
from .node_pack import Streams as Nested

TOKENS = {"video": (7, 4, 6), "audio": 37}  # 96x64, 22 frames


@pytest.fixture(scope="module")
def parts(pack) -> SimpleNamespace:
    (clip,) = pack.run("H3RuntimeLoadTextEncoder", text_encoder=CARRIED)
    video_vae, audio_vae = pack.run("H3RuntimeLoadVaes", video_vae=CARRIED, audio_vae=CARRIED)
    (model,) = pack.run("H3RuntimeLoadModel", model=CARRIED)
    empty, *_ = pack.run("H3RuntimeEmptyLatent", width=96, height=64, frames=22)
    picture, frames, sound, mask, *_ = pack.run("H3RuntimeSampleMedia", width=96, height=64, frames=22)
    return SimpleNamespace(**{name: value for name, value in locals().items() if name != "pack"})


def streams(value: float | None = None, frames: int = 7, sound: int = 37):
    if value is not None:
        return torch.full((1, 24, frames, 4, 6), value), torch.full((1, 32, 2, sound), value)
    return torch.randn(1, 24, frames, 4, 6), torch.randn(1, 32, 2, sound)


# ---- loaders


def test_every_loader_quantises_its_part(pack, parts):
    (clip,) = pack.run("H3RuntimeLoadTextEncoder", text_encoder=CARRIED, quantise="int8")
    video_vae, _ = pack.run("H3RuntimeLoadVaes", video_vae=CARRIED, audio_vae=CARRIED, quantise="int8_convrot")
    (model,) = pack.run("H3RuntimeLoadModel", model=CARRIED, quantise="fp8")
    for part, method in ((clip.part, "int8"), (video_vae.part, "int8_convrot"), (model, "fp8")):
        part.load()
        assert list(part.info.online) == [method] and part.info.approximate
        part.release()
    assert parts.clip.part.models.loading.online("text_encoder") is None
    assert parts.video_vae.part.models.loading.online("video_vae") is None


# ---- LATENT


def test_a_clip_goes_in_and_out_unchanged(pack):
    video, audio = streams()
    taken = pack.av_latent.take_latent({"samples": Nested(video, audio)})
    assert (taken.canvas.width, taken.canvas.height, taken.canvas.num_frames) == (96, 64, 22)
    assert torch.equal(taken.clip.video, video) and torch.equal(taken.clip.audio, audio)
    given = pack.av_latent.give_latent(taken.clip, overlap=5)
    again = pack.av_latent.take_latent(given)
    assert torch.equal(again.clip.video, video) and again.carried.overlap == 5
    half = pack.av_latent.take_latent({"samples": Nested(video.half(), audio.half())})
    assert half.clip.video.dtype == torch.float32


def test_inference_tensors_of_the_host_become_plain_ones(pack):
    with torch.inference_mode():
        video, audio = streams()
    taken = pack.av_latent.take_latent({"samples": Nested(video, audio)})
    taken.clip.video.add_(1)  # raises on an inference tensor
    assert not taken.clip.video.is_inference()


def test_what_is_known_of_a_latent_dies_when_another_node_changes_it(pack):
    av = pack.av_latent
    clip = av.take_latent({"samples": Nested(*streams())}).clip
    given = av.give_latent(clip, finished=False, stop=3)
    assert not av.take_latent(given).carried.finished
    moved = {**given, "samples": Nested(clip.video.clone(), clip.audio.clone())}
    assert av.take_latent(moved).carried is not None, "the same values elsewhere are the same clip"
    scaled = {**given, "samples": Nested(clip.video * 2, clip.audio)}
    taken = av.take_latent(scaled)
    assert taken.carried is None and "changed after a sampler that stopped" in taken.notes[0]


@pytest.mark.parametrize(
    ("shape", "extra", "size"),
    [
        ((1, 4, 8, 12), {}, (96, 64, 22)),
        ((1, 16, 8, 12), {"downscale_ratio_spacial": 8}, (96, 64, 22)),
        ((1, 32, 4, 6), {"downscale_ratio_spacial": 16}, (96, 64, 22)),
        ((1, 16, 4, 8, 12), {}, (96, 64, 22)),
        ((1, 16, 7, 8, 12), {}, (96, 64, 22)),
        ((1, 16, 8, 8, 12), {}, (96, 64, 39)),
        ((1, 16, 1, 8, 12), {}, (96, 64, 5)),
        ((1, 24, 7, 8, 12), {"downscale_ratio_spacial": 8}, (96, 64, 22)),
        ((1, 4, 74, 132), {}, (1056, 576, 22)),
    ],
)
def test_plain_empty_latents_keep_their_pixel_size(pack, shape, extra, size):
    taken = pack.av_latent.take_latent({"samples": torch.zeros(shape), **extra}, frames=22)
    canvas = taken.canvas
    assert (canvas.width, canvas.height, canvas.num_frames) == size
    assert taken.clip is None and "was replaced by an H3 one" in taken.notes[0]


def test_latents_that_cannot_be_taken_are_refused_in_a_sentence(pack):
    take, wrong = pack.av_latent.take_latent, pack.h3.H3Error
    video, audio = streams()
    for samples, words in (
        (torch.ones(1, 4, 8, 12), "another model's"),
        (torch.ones(1, 32, 2, 37), "another model's, or one stream alone"),
        (torch.zeros(2, 4, 8, 12), "2 clips"),
        (Nested(video.expand(2, -1, -1, -1, -1), audio), "2 clips"),
        (Nested(audio, video), "sound first"),
        (Nested(video, audio, audio), "3 streams"),
        (Nested(video, audio[..., :30]), "37 are needed"),
        (Nested(video[:, :, :6], audio), "5k"),
        (Nested(video * torch.nan, audio), "NaN"),
        (torch.zeros(1, 4, 8), "4 or 5 dimensions"),
    ):
        with pytest.raises(wrong, match=words) as caught:
            take({"samples": samples})
        assert "\n" not in str(caught.value)


def test_a_picture_without_sound_is_taken(pack):
    video, _ = streams()
    taken = pack.av_latent.take_latent({"samples": video})
    assert torch.equal(taken.clip.video, video) and not taken.clip.audio.any()
    assert "sound is made anew" in taken.notes[0]


# ---- noise masks


def masked(pack, mask):
    taken = pack.av_latent.take_latent({"samples": Nested(*streams()), "noise_mask": mask})
    return taken.masks, taken.notes


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(64, 96),
        torch.zeros(1, 64, 96),
        torch.zeros(1, 1, 64, 96),
        torch.zeros(22, 64, 96),
        torch.zeros(22, 1, 64, 96),
        torch.zeros(1, 1, 7, 4, 6),
        torch.zeros(1, 24, 7, 4, 6),
        torch.zeros(7, 4, 6),
        torch.zeros(1, 128, 192),
        torch.zeros(22, 128, 192),
        torch.zeros(9, 64, 96),
    ],
)
def test_masks_of_the_picture_in_every_shape(pack, mask):
    masks, notes = masked(pack, mask)
    assert tuple(masks.video.shape) == TOKENS["video"] and not masks.video.any() and masks.audio is None
    assert any("for the picture alone" in note for note in notes)
    everything, _ = masked(pack, torch.ones_like(mask))
    assert everything is None, "all made anew is no mask"


@pytest.mark.parametrize(
    "audio", [torch.zeros(1, 32, 2, 37), torch.zeros(1, 1, 2, 37), torch.zeros(1, 1, 1, 37), torch.zeros(2, 37)]
)
def test_masks_of_both_streams(pack, audio):
    masks, notes = masked(pack, Nested(torch.ones(1, 1, 7, 4, 6), audio))
    assert masks.video is None and tuple(masks.audio.shape) == (2, 37) and not masks.audio.any()
    assert not notes


def test_one_white_pixel_makes_its_token_anew(pack):
    pixels = torch.zeros(22, 64, 96)
    pixels[10, 40, 70] = 1  # frame 10 belongs to latent 3 (frames 9 to 12), cell 2, 4
    masks, _ = masked(pack, pixels)
    assert masks.video.nonzero().tolist() == [[3, 2, 4]]
    tokens = masks.video_tokens.view(7, 2, 3)
    assert tokens.nonzero().tolist() == [[3, 1, 2]]


def test_masks_travel_to_the_host_and_back(pack):
    clip = pack.av_latent.take_latent({"samples": Nested(*streams())}).clip
    video, audio = torch.rand(7, 4, 6), torch.rand(2, 37)
    masks = pack.h3.Masks.make(video, audio)
    given = pack.av_latent.give_latent(clip, masks)
    shapes = [tuple(mask.shape) for mask in given["noise_mask"].unbind()]
    assert shapes == [(1, 1, 7, 4, 6), (1, 1, 2, 37)]
    back = pack.av_latent.take_latent(given).masks
    assert torch.equal(back.video, masks.video) and torch.equal(back.audio, masks.audio)


def test_the_mask_node_draws_and_counts(pack, parts):
    (latent, *_) = pack.run(
        "H3RuntimeEncodeClip", video_vae=parts.video_vae, audio_vae=parts.audio_vae, images=parts.frames
    )
    masked_latent, grid = pack.run(
        "H3RuntimeNoiseMasks", latent=latent, picture="keep", sound="ranges", sound_text="0.5-0.7"
    )
    masks = pack.av_latent.take_latent(masked_latent).masks
    assert not masks.video.any()
    assert masks.audio[0].nonzero().flatten().tolist() == list(range(20, 28)), "0.5 to 0.7 s at 40 a second"
    assert grid.shape[-1] == 3 and grid.max() <= 1
    for wrong, words in (
        ({"sound": "ranges", "sound_text": "0=0,1=1"}, "is no ranges"),
        ({"sound": "curve", "sound_text": "nonsense"}, "sound mask"),
        ({"picture": "mask"}, "no mask is connected"),
    ):
        with pytest.raises(pack.h3.H3Error, match=words):
            pack.run("H3RuntimeNoiseMasks", latent=latent, **{"picture": "keep", "sound": "keep", **wrong})
    with pytest.raises(pack.h3.H3Error, match="the latent is empty"):
        pack.run("H3RuntimeNoiseMasks", latent=parts.empty, picture="keep")


# ---- CONDITIONING


def prompt_of(pack, parts, words: str = "a ball") -> list:
    return pack.run("H3RuntimeEncodePrompt", clip=parts.clip, prompt=words)[0]


def guided(pack, parts, positive: list, frame: int, **more) -> list:
    given = {"video_vae": parts.video_vae, "image": parts.picture, **more}
    return pack.run("H3RuntimeAddGuide", positive=positive, latent=parts.empty, frame=frame, **given)[0]


def test_ours_has_the_hosts_keys_and_nothing_is_none(pack, parts):
    positive = guided(pack, parts, prompt_of(pack, parts), 9)
    positive = guided(pack, parts, positive, 0, image=None, audio=parts.sound, audio_vae=parts.audio_vae)
    (hidden, values), *others = positive
    assert not others and hidden.ndim == 3 and values["minimax_token_tags"].shape == hidden.shape[1:2]
    picture, sound = values["minimax_keyframes"]
    assert picture["resolved_frame_index"] == 9 and picture["latent"].shape == (1, 24, 1, 4, 6)
    assert "audio_latent" not in picture and "latent" not in sound and sound["audio_latent"].shape == (1, 32, 2, 37)


def test_five_guides_in_any_order_are_one_job(pack, parts):
    av, canvas = pack.conditioning, pack.av_latent.take_latent(parts.empty).canvas
    places = [(3, 1.0), (9, 0.5), (9, 1.0), (15, 0.3), (21, 1.0)]
    jobs = []
    for order in (places, places[::-1], places[2:] + places[:2]):
        positive = prompt_of(pack, parts)
        for frame, strength in order:
            image = parts.frames[frame : frame + 1]
            positive = guided(pack, parts, positive, frame, image=image, strength=strength)
        taken = av.take_condition(positive, canvas)
        jobs.append(pack.h3.RenderJob(canvas, taken.text, guides=taken.guides))
    assert len({job.fingerprint() for job in jobs}) == 1
    assert [guide.frame_index for guide in jobs[0].guides] == [3, 9, 9, 15, 21]


def test_guides_are_placed_cut_and_said(pack, parts):
    positive = prompt_of(pack, parts)
    last = guided(pack, parts, positive, -1)
    assert last[0][1]["minimax_keyframes"][0]["resolved_frame_index"] == 21
    by_time = guided(pack, parts, positive, 0, at="seconds", seconds=0.5)
    assert by_time[0][1]["minimax_keyframes"][0]["resolved_frame_index"] == 12
    cut = guided(pack, parts, positive, 10, image=parts.frames)
    assert cut[0][1]["minimax_keyframes"][0]["latent"].shape[2] == 2, "12 frames are left: 5 of them are a whole clip"
    for more, words in (
        ({"image": None}, "nothing to hold"),
        ({"frame": 22}, "frames 0 to 21"),
        ({"video_vae": None}, "a video vae is needed"),
        ({"video_vae": parts.audio_vae}, "the other output of H3 Load VAEs"),
        ({"image": parts.picture * torch.nan}, "NaN"),
    ):
        with pytest.raises(pack.h3.H3Error, match=words):
            guided(pack, parts, positive, **{"frame": 0, **more})


def test_the_recipe_and_the_vae_of_a_guide_are_in_the_job(pack, parts):
    plain = take(pack, parts, guided(pack, parts, prompt_of(pack, parts), 9))
    comfy = take(pack, parts, guided(pack, parts, prompt_of(pack, parts), 9, recipe="comfy"))
    assert (plain.recipe, comfy.recipe) == ("reference", "comfy")
    assert set(plain.infos) == {"text_encoder", "video_vae"}


def theirs(*keyframes, references=(), width: int = 64, **more) -> list:
    values = {"minimax_token_tags": torch.ones(5, dtype=torch.long), "pooled_output": None, **more}
    if keyframes:
        values["minimax_keyframes"] = list(keyframes)
    if references:
        values["minimax_refs"] = list(references)
    return [[torch.randn(1, 5, width), values]]


def take(pack, parts, positive):
    return pack.conditioning.take_condition(positive, pack.av_latent.take_latent(parts.empty).canvas)


def test_the_hosts_keyframes_in_every_versions_shape(pack, parts):
    picture = torch.randn(1, 24, 1, 4, 6)
    sound = torch.randn(1, 32, 2, 5)
    taken = take(
        pack,
        parts,
        theirs(
            {"resolved_frame_index": 21, "latent": picture},
            {"resolved_frame_index": 0, "latent": picture[:, :, 0]},
            {"resolved_frame_index": 6, "latent": None, "audio_latent": sound.half()},
            {"resolved_frame_index": 4, "latent": picture, "audio_latent": None},
        ),
    )
    assert [(g.frame_index, g.keyframe) for g in taken.guides] == [(0, True), (21, True), (4, False), (6, False)]
    assert taken.guides[3].audio.dtype == torch.float32 and taken.guides[3].video is None
    assert len(taken.foreign) == 4 and taken.made is None
    with pytest.raises(pack.h3.H3Error, match="names no frame"):
        take(pack, parts, theirs({"latent": picture}))


def test_the_hosts_references_in_every_kind(pack, parts):
    video, sound = torch.randn(1, 24, 7, 4, 6), torch.randn(1, 32, 2, 5)
    taken = take(
        pack,
        parts,
        theirs(
            references=(
                {"kind": "image", "latent_h": 4, "latent_w": 6, "latent": video[:, :, :1]},
                {"kind": "video", "latent": video, "audio_latent": None, "ref_audio_t": 0, "latent_t": 7},
                {"kind": "video_audio", "latent": video, "audio_latent": sound, "ref_audio_t": 5},
                {"kind": "audio", "audio_latent": sound, "ref_audio_t": 5},
            )
        ),
    )
    assert [reference.kind for reference in taken.references] == ["image", "video", "video_audio", "audio"]
    assert [asked.kind for asked in taken.asked_references] == ["image", "video", "video", "audio"]


def test_conditioning_noise_of_the_host_weakens_guides(pack, parts):
    keyframe = {"resolved_frame_index": 5, "latent": torch.randn(1, 24, 1, 4, 6)}
    taken = take(pack, parts, theirs(keyframe, minimax_visual_cond_noise_aug=0.4995))
    assert taken.guides[0].strength == pytest.approx(0.5) and "strength 0.500" in taken.notes[0]
    assert take(pack, parts, theirs(keyframe, minimax_visual_cond_noise_aug=0.999)).guides[0].strength == 1.0


def test_conditionings_that_cannot_be_taken(pack, parts):
    one = theirs()
    for positive, words in (
        (one + theirs(), "2 prompts"),
        ([], "0 prompts"),
        ([[torch.randn(2, 5, 64), one[0][1]]], "one prompt"),
        ([[torch.randn(1, 6, 64), one[0][1]]], "tags for 5"),
        ([[torch.full((1, 5, 64), torch.nan), one[0][1]]], "NaN"),
    ):
        with pytest.raises(pack.h3.H3Error, match=words):
            take(pack, parts, positive)
    assert "control in the conditioning has no effect" in take(pack, parts, theirs(control=object())).notes[0]


def test_a_prompt_that_another_node_changed_is_no_longer_ours(pack, parts):
    positive = prompt_of(pack, parts)
    assert take(pack, parts, positive).prompt == "a ball"
    (hidden, values), *_ = positive
    taken = take(pack, parts, [[hidden * 2, values]])
    assert taken.made is None and taken.prompt != "a ball"
    assert any("changed by another node" in note for note in taken.notes)


# ---- jobs


def make(pack, parts, positive=None, latent=None, **settings):
    given = pack.jobs.Settings(**{"steps": 4, **settings})
    return pack.jobs.make_job(positive or prompt_of(pack, parts), latent or parts.empty, given, parts.model)


def test_a_job_tells_what_has_no_effect(pack, parts):
    clip = {"samples": Nested(*streams())}
    made = make(pack, parts, latent=clip)
    assert made.job.source is None and any("only gave the size" in note for note in made.origin.notes)
    assert make(pack, parts, latent=clip, denoise=0.5).job.source is not None
    for settings, words in (({"denoise": 0.5}, "denoise 0.5 starts"), ({"start": 2}, "start_step 2 starts")):
        with pytest.raises(pack.h3.H3Error, match=words):
            make(pack, parts, **settings)


def test_the_manifest_of_a_job_tells_media_by_name_and_hash(pack, parts):
    framed = pack.run(
        "H3RuntimeFirstLastFrame",
        clip=parts.clip,
        video_vae=parts.video_vae,
        latent=parts.empty,
        prompt="two pictures",
        first_frame=parts.picture,
        last_frame=parts.picture,
    )[0]
    request = make(pack, parts, guided(pack, parts, framed, 9, strength=0.5), seed=7).request
    assert request.prompt == "two pictures" and request.seed == 7 and request.size == (96, 64)
    assert request.first_frame.name == "first frame" and request.last_frame.name == "last frame"
    assert request.first_frame.sha256 == request.last_frame.sha256
    (guide,) = request.guides
    assert (guide.frame, guide.strength, guide.media.name) == (9, 0.5, "guide picture")
    foreign = make(pack, parts, theirs()).request
    assert foreign.prompt == "(encoded by another program's node)"


def test_a_host_model_and_a_foreign_saved_prompt_are_refused_by_name(pack, parts):
    with pytest.raises(pack.h3.H3Error, match="H3 Load Model"):
        pack.run("H3RuntimeSampler", model=object(), positive=theirs(), latent=parts.empty)
    types = {"model": "MODEL", "positive": "CONDITIONING", "latent": "LATENT"}
    assert "H3 Load Model" in pack.render.Sampler.validate_inputs(types)
    assert pack.render.Sampler.validate_inputs({**types, "model": "H3_MODEL"}) is True
    assert "takes LATENT" in pack.render.Sampler.validate_inputs({**types, "model": "H3_MODEL", "latent": "IMAGE"})
    with pytest.raises(pack.h3.H3Error, match="H3 Load Prompt Embeddings only"):
        pack.run(
            "H3RuntimeFirstLastFrame",
            video_vae=parts.video_vae,
            latent=parts.empty,
            prompt="x",
            first_frame=parts.picture,
            saved=theirs(),
        )


# ---- CLIP and VAE of the host


class HostClip:
    """The host's CLIP as our nodes call it; ``split`` makes three tokens of <d>, as hosts without H3's words do."""

    def __init__(self, split: bool = False, tags: bool = True):
        self.split, self.tags, self.seen = split, tags, []

    def tokenize(self, text, images=(), minimax_ref_items=None):
        count = 3 if self.split and text in ("<d>", "</d>") else 1 if text in ("<d>", "</d>") else 5
        self.seen.append((text, images, minimax_ref_items))
        return {"qwen3vl_32b": [[(1, 1.0)] * count]}

    def encode_from_tokens_scheduled(self, tokens):
        rows = len(tokens["qwen3vl_32b"][0])
        values = {"pooled_output": None}
        if self.tags:
            values["minimax_token_tags"] = torch.ones(rows, dtype=torch.long)
        return [[torch.randn(1, rows, 64), values]]


def test_a_host_clip_is_used_and_its_missing_tokens_are_said(pack, parts):
    encode = pack.stand_ins.encode_with_clip
    assert encode(HostClip(), "<d>[English] hi</d>")[1] == []
    (told, *_) = encode(HostClip(split=True), "<d>[English] hi</d>")[1]
    assert "reads <d> as 3 tokens" in told
    assert encode(HostClip(split=True), "no speech")[1] == []
    with pytest.raises(pack.h3.H3Error, match="not MiniMax H3's text encoder"):
        encode(HostClip(tags=False), "x")
    clip = HostClip()
    (positive,) = pack.run(
        "H3RuntimeFirstLastFrame",
        clip=clip,
        video_vae=parts.video_vae,
        latent=parts.empty,
        prompt="a ball",
        first_frame=parts.picture,
    )
    (text, _, items), *_ = [seen for seen in clip.seen if seen[2]]
    assert text == "a ball" and items[0]["type"] == "image" and items[0]["data"].shape == (1, 64, 96, 3)
    taken = take(pack, parts, positive)
    assert taken.made is None and taken.guides[0].keyframe and taken.foreign == ()


class HostVae:
    """The host's video VAE as our nodes call it."""

    latent_channels = 24

    def encode(self, pixels):
        assert pixels.is_floating_point() and pixels.shape[-1] == 3 and pixels.max() <= 1
        return torch.zeros(1, 24, 1 if len(pixels) == 1 else 7, pixels.shape[1] // 16, pixels.shape[2] // 16)

    def decode(self, latent):
        return torch.full((1, 22, 64, 96, 3), 0.5)


def test_a_host_vae_encodes_for_us_and_the_label_says_so(pack, parts):
    positive = guided(pack, parts, prompt_of(pack, parts), 9, video_vae=HostVae())
    assert take(pack, parts, positive).foreign == ("guide picture",)
    images, _ = pack.run("H3RuntimeDecodeVideo", latent={"samples": Nested(*streams())}, video_vae=HostVae())
    assert images.shape == (22, 64, 96, 3)


def test_our_text_encoder_answers_as_the_hosts_clip(pack, parts):
    clip = parts.clip.clone()
    (hidden, values), *_ = clip.encode_from_tokens_scheduled(clip.tokenize("a ball"))
    ours = prompt_of(pack, parts)[0]
    assert torch.equal(hidden, ours[0]) and torch.equal(values["minimax_token_tags"], ours[1]["minimax_token_tags"])
    cond, pooled = clip.encode_from_tokens(clip.tokenize("a ball"), return_pooled=True)
    assert torch.equal(cond, hidden) and pooled is None
    shown = clip.tokenize("<Picture 1>", images=[parts.picture])
    assert clip.encode_from_tokens_scheduled(shown)[0][1]["minimax_token_tags"].eq(0).any()
    clips = [
        {"type": "audio"},
        {"type": "video", "data": parts.frames[:3], "timestamps": [0.0, 0.5, 1.0]},
        {"type": "image", "data": parts.picture},
    ]
    rows = clip.encode_from_tokens_scheduled(clip.tokenize("x", minimax_ref_items=clips))[0][0].shape[1]
    assert rows > 3
    assert not hasattr(clip, "add_patches")
    with pytest.raises(AttributeError, match="this node works on the host's own models"):
        clip.add_patches()


def test_our_vaes_answer_as_the_hosts(pack, parts):
    video, audio = parts.video_vae, parts.audio_vae
    latent = video.encode(torch.rand(23, 70, 100, 4))
    assert latent.shape == (1, 24, 7, 4, 6), "cut to 22 frames of 96x64"
    assert video.decode(latent).shape == (1, 22, 64, 96, 3)
    assert torch.equal(video.decode(latent), video.decode_tiled(latent, tile_x=8, tile_y=8, overlap=2, tile_t=2))
    assert (video.spacial_compression_decode(), video.temporal_compression_decode()) == (16, 3)
    sound = audio.encode(torch.rand(1, 1700, 1) * 0.1)
    assert sound.shape == (1, 32, 2, 3)
    assert audio.decode(sound).shape == (1, 2400, 2) and audio.audio_sample_rate == 32000
    for vae, wrong, words in (
        (video, sound, "a video latent|5 dimensions"),
        (video, torch.zeros(1, 32, 2, 4, 4), "it is a sound latent"),
        (audio, latent, "this is the video latent"),
        (video, torch.zeros(2, 24, 7, 4, 6), "one clip"),
    ):
        with pytest.raises(pack.h3.H3Error, match=words):
            vae.decode(wrong)


# ---- media


def test_media_of_any_form(pack):
    media, notes = pack.media, []
    assert media.take_frames(torch.rand(2, 8, 8, 4), "x", notes).shape == (2, 8, 8, 3)
    assert media.take_frames(torch.rand(2, 8, 8, 1), "x", notes).shape == (2, 8, 8, 3)
    mono = {"waveform": torch.rand(2, 1, 44100), "sample_rate": 44100}
    assert media.take_sound(mono, "x", notes).shape == (2, 32000)
    assert media.take_sound({"waveform": torch.rand(1, 6, 320), "sample_rate": 32000}, "x", notes).shape == (2, 320)
    assert media.take_sound(None, "x", notes) is None
    assert len(media.take_clip(torch.rand(10, 8, 8, 3), 12.0, "x", notes)) == 20
    said = "\n".join(notes)
    for words in ("alpha", "first of 2 sounds", "from 44100 to 32000", "6 channels", "12 fps put on 20 at 24"):
        assert words in said
    assert "x: grey read as RGB" in notes and "x: mono sound repeated on both channels" in notes

    class Video:
        def get_components(self):
            alpha = torch.rand(15, 8, 8)
            return SimpleNamespace(images=torch.rand(15, 8, 8, 3), audio=mono, frame_rate=30, alpha=alpha)

    notes.clear()
    taken = media.take_media(Video(), "clip", notes)
    assert taken.frames.shape == (12, 8, 8, 3) and taken.audio.shape == (2, 32000)
    assert "clip: its alpha channel is left out" in notes
    notes.clear()
    options = {"videos": {"video_0": Video()}, "video_sounds": {"video_sound_0": mono}}
    found = pack.references.collect(options, notes)
    assert len(found) == 1 and any("its own sound is left out, video sound 1 takes its place" in note for note in notes)


def test_nan_sound_costs_the_sound_and_is_said(pack, parts):
    broken = {"waveform": torch.full((1, 2, 29333), torch.nan), "sample_rate": 32000}
    path, report = pack.run("H3RuntimeSaveVideo", images=parts.frames, audio=broken, filename_prefix="nan/clip")
    assert "NaN or infinite: made silent" in report and path.endswith(".mp4")
    with pytest.raises(pack.h3.H3Error, match="only 24"):
        pack.run("H3RuntimeSaveVideo", images=parts.frames, fps=16.0)


@pytest.mark.parametrize(
    ("latent", "words"),
    [
        (streams(2.0), "the constant 2"),
        ((torch.randn(1, 24, 7, 12, 12), torch.randn(1, 32, 2, 37)), "pure noise"),
    ],
)
def test_latents_that_cannot_be_clips_are_decoded_with_a_warning(pack, parts, latent, words):
    _, report = pack.run("H3RuntimeDecodeVideo", latent={"samples": Nested(*latent)}, video_vae=parts.video_vae)
    assert "WARNING" in report and words in report


def test_the_shortest_clip_is_five_frames_and_said(pack):
    for frames in range(1, 6):
        latent, width, height, count = pack.run("H3RuntimeEmptyLatent", width=96, height=64, frames=frames)
        assert (width, height, count) == (96, 64, 5) and latent["samples"].unbind()[0].shape[2] == 2
    _, width, height, count = pack.run("H3RuntimeEmptyLatent", seconds=5.167, ratio="16:9")
    assert (width, height, count) == (1344, 768, 124)
    with pytest.raises(pack.h3.H3Error, match="give both"):
        pack.run("H3RuntimeEmptyLatent", width=96)


def test_sides_of_any_size_are_refused_or_snapped_and_said(pack, parts):
    with pytest.raises(pack.h3.H3Error, match="not a multiple of 32: the nearest are 384 and 416"):
        pack.run("H3RuntimeEmptyLatent", width=400, height=720)
    _, width, height, _ = pack.run(
        "H3RuntimeEncodeClip",
        video_vae=parts.video_vae,
        audio_vae=parts.audio_vae,
        images=torch.rand(5, 72, 128, 3),
        size_of=parts.empty,
    )
    assert (width, height) == (96, 64)


def test_adding_a_guide_leaves_the_given_conditioning_as_it_is(pack, parts):
    positive = prompt_of(pack, parts)
    guided(pack, parts, positive, 3)
    assert "minimax_keyframes" not in positive[0][1], "the input is not changed"


def test_the_original_sound_stands_where_a_mask_kept_it(pack, parts):
    vaes = {"video_vae": parts.video_vae, "audio_vae": parts.audio_vae}
    encoded, *_ = pack.run("H3RuntimeEncodeClip", **vaes, images=parts.frames, audio=parts.sound)
    masked, *_ = pack.run("H3RuntimeNoiseMasks", latent=encoded, picture="all", sound="keep")
    latent, _ = pack.run("H3RuntimeSampler", model=parts.model, positive=prompt_of(pack, parts), latent=masked, steps=1)
    given = {"latent": latent, "audio_vae": parts.audio_vae}
    (copy,) = pack.run("H3RuntimeDecodeSound", **given)
    (own,) = pack.run("H3RuntimeDecodeSound", **given, original=parts.sound)
    length = own["waveform"].shape[-1]
    assert torch.equal(own["waveform"], parts.sound["waveform"][..., :length])
    assert (copy["waveform"] - own["waveform"]).abs().max() > 1e-3
    _, report = pack.run("H3RuntimeDecodeAndSave", **vaes, latent=latent, original=parts.sound)
    assert "(all of it) the source's own samples stand" in report
    _, report = pack.run("H3RuntimeDecodeAndSave", **vaes, latent=encoded, original=parts.sound)
    assert "the original sound has no effect" in report


def test_a_flat_picture_of_a_hosts_vae_is_told(pack, parts):
    flat = SimpleNamespace(decode=lambda latent: torch.full((1, 22, 64, 96, 3), 0.5))
    _, report = pack.run("H3RuntimeDecodeVideo", latent={"samples": Nested(*streams())}, video_vae=flat)
    assert "WARNING: every frame of the picture is one flat colour" in report


def test_the_hosts_flags_about_memory_hold_for_us(pack, monkeypatch):
    import os

    from comfy.cli_args import args

    for name in ("H3_NO_PIN", "H3_RESERVE_VRAM"):
        monkeypatch.setenv(name, "x")  # put back at the end whatever is set below
        monkeypatch.delenv(name)
    pack.host.follow_flags()
    assert "H3_NO_PIN" not in os.environ and "H3_RESERVE_VRAM" not in os.environ
    monkeypatch.setattr(args, "disable_pinned_memory", True, raising=False)
    monkeypatch.setattr(args, "reserve_vram", 1.5, raising=False)
    pack.host.follow_flags()
    assert os.environ["H3_NO_PIN"] == "1" and os.environ["H3_RESERVE_VRAM"] == "1.5"
    monkeypatch.setenv("H3_NO_PIN", "0")
    pack.host.follow_flags()
    assert os.environ["H3_NO_PIN"] == "0", "what the user set for the runtime goes first"
