"""Rendering on a server: what is sent, what is refused before, and that whatever a server does ends well.

The stand-ins (engine_server.py) are written from SGLang 0.5.23 and vLLM-Omni 0.30.0, files named there.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from h3_runtime.engines import ENGINES
from h3_runtime.engines.returned import differences, look_at
from h3_runtime.engines.run import RemoteOptions, render_remote, resume_remote
from h3_runtime.engines.settings import Origin, Server
from h3_runtime.engines.wire import Limits
from h3_runtime.errors import H3Error
from h3_runtime.geometry import SAMPLE_RATE
from h3_runtime.media import read_clip
from h3_runtime.request import GuideRequest, LoraRequest, Media, ReferenceRequest, RenderRequest, SoundMask

from .engine_server import clip_bytes, serving

KEY = "sk-secret-0123456789"
QUICK = Limits(
    connect=2.0, idle=3.0, answer=5.0, upload=5.0, download=5.0, clip_bytes=4 << 20, pace=(0.02, 0.05), patience=0.5,
    job=3.0,
)  # fmt: skip
SMALL = {"size": (96, 96), "frames": 107}
VERSIONS = {"sglang": "", "vllm-omni": "0.30.0"}
BOTH = list(ENGINES)


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("H3_REMOTE_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("H3_ENGINES", str(tmp_path / "engines.json"))


@pytest.fixture(autouse=True, scope="module")
def clips_made_before():
    """Coding one takes longer than the stand-ins' patience."""
    for size in ((96, 96), (64, 128), (96, 64), (256, 256), (64, 96)):
        clip_bytes(*size, 107)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "clip.mp4"


def server_of(stand, **changes) -> Server:
    given = {"version": VERSIONS[stand.engine], "key": stand.key, **changes}
    return Server("studio", stand.engine, Origin.parse(stand.url), **given)


def ask(**changes) -> RenderRequest:
    return RenderRequest(**{"prompt": "a cat, ü \r\n 喵", "seed": 7, "num_forwards": 3, **SMALL, **changes})


def send(stand, out, request=None, limits=QUICK, server=None, **options):
    said: list[str] = []
    result = render_remote(
        request or ask(), server or server_of(stand), out, RemoteOptions(limits=limits, **options), said.append
    )
    return result, said


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pixels(width: int, height: int, count: int = 1) -> np.ndarray:
    down, across = np.mgrid[:height, :width]
    still = np.stack([across % 256, down % 256, (across + down) % 256], -1).astype(np.uint8)
    return np.broadcast_to(still, (count, height, width, 3)).copy()


def picture(width: int, height: int, name: str = "secret holiday.png") -> Media:
    return Media(frames=pixels(width, height), name=name)


def tone(seconds: float) -> torch.Tensor:
    return torch.sin(torch.arange(round(seconds * SAMPLE_RATE)) * 0.05).expand(2, -1).contiguous() * 0.5


# ---- what is sent


@pytest.mark.parametrize("engine", BOTH)
def test_a_clip_comes_back_checked_and_labelled(engine, out):
    with serving(engine, key=KEY) as stand:
        looks = []
        result = render_remote(ask(), server_of(stand), out, RemoteOptions(limits=QUICK), watch=looks.append)
        (job,) = stand.jobs.values()
        assert all(headers["Authorization"] == f"Bearer {KEY}" for _, _, headers, _ in stand.seen)
    assert files(out.parent) == ["clip.mp4", "clip.report.json"]
    assert (job.width, job.height, job.frames, job.seed) == (96, 96, 107, 7)
    (clip,) = result.clips
    assert clip.path == out and out.read_bytes() == clip_bytes(96, 96, 107, 7)
    assert (clip.facts.frames, clip.facts.fps, clip.notes) == (107, 24.0, ())
    title = {"sglang": "SGLang", "vllm-omni": "vLLM-Omni"}[engine]
    assert result.fidelity.title == f"APPROXIMATE ({title} quality lossless, remote, not verified here)"
    report = json.loads(clip.report.read_text(encoding="utf-8"))
    assert report["label"] == result.fidelity.title and report["remote"]["seed"] == 7
    assert any("draws its noise its own way: seed 7" in note for note in report["notes"])
    assert [look.words for look in looks] == ["in progress"] and looks[0].seconds >= 0
    assert not list((out.parent.parent / "jobs").glob("*")), "a job whose clip is here is not remembered"


