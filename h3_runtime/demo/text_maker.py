"""A small text encoder of the real kind: Qwen3-VL in every part, with seeded weights, and a vocabulary of its own.

    CORPUS, WORLD --byte-level BPE--> vocab.json, merges.txt     800 words + Qwen's 26 + H3's 7 special tokens
    seed          --per tensor------> text_encoder.safetensors   3 layers x 64, vision tower 3 x 48, 2 deepstack taps

The file has ComfyUI's tensor names and bf16 values, as the released single file has, and carries its config in the
header. The weights are scaled so that states stay near unit size: an untrained encoder, but one in which every word
and every pixel moves the condition.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.text_layout import LAYOUTS
from ..text.config import TextEncoderConfig
from ..text.encoder import CONFIG_KEY, OWN_FILE, build_module
from ..text.tokenizer import (
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    Tokenizer,
    import_tokenizers,
    pipeline_around,
)

NUM_WORDS = 800
WORLD_WEIGHT = 50  # how often a word of the small world counts as against one of CORPUS: each becomes one token
BRANCH = 0.5  # of the layers' last linears: a state keeps mostly its own word, with some of its neighbours
EMBEDDING_STEP = 64
BRANCH_ENDS = ("o_proj.weight", "down_proj.weight")
COMFY = next(layout for layout in LAYOUTS if layout.name == "ComfyUI")

CORPUS = """
A red ball rolls slowly across a wooden floor while the camera follows it from left to right.
A woman in a blue coat walks along the beach at sunset, waves breaking on the sand behind her.
A man with a grey beard plays the piano in a quiet room; soft light falls through the window.
Two children run through tall grass, laughing, and a small brown dog jumps around them.
Close-up of rain drops on a green leaf, shallow depth of field, gentle wind, thunder far away.
Wide shot of a city street at night: neon signs, wet asphalt, passing cars, people with umbrellas.
The camera pans over snowy mountains under a clear sky, then tilts down to a frozen lake.
A black cat sits on the windowsill and looks out; outside, birds sing in the trees.
An old train crosses a stone bridge, white steam rising, the whistle sounds twice.
A chef cuts vegetables on a board, quick steps of the knife, water boils in a pot.
Slow motion of a horse galloping over a field, dust and grass flying, drums in the background.
A bright yellow taxi stops in front of a hotel and a young woman with a suitcase steps out.
Aerial view of a river winding through a forest in autumn, orange and gold leaves, morning fog.
A robot made of metal and glass opens its eyes, lights blink, machines hum.
The first frame shows an empty stage; the curtain opens and a dancer turns under a spotlight.
The last frame holds on her face as she smiles and says nothing.
Picture 1 is the first frame and Picture 2 is the last frame of the video.
Use the voice from Audio 1 for the person in Picture 1, and the motion from Video 1.
He says: <d>[English] Hello there, how are you today?</d> and she answers: <d>[English] I am fine, thank you.</d>
The singer steps to the microphone. <|lyrics_start|>Oh, the night is long and the road is far<|lyrics_end|>
Sound: footsteps, a door closing, a clock ticking, distant traffic, music fading in and out.
Style: realistic, cinematic lighting, film grain, warm colours, high detail, 24 frames per second.
Anime style, flat colours, thick lines, a girl with short hair holds a glowing lantern in the dark.
Static camera. Handheld camera. The camera moves forward, backward, up, down, and around the subject.
It is early in the morning; the sun comes up over the sea and the sky turns from blue to pink.
A glass of water falls from the table, breaks, and the pieces scatter over the white tiles.
A boat drifts on a calm lake while the moon shines; frogs and crickets can be heard.
Black and white footage of workers in a factory, sparks, heavy machines, a low steady noise.
A large crowd cheers in the stadium as the player kicks the ball into the net.
Macro shot of a bee on a purple flower, its wings buzzing, petals moving in the breeze.
"""

# Every word of the small world in which the carried model was trained; each is one token, with a space before it.
WORLD = """
 a an the of on in to at from with and then while is it
 red green blue yellow orange purple pink cyan white black grey brown dark light bright
 circle square triangle ring star diamond disc ball shape ground background colour picture Picture Audio Video
 small large big tiny medium wide
 moves move moving left right up down upwards downwards top bottom middle centre side across diagonally
 stays still grows shrinks bounces jumps turns rotates changes appears fades slow fast slowly quickly
 low high deep tone tones beep beeps sound note steady silent silence rising falling rises falls loud quiet pulses
 one two three four once twice first last frame into
