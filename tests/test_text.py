"""The prompt's way to the DiT: vocabulary, presentation, picture preprocessing, encoder, the small encoder's maker.

Oracles: transformers' own Qwen3-VL, Qwen2 tokenizer and picture processor; diffusers' presentation of H3; the ids that
the release publishes (with the real vocabulary, where COMFYUI_PATH names a ComfyUI).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from h3_runtime.demo.maker import SEED
from h3_runtime.demo.text_maker import CORPUS, WORLD, make_text_encoder
from h3_runtime.errors import CheckpointError, H3Error
from h3_runtime.text.config import TextEncoderConfig
from h3_runtime.text.encoder import TextEncoder, import_qwen, open_weights
from h3_runtime.text.presentation import (
    Clip,
    Picture,
    Sound,
    TextPiece,
    lint_pace,
    lint_prompt,
    present,
    sample_clip,
    tokenize,
)
from h3_runtime.text.tokenizer import COMFY_VOCABULARY, H3_TOKENS, IMAGE_PAD, QWEN_SPECIAL_TOKENS, VIDEO_PAD, Tokenizer
from h3_runtime.text.vision import clip_size, picture_size, preprocess_clip, preprocess_picture

PROMPT = "A red ball rolls slowly across a wooden floor. He says: <d>[English] Hello there</d>"
TEXTS = (
    PROMPT,
    "  leading, trailing and   inner spaces \n\n\t and lines\r\n",
    "Ünïcödé café e\u0301 A\u030a 你好，世界 日本語 한국어 नमस्ते مرحبا 🙂👩‍👩‍👧 ½ ² Ⅷ",
    "it's we'LL I'D 12345 3.14159 foo_bar::baz() {\"a\": [1, 2]} https://x.y/z?q=1",
    "<|cutoff|><|lyrics_start|>la la<|lyrics_end|> <|caption_start|>x<|caption_end|><d></d>< d >",
    "<|im_start|>user<|im_end|><think>hm</think><tool_call>",
    "a" * 300 + "\u00a0\u2003\u200b" + "ﬁ",
)


def noise(seed: int, height: int, width: int, frames: int | None = None) -> np.ndarray:
    shape = (height, width, 3) if frames is None else (frames, height, width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("encoder")
    make_text_encoder(made, seed=3)
    return made


@pytest.fixture(scope="module")
def encoder(folder) -> TextEncoder:
    return TextEncoder.load(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def deeper(encoder):
    """transformers' whole model: the same weights, two layers more and a last norm."""
    _, version = import_qwen()
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    whole = TextEncoderConfig.from_dict({**encoder.config.to_dict(), "layers": encoder.config.layers + 2})
    model = Qwen3VLForConditionalGeneration(whole.to_transformers(version)).eval()
    missing, unexpected = model.model.load_state_dict(encoder.module.state_dict(), strict=False)
    assert not unexpected and all(
        "layers.3" in n or "layers.4" in n or n.endswith("model.norm.weight") for n in missing
    )
    return model


@pytest.fixture(scope="module")
def processor(encoder):
    """The two things of Qwen3VLProcessor that a presentation needs; the class itself wants torchvision."""
    config = encoder.config

    def kinds(batch):
        return [[{config.image_token: 1, config.video_token: 2}.get(token, 0) for token in ids] for ids in batch]

    return SimpleNamespace(image_processor=picture_oracle(), create_mm_token_type_ids=kinds)


def released_processing():
    """transformers' module with the picture processor that works on Pillow pictures; 4.57 has no other."""
    try:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as released
    except ImportError:
        from transformers.models.qwen2_vl import image_processing_qwen2_vl as released
    return released


