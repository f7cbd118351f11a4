"""Small checkpoints in every layout that is in circulation, written by hand from the golden files.

The golden files hold the same weights under several namings; here they become the folders and files that people have.
"""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3_runtime.checkpoint.reader import places_looked_at
from h3_runtime.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden"
CONFIGS = {
    case["id"].split("/")[0]: case["config"]["diffusers_config"]
    for case in json.loads((GOLDEN / "index.json").read_text(encoding="utf-8"))["cases"]
    if "diffusers_config" in (case.get("config") or {})
}
VIDEO_CONFIG, AUDIO_CONFIG = CONFIGS["vae"], CONFIGS["audio_vae"]


def golden(name):
    return load_file(GOLDEN / f"{name}.safetensors")


def write_sharded(folder, tensors, stem, count=3):
    """Shards and their index, as the transformers and diffusers savers write them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for index in range(count):
        shard = f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"
        part = names[index::count]
        save_file({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def write_file(path, tensors, config=None, metadata=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def write_raw(path, header, payload=b""):
    """A file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def official_repository(root):
    """FL2VA/ and Ref2VA/ as published: sharded interleaved DiT, video VAE in source/, audio VAE with weight norm."""
    for partition in ("FL2VA", "Ref2VA"):
        folder = root / partition
        write_sharded(folder / "transformer", golden("b_dit_raw"), "model")
        index = {"_class_name": "MiniMaxH3Pipeline", "_minimax_h3": {"partition": partition.lower()}}
        (folder / "model_index.json").write_text(json.dumps(index))
        video = {k: v for k, v in golden("f_vae_comfy").items() if not k.startswith("latents_")}
        kwargs = {"heads": 2, "dim_head": 16, "num_layers": 2, "rope_theta": 100.0, "rope_dim_ratio": 0.75}
        source = {"_class_name": "AutoencoderKLLegacy", "z_channels": 24, "vit_decoder_kwargs": kwargs}
        write_file(folder / "video_vae" / "source" / "model.safetensors", video, source)
        statistics = {key: VIDEO_CONFIG[key] for key in ("latents_mean", "latents_std")}
        outer = {"_class_name": "MiniMaxH3VideoVAE", "vae_clip_length": 17, "vae_token_drop": 3, **statistics}
        (folder / "video_vae" / "config.json").write_text(json.dumps(outer))
        audio = {"_class_name": "MiniMaxH3AudioVAE", **AUDIO_CONFIG}
        write_file(folder / "audio_vae" / "model.safetensors", golden("g_audio_vae_diffusers"), audio)
        write_file(folder / "text_encoder" / "model.safetensors", text_encoder_like("model.language_model."))
        (folder / "tokenizer").mkdir()
        for name in ("vocab.json", "merges.txt"):
            (folder / "tokenizer" / name).write_text("{}")
    return root


def diffusers_repository(root):
    for name in ("transformer", "transformer_ref"):
        write_sharded(root / name, golden("b_dit_diffusers"), "diffusion_pytorch_model")
        (root / name / "config.json").write_text('{"_class_name": "MiniMaxH3Transformer3DModel", "rope_freq_dim": 4}')
    (root / "model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}')
    video = {"_class_name": "AutoencoderKLMiniMaxH3", "clip_length": 17, "token_drop": 3, **VIDEO_CONFIG}
    write_file(root / "vae" / "diffusion_pytorch_model.safetensors", golden("f_vae_diffusers"), video)
    audio = {"_class_name": "AutoencoderKLMiniMaxH3Audio", "sampling_rate": 32000, **AUDIO_CONFIG}
    write_file(root / "audio_vae" / "diffusion_pytorch_model.safetensors", golden("g_audio_vae_diffusers"), audio)
    write_file(root / "text_encoder" / "model.safetensors", text_encoder_like("model.language_model."))
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "tokenizer.json").write_text("{}")
    return root


def text_encoder_like(prefix):
    return {f"{prefix}layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}


def dit_bytes(changes=None, drop=(), extra=None):
    tensors = {k: v for k, v in golden("b_dit_comfy").items() if k not in drop}
    return tensors | (changes or {}) | (extra or {})


def assert_same(got, want, but=()):
    assert set(got) - set(but) == set(want) - set(but)
    for name in set(want) - set(but):
        assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name


def assert_refused(loader, path, *messages):
    """``loader(path)`` ends in a CheckpointError that names ``path`` and says all of ``messages``."""
    with pytest.raises(CheckpointError) as error:
        loader(path)
    for message in (str(path), *messages):
        assert message in str(error.value)


def mark_filled(path: Path) -> None:
    """A few bytes into the holes of a sparse file, where a download that was never filled is looked for."""
    with open(path, "r+b") as stream:
        for place in places_looked_at(path.stat().st_size)[1:]:
            stream.seek(place)
            stream.write(b"\1")