def test_sglang_is_told_everything_in_its_own_words(out):
    with serving("sglang") as stand:
        send(stand, out, ask(video_shift=6.0, audio_shift=2.0, size=(64, 128)), outputs=2)
        ((*_, body),) = stand.posts()
        asked = json.loads(body)
    assert asked["target"] == {"short_edge": 64, "aspect_ratio": "9:16", "duration_seconds": 107 / 24}
    assert (asked["flow_shift"], asked["audio_flow_shift"], asked["num_inference_steps"]) == (6.0, 2.0, 3)
    assert (asked["task"], asked["conditions"], asked["prompt"]) == ("t2va", [], "a cat, ü \r\n 喵")
    assert files(out.parent) == ["clip.mp4", "clip.report.json", "clip_2.mp4", "clip_2.report.json"]
    second = json.loads((out.parent / "clip_2.report.json").read_text(encoding="utf-8"))
    assert second["remote"]["seed"] == 8 and out.read_bytes() != (out.parent / "clip_2.mp4").read_bytes()


def test_a_vllm_omni_job_gives_one_clip_so_each_output_is_a_job(out):
    with serving("vllm-omni") as stand:
        result, _ = send(stand, out, outputs=2)
        assert [job.seed for job in stand.jobs.values()] == [7, 8] and len(result.jobs) == 2
        asked = next(iter(stand.jobs.values())).asked
    assert asked["texts"]["prompt"] == "a cat, ü \r\n 喵" and asked["texts"]["aspect_ratio"] == "1:1"
    assert asked["extra"] == {"task": "t2va", "duration": 107 / 24, "audio_flow_shift": 3.0}
    assert len(list(out.parent.glob("*.mp4"))) == 2


@pytest.mark.parametrize("version, sent", [("0.5.21", 4), ("0.5.22", 3), ("0.5.23+cu129", 3), ("0.6.0", 3)])
def test_steps_are_forwards_whatever_the_version_counts(version, sent, out):
    """Until 0.5.21 SGLang counted grid points: minimax_h3/time_request.py of the wheels 0.5.19 to 0.5.23."""
    with serving("sglang", version=version) as stand:
        result, _ = send(stand, out)
        assert json.loads(stand.posts()[0][3])["num_inference_steps"] == sent
    assert any("the newest whose sources were read" in note for note in result.notes) == (version == "0.6.0")


@pytest.mark.parametrize(
    "engine, told, own",
    [("sglang", "0.5.18", ""), ("sglang", "0.5.22rc1", ""), ("vllm-omni", "", ""), ("vllm-omni", "", "0.30.0rc1")],
)
def test_a_version_that_nobody_has_read_is_refused_before_sending(engine, told, own, out):
    with serving(engine, version=told) as stand:
        with pytest.raises(H3Error, match=r"^steps: .* counts one more than it runs"):
            send(stand, out, server=server_of(stand, version=own))
        assert not stand.posts()


@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("ends", ["first", "last", "both"])
def test_keyframes_go_as_pictures_on_the_canvas(engine, ends, out):
    frames = {"first_frame": picture(300, 200), "last_frame": picture(256, 256, "b.png")}
    if ends != "both":
        frames = {f"{ends}_frame": frames[f"{ends}_frame"]}
    size = {"sglang": (96, 64), "vllm-omni": (256, 256)}[engine]
    with serving(engine) as stand:
        result, _ = send(stand, out, ask(size=size, **frames))
        ((*_, body),) = stand.posts()
        asked = next(iter(stand.jobs.values())).asked
    places = {"first": [0], "last": [-1], "both": [0, -1]}[ends]
    if engine == "sglang":
        assert [one["frame_index"] for one in asked["conditions"]] == places
    else:
        assert asked["extra"]["frame_indices"] == places and "aspect_ratio" not in asked["texts"]
    assert b"holiday" not in body, "no name of a file leaves this machine"
    assert any("secret holiday.png (300x200) was" in note for note in result.notes) == (ends != "last")