def picture_oracle():
    released = released_processing()
    kind = getattr(released, "Qwen2VLImageProcessorPil", None) or released.Qwen2VLImageProcessor
    limits = {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    if import_qwen()[1] < (5,):
        limits = {"min_pixels": 65_536, "max_pixels": 16_777_216}
    half = [0.5, 0.5, 0.5]
    return kind(patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=half, image_std=half, **limits)


def diffusers_encoders():
    pytest.importorskip("diffusers")
    from diffusers.modular_pipelines.minimax_h3 import encoders

    return encoders


class OracleTokenizer:
    """Our small vocabulary behind the two calls that diffusers makes."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": self.tokenizer.encode(text)}

    def convert_tokens_to_ids(self, name):
        return self.tokenizer.token_id(name)


# ---- vocabulary


def real_vocabulary(incomplete) -> Tokenizer:
    path = os.environ.get("COMFYUI_PATH")
    if not path or not (Path(path) / COMFY_VOCABULARY / "vocab.json").is_file():
        incomplete("published token ids with the real vocabulary", "COMFYUI_PATH names no ComfyUI", needs="comfyui")
    return Tokenizer.find(folder=Path(path) / COMFY_VOCABULARY)


@pytest.mark.needs("comfyui")
def test_published_ids(incomplete):
    tokenizer = real_vocabulary(incomplete)
    assert [tokenizer.token_id(token) for token in H3_TOKENS] == list(range(151_669, 151_676))
    assert [tokenizer.token_id(token) for token in QWEN_SPECIAL_TOKENS] == list(range(151_643, 151_669))
    published = {
        "<d>[English] hold on</d><|cutoff|>": [151669, 58, 22574, 60, 3331, 389, 151670, 151671],
        "<Picture 1>: ": [21604, 3826, 220, 16, 26818, 220],
        "<Audio 1>: ": [65406, 220, 16, 26818, 220],
        "<Video 2>: ": [27, 10724, 220, 17, 26818, 220],
        "<0.2 seconds>": [27, 15, 13, 17, 6486, 29],
    }
    for text, ids in published.items():
        assert tokenizer.encode(text) == ids
    assert tokenize(present("", ()), tokenizer).ids.tolist() == [151_643]


@pytest.mark.needs("comfyui")
def test_real_vocabulary_equals_transformers(incomplete):
    tokenizer = real_vocabulary(incomplete)
    from transformers import Qwen2Tokenizer

    files = Path(tokenizer.source)
    oracle = Qwen2Tokenizer(vocab=str(files / "vocab.json"), merges=str(files / "merges.txt"))
    oracle.add_tokens(list(QWEN_SPECIAL_TOKENS) + list(H3_TOKENS), special_tokens=True)
    for text in TEXTS:
        assert tokenizer.encode(text) == oracle(text, add_special_tokens=False)["input_ids"]


def test_small_vocabulary(encoder):
    tokenizer = encoder.tokenizer
    words = json.loads((Path(tokenizer.source) / "vocab.json").read_text(encoding="utf-8"))
    specials = [tokenizer.token_id(token) for token in QWEN_SPECIAL_TOKENS + H3_TOKENS]
    assert specials == list(range(len(words), len(words) + 33)) and tokenizer.size == len(words) + 33
    ids = tokenizer.encode("<d>[English] Hello there</d><|cutoff|>")
    assert ids[0] == specials[26] and ids[-2:] == specials[27:29]
    assert len(tokenizer.encode(CORPUS)) < len(CORPUS) / 2  # it has learned words, not letters
    assert all(len(tokenizer.encode(f" {word}")) == 1 for word in WORLD.split())  # the small world's words stay whole
    assert tokenizer.encode("") == []
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")  # NFC
    with pytest.raises(H3Error, match="U\\+D800"):
        tokenizer.encode("half \ud800")
    with pytest.raises(H3Error, match="no token"):
        tokenizer.token_id("<|nothing|>")


def test_every_byte_of_a_prompt_reaches_the_ids(encoder):
    """The words of the ids, put together, are the text again: nothing is dropped or unknown."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = {i: w for w, i in json.loads((Path(encoder.tokenizer.source) / "vocab.json").read_text("utf-8")).items()}
    words |= {encoder.tokenizer.token_id(token): token for token in QWEN_SPECIAL_TOKENS + H3_TOKENS}
    letters = ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("plain words, 2 of them", "你好 🙂", "x" * 99):
        written = "".join(words[i] for i in encoder.tokenizer.encode(text))
        assert written == "".join(piece for piece, _ in letters.pre_tokenize_str(text))


def test_vocabulary_is_found_or_the_places_are_named(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    models = tmp_path / "ComfyUI" / "models" / "text_encoders"
    models.mkdir(parents=True)
    file = models / "encoder.safetensors"
    with pytest.raises(H3Error, match=r"no vocabulary .*encoder.safetensors.*looked in: .*text_encoders.*qwen25"):
        Tokenizer.find(file)
    here = tmp_path / "ComfyUI" / COMFY_VOCABULARY
    here.mkdir(parents=True)
    for name in ("vocab.json", "merges.txt"):
        (here / name).write_bytes((folder / name).read_bytes())
    assert Tokenizer.find(file).source == str(here)
    assert Tokenizer.find(comfy=tmp_path / "ComfyUI").source == str(here)
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "ComfyUI"))
    assert Tokenizer.find().source == str(here)
    assert Tokenizer.find(folder / "text_encoder.safetensors").source == str(folder)  # beside it comes first
    with pytest.raises(H3Error, match="looked in"):
        Tokenizer.find(folder, folder=tmp_path)


