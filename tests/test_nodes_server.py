"""The nodes in a real ComfyUI: queued through its API as the page does it, with the small carried model.

One server for the module; tests that kill it or start it with other options have their own.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request

import pytest
import torch

from h3_runtime.compare.page import viewer_source
from h3_runtime.demo.maker import make_model
from h3_runtime.latents import load_latent
from h3_runtime.media import read_clip, read_metadata

from .comfy_graphs import (
    decode,
    full_graphs,
    loaders,
    minimal_graphs,
    node,
    prompted,
    refusals,
    sampler,
    saved,
)
from .comfy_server import ComfyServer, Listener, find_checkout
from .engine_server import clip_bytes, serving

pytestmark = pytest.mark.needs("comfyui")
OURS = "H3Runtime"


CHECKOUT, WHY = find_checkout()
if CHECKOUT is None:
    pytest.skip(f"needs comfyui: {WHY}", allow_module_level=True)


def started(base, *options, **environment) -> ComfyServer:
    try:
        return ComfyServer(CHECKOUT, base, *options, **environment).start()
    except RuntimeError as error:
        pytest.skip(f"needs comfyui: it does not start here ({error})")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    base = tmp_path_factory.mktemp("comfy")
    make_model(base / "models" / "diffusion_models")
    running = started(base, H3_ENGINES=str(base / "engines.json"), H3_REMOTE_JOBS=str(base / "jobs"))
    yield running
    running.kill()


@pytest.fixture(scope="module")
def info(server) -> dict:
    return server.get("/object_info")


def kept_latent(server: ComfyServer, prefix: str):
    """The first latent saved under ``prefix``."""
    return load_latent(server.output / f"{prefix}_00001_.h3-latent.safetensors")


# ---- what the page is told


def test_the_package_loads_fast_and_without_a_warning(server):
    times = re.findall(r"([\d.]+) seconds( \(IMPORT FAILED\))?: .*minimax-h3-runtime", server.log)
    assert len(times) == 1 and not times[0][1] and float(times[0][0]) <= 0.3, times
    complaints = [line for line in server.log.splitlines() if re.search(r"WARN|ERROR", line)]
    assert not [line for line in complaints if re.search("minimax|h3", line, re.IGNORECASE)], complaints


def test_ids_are_ours_alone(info):
    ours = {name: about for name, about in info.items() if about["python_module"].endswith("minimax-h3-runtime")}
    assert len(ours) >= 26 and all(name.startswith(OURS) for name in ours)
    others = set(info) - set(ours)
    assert any(name.startswith("MiniMaxH3") for name in others), "this ComfyUI has no H3 nodes of its own"
    assert not [name for name in others if name.startswith(OURS)]


def inputs_of(about: dict):
    for group in ("required", "optional"):
        for name, entry in about["input"].get(group, {}).items():
            yield group, name, entry[0], entry[1] if len(entry) > 1 else {}


def test_every_node_and_input_explains_itself(info):
    for name, about in info.items():
        if not name.startswith(OURS):
            continue
        assert about["display_name"].startswith("H3 ") and about["category"].startswith("H3 Runtime/"), name
        assert len(about["description"].split()) > 5, name
        for group, field, kind, options in inputs_of(about):
            assert len(options.get("tooltip", "").split()) >= 2, f"{name}.{field} has no tooltip"
            if kind in ("INT", "FLOAT", "BOOLEAN"):
                assert "default" in options and group == "optional", f"{name}.{field}: old graphs must still run"
            if kind == "COMBO":
                assert all(key.isascii() for key in options["options"]), f"{name}.{field}"


def test_every_text_is_there_in_english_and_chinese(server, info):
    texts = server.get("/i18n")
    for language in ("en", "zh"):
        assert {name for name in info if name.startswith(OURS)} <= set(texts[language]["nodeDefs"]), language
    assert texts["zh"]["nodeDefs"]["H3RuntimeSampler"]["inputs"]["steps"]["name"] == "\u6b65\u6570"


# ---- every node, with the least and with all of its inputs


def test_the_viewer_of_two_clips_is_served(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/api/h3_runtime/compare_viewer.js") as answer:
        assert answer.headers["Content-Type"].startswith("text/javascript")
        assert answer.read().decode("utf-8") == viewer_source()


def ids_in(graphs: dict[str, dict]) -> set[str]:
    return {step["class_type"] for graph in graphs.values() for step in graph.values()}


LOADED_LATER = {"H3RuntimeLoadLatent", "H3RuntimeLoadPrompt", "H3RuntimeLoadLora"}  # they need a file: tests below
NEEDS_A_SERVER = {"H3RuntimeRemoteRender"}  # test_nodes_remote.py


def test_no_node_is_forgotten(info):
    ours = {name for name in info if name.startswith(OURS)}
    assert ids_in(minimal_graphs()) & ours == ours - LOADED_LATER - NEEDS_A_SERVER
    assert ours - ids_in(full_graphs()) == LOADED_LATER | NEEDS_A_SERVER | {
        "H3RuntimeExtendClip",
        "H3RuntimeJoinClips",
        "H3RuntimeSplitLatent",
        "H3RuntimeJoinLatent",
    }, "these have no inputs beyond those of the minimal graphs"


@pytest.mark.parametrize("name", minimal_graphs())
def test_minimal_inputs(server, name):
    done = server.run(minimal_graphs()[name])
    assert done.status == "success", f"{done.failed_node}: {done.error}"


@pytest.mark.parametrize("name", full_graphs())
def test_full_inputs(server, name):
    done = server.run(full_graphs()[name])
    assert done.status == "success", f"{done.failed_node}: {done.error}"


# ---- caching


def test_twice_the_same_runs_nothing_and_a_new_seed_only_what_follows(server):
    graph = {**prompted("a cat on a wall"), "sampler": sampler(seed=11), "save": decode()}
    del graph["media"]
    first = server.run(graph)
    assert first.status == "success", first.error
    again = server.run(graph)
    assert again.cached == set(graph)
    graph["sampler"]["inputs"]["seed"] = 12
    other = server.run(graph)
    assert other.cached == set(graph) - {"sampler", "save"}
    graph["prompt"]["inputs"]["prompt"] = "a dog on a wall"
    third = server.run(graph)
    assert third.cached == {"model", "clip", "vaes", "empty"}


def test_ten_runs_return_their_memory(server):
    def once(seed: int) -> int:
        graph = {**prompted(), "sampler": sampler(seed=seed), "save": decode(prefix="ten")}
        assert server.run(graph).status == "success"
        return server.resident_bytes()

    before = max(once(seed) for seed in range(20, 24))
    after = [once(seed) for seed in range(24, 34)][-1]
    assert after - before < 24 << 20, f"{(after - before) / 2**20:.1f} MiB more after ten runs"


# ---- telling and stopping

LONG = {"steps": 200, "resume": False}


def long_graph(**more) -> dict:
    empty = node("H3RuntimeEmptyLatent", width=192, height=128, frames=39)
    return {**prompted(), "empty": empty, "sampler": sampler(**{**LONG, **more}), "save": decode()}


def test_cancel_stops_within_a_block_and_is_no_error(server):
    page = Listener(server, "cancel")
    prompt_id, answer = server.queue(long_graph(), client_id="cancel")
    assert prompt_id, answer
    until = time.monotonic() + 60
    while not any(text.startswith("sampling: ") for text in page.texts()) and time.monotonic() < until:
        time.sleep(0.02)
    told = time.monotonic()
    server.request("/interrupt", {})
    done = server.wait(prompt_id)
    took = time.monotonic() - told
    kinds = [message[0] for message in done.messages]
    assert "execution_interrupted" in kinds and "execution_error" not in kinds
    assert took < 2, f"{took:.1f} s after Cancel"
    assert page.of_type("execution_interrupted") and not page.of_type("execution_error")
    page.close()
    after = server.run({**prompted(), "sampler": sampler(seed=77), "save": decode()})
    assert after.status == "success", "the next job must run after a cancelled one"


def test_progress_tells_steps_blocks_and_time_left(server):
    page = Listener(server, "progress")
    graph = long_graph(steps=12, seed=5)
    prompt_id, _ = server.queue(graph, client_id="progress", extra_data={"preview_method": "none"})
    assert server.wait(prompt_id).status == "success"
    texts = page.texts()
    assert any(re.search(r"sampling: .*[\d.]+ s left", text) for text in texts), texts[-20:]
    states = [event["nodes"].get("sampler") for event in page.of_type("progress_state")]
    values = [state["value"] for state in states if state]
    assert values == sorted(values) and values[-1] == 12 and len(set(values)) > 3
    assert page.previews() == 0
    page.close()


def test_previews_change_nothing_and_their_failure_costs_only_themselves(server):
    latents = {}
    for method in ("none", "latent2rgb", "taesd"):
        (server.base / "models" / "vae_approx").mkdir(exist_ok=True)
        (server.base / "models" / "vae_approx" / "taeh3.safetensors").write_bytes(b"this is no decoder")
        page = Listener(server, method)
        graph = {**prompted(), "sampler": sampler(seed=8, steps=3), "save": saved(prefix=f"preview/{method}")}
        graph["sampler"]["inputs"]["resume"] = False
        prompt_id, _ = server.queue(graph, client_id=method, extra_data={"preview_method": method})
        done = server.wait(prompt_id)
        assert done.status == "success", done.error
        if method == "latent2rgb" and "sampler" not in done.cached:
            assert page.previews() >= 3
        latents[method] = done
        page.close()
        server.request("/free", {"free_memory": True})
        time.sleep(0.5)
    files = [kept_latent(server, f"preview/{method}") for method in latents]
    for other in files[1:]:
        assert torch.equal(files[0].latent.video, other.latent.video)
        assert torch.equal(files[0].latent.audio, other.latent.audio)


# ---- refusals: one sentence, before the weights are read


def test_a_model_of_the_host_is_refused_by_name(server):
    graph = {**prompted(), "sampler": sampler(), "save": decode()}
    graph["model"] = node("CheckpointLoaderSimple", ckpt_name="none.safetensors")
    done = server.run(graph)
    assert done.status == "refused"
    assert "H3 Load Model" in done.error and "ComfyUI's MODEL" in done.error


def test_a_missing_file_names_folder_and_page(server):
    graph = {**prompted(), "sampler": sampler(), "save": decode()}
    graph["model"]["inputs"]["model"] = "gone.safetensors"
    done = server.run(graph)
    assert done.status == "refused"
    for words in ("gone.safetensors", "diffusion_models", "https://huggingface.co/"):
        assert words in done.error


@pytest.mark.parametrize("name", refusals())
def test_refused_in_one_sentence(server, name):
    graph, words = refusals()[name]
    done = server.run(graph)
    assert done.status == "error" and words in done.error, done.error
    assert "\n" not in done.error, "one sentence"


# ---- beside the host's own nodes


def test_the_hosts_h3_nodes_into_our_sampler(server):
    graph = {
        **loaders(),
        "their": node("MiniMaxH3ImageToVideo", clip=["clip", 0], vae=["vaes", 0], prompt="a ball", width=96, height=64,
                      length=22, first_frame=["media", 0]),
        "guide": node("MiniMaxH3AddGuide", positive=["their", 0], latent=["their", 1], vae=["vaes", 0],
                      audio_vae=["vaes", 1], image=["media", 0], audio=["media", 2], frame_idx=12),
        "sampler": sampler("guide"),
        "save": decode(),
    }  # fmt: skip
    graph["sampler"]["inputs"]["latent"] = ["their", 1]
    done = server.run(graph)
    assert done.status == "success", f"{done.failed_node}: {done.error}"
    parts = done.outputs["sampler"]["h3_fidelity"][0]["parts"]
    foreign = [part["reason"] for part in parts if part["name"] == "condition/foreign"]
    assert foreign and "guide at frame 12" in foreign[0]


def test_the_hosts_references_into_our_sampler(server):
    graph = {
        **loaders(),
        "their": node("MiniMaxH3ReferenceToVideo", clip=["clip", 0], vae=["vaes", 0], audio_vae=["vaes", 1],
                      prompt="<Picture 1>", width=96, height=64, length=22, ref_image_size="match",
                      **{"ref_images.ref_image_0": ["media", 0], "ref_audios.ref_audio_0": ["media", 2]}),
        "sampler": sampler("their"),
        "save": decode(),
    }  # fmt: skip
    graph["sampler"]["inputs"]["latent"] = ["their", 1]
    done = server.run(graph)
    assert done.status == "success", f"{done.failed_node}: {done.error}"


def test_our_vaes_and_latents_in_the_hosts_nodes(server):
    graph = {
        **prompted(),
        "sampler": sampler(seed=2),
        "plain": node("VAEDecode", samples=["sampler", 0], vae=["vaes", 0]),
        "tiled": node("VAEDecodeTiled", samples=["sampler", 0], vae=["vaes", 0], tile_size=512, overlap=64,
                      temporal_size=64, temporal_overlap=8),
        "ours": node("H3RuntimeDecodeVideo", latent=["sampler", 0], video_vae=["vaes", 0]),
        "sound": node("VAEDecodeAudio", samples=["sampler", 0], vae=["vaes", 1]),
        "back": node("VAEEncode", pixels=["media", 1], vae=["vaes", 0]),
        "from": sampler("prompt", "back", denoise=0.5),
        "one": node("SaveImage", images=["plain", 0], filename_prefix="plain"),
        "two": node("SaveImage", images=["tiled", 0], filename_prefix="tiled"),
        "three": node("SaveImage", images=["ours", 0], filename_prefix="ours"),
        "four": node("PreviewAudio", audio=["sound", 0]),
        "five": decode("from"),
        "text": node("CLIPTextEncode", clip=["clip", 0], text="a ball"),
        "six": {**sampler("text"), "class_type": "H3RuntimeSampler"},
        "seven": decode("six"),
    }  # fmt: skip
    done = server.run(graph)
    assert done.status == "success", f"{done.failed_node}: {done.error}"
    assert "sound is made anew" in done.notes("from")

    def pictures(prefix: str) -> list[bytes]:
        from PIL import Image

        return [Image.open(path).tobytes() for path in sorted(server.output.glob(f"{prefix}_*.png"))]

    assert len(pictures("ours")) == 22
    assert pictures("plain") == pictures("tiled") == pictures("ours")


@pytest.mark.parametrize(
    ("empty", "said"),
    [
        (node("EmptyLatentImage", width=96, height=64, batch_size=1), "96x64, 22 frames"),
        (node("EmptySD3LatentImage", width=96, height=64, batch_size=1), "96x64, 22 frames"),
        (node("EmptyHunyuanLatentVideo", width=96, height=64, length=13, batch_size=1), "96x64"),
        (node("EmptyMiniMaxH3LatentAV", width=96, height=64, length=22), ""),
    ],
)
def test_plain_empty_latents_are_replaced_and_said(server, empty, said):
    graph = {**prompted(), "empty": empty, "sampler": sampler(frames=22, seed=1), "save": decode()}
    done = server.run(graph)
    assert done.status == "success", done.error
    assert said in done.notes("sampler")
    assert bool(said) == ("was replaced by an H3 one" in done.notes("sampler"))


def test_a_noise_mask_of_the_host_keeps_what_it_keeps(server):
    graph = {
        **prompted(),
        "encoded": node("H3RuntimeEncodeClip", video_vae=["vaes", 0], audio_vae=["vaes", 1], images=["media", 1],
                        audio=["media", 2]),
        "none": node("SolidMask", value=0.0, width=96, height=64),
        "masked": node("SetLatentNoiseMask", samples=["encoded", 0], mask=["none", 0]),
        "sampler": sampler("prompt", "masked"),
        "made": saved(prefix="masks/made"),
        "given": saved("encoded", "masks/given"),
    }  # fmt: skip
    done = server.run(graph)
    assert done.status == "success", done.error
    made, given = (
        load_latent(server.output / "masks" / f"{n}_00001_.h3-latent.safetensors") for n in ("made", "given")
    )
    assert torch.equal(made.latent.video, given.latent.video)
    assert not torch.equal(made.latent.audio, given.latent.audio), "the sound has no mask"
    assert "for the picture alone" in done.notes("sampler")


def test_other_models_may_take_our_memory(server):
    graph = {**prompted(), "sampler": sampler(seed=31), "save": decode()}
    assert server.run(graph).status == "success"
    server.request("/free", {"unload_models": True})
    time.sleep(1.0)
    asked = server.log.count("Requested to load H3Runtime_dit")
    graph["sampler"]["inputs"]["seed"] = 32
    assert server.run(graph).status == "success"
    assert server.log.count("Requested to load H3Runtime_dit") == asked + 1


# ---- files


def test_a_saved_clip_holds_workflow_and_manifest(server):
    graph = {**prompted(), "sampler": sampler(seed=41), "save": decode(prefix="tags/clip")}
    workflow = {"nodes": [], "links": [], "version": 0.4}
    done = server.run(graph, extra_data={"extra_pnginfo": {"workflow": workflow}})
    assert done.status == "success", done.error
    shown = done.outputs["save"]["images"][0]
    tags = read_metadata(server.output / shown["subfolder"] / shown["filename"])
    assert {"prompt", "workflow", "h3_manifest"} <= set(tags)
    assert json.loads(tags["workflow"]) == workflow
    assert json.loads(tags["prompt"])["sampler"]["inputs"]["seed"] == 41
    manifest = json.loads(tags["h3_manifest"])
    assert manifest["request"]["seed"] == 41 and manifest["request"]["prompt"] == "a red ball"
    assert set(manifest["models"]) == {"dit", "text_encoder", "video_vae", "audio_vae"}
    assert str(server.base) not in tags["h3_manifest"], "names of files, never places"


def test_prompts_and_latents_come_back_from_their_files(server):
    graph = {
        **prompted("kept words"),
        "sampler": sampler(seed=51),
        "latent": saved(prefix="kept/latent"),
        "words": node("H3RuntimeSavePrompt", positive=["prompt", 0], filename_prefix="kept/prompt"),
    }
    assert server.run(graph).status == "success"
    again = {
        **loaders(),
        "prompt": node("H3RuntimeLoadPrompt", file="kept/prompt_00001_.h3-condition.safetensors [output]"),
        "sampler": sampler(seed=51),
        "latent": saved(prefix="kept/again"),
        "loaded": node("H3RuntimeLoadLatent", file="kept/latent_00001_.h3-latent.safetensors [output]"),
        "clip_file": decode("loaded"),
    }
    again["sampler"]["inputs"]["resume"] = False
    done = server.run(again)
    assert done.status == "success", done.error
    one, two = (kept_latent(server, f"kept/{name}") for name in ("latent", "again"))
    assert torch.equal(one.latent.video, two.latent.video) and torch.equal(one.latent.audio, two.latent.audio)


def test_a_run_stopped_part_way_goes_on_to_the_same_bits(server):
    whole = {**prompted(), "sampler": sampler(seed=61, steps=4, resume=False), "save": saved(prefix="parts/whole")}
    parts = {
        **prompted(),
        "first": sampler(seed=61, steps=4, stop_step=2, resume=False),
        "kept": saved("first", "parts/state"),
        "second": sampler("prompt", "first", seed=61, steps=4, start_step=2, resume=False),
        "save": saved("second", "parts/both"),
    }
    for graph in (whole, parts):
        done = server.run(graph)
        assert done.status == "success", done.error
    a, b = (kept_latent(server, f"parts/{name}") for name in ("whole", "both"))
    assert torch.equal(a.latent.video, b.latent.video) and torch.equal(a.latent.audio, b.latent.audio)
    wrong = {
        **loaders(),
        "prompt": node("H3RuntimeEncodePrompt", clip=["clip", 0], prompt="a red ball"),
        "state": node("H3RuntimeLoadLatent", file="parts/state_00001_.h3-latent.safetensors [output]"),
        "sampler": sampler("prompt", "state", seed=61, steps=4, resume=False),
        "save": decode(),
    }
    done = server.run(wrong)
    assert "start_step to 2" in done.error
    wrong["sampler"]["inputs"] |= {"start_step": 2, "steps": 9}
    assert "stands at sigma" in server.run(wrong).error


# ---- a server that dies


def test_a_killed_render_is_taken_up_when_it_is_queued_again(tmp_path_factory):
    base = tmp_path_factory.mktemp("killed")
    first = started(base)
    graph = long_graph(steps=40, seed=71, resume=True)
    graph["save"] = saved(prefix="resumed")
    early = {**prompted("early"), "sampler": sampler(seed=1), "keep": saved(prefix="early"), "save": decode(prefix="e")}
    assert first.run(early).status == "success"
    prompt_id, answer = first.queue(graph)
    assert prompt_id, answer
    states = base / "recovery"
    until = time.monotonic() + 60
    known = {path.name for path in states.glob("*.safetensors")}
    while time.monotonic() < until:
        new = [p for p in states.glob("*.safetensors") if p.name not in known]
        if new and first.get("/queue")["queue_running"]:
            break
        time.sleep(0.01)
    time.sleep(0.3)
    first.kill()
    second = started(base, "--disable-metadata")
    try:
        done = second.run(graph)
        assert done.status == "success", done.error
        taken = re.search(r"taken up after forward (\d+) of 40", done.notes("sampler"))
        assert taken and 0 < int(taken[1]) < 40, done.notes("sampler")
        whole = long_graph(steps=40, seed=71, resume=False)
        whole["save"] = saved(prefix="whole")
        assert second.run(whole).status == "success"
        a, b = (kept_latent(second, name) for name in ("resumed", "whole"))
        assert torch.equal(a.latent.video, b.latent.video) and torch.equal(a.latent.audio, b.latent.audio)
        late = {
            **loaders(),
            "kept": node("H3RuntimeLoadLatent", file="early_00001_.h3-latent.safetensors [output]"),
            "save": decode("kept", "late"),
        }
        assert second.run(late).status == "success"
        before, after = (base / "output" / f"{n}_00001_.mp4" for n in ("e", "late"))
        assert not {"prompt", "workflow", "h3_manifest"} & set(read_metadata(after)), "--disable-metadata"
        assert (read_clip(before).frames == read_clip(after).frames).all(), "decoded after a restart: the same frames"
    finally:
        second.kill()


# ---- a render on a server of the user's own


def remote(**inputs) -> dict:
    small = {"prompt": "a ball", "server": "studio", "width": 96, "height": 96, "seconds": 4.4, "steps": 3}
    return {
        "media": node("H3RuntimeSampleMedia", width=96, height=96, frames=107),
        "remote": node("H3RuntimeRemoteRender", **{**small, **inputs}),
    }


@pytest.fixture
def engine(server):
    with serving("vllm-omni", key="sk-secret", looks=1) as stand:
        entry = {"engine": "vllm-omni", "origin": stand.url, "key": "sk-secret", "version": "0.30.0"}
        (server.base / "engines.json").write_text(json.dumps({"studio": entry}), encoding="utf-8")
        clip_bytes(96, 96, 107)
        yield stand


def test_a_render_on_a_server_with_media_and_a_workflow(server, engine):
    graph = remote(source=["media", 1], mask=["media", 3], filename_prefix="far/clip")
    graph["shown"] = node("PreviewImage", images=["remote", 0])
    graph["again"] = node("SaveVideo", video=["remote", 2], filename_prefix="far/again", format="auto", codec="auto")
    done = server.run(graph, extra_data={"extra_pnginfo": {"workflow": {"nodes": [7]}}})
    assert done.status == "success", done.error
    assert done.outputs["remote"]["h3_label"] == ["APPROXIMATE (vLLM-Omni quality lossless, remote, not verified here)"]
    assert "video" in next(iter(engine.jobs.values())).asked
    assert read_metadata(server.output / "far" / "clip_00001_.mp4")["workflow"] == '{"nodes": [7]}'
    assert server.run(graph).cached == set(graph)
    growing = remote(prompt="<Picture 1>", **{"images.image_0": ["media", 0]})
    assert "is 96x96 as it is sent" in server.run(growing).error
    assert "sk-secret" not in server.log


def test_an_address_is_refused_at_the_queue_and_cancel_ends_the_job(server, engine):
    refused = server.run(remote(server="http://10.0.0.1:30010"))
    assert refused.status == "refused" and "chosen by its name, not by an address: add it to" in refused.error
    engine.looks = 10**6
    prompt_id, _ = server.queue(remote(seed=9))
    while not engine.jobs:
        time.sleep(0.05)
    server.request("/interrupt", {})
    assert [m[0] for m in server.wait(prompt_id, 20).messages][-1] == "execution_interrupted"
    assert not engine.jobs, "vLLM-Omni ends a job when it is asked to"