@pytest.mark.parametrize("engine", BOTH)
def test_references_go_in_the_order_given(engine, out, tmp_path):
    clip = tmp_path / "walk.mp4"
    clip.write_bytes(clip_bytes(256, 256, 56))
    references = (
        ReferenceRequest("image", picture(300, 400)),
        ReferenceRequest("video", Media(str(clip))),
        ReferenceRequest("video", Media(str(clip)), sound=False),
        ReferenceRequest("audio", Media(audio=tone(3.0), name="voice")),
    )
    asked = ask(prompt="<Picture 1> <Video 1> <Video 2> <Audio 1> <Audio 2>", references=references)
    with serving(engine) as stand:
        result, _ = send(stand, out, asked)
        job = next(iter(stand.jobs.values())).asked
    if engine == "sglang":
        kinds = [(one["type"], one["role"]) for one in job["conditions"]]
        assert kinds == [(kind, "reference") for kind in ("image", "video_audio", "video", "audio")]
    else:
        assert [mime for _, _, mime, _ in job["files"]] == ["image/png", "video/mp4", "video/mp4", "audio/wav"]
    assert any("<Audio 1> <Video 1> = walk.mp4" in note and "<Audio 2> = voice" in note for note in result.notes)


def test_sglang_takes_a_first_frame_beside_references(out):
    reference = ReferenceRequest("image", picture(64, 64, "who"))
    with serving("sglang") as stand:
        result, _ = send(stand, out, ask(first_frame=picture(96, 96), references=(reference,), prompt="<Picture 1>"))
        roles = [one["role"] for one in next(iter(stand.jobs.values())).asked["conditions"]]
    assert roles == ["keyframe", "reference"]
    assert "in the prompt: <Picture 1> = who" in result.notes, "there a keyframe takes no number beside references"


def test_masks_go_on_the_latent_grid(out, tmp_path):
    source = tmp_path / "source.mp4"
    source.write_bytes(clip_bytes(64, 96, 107))
    mask = torch.zeros(1, 96, 64)
    mask[:, 48:] = 1
    request = ask(
        size=(64, 96),
        source=Media(str(source)),
        mask=Media(frames=mask, name="mask"),
        sound_mask=SoundMask.parse("1-2"),
    )
    with serving("vllm-omni") as stand:
        result, _ = send(stand, out, request)
        asked = next(iter(stand.jobs.values())).asked
    assert asked["video"].shape == (32, 6, 4) and not asked["video"][:, :3].any() and asked["video"][:, 3:].all()
    assert np.flatnonzero(asked["audio"][0]).tolist() == list(range(40, 80)), "40 a second, 1 is made anew"
    assert any("is sent as H.264" in note for note in result.notes)
    with serving("vllm-omni") as stand:
        send(stand, out, replace(request, mask="keep", sound_mask=None))
        asked = next(iter(stand.jobs.values())).asked
    assert not asked["video"].any() and "audio" not in asked


# ---- what is refused before anything is sent


WAV = Media(audio=tone(3.0), name="sound")
GUIDE = GuideRequest(picture(96, 96), frame=9)
FORTH = (ReferenceRequest("audio", WAV), ReferenceRequest("image", picture(300, 300)))
REFUSED = [
    (BOTH, {"guides": (GUIDE,)}, {}, "^guides: "),
    (BOTH, {"loras": (LoraRequest(Media("x.safetensors")),)}, {}, "^LoRA: "),
    (BOTH, {"embeds": Media("x.safetensors")}, {}, "^embeds: "),
    (BOTH, {"prompt": "a street, embedding:noir"}, {}, "^embedding: in the prompt"),
    (BOTH, {"prompt": "  "}, {}, "^prompt: "),
    (BOTH, {"denoise": 0.5}, {}, "^denoise: "),
    (BOTH, {"stop": 2}, {}, "^start and stop: "),
    (BOTH, {"state": Media("x.safetensors")}, {}, "^state: "),
    (BOTH, {"quantise": "int8"}, {}, "^quantise: "),
    (BOTH, {"tile_batch": 2}, {}, "^tile batch: "),
    (BOTH, {"accelerators": (("sparse", ()),)}, {}, "^accelerate: "),
    (BOTH, {"solver": "second-order"}, {}, "^solver: "),
    (BOTH, {"dtype": "float32"}, {}, "^dtype: "),
    (BOTH, {"recipe": "comfy"}, {}, "^recipe: "),
    (BOTH, {"source": Media("x.mp4")}, {}, "^source: "),
    (BOTH, {"seed": 1 << 63}, {}, "^seed 9223372036854775808"),
    (BOTH, {"seed": (1 << 63) - 2}, {"outputs": 3}, "^seed "),
    (BOTH, {}, {"outputs": 11}, "^outputs 11"),
    (BOTH, {}, {"quality": "draft"}, "^quality 'draft'"),
    (BOTH, {"frames": 90}, {}, r"^frames 90 .* renders 107 to 362 frames"),
    (BOTH, {"frames": 379}, {}, "^frames 379 "),
    (["sglang"], {"size": (288, 96)}, {}, "^size 288x96 is off the canvas of SGLang"),
    (["sglang"], {"size": (1536, 864), "first_frame": picture(64, 64)}, {}, "^size 1536x864 is off"),
    (["sglang"], {}, {"quality": "high"}, "^quality high: .* this has width 96, height 96, frames 107, steps 3"),
    (["vllm-omni"], {"num_forwards": 201}, {}, "^steps 201: "),
    (["vllm-omni"], {"size": (32, 160)}, {}, "^size 32x160 is outside"),
    (["vllm-omni"], {"first_frame": picture(96, 96)}, {}, "holiday.png is 96x96 as it is sent"),
    (["vllm-omni"], {"references": FORTH}, {}, "^references: vLLM-Omni takes pictures first"),
    (["vllm-omni"], {"references": FORTH[1:], "first_frame": picture(300, 300)}, {}, "^first or last frame: "),
    (["vllm-omni"], {"references": (FORTH[1], ReferenceRequest("audio", Media(audio=tone(1.0))))}, {}, "lasts 1.000 s"),
    (
        ["vllm-omni"],
        {"references": (FORTH[1], *[FORTH[0]] * 3), "frames": 243},
        {"many": 6.0},
        "together: vLLM-Omni takes",
    ),
]


