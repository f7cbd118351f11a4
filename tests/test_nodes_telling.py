"""What nodes tell: words on a node, times, names of saved files, the tags of a saved clip."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch


def test_clock_and_text(pack):
    clock = pack.host.clock
    assert [clock(s) for s in (4.23, 42, 185, 4320)] == ["4.2 s", "42 s", "3 min 05 s", "1 h 12 min"]


def test_workflow_tags_are_the_hosts(pack):
    hidden = SimpleNamespace(prompt={"1": {}}, extra_pnginfo={"workflow": {"nodes": []}})
    tags = pack.host.workflow_tags(hidden)
    assert json.loads(tags["prompt"]) == {"1": {}} and json.loads(tags["workflow"]) == {"nodes": []}
    assert pack.host.workflow_tags(None) == {}


def test_text_on_a_node_keeps_what_stands_in_angle_brackets(pack, monkeypatch):
    told = []
    instance = SimpleNamespace(send_progress_text=lambda text, node: told.append((text, node)))
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace(instance=instance)))
    node = SimpleNamespace(hidden=SimpleNamespace(unique_id="5"))
    pack.host.show_text(node, "in the prompt: <Picture 1> = picture 1")
    assert told == [("in the prompt: \u2039Picture 1\u203a = picture 1", "5")], "the page would take it for HTML"


@pytest.mark.parametrize("subfolder", ["", "h3", "h3\\deep"])
def test_a_saved_file_is_named_as_the_picker_lists_it(pack, monkeypatch, subfolder):
    shown = {"filename": "clip_00001_.h3-latent.safetensors", "subfolder": subfolder, "type": "output"}
    monkeypatch.setattr(pack.host.os, "sep", "\\")  # as on Windows
    name = pack.host.saved_name(shown)
    monkeypatch.undo()
    assert name == "/".join([*subfolder.split("\\"), shown["filename"]]).strip("/") + " [output]"
    folder = pack.base / "output" / subfolder.replace("\\", "/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / shown["filename"]).write_bytes(b"")
    assert name in pack.host.saved_files(".h3-latent.safetensors") and pack.host.saved_file(name).is_file()
    (folder / shown["filename"]).unlink()


def test_a_refusal_stands_on_its_node(pack, monkeypatch):
    told = []
    monkeypatch.setattr(pack.host, "show_text", lambda node, text: told.append(text))
    with pytest.raises(pack.h3.H3Error, match="height 0: give both"):
        pack.run("H3RuntimeEmptyLatent", width=192, height=0)
    assert told == ["width is 192 and height 0: give both, or 0 for both to use the ratio"]


def test_files_are_listed_through_links_and_a_missing_folder_takes_nothing_down(pack, tmp_path, monkeypatch):
    models, far = tmp_path / "models", tmp_path / "far"
    (models / "sub").mkdir(parents=True)
    far.mkdir()
    for file in (models / "a.gguf", models / "sub" / "b.gguf", far / "c.gguf"):
        file.write_bytes(b"GGUF")
    try:
        (models / "linked").symlink_to(far, target_is_directory=True)
        (far / "round").symlink_to(models, target_is_directory=True)
    except OSError:
        pytest.skip("needs os: this system lets nobody make links")
    paths = pack.host.folder_paths
    monkeypatch.setattr(paths, "get_filename_list", lambda kind: [])
    monkeypatch.setattr(paths, "get_folder_paths", lambda kind: [str(models), str(tmp_path / "gone")])
    assert pack.host.folder_files("diffusion_models") == ["a.gguf", "linked/c.gguf", "sub/b.gguf"]

    def missing(kind):
        raise KeyError(kind)

    monkeypatch.setattr(paths, "get_filename_list", missing)
    assert pack.host.folder_files("diffusion_models") == []


def test_decoded_frames_are_held_once_or_refused_before_the_decode(pack, monkeypatch):
    kept = pack.stand_ins.FrameList(22, 64, 96)
    place = kept.held.data_ptr()
    for count in (17, 5):
        kept.write(torch.full((1, 3, count, 64, 96), count / 100))
    frames = kept.frames()
    assert frames.data_ptr() == place and frames.shape == (22, 64, 96, 3), "no second copy"
    assert frames[16].unique().tolist() == pytest.approx([0.17]) and frames[17].unique().tolist() == pytest.approx(
        [0.05]
    )
    home = sys.modules[pack.h3.probe_host.__module__]
    monkeypatch.setattr(home, "system_memory", lambda: (64 << 30, 1 << 30))
    with pytest.raises(
        pack.h3.H3Error, match=r"362 frames of 1344x768 take 4\.2 GiB .* 1\.0 GiB are free: use H3 Decode"
    ):
        pack.stand_ins.FrameList(362, 768, 1344)