"""


def make_text_encoder(folder: str | Path, seed: int) -> Path:
    """Write the encoder and its vocabulary into ``folder`` (made if needed) and return the encoder's path.

    The same seed gives the same bytes; the vocabulary depends on no seed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(make_vocabulary(folder))
    tensors = seeded_weights(config, seed)
    path = folder / OWN_FILE
    _write_whole(path, lambda part: _save(tensors, part, {CONFIG_KEY: json.dumps(config.to_dict())}))
    return path


def make_vocabulary(folder: Path) -> Tokenizer:
    """Learn the byte-level BPE from CORPUS and WORLD, write vocab.json and merges.txt, and read them back."""
    tokenizers = import_tokenizers()
    pipeline = pipeline_around(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=NUM_WORDS,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=[],
    )
    world = [f" {word}" for word in WORLD.split()]
    pipeline.train_from_iterator([*CORPUS.strip().splitlines(), *(world * WORLD_WEIGHT)], trainer)
    learned = json.loads(pipeline.to_str())["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in learned["merges"]]
    words = dict(sorted(learned["vocab"].items(), key=lambda word: word[1]))
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    _write_text(vocab, json.dumps(words, ensure_ascii=False))
    _write_text(merges, "\n".join(["#version: 0.2", *pairs]) + "\n")
    return Tokenizer.from_files(vocab, merges)


def make_config(tokenizer: Tokenizer) -> TextEncoderConfig:
    """Small, with the released proportions: inner width above hidden, fewer key heads, taps before the last layer."""
    return TextEncoderConfig(
        vocab=-(-tokenizer.size // EMBEDDING_STEP) * EMBEDDING_STEP,
        hidden=64,
        layers=3,
        ffn=160,
        heads=6,
        kv_heads=2,
        head_dim=16,
        rope_sections=(4, 2, 2),
        vision_depth=3,
        vision_hidden=48,
        vision_ffn=96,
        vision_heads=3,
        vision_positions=256,
        deepstack=(0, 1),
        image_token=tokenizer.token_id(IMAGE_PAD),
        video_token=tokenizer.token_id(VIDEO_PAD),
        vision_start_token=tokenizer.token_id(VISION_START),
        vision_end_token=tokenizer.token_id(VISION_END),
    )


def seeded_weights(config: TextEncoderConfig, seed: int) -> dict[str, Tensor]:
    """bf16 weights under ComfyUI's names, drawn in the order of the names from one generator."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: value.shape for name, value in build_module(config).state_dict().items()}
    tensors = {}
    for name in sorted(shapes):
        tensors[COMFY.stored_name(name)] = _draw(name, shapes[name], generator).to(torch.bfloat16)
    return tensors


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        return values * 0.05 + (1.0 if name.endswith("weight") else 0.0)
    if name.endswith("bias"):
        return values * 0.05
    if "embed_tokens" in name or "pos_embed" in name:
        return values
    scale = BRANCH if name.endswith(BRANCH_ENDS) and not name.startswith("visual") else 1.0
    return scale * values / values[0].numel() ** 0.5  # keeps the size of what passes


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, str(path), metadata=metadata)


def _write_text(path: Path, text: str) -> None:
    _write_whole(path, lambda part: part.write_bytes(text.encode("utf-8")))


def _write_whole(path: Path, write) -> None:
    """A file under its name is complete: it is written beside and renamed."""
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)
