"""python -m h3_runtime.demo.training PIECE [--work DIR]: make the carried model, piece by piece, from seeds alone.

    vaes     both VAEs, computed from the world (minutes)
    clips    latents and text states of the training scenes (minutes); --first: the ones without conditions alone
    dit      --steps N --of M: the DiT up to step N of M; run it again with a larger N to go on
    lora     the few-step LoRA
    files    everything into the package

Pieces save what they made into DIR; a piece that is there already is used as it is.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch

from ...models.audio_vae import AudioVAE
from ...models.dit import DiT
from ...models.video_vae import VideoVAE
from ...text.encoder import TextEncoder
from ..carried import CARRIED_MODEL, FEW_STEP_LORA
from ..maker import SEED
from ..text_maker import make_text_encoder
from . import audio_vae, clips, dit, lora, video_vae
from .files import write_part, write_tensors

CLIPS_SEED, PAIRS_SEED, LORA_SEED = 1, 3, 4


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def make_vaes(work: Path) -> None:
    torch.save(video_vae.start().state_dict(), work / "video_vae.pt")
    torch.save(audio_vae.build().state_dict(), work / "audio_vae.pt")


def load_vaes(work: Path) -> tuple[VideoVAE, AudioVAE]:
    made = []
    for kind, config, name in (
        (VideoVAE, video_vae.CONFIG, "video_vae.pt"),
        (AudioVAE, audio_vae.CONFIG, "audio_vae.pt"),
    ):
        vae = kind(config).eval().requires_grad_(False)
        vae.load_state_dict(torch.load(work / name, weights_only=True))
        made.append(vae)
    return made[0], made[1]


def make_clips(work: Path, plan) -> None:
    text = make_text_encoder(work / "text", SEED)
    encoder = TextEncoder.load(text, text.parent, dtype=torch.float32)
    file = work / "clips.pt"
    done = clips.load(file) if file.is_file() else []
    groups = clips.make_all(clips.Maker(*load_vaes(work), encoder), CLIPS_SEED, say, plan, done)
    clips.save(groups, file)


def loss_weights(work: Path) -> tuple[torch.Tensor, torch.Tensor]:
    picture, sound = load_vaes(work)
    return dit.channel_weights(picture.latents_std, 4), dit.channel_weights(sound.latents_std, 1)


def train_dit(work: Path, stop: int, total: int) -> None:
    dit.train(clips.load(work / "clips.pt"), loss_weights(work), work / "dit.pt", (stop, total), say)


def train_lora(work: Path, steps: int, count: int) -> None:
    model = as_stored(dit.load_average(work / "dit.pt"))
    examples = clips.load(work / "clips.pt")[0]
    pairs = lora.make_pairs(model, examples, count, PAIRS_SEED)
    say(f"LoRA: {count} batches of pairs made")
    weights = loss_weights(work)
    tensors = lora.train(model, pairs, steps, LORA_SEED, lambda m, batch: dit.loss_of(m, batch, weights), say)
    torch.save(tensors, work / "lora.pt")


def as_stored(model: DiT) -> DiT:
    """``model`` with its weights rounded as its file holds them."""
    for name, value in model.named_parameters():
        if not name.startswith(DiT.float32_islands):
            value.data = value.data.to(torch.bfloat16).float()
    return model


def write_files(work: Path) -> None:
    picture, sound = load_vaes(work)
    CARRIED_MODEL.mkdir(parents=True, exist_ok=True)
    write_part(CARRIED_MODEL / "video_vae.safetensors", picture, video_vae.CONFIG)
    write_part(CARRIED_MODEL / "audio_vae.safetensors", sound, audio_vae.CONFIG)
    write_part(CARRIED_MODEL / "dit.safetensors", dit.load_average(work / "dit.pt"), dit.CONFIG)
    text = make_text_encoder(work / "text", SEED)
    for name in (text.name, "vocab.json", "merges.txt"):
        shutil.copyfile(text.parent / name, CARRIED_MODEL / name)
    if (work / "lora.pt").is_file():
        about = {"rank": str(lora.RANK), "alpha": str(lora.RANK), "name": "few_step, 4 forwards, of the carried DiT"}
        write_tensors(FEW_STEP_LORA, torch.load(work / "lora.pt", weights_only=True), about)
    total = sum(file.stat().st_size for file in CARRIED_MODEL.rglob("*") if file.is_file())
    say(f"{CARRIED_MODEL}: {total / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m h3_runtime.demo.training", description=__doc__.splitlines()[0])
    parser.add_argument("piece", choices=("vaes", "clips", "dit", "lora", "files"))
    parser.add_argument("--work", type=Path, default=Path("training_work"), help="folder for what pieces make")
    parser.add_argument("--steps", type=int, default=0, help="dit: up to which step; lora: how many")
    parser.add_argument("--of", type=int, default=0, help="dit: steps of the whole run, over which the rate falls")
    parser.add_argument("--pairs", type=int, default=10, help="lora: batches of 16 pairs")
    parser.add_argument("--first", action="store_true", help="clips: only the text-to-video ones, to begin with")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.piece == "vaes":
        make_vaes(given.work)
    elif given.piece == "clips":
        make_clips(given.work, clips.FIRST_PLAN if given.first else clips.PLAN)
    elif given.piece == "dit":
        train_dit(given.work, given.steps, given.of or given.steps)
    elif given.piece == "lora":
        train_lora(given.work, given.steps or 100, given.pairs)
    else:
        write_files(given.work)


if __name__ == "__main__":
    main()
