"""H3 Render on a Server without a ComfyUI and without an engine: against the stand-ins of engine_server.py."""

from __future__ import annotations

import json

import pytest
import torch

from h3_runtime.media import read_clip, read_metadata

from .comfy_graphs import node, prompted, sampler
from .engine_server import clip_bytes, serving

KEY = "sk-secret-0123456789"
SMALL = {"width": 96, "height": 96, "seconds": 4.458, "steps": 3}


@pytest.fixture
def servers(tmp_path, monkeypatch):
    """``servers(name=stand, ...)`` writes the user's settings."""
    monkeypatch.setenv("H3_REMOTE_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("H3_ENGINES", str(tmp_path / "engines.json"))

    def write(**stands) -> None:
        entries = {}
        for name, stand in stands.items():
            entries[name] = {"engine": stand.engine, "origin": stand.url, "key": stand.key}
            if stand.engine == "vllm-omni":
                entries[name]["version"] = "0.30.0"
        (tmp_path / "engines.json").write_text(json.dumps(entries), encoding="utf-8")

    return write


@pytest.fixture(scope="module")
def media(pack):
    clip_bytes(96, 96, 107)
    clip_bytes(256, 256, 107)
    picture, clip, sound, mask, *_ = pack.run("H3RuntimeSampleMedia", width=96, height=96, frames=107)
    return {"picture": picture, "clip": clip, "sound": sound, "mask": mask}


def render(pack, **inputs) -> tuple:
    return pack.run("H3RuntimeRemoteRender", **{"prompt": "a ball", "server": "studio", **SMALL, **inputs})


def test_the_clip_its_file_and_a_report_that_compare_takes(pack, servers, media):
    with serving("sglang", key=KEY, looks=1) as stand:
        servers(studio=stand)
        images, audio, _, report = render(pack, seed=5, filename_prefix="remote/one")
        (job,) = stand.jobs.values()
    assert (job.seed, job.asked["num_inference_steps"], job.frames) == (5, 3, 107)
    assert images.shape == (107, 96, 96, 3) and audio["waveform"].shape == (1, 2, round(107 / 24 * 32000))
    assert report.splitlines()[0] == "APPROXIMATE (SGLang quality lossless, remote, not verified here)"
    path = pack.base / "output" / "remote" / "one_00001_.mp4"
    told = json.loads(path.with_suffix(".report.json").read_text(encoding="utf-8"))
    assert told["label"] == report.splitlines()[0] and KEY not in report + json.dumps(told)
    said, _, passed = pack.run(
        "H3RuntimeCompare", images_a=images[:8], images_b=images[:8], report_b=report, filename_prefix="remote/compare",
    )  # fmt: skip
    assert passed and "B: B  APPROXIMATE (SGLang quality lossless" in said
    assert "measured after H.264, 8 frames" in said, "a server's frames have gone through its encoder"


def test_the_file_carries_the_workflow_and_the_servers_own_picture_and_sound(pack, servers, media, monkeypatch):
    tags = {"workflow": json.dumps({"nodes": [1]}), "prompt": "{}"}
    monkeypatch.setattr(pack.host, "workflow_tags", lambda hidden: tags)
    with serving("sglang", looks=1) as stand:
        servers(studio=stand)
        render(pack, filename_prefix="remote/tagged")
    path = pack.base / "output" / "remote" / "tagged_00001_.mp4"
    assert tags.items() <= read_metadata(path).items()
    own = pack.base / "own.mp4"
    own.write_bytes(clip_bytes(96, 96, 107))
    one, two = read_clip(path), read_clip(own)
    assert (one.frames == two.frames).all() and torch.equal(one.audio, two.audio)
    assert [file.name for file in sorted(path.parent.glob("*tagged*"))] == [path.name, "tagged_00001_.report.json"]


def test_frames_references_and_masks_reach_the_engines(pack, servers, media):
    with serving("sglang", looks=1) as stand, serving("vllm-omni", looks=1) as other:
        servers(studio=stand, farm=other)
        references = {"images": {"image_0": media["picture"]}, "sounds": {"sound_0": media["sound"]}}
        render(pack, prompt="<Picture 1> <Audio 1>", first_frame=media["picture"], **references)
        kinds = [(one["type"], one["role"]) for one in next(iter(stand.jobs.values())).asked["conditions"]]
        assert kinds == [("image", "keyframe"), ("image", "reference"), ("audio", "reference")]
        source = {"source": media["clip"], "mask": media["mask"], "sound_mask": "all"}
        render(pack, server="farm", **source)
        asked = next(iter(other.jobs.values())).asked
        assert 0 < asked["video"].mean() < 1 and "audio" not in asked
        frames = {"first_frame": media["picture"], "last_frame": media["picture"], "width": 256, "height": 256}
        report = render(pack, server="farm", **frames)[3]
        assert "was resized to 256x256" in report and "the mask has no effect" not in report
        assert "the mask has no effect" in render(pack, mask=media["mask"], seed=8)[3]
        with pytest.raises(pack.h3.H3Error, match=r"^mask: SGLang takes no masks"):
            render(pack, **source)


def test_a_job_is_taken_up_and_one_is_fetched_by_its_id(pack, servers, media):
    with serving("sglang", looks=1) as stand:
        servers(studio=stand)
        stand.trouble["content"] = ["cut", "cut"]
        for _ in range(2):
            with pytest.raises(pack.h3.H3Error, match=r"the job's id is kept"):
                render(pack, seed=31)
        assert len(stand.posts()) == 1
        (job,) = stand.jobs
        images, _, _, report = render(pack, seed=999, job=job)
        assert images.shape == (107, 96, 96, 3) and len(stand.posts()) == 1 and f"job {job} took" in report
        render(pack, seed=31, resume=False)
        assert len(stand.posts()) == 2


def test_cancel_in_the_host_stops_the_wait(pack, servers, media, monkeypatch):
    class Interrupted(Exception):
        pass

    def poll():
        if stand.posts():
            raise Interrupted

    monkeypatch.setattr(pack.host, "poll", poll)
    with serving("vllm-omni", looks=1) as stand:
        servers(studio=stand)
        stand.looks = 10**6
        with pytest.raises(Interrupted):
            render(pack, seed=77)


@pytest.mark.parametrize(
    "name, words",
    [
        ("http://10.0.0.1:30010", "chosen by its name, not by an address: add it to"),
        ("https://studio", "chosen by its name"),
        ("127.0.0.1:30010", "chosen by its name"),
        ("nobody", "no server is called nobody: there are studio"),
        ("no server set up", "no server set up: add it to"),
    ],
)
def test_an_address_in_a_workflow_is_refused_with_how_to_add_it(pack, servers, name, words):
    with serving("sglang", looks=1) as stand:
        servers(studio=stand)
        said = pack.remote.RemoteRender.validate_inputs(server=name)
        assert words in said and "engines.json" in said
        with pytest.raises(pack.h3.H3Error, match=words):
            render(pack, server=name)
        assert not stand.seen
        assert pack.remote.RemoteRender.validate_inputs(server="studio") is True


def test_the_picker_holds_names_only_and_the_badge_tells_the_engine(pack, servers):
    with serving("sglang", key=KEY, looks=1) as stand, serving("vllm-omni", looks=1) as other:
        servers(studio=stand, farm=other)
        assert pack.remote.server_names() == ["farm", "studio"]
        graph = {"r": {"class_type": "H3RuntimeRemoteRender", "inputs": {"server": "farm", "quality": "high"}}}
        (label,) = pack.routes.answer({"graph": graph})["labels"].values()
        assert label["fidelity"]["title"] == "APPROXIMATE (vLLM-Omni quality high, remote, not verified here)"
        one = pack.remote.RemoteRender.fingerprint_inputs(server="studio", prompt="x")
        servers(studio=other)
        assert pack.remote.RemoteRender.fingerprint_inputs(server="studio", prompt="x") != one
        assert KEY not in one and not stand.seen
    servers()
    assert pack.remote.server_names() == ["no server set up"]
    (pack.base / "broken.json").write_text("{")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H3_ENGINES", str(pack.base / "broken.json"))
        assert pack.remote.server_names() == ["no server set up"], "broken settings must not take the nodes away"


def test_here_lossless_against_a_server(pack, servers):
    """What workflow 13 does with its server side on; smaller, for time, and shorter here than a server can."""
    words = {"prompt": "a red circle moves left to right, low tone"}
    graph = {
        **prompted(**words),
        "empty": node("H3RuntimeEmptyLatent", width=64, height=32, seconds=0.9),
        "sampler": sampler(seed=1),
        "images": node("H3RuntimeDecodeVideo", latent=["sampler", 0], video_vae=["vaes", 0]),
        "sound": node("H3RuntimeDecodeSound", latent=["sampler", 0], audio_vae=["vaes", 1]),
        "far": node("H3RuntimeRemoteRender", server="studio", quality="high", seconds=4.458, seed=1, steps=2,
                    width=["empty", 1], height=["empty", 2], filename_prefix="h3/server", **words),
        "compare": node("H3RuntimeCompare", name_a="here, lossless", images_a=["images", 0], audio_a=["sound", 0],
                        latent_a=["sampler", 0], report_a=["images", 1], name_b="server, high",
                        images_b=["far", 0], audio_b=["far", 1], report_b=["far", 3]),
    }  # fmt: skip
    with serving("vllm-omni", looks=1) as stand:
        servers(studio=stand)
        clip_bytes(64, 32, 107)
        done = pack.walk(graph)
        asked = next(iter(stand.jobs.values())).asked["texts"]
    assert (asked["width"], asked["height"], asked["quality"], asked["seed"]) == ("64", "32", "high", "1")
    report = done["compare"][0]
    assert "measured after H.264/AAC, 22 frames" in report
    assert "A: here, lossless  APPROXIMATE" in report  # two steps
    assert "B: server, high  APPROXIMATE (vLLM-Omni quality high, remote, not verified here)" in report
