"""The nodes' memory widgets: converted weights that are kept, and tiles decoded at once; what they change and say."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3_runtime.manifest import load_manifest

from .comfy_graphs import CARRIED, loaders, node, prompted, sampler


@pytest.fixture(scope="module")
def vaes(pack):
    return pack.run("H3RuntimeLoadVaes", video_vae=CARRIED, audio_vae=CARRIED)


def load(pack, **widgets):
    return pack.run("H3RuntimeLoadModel", model=CARRIED, **widgets)[0]


def test_the_folder_of_converted_weights_is_the_hosts(pack):
    folder = pack.host.converted_folder()
    assert folder.name == "h3_converted" and folder.parent.name == "models"


def test_converted_weights_are_kept_and_used_again(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(pack.host, "converted_folder", lambda: tmp_path / "h3_converted")

    def converted() -> list[Path]:
        return sorted(tmp_path.rglob("*.h3-layers.safetensors"))

    plain = load(pack, quantise="int8", place="disk")
    plain.load()
    assert converted() == [], "only where it was asked for"
    kept = load(pack, quantise="int8", place="disk", keep_converted=True)
    kept.load()
    (file,) = converted()
    assert any(str(file) in note for note in kept.info.notes)
    stamp = file.stat().st_mtime_ns
    again = load(pack, quantise="int8", place="disk", keep_converted=True)
    again.load()
    assert converted() == [file] and file.stat().st_mtime_ns == stamp
    assert any("reused from" in note for note in again.info.notes)
    assert kept.info.fingerprint == plain.info.fingerprint, "it decides nothing of the output"
    for part in (plain, kept, again):
        part.release()


def test_it_is_refused_where_no_block_comes_from_disk(pack):
    with pytest.raises(pack.h3.H3Error, match="keep_converted is for blocks from disk, and place is ram"):
        load(pack, place="ram", keep_converted=True)


def rendered(pack) -> dict:
    """A finished latent of the sampler, two tiles wide."""
    graph = {**prompted(), "latent": node("H3RuntimeEmptyLatent", width=320, height=64, frames=5)}
    graph["sampler"] = {**sampler(), "inputs": {**sampler()["inputs"], "latent": ["latent", 0], "steps": 1}}
    return pack.walk(graph)["sampler"][0]


def test_tiles_decoded_at_once_change_next_to_nothing(pack, vaes, monkeypatch):
    latent, asked = rendered(pack), []
    plain = type(vaes[0].models).decoders
    monkeypatch.setattr(type(vaes[0].models), "decoders", lambda s, *given: asked.append(given[0]) or plain(s, *given))
    one, _ = pack.run("H3RuntimeDecodeVideo", latent=latent, video_vae=vaes[0])
    two, _ = pack.run("H3RuntimeDecodeVideo", latent=latent, video_vae=vaes[0], tile_batch=2)
    assert one.shape == two.shape and (one - two).abs().max() < 1e-5 and asked == [1, 2]
    names = [part.name for part in pack.render.label_of(pack.av_latent.take_latent(latent), [], 2).parts]
    assert "video-vae/tile-batch" in names


def test_the_file_says_how_many_tiles(pack, vaes):
    latent = rendered(pack)
    given = {"latent": latent, "video_vae": vaes[0], "audio_vae": vaes[1]}
    video, _ = pack.run("H3RuntimeDecodeAndSave", **given, tile_batch=2, keep_frames=True)
    path = Path(video)
    manifest = load_manifest(path)
    assert manifest["request"]["tile_batch"] == 2
    assert "video-vae/tile-batch" in [part["name"] for part in manifest["fidelity"]["parts"]]
    assert "video-vae/tile-batch" in path.with_suffix(".report.json").read_text("utf-8")
    plain, _ = pack.run("H3RuntimeDecodeAndSave", **given)
    assert load_manifest(Path(plain))["request"]["tile_batch"] == 1


def test_the_badge_knows_before(pack):
    graph = {**prompted(), "sampler": sampler(), **{k: v for k, v in loaders().items() if k == "vaes"}}
    graph["decode"] = node("H3RuntimeDecodeVideo", latent=["sampler", 0], video_vae=["vaes", 0], tile_batch=2)
    graph["plain"] = node("H3RuntimeDecodeVideo", latent=["sampler", 0], video_vae=["vaes", 0])
    labels = pack.foresee.forecast(graph, {})["labels"]
    names = {key: [part["name"] for part in labels[key]["fidelity"]["parts"]] for key in ("decode", "plain")}
    assert "video-vae/tile-batch" in names["decode"] and "video-vae/tile-batch" not in names["plain"]


def test_it_has_no_effect_on_another_programs_vae(pack):
    notes: list[str] = []
    assert pack.render.settled_batch(3, object(), notes) == 1
    assert notes == ["tile_batch 3 has no effect: the VAE is ComfyUI's own"]