@pytest.mark.parametrize("engines, changes, options, words", REFUSED)
def test_what_an_engine_cannot_do_is_refused_by_name_before_sending(engines, changes, options, words, out):
    if "many" in options:
        long = ReferenceRequest("audio", Media(audio=tone(options["many"]), name="long"))
        changes, options = {**changes, "references": (FORTH[1], long, long, long)}, {}
    for engine in engines:
        with serving(engine) as stand:
            with pytest.raises(H3Error, match=words) as caught:
                send(stand, out, ask(**changes), **options)
            assert "\n" not in str(caught.value) and not stand.posts()
    assert files(out.parent) == []


def test_masks_and_wrong_weights_are_refused_before_sending(out, tmp_path):
    source = tmp_path / "source.mp4"
    source.write_bytes(clip_bytes(96, 96, 107))
    with serving("sglang") as stand:
        with pytest.raises(H3Error, match=r"^mask: SGLang takes no masks"):
            send(stand, out, ask(source=Media(str(source)), mask="keep"))
        with pytest.raises(H3Error, match=r"^references: they need Ref2VA weights, and this server serves FL2VA"):
            send(stand, out, ask(references=FORTH[1:]), server=server_of(stand, partition="fl2va"))
        stand.facts = {"info": {"model_path": "/models/H3/ref2va/"}}
        with pytest.raises(H3Error, match="needs FL2VA weights, and this server serves Ref2VA weights"):
            send(stand, out)
        stand.facts = {"model": {"pipeline_name": "FastH3Pipeline"}}
        with pytest.raises(H3Error, match="runs FastH3Pipeline"):
            send(stand, out)
        assert not stand.posts()


def test_quality_high_of_sglang_is_sent_for_its_workload(out):
    with serving("sglang") as stand:
        stand.trouble["post"] = ["500"]  # nothing has to be rendered at this size
        with pytest.raises(H3Error, match=r"^server studio refused the request \(status 500\)"):
            send(stand, out, ask(size=None, frames=124, num_forwards=50), quality="high")
        ((*_, body),) = stand.posts()
    assert json.loads(body)["quality"] == "high" and json.loads(body)["target"]["short_edge"] == 768


# ---- servers that misbehave


