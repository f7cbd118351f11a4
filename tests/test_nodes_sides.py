"""The sides of a comparison: one loader for both, one DiT in memory, frames that know how they were decoded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from .comfy_graphs import CARRIED


def test_one_loader_serves_both_sides_of_a_comparison(pack):
    (kept,) = pack.run("H3RuntimeLoadModel", model=CARRIED, precision="float32")
    (fewer,) = pack.run("H3RuntimeQuantise", model=kept, quantise="int8", place="ram")
    assert (fewer.path, fewer.dtype, fewer.size) == (kept.path, kept.dtype, kept.size)
    assert fewer.models.loading.placement.rung == "ram"
    load = pack.stand_ins.load_part
    load(kept)
    load(fewer)
    assert fewer.loaded and not kept.loaded, "one DiT at a time"
    assert list(fewer.info.online) == ["int8"] and not kept.info.online
    load(kept)
    assert kept.loaded and not fewer.loaded
    (lora,) = pack.run("H3RuntimeLoadLora", model=kept, lora="small carried model, 4 steps")
    load(lora)
    assert kept.loaded, "a LoRA is put on the same weights"
    (both,) = pack.run("H3RuntimeQuantise", model=lora)
    assert both.loras == lora.loras and both.root is not kept.root
    (again,) = pack.run("H3RuntimeQuantise", model=fewer, quantise="fp8")
    assert again.models.loading.quantise == "dit=fp8", "the last one counts"
    kept.release()


def test_frames_know_how_they_were_decoded(pack):
    (model,) = pack.run("H3RuntimeLoadModel", model=CARRIED)
    (clip,) = pack.run("H3RuntimeLoadTextEncoder", text_encoder=CARRIED)
    video_vae, _ = pack.run("H3RuntimeLoadVaes", video_vae=CARRIED, audio_vae=CARRIED)
    empty, *_ = pack.run("H3RuntimeEmptyLatent", width=96, height=64, frames=22)
    (positive,) = pack.run("H3RuntimeEncodePrompt", clip=clip, prompt="a red circle grows, low tone")
    latent, _ = pack.run("H3RuntimeSampler", model=model, positive=positive, latent=empty)
    plain, said = pack.run("H3RuntimeDecodeVideo", latent=latent, video_vae=video_vae)
    other, told = pack.run("H3RuntimeDecodeVideo", latent=latent, video_vae=video_vae, tile=128)
    assert said.startswith("LOSSLESS") and told.startswith("APPROXIMATE") and "tiles of 128 px" in told
    for images, label in ((plain, "LOSSLESS"), (other, "APPROXIMATE"), (other.clone(), "LOSSLESS")):
        _, report = pack.run("H3RuntimeSaveVideo", images=images, latent=latent)
        assert report.startswith(label), "what another node changed carries the label of the latent alone"
    theirs = SimpleNamespace(latent_channels=24, decode=lambda video: torch.zeros(1, 22, 64, 96, 3))
    _, told = pack.run("H3RuntimeDecodeVideo", latent=latent, video_vae=theirs, tile=128)
    assert "tile 128 is not used" in told and told.startswith("LOSSLESS")
    with pytest.raises(pack.h3.H3Error, match="tile 130 cannot be used"):
        pack.run("H3RuntimeDecodeVideo", latent=latent, video_vae=video_vae, tile=130)