@pytest.mark.parametrize(
    "vocab, merges, message",
    [
        (None, "", "vocab.json is missing"),
        ("{broken", "", "no readable JSON"),
        ("[1, 2]", "", "is no vocabulary"),
        ('{"a": 0, "b": 2}', "", "without gap"),
        ('{"a": 0, "b": 1}', None, "merges.txt is missing or unreadable"),
        ('{"a": 0, "b": 1}', "#version: 0.2\na b\n", "line 2: 'a b' joins no two words"),
        ('{"a": 0, "b": 1}', "ab\n", "line 1: 'ab' joins no two words"),
        ('{"a": 0, "<d>": 1}', "", "token <d> on id 1 where 28"),
    ],
)
def test_damaged_vocabulary(tmp_path, vocab, merges, message):
    for name, text in (("vocab.json", vocab), ("merges.txt", merges)):
        if text is not None:
            (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt")


# ---- presentation


def test_presentation_equals_diffusers(encoder):
    step = diffusers_encoders().MiniMaxH3Ref2VATextEncoderStep
    items = [
        Picture((4, 6)),
        Sound(),
        Clip((6, 4), (0.25, 1.25, 2.0), has_sound=True),
        Picture((2, 2)),
        Clip((2, 4), (0.25,)),
        Sound(),
    ]
    references = [
        SimpleNamespace(
            kind={Picture: "image", Clip: "video", Sound: "audio"}[type(item)],
            has_audio=isinstance(item, Sound) or getattr(item, "has_sound", False),
        )
        for item in items
    ]
    ids, tags = step._build_presentation(
        OracleTokenizer(encoder.tokenizer), PROMPT, references, [6, 1], [6, 2], [[0.25, 1.25, 2.0], [0.25]]
    )
    ours = tokenize(present(PROMPT, items), encoder.tokenizer)
    assert ours.ids.tolist() == ids and ours.tags.tolist() == tags and not ours.is_empty
    labels = [segment.text for segment in present(PROMPT, items) if isinstance(segment, TextPiece)]
    assert labels == [
        "<Picture 1>: ",
        "<Audio 1>: ",
        "<Audio 2>: ",
        "<Video 1>: ",
        "<0.2 seconds>",
        "<1.2 seconds>",
        "<2.0 seconds>",
        "<Picture 2>: ",
        "<Video 2>: ",
        "<0.2 seconds>",
        "<Audio 3>: ",
        PROMPT,
    ]


def test_clip_sampling_equals_diffusers():
    step = diffusers_encoders().MiniMaxH3Ref2VATextEncoderStep()
    for num_frames, fps in [(13, 24.0), (24, 24.0), (25, 24.0), (48, 24.0), (362, 24.0), (61, 25.0), (90, 29.97)]:
        numbered = np.arange(num_frames).reshape(-1, 1, 1, 1)
        frames, times = step._sample_video_condition_frames(numbered, fps, 2.0, 2)
        assert sample_clip(num_frames, fps) == (tuple(int(frame.item()) for frame in frames), tuple(times))
    with pytest.raises(H3Error, match=r"12 frames at 24 fps is too short.*13 frames"):
        sample_clip(12)


def test_tags_cover_the_whole_block(encoder):
    rows = tokenize(present("a b", [Picture((4, 4))]), encoder.tokenizer)
    label, prompt = (len(encoder.tokenizer.encode(text)) for text in ("<Picture 1>: ", "a b"))
    assert rows.tags.tolist() == [1] * label + [0] * 6 + [1] * prompt
    assert rows.ids[rows.tags == 0].tolist() == [
        encoder.config.vision_start_token,
        *[encoder.config.image_token] * 4,
        encoder.config.vision_end_token,
    ]


def test_positions_equal_transformers(encoder, deeper, processor):
    items = [Picture((4, 10)), Clip((6, 4), (0.25, 1.25), has_sound=True), Picture((8, 2)), Clip((2, 2), (0.25,))]
    rows = tokenize(present(PROMPT, items), encoder.tokenizer)
    kinds = {}
    if import_qwen()[1] >= (5,):
        kinds["mm_token_type_ids"] = torch.tensor(processor.create_mm_token_type_ids([rows.ids.tolist()]))
    theirs, _ = deeper.model.get_rope_index(
        rows.ids[None],
        **kinds,
        image_grid_thw=torch.tensor([[1, 4, 10], [1, 8, 2]]),
        video_grid_thw=torch.tensor([[2, 6, 4], [1, 2, 2]]),
    )
    assert torch.equal(rows.positions, theirs[:, 0])


def test_pads_in_the_prompt_are_refused(encoder):
    for pad in (IMAGE_PAD, VIDEO_PAD):
        with pytest.raises(H3Error, match="kept for the rows of pictures"):
            encoder.encode(f"look at {pad}")


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("A cat. <d>[English] Hi</d> then <d>[中文] 你好</d> \"quoted\" 'words'", []),
        ("no speech at all, a < b, <div>", []),
        ("<d>[English] hi", ["<d> at character 1 is never closed"]),
        ("hi</d> there", ["</d> at character 3 has no <d> before it"]),
        ("<d>[English] a <d>[English] b</d>", ["lies inside the <d> at character 1"]),
        ("<d>[English] a</d></d>", ["has no <d> before it"]),
        ("<D>[English] a</D>", ["'<D>' at character 1 is read as plain letters", "'</D>' at character 15"]),
        ("＜d＞[English] a< /d >", ["'＜d＞' at character 1", "'< /d >' at character 15"]),
        ("<d>hello</d>", ["names no language"]),
        ("<d>[English]  </d>", ["holds no words"]),
        ("<d></d>", ["names no language", "holds no words"]),
    ],
)
def test_dialogue_notes(prompt, expected):
    notes = lint_prompt(prompt)
    assert len(notes) == len(expected), notes
    for note, part in zip(notes, expected):
        assert part in note