@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize(
    "kind, trouble, words",
    [
        ("content", ["drop", "drop"], None),
        ("content", ["hang up"], None),
        ("content", ["slow"], None),
        ("content", ["drop"] * 3, "dropped the connection before all had come, 3 times"),
        ("content", ["silent"] * 3, "does not answer, 3 times"),
        ("content", ["html"], "sent text/html in place of video/mp4"),
        ("content", ["cut"], "is (cut short|damaged)"),
        ("content", ["noise"], "is damaged or cut short"),
        ("content", ["endless"], "sends more than 4 MiB"),
        ("content", ["large"], "sends more than 4 MiB"),
        ("content", ["lost"], r"does not give the clip of job .* \(status 404\): Video not found"),
        ("content", ["500"], r"\(status 500\): boom \*\*\*"),
        ("content", ["to http://127.0.0.2:1/x"], "redirects to http://127.0.0.2: no redirect is followed"),
        ("status", ["slow", "500", "hang up", "silent", "503 html"], None),
        ("status", ["always"], "has trouble"),
        ("status", ["lost"], "does not know job .* render again"),
        ("status", ["failed"], r"failed at server studio: (CUDA out of memory|worker died, key \*\*\*)"),
        ("status", ["strange"], "says that the job is 'sublimated'"),
        ("status", ["garbage"], "damaged JSON"),
        ("status", ["html"], "text/html in place of JSON"),
        ("status", ["to https://evil.example/v1"], "redirects to https://evil.example"),
        ("post", ["hang up"], "whether the request reached it is not known"),
        ("post", ["garbage"], "damaged JSON"),
        ("post", ["422"], r"refused the request \(status 422\): body.seed: Input should be an integer"),
        ("health", ["503 html"], "is not ready"),
        ("health", ["silent"], "does not answer"),
    ],
)
def test_whatever_a_server_does_ends_in_a_clip_or_in_a_sentence(engine, kind, trouble, words, out, capfd):
    limits = replace(QUICK, idle=0.5, answer=1.2, patience=5.0 if words is None else 0.3)
    with serving(engine, key=KEY) as stand:
        stand.trouble[kind] = ["500"] * 99 if trouble == ["always"] else list(trouble)
        if words is None:
            result, said = send(stand, out, limits=limits)
            assert result.clips[0].notes == () and not stand.trouble[kind]
        else:
            with pytest.raises(H3Error, match=words) as caught:
                send(stand, out, limits=limits)
            said = [str(caught.value)]
            assert "\n" not in said[0] and "Traceback" not in said[0] and "\x1b" not in said[0]
    assert files(out.parent) == ([] if words else ["clip.mp4", "clip.report.json"]), "nothing half-written is left"
    assert KEY not in " ".join(said) + "".join(capfd.readouterr())
    for path in out.parent.parent.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), f"{path.name} holds the key"


@pytest.mark.parametrize("engine", BOTH)
def test_a_job_is_picked_up_again_after_a_failure(engine, out):
    """By the same request, and by its id alone from another process, which knows nothing but its record."""
    with serving(engine) as stand:
        for again in ("same", "id"):
            stand.trouble["content"] = ["drop"] * 3
            with pytest.raises(H3Error, match=r"the job's id is kept: .* render --engine studio --job video/"):
                send(stand, out, ask(seed=70 if again == "id" else 7))
            posted, (job,) = len(stand.posts()), list(stand.jobs)[-1:]
            if again == "same":
                _, said = send(stand, out)
                assert "of the same request is taken up" in said[-1]
            else:
                result = resume_remote([job], server_of(stand), out, RemoteOptions(limits=QUICK))
                assert result.clips[0].notes == () and "quality lossless" in result.fidelity.title
            assert len(stand.posts()) == posted, "nothing is rendered twice"
            assert files(out.parent) == ["clip.mp4", "clip.report.json"]
            for path in out.parent.iterdir():
                path.unlink()
        _, said = send(stand, out)
        assert any("was posted" in line for line in said), "a clip that is here is not a job that runs"
        stand.looks = 10**9
        with pytest.raises(H3Error, match="is not done after"):
            send(stand, out, ask(seed=5), limits=replace(QUICK, job=0.1))
        count = len(stand.posts())
        stand.looks = 1
        send(stand, out, ask(seed=5), fresh=True)
        assert len(stand.posts()) == count + 1


def test_a_job_that_nobody_wrote_down_can_be_fetched_and_one_of_another_server_cannot(out):
    with serving("sglang") as stand:
        send(stand, out)
        (job,) = stand.jobs
        result = resume_remote([job], server_of(stand), out, RemoteOptions(limits=QUICK))
        assert "nothing is known here of what was asked for" in result.notes[0]
        stand.trouble["content"] = ["cut"]
        with pytest.raises(H3Error, match=r"cut short|damaged"):
            send(stand, out, ask(seed=9))
        job = list(stand.jobs)[-1]
        with serving("sglang") as other, pytest.raises(H3Error, match="was sent to server studio at"):
            resume_remote([job], server_of(other), out, RemoteOptions(limits=QUICK))