@pytest.mark.parametrize(
    "prompt, seconds, expected",
    [
        ("He says <d>[English] one two three four five six seven eight.</d>", 2.0, None),
        ("He says <d>[English] one two three four five six seven eight nine.</d>", 2.0, "9 words"),
        ("<d>[English] don't stop - it's</d> and <d>[French] jusqu'à ici</d>", 1.0, "5 words"),
        ("<d>[Chinese] 今天天气很好我们走吧</d>", 1.0, "10 characters"),
        ("<d>[Chinese] 今天天气很好吗</d>", 1.0, None),
        ("<d>[Japanese] Tokyo で会おう</d>", 0.5, "1 word and 4 characters: at the fastest"),
        ("no dialogue, however many words are in it, counts for anything here at all", 0.2, None),
    ],
)
def test_dialogue_that_cannot_be_spoken_in_time(prompt, seconds, expected):
    notes = lint_pace(prompt, seconds)
    assert len(notes) == (expected is not None)
    assert expected is None or (expected in notes[0] and f"lasts {seconds:.1f} s" in notes[0]), notes


# ---- pictures


@pytest.mark.parametrize("size", [(256, 256), (192, 192), (500, 900), (352, 608), (33, 700), (10, 1500)])
def test_pictures_equal_the_released_processor(size):
    picture = noise(1, *size)
    theirs = picture_oracle()(images=[picture], return_tensors="pt")
    ours = preprocess_picture(picture)
    assert list(ours.grid) == theirs["image_grid_thw"][0].tolist()
    levels = (ours.patches - theirs["pixel_values"]).abs() * 127.5
    if picture_size(*size) == size:
        assert levels.max() < 1e-4
    else:  # Pillow and torch round the same filter's byte passes apart by a level or two, rarely
        assert levels.max() < 2.5 and (levels > 0.5).float().mean() < 0.02