@pytest.mark.parametrize("engine", BOTH)
def test_cancel_ends_what_can_be_ended_and_is_quick(engine, out):
    class Cancelled(Exception):
        pass

    asked = []

    def poll():
        asked.append(time.monotonic())
        if stand.posts() and stand.trouble.get("status") == []:
            raise Cancelled

    said = []
    with serving(engine) as stand:
        stand.trouble["status"] = ["silent"]  # in the middle of an answer that does not come
        began = time.monotonic()
        limits = replace(QUICK, idle=30.0, answer=30.0)
        with pytest.raises(Cancelled):
            render_remote(ask(), server_of(stand), out, RemoteOptions(limits=limits), said.append, poll=poll)
        assert time.monotonic() - began < 3.0
        ended = not stand.jobs
    assert ended == (engine == "vllm-omni")
    assert ("was ended" if ended else "cannot end a running job") in said[-1]
    assert bool(list((out.parent.parent / "jobs").glob("*.json"))) != ended, "a job that goes on stays known"
    assert files(out.parent) == []


@pytest.mark.parametrize(
    "made, words",
    [
        ((96, 64, 107), "DIFFERS: the size is 96x64, 96x96 was asked for"),
        ((96, 96, 90), "DIFFERS: the clip has 90 frames, 107 were asked for"),
        ((96, 96, 107, 0, False), "DIFFERS: the clip has no sound"),
        ((96, 96, 107, 0, True, True), "WARNING: every frame of the picture is black: the render failed"),
    ],
)
def test_a_clip_that_is_not_what_was_asked_for_is_kept_and_told(made, words, out):
    with serving("sglang") as stand:
        stand.trouble["content"] = [clip_bytes(*made)]
        result, _ = send(stand, out)
    told = json.loads(result.clips[0].report.read_text(encoding="utf-8"))["notes"]
    assert [line.startswith(words) for line in result.clips[0].notes] == [True]
    assert result.clips[0].notes[0] in told


def test_other_rates_and_codecs_are_told(tmp_path):
    import av

    path = tmp_path / "other.mp4"
    with av.open(str(path), "w") as made:
        picture_stream = made.add_stream("mpeg4", rate=30)
        picture_stream.width = picture_stream.height = 64
        sound_stream = made.add_stream("aac", rate=48000, layout="mono")
        for _ in range(30):
            made.mux(picture_stream.encode(av.VideoFrame.from_ndarray(pixels(64, 64)[0], format="rgb24")))
        made.mux(picture_stream.encode(None))
        heard = av.AudioFrame.from_ndarray(np.zeros((1, 1024 * 20), np.float32), format="fltp", layout="mono")
        heard.sample_rate = 48000
        made.mux([*sound_stream.encode(heard), *sound_stream.encode(None)])
    said = " | ".join(differences(look_at(path, "it"), None))
    for words in ("30 frames a second", "coded as mpeg4", "48000 Hz", "1 channel", "the sound lasts 0.4"):
        assert words in said, said


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_a_clip_cut_between_two_packets_is_cut_short(place, tmp_path):
    """Nothing of it is damaged: only the count in its header tells that frames are missing."""
    import av

    whole, part = tmp_path / "whole.mp4", tmp_path / "part.mp4"
    whole.write_bytes(clip_bytes(96, 96, 107))
    with av.open(str(whole)) as made:
        packets = [packet for packet in made.demux() if packet.pos is not None and packet.size]
    packets.sort(key=lambda packet: packet.pos)
    part.write_bytes(whole.read_bytes()[: packets[int(len(packets) * place)].pos])
    look_at(whole, "it")
    with pytest.raises(H3Error, match="it is cut short: it tells 107 frames and holds"):
        look_at(part, "it")


def test_a_disk_that_is_full_costs_no_half_file(out, monkeypatch):
    import builtins
    import errno

    opened = builtins.open

    def full(path, mode="r", *more, **options):
        if mode == "wb" and ".part" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *more, **options)

    with serving("sglang") as stand:
        monkeypatch.setattr(builtins, "open", full)
        with pytest.raises(H3Error, match=r"could not be written .*free some space; the job's id is kept"):
            send(stand, out)
    assert files(out.parent) == []


def test_a_proxy_of_the_environment_is_not_used(out, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving("sglang", key=KEY) as stand:
        result, _ = send(stand, out)
    assert read_clip(result.clips[0].path).frames.shape == (107, 96, 96, 3)