def test_sizes_equal_transformers():
    picture_rule = released_processing().smart_resize
    generator = np.random.default_rng(0)
    for height, width in generator.integers(1, 9000, (300, 2)).tolist() + [[2048, 6304], [2048, 8192], [16, 3200]]:
        if max(height, width) <= 200 * min(height, width):
            assert picture_size(height, width) == picture_rule(height, width, 32, 65_536, 16_777_216)
    assert clip_size(25, 768, 1344) == (768, 1344) and clip_size(26, 768, 1344) == (736, 1280)
    assert clip_size(30, 768, 1344) == clip_size(31, 768, 1344) == (672, 1184)
    module = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    smallest = 8 if import_qwen()[1] >= (5,) else 32  # older versions refuse edges below one merged patch
    for frames, height, width in generator.integers((2, smallest, smallest), (40, 2200, 2200), (300, 3)).tolist():
        if max(height, width) <= 200 * min(height, width):
            assert clip_size(frames, height, width) == module.smart_resize(
                frames, height, width, 2, 32, 4_096, 25_165_824
            )


def test_clip_rows_hold_pairs_of_frames():
    frames = noise(2, 64, 96, frames=3)
    seen = preprocess_clip(frames)
    assert seen.grid == (2, 4, 6) and seen.patches.shape == (48, 1536)
    still = [preprocess_clip(np.stack([frame, frame])).patches for frame in frames]
    rows = seen.patches.reshape(2, 24, 3, 2, 256)  # [pair, patch, colour, time, pixel]
    for pair, first, second in ((0, 0, 1), (1, 2, 2)):
        for time, frame in ((0, first), (1, second)):
            assert torch.equal(rows[pair, :, :, time], still[frame].reshape(24, 3, 2, 256)[:, :, time])


@pytest.mark.parametrize(
    "pixels, message",
    [
        (np.zeros((8, 8, 3), np.float32), "must be uint8"),
        (np.zeros((8, 8, 4), np.uint8), r"\[8, 8, 4\]"),
        (np.zeros((0, 8, 3), np.uint8), r"\[0, 8, 3\]"),
        (np.zeros((8, 1700, 3), np.uint8), "crop it first"),
        ("picture.png", "not str"),
    ],
)
def test_bad_pictures(encoder, pixels, message):
    with pytest.raises(H3Error, match=message):
        encoder.encode("x", [pixels])


# ---- encoder


@pytest.mark.parametrize("pictures", [(), ((256, 320), (512, 128))])
def test_state_after_the_layer_is_transformers_own(encoder, deeper, processor, pictures):
    """Bit for bit the hidden state that the whole model has after the same layer, and that diffusers reads."""
    pixels = [noise(seed, *size) for seed, size in enumerate(pictures)]
    ours = encoder.encode(PROMPT, pixels)
    seen = [preprocess_picture(picture) for picture in pixels]
    rows = tokenize(present(PROMPT, [Picture(value.grid[1:]) for value in seen]), encoder.tokenizer)
    vision = {}
    if seen:
        vision["pixel_values"] = torch.cat([value.patches for value in seen])
        vision["image_grid_thw"] = torch.tensor([value.grid for value in seen])
    theirs = diffusers_encoders().get_qwen3vl_prompt_embeds(
        deeper, processor, rows.ids.tolist(), vision, text_encoder_layer=encoder.config.layers
    )
    assert torch.equal(ours.hidden, theirs[0].detach())
    assert torch.equal(ours.tags, rows.tags)
    assert ours.hidden.dtype == torch.float32 and ours.tags.dtype == torch.int64


def test_keyframe_condition_equals_diffusers_block(encoder, deeper, processor):
    """The reference's whole block, its own picture processor included (sizes that need no resize)."""
    encoders = diffusers_encoders()
    keyframes = [noise(5, 256, 288), noise(6, 256, 288)]
    components = SimpleNamespace(
        tokenizer=OracleTokenizer(encoder.tokenizer),
        processor=processor,
        text_encoder=deeper,
        text_encoder_layer=encoder.config.layers,
        text_tag=1,
        video_tag=0,
        _execution_device=torch.device("cpu"),
    )
    processor.image_processor.merge_size = 2
    block = encoders.MiniMaxH3FL2VATextEncoderStep()
    state = SimpleNamespace(prompt=PROMPT, keyframes=keyframes)
    block.get_block_state, block.set_block_state = lambda _: state, lambda *_: None
    block(components, None)
    ours = encoder.encode(PROMPT, keyframes)
    error = (ours.hidden - state.prompt_embeds[0]).norm() / state.prompt_embeds.norm()
    assert error < 1e-6
    assert torch.equal(ours.tags, state.text_token_tags)


def test_clips_and_sounds_equal_transformers(encoder, deeper, processor):
    picture, clip = preprocess_picture(noise(1, 256, 256)), preprocess_clip(noise(2, 64, 64, frames=4))
    items = [Clip(clip.grid[1:], (0.25, 1.25), has_sound=True), Sound(), Picture(picture.grid[1:])]
    ours = encoder.encode_items(PROMPT, items, [clip, picture])
    rows = tokenize(present(PROMPT, items), encoder.tokenizer)
    vision = {
        "pixel_values": picture.patches,
        "image_grid_thw": torch.tensor([picture.grid]),
        "pixel_values_videos": clip.patches,
        "video_grid_thw": torch.tensor([clip.grid]),
    }
    theirs = diffusers_encoders().get_qwen3vl_prompt_embeds(
        deeper, processor, rows.ids.tolist(), vision, text_encoder_layer=encoder.config.layers
    )
    assert torch.equal(ours.hidden, theirs[0].detach())


def test_prompt_and_pictures_matter_and_repeat(encoder):
    base = encoder.encode(PROMPT)
    assert torch.equal(base.hidden, encoder.encode(PROMPT).hidden)
    other = encoder.encode(PROMPT.replace("red", "blue"))
    assert not torch.allclose(base.hidden[-1], other.hidden[-1], atol=1e-3)
    pictures = [noise(1, 256, 256), noise(2, 256, 256)]
    with_first, with_second = (encoder.encode(PROMPT, [picture]) for picture in pictures)
    assert with_first.hidden.shape == with_second.hidden.shape
    vision = with_first.tags == 0
    assert int(vision.sum()) == 66
    label = len(encoder.tokenizer.encode("<Picture 1>: "))
    assert torch.equal(with_first.hidden[:label], with_second.hidden[:label])  # causal: the label comes before
    assert (with_first.hidden - with_second.hidden)[label + 1 :].abs().amax(1).min() > 1e-4
    swapped = encoder.encode(PROMPT, pictures[::-1])
    assert not torch.equal(encoder.encode(PROMPT, pictures).hidden, swapped.hidden)
    assert "rows of the prompt" in base.notes[0] and str(len(base.tags)) in base.notes[0]
    assert "text_encoder.safetensors" in base.source and "layer 3" in base.source


@pytest.mark.parametrize("count, layers", [(40, 3), (500, 3), (2000, 3), (8000, 1)])
def test_long_prompts_are_never_cut(folder, count, layers):
    encoder = TextEncoder.load(folder, dtype=torch.float32, layers=layers)
    middle = " ball" * count
    base, last, first = (
        encoder.encode(a + middle + b) for a, b in ((" red", " red"), (" red", " blue"), (" blue", " red"))
    )
    assert len(base.tags) >= count and str(len(base.tags)) in base.notes[0]
    assert not torch.allclose(base.hidden[-1], last.hidden[-1], atol=1e-3)
    assert not torch.equal(base.hidden[-1], first.hidden[-1])  # the first word still reaches the last row


def test_empty_prompts(encoder):
    empty = encoder.encode("")
    assert empty.hidden.shape == (1, encoder.text_dim) and empty.tags.tolist() == [1]
    assert any("single pad token" in note for note in empty.notes)
    pad = encoder.encode("<|endoftext|>")
    assert torch.equal(empty.hidden, pad.hidden)
    assert any("no words" in note for note in encoder.encode("  \n").notes)
    pictured = encoder.encode("", [noise(0, 256, 256)])
    assert pictured.tags[-1] == 0 and any("no words" in note for note in pictured.notes)
    assert any("embedding" in note for note in encoder.encode("a cat, embedding:style").notes)
    with pytest.raises(H3Error, match="prompt is list"):
        encoder.encode(["a", "b"])


def test_bf16_equals_transformers_and_keeps_rotary_tables(folder, encoder, deeper):
    stored = TextEncoder.load(folder)  # the file's own type
    assert stored.dtype == torch.bfloat16 and stored.encode(PROMPT).hidden.dtype == torch.bfloat16
    for name, table in stored.module.named_buffers():
        assert table.dtype == torch.float32 and torch.equal(table, dict(deeper.model.named_buffers())[name])
    fp32 = encoder.encode(PROMPT).hidden
    assert (stored.encode(PROMPT).hidden.float() - fp32).norm() / fp32.norm() < 0.05
    assert not any(value.requires_grad for value in stored.module.parameters())


# ---- the maker


def test_same_seed_same_bytes(folder, encoder, tmp_path):
    make_text_encoder(tmp_path / "again", seed=3)
    make_text_encoder(tmp_path / "other", seed=4)
    for name in ("vocab.json", "merges.txt", "text_encoder.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == sorted(p.name for p in folder.iterdir())
    assert (tmp_path / "other" / "vocab.json").read_bytes() == (folder / "vocab.json").read_bytes()
    other = TextEncoder.load(tmp_path / "other", dtype=torch.float32)
    assert not torch.equal(other.encode(PROMPT).hidden, encoder.encode(PROMPT).hidden)
    assert encoder.text_dim == 64 and open_weights(folder).layout.name == "ComfyUI"
    assert 0.3 < float(encoder.encode(PROMPT).hidden.std()) < 10


FROZEN = {
    "merges.txt": "bcaedb186181a0991e9c1408ff29ddea5c2566a4e1577ddd2fc743da16b38c93",
    "text_encoder.safetensors": "08c47b25f974fc50b7b48ce06f96285f21c5e3e48dcdc78aed3b6a0e56356768",
    "vocab.json": "5ab7594fc43edc49a5e22404eda78af26c3ddfd7e685706ba11ae235f0de62be",
}
FROZEN_IDS = {" circle": 1, " red": 1, "<d>": 1, "</d>": 1}  # words -> how many tokens
FROZEN_STATES = {  # the last row's first values: of text, and of text after a picture
    False: (-1.771974, 0.302956, 0.567021, -2.034698),
    True: (0.525370, -1.195375, -0.810118, 2.017981),
}


def test_the_small_encoder_is_frozen(tmp_path):
    """The carried model was trained on these states: another vocabulary, weight or way to run them makes it useless.
    Whoever changes one of them trains the carried model anew, and only then these figures."""
    make_text_encoder(tmp_path, SEED)
    made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert made == FROZEN
    encoder = TextEncoder.load(tmp_path, dtype=torch.float32)
    assert {word: len(encoder.tokenizer.encode(word)) for word in FROZEN_IDS} == FROZEN_IDS
    picture = np.arange(64 * 64 * 3).reshape(64, 64, 3).astype(np.uint8)
    states = {
        False: encoder.encode("a red circle moves left on a blue ground").hidden,
        True: encoder.encode("the circle of <Picture 1> grows", [picture]).hidden,
    }
    assert [len(states[shown]) for shown in (False, True)] == [9, 83]
    for shown, values in FROZEN_STATES.items():  # versions and machines differ in the last bits
        assert torch.allclose(states[shown][-1, :4], torch.tensor(values), atol=1e-4), states[shown][-1, :4]
