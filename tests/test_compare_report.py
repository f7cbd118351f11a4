"""The files of a comparison: kept frames, the page, the videos, the command; and the page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from h3_runtime.cli import main
from h3_runtime.compare import letters
from h3_runtime.compare import page as pages
from h3_runtime.compare.plots import Plot, png, svg, thinned, tick_words, ticks
from h3_runtime.compare.report import compare_files, compare_saved, compare_sides
from h3_runtime.compare.sources import open_pair, side_of_frames
from h3_runtime.errors import H3Error
from h3_runtime.media import Encoding, KeptWriter, Mp4Writer, kept_path, read_clip, stream_frames, track_facts
from h3_runtime.save import Saved

from .comfy_server import find_python
from .drawn_media import drawn_media
from .report_page import NO_BROWSER

ODD_NAME = 'b </script><img src=x onerror=alert(1)> & "quoted"'


@pytest.fixture(scope="module")
def media():
    return drawn_media(96, 64, 22)


def quieter(media) -> torch.Tensor:
    return media.sound * 0.9


def changed(media) -> np.ndarray:
    """One level more in every second pixel of red: 57.1 dB, far less than an encoder changes."""
    clip = media.clip.copy()
    clip[:, :, ::2, 0] += 1
    return clip


def save(path: Path, frames, sound, kept: bool = True, report: dict | None = None, lossless: bool = False) -> Path:
    with Mp4Writer(path, 96, 64, audio=sound, encoding=Encoding(lossless=lossless)) as writer:
        writer.write(frames)
    if kept:
        with KeptWriter(kept_path(path), 96, 64, sound) as writer:
            writer.write(frames)
    if report is not None:
        path.with_suffix(".report.json").write_text(json.dumps(report), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def made(media, tmp_path_factory):
    """A finished comparison of two clips in memory, with names and labels that want to break out of the page."""
    report = {"label": "APPROXIMATE <script>alert(2)</script>", "dit_calls": 12, "stage_seconds": {"denoise": 2.5}}
    return compare_sides(
        side_of_frames(media.clip, media.sound, "a.mp4", {"label": "LOSSLESS", "stage_seconds": {"denoise": 5.0}}),
        side_of_frames(changed(media), quieter(media), ODD_NAME, report),
        tmp_path_factory.mktemp("report") / "out",
        {"psnr": 40.0, "snr": 90.0},
    )


# ---- before and after encoding


def test_a_small_difference_is_right_before_encoding_and_marked_after(media, tmp_path):
    one = save(tmp_path / "one.mp4", media.clip, media.sound)
    two = save(tmp_path / "two.mp4", changed(media), quieter(media))
    exact = 10 * np.log10(255**2 / (1 / 6))  # one level in a sixth of all values
    kept = compare_files(one, two)
    assert kept.data["basis"] == "before encoding"
    assert kept.data["picture"]["psnr"] == pytest.approx(exact, abs=1e-3)
    assert kept.data["sound"]["channels"]["left"]["snr"] == pytest.approx(20, abs=1e-3)
    assert kept.data["sound"]["channels"]["left"]["rms_ratio"] == pytest.approx(0.9, abs=1e-5)
    assert not [note for note in kept.data["notes"] if "after" in note]
    kept_path(two).unlink()
    coded = compare_files(one, two)
    assert coded.data["basis"] == "after H.264/AAC"
    assert abs(coded.data["picture"]["psnr"] - exact) > 3, "the encoder hides it"
    assert any("measured after H.264/AAC" in note for note in coded.data["notes"])
    assert any("one.kept.mkv is not used" in note for note in coded.data["notes"])
    assert "measured after H.264/AAC" in "\n".join(coded.lines())


def test_kept_frames_come_back_to_the_bit(media, tmp_path):
    path = save(tmp_path / "clip.mp4", media.clip, media.sound * 5)
    clip = read_clip(kept_path(path))
    assert np.array_equal(clip.frames, media.clip)
    assert (clip.audio - (media.sound * 5).clamp(-1, 1)).abs().max() <= 2**-23
    facts = track_facts(kept_path(path))
    assert (facts.picture_codec, facts.sound_codec, facts.num_frames, facts.sound_start) == ("ffv1", "flac", 22, 0)
    side, _ = open_pair((path, path))
    assert side.sound_told["peak"] == pytest.approx(1.25, abs=0.01), "the peak that whole numbers cannot hold"


def test_kept_frames_of_an_earlier_render_are_not_used(media, tmp_path):
    one, two = (save(tmp_path / f"{name}.mp4", media.clip, media.sound) for name in ("one", "two"))
    old = one.stat().st_mtime - 60
    os.utime(kept_path(one), (old, old))
    compared = compare_files(one, two)
    assert compared.data["basis"] == "after H.264/AAC"
    assert any("of an earlier render" in note for note in compared.data["notes"])


def test_a_failed_keeping_leaves_no_file(media, tmp_path):
    with pytest.raises(RuntimeError, match="stopped"), KeptWriter(tmp_path / "x.kept.mkv", 96, 64) as writer:
        writer.write(media.clip[:2])
        raise RuntimeError("stopped")
    assert not list(tmp_path.iterdir())


def test_files_without_loss_count_as_before_encoding(media, tmp_path):
    one = save(tmp_path / "one.mp4", media.clip, media.sound, kept=False, lossless=True)
    two = save(tmp_path / "two.mp4", changed(media), quieter(media), kept=False, lossless=True)
    assert compare_files(one, two).data["basis"] == "before encoding"
    coded = save(tmp_path / "coded.mp4", media.clip, media.sound, kept=False)
    assert compare_files(one, coded).data["basis"] == "after H.264/AAC"


def test_two_saved_renders_are_compared_and_their_frames_go(media, tmp_path):
    saved = []
    for name, frames in (("lossless", media.clip), ("int8", changed(media))):
        clip = save(tmp_path / f"{name}.mp4", frames, media.sound, report={"label": name.upper(), "dit_calls": 4})
        saved.append(Saved(clip, None, None, clip.with_suffix(".report.json"), (), kept_path(clip)))
    compared = compare_saved(*saved, tmp_path / "out")
    assert compared.data["basis"] == "before encoding" and compared.data["sides"]["A"]["label"] == "LOSSLESS"
    assert compared.page.exists() and not kept_path(saved[0].video).exists() and saved[0].video.exists()
    with pytest.raises(H3Error, match="stopped early"):
        compare_saved(saved[0], Saved(None, tmp_path / "x", None, tmp_path / "y", ()), tmp_path / "out")


# ---- lengths, rates, files


def test_other_lengths_and_rates_are_put_right_and_told(media, tmp_path):
    one = save(tmp_path / "one.mp4", media.clip, media.sound, kept=False)
    slow = tmp_path / "slow.mp4"
    with av.open(str(slow), "w") as container:
        stream = container.add_stream("libx264", rate=12)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for frame in media.clip[::2]:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    compared = compare_files(one, slow)
    assert compared.data["frames"] == 22 and compared.data["basis"] == "after H.264/AAC"
    assert any("slow.mp4 has 12 frames a second" in note for note in compared.data["notes"])
    assert compared.data["sound"]["why"] == "not measured: B has no sound"


def test_files_that_cannot_be_compared(media, tmp_path, capsys):
    clip = save(tmp_path / "clip.mp4", media.clip, media.sound, kept=False)
    words = tmp_path / "words.mp4"
    words.write_text("no clip")
    (tmp_path / "broken.json").write_text("{")
    for arguments, said in (
        ([clip, tmp_path / "none.mp4"], "does not exist"),
        ([clip, words], "words.mp4"),
        ([clip, clip], "A and B are one file"),
    ):
        assert main(["compare", *map(str, arguments)]) == 2
        assert said in capsys.readouterr().out
    other = str(shutil.copy(clip, tmp_path / "other.mp4"))
    assert main(["compare", str(clip), other, "--reports", str(tmp_path / "broken.json"), "x"]) == 2
    assert "broken.json cannot be read" in capsys.readouterr().out
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(clip, out / "a.mp4")
    assert main(["compare", str(out / "a.mp4"), other, "--out", str(out)]) == 2
    assert "would replace a.mp4" in capsys.readouterr().out


def test_the_command_says_writes_and_judges(media, tmp_path, capsys):
    one = save(tmp_path / "one.mp4", media.clip, media.sound, report={"label": "LOSSLESS"})
    two = save(tmp_path / "two.mp4", changed(media), quieter(media), report={"label": "APPROXIMATE"})
    asked = ["compare", str(one), str(two), "--json", "--threshold", "psnr=50", "lag=0"]
    assert main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in told["results"]}
    assert rows["picture/psnr"]["value"] > 55 and rows["picture/psnr"]["basis"] == "before encoding"
    assert rows["label/B"]["value"] == "APPROXIMATE" and rows["passed"]["value"] is True
    assert main([*asked[:3], "--threshold", "psnr=60", "--out", str(tmp_path / "out"), "--drop-kept"]) == 1
    said = capsys.readouterr().out
    assert "not met: PSNR at least 60 dB" in said and "removed one.kept.mkv" in said
    assert (tmp_path / "out" / "report.html").exists() and not kept_path(one).exists()


# ---- what stands in the folder


def test_side_by_side_has_both_sounds_and_captions(made, media):
    with av.open(str(made.side_by_side)) as container:
        assert [stream.metadata["handler_name"][:2] for stream in container.streams.audio] == ["A:", "B:"]
        assert container.streams.video[0].frames == 22
    frame = next(stream_frames(made.side_by_side))
    assert frame.shape[1] == 2 * 96 + 8 and frame[52 : 52 + 64, :96].std() > 20
    assert frame[:52].max() > 150 and frame[-34:].max() > 150, "captions above, the frame's number below"
    apart = list(stream_frames(made.folder / "difference.mp4"))
    assert len(apart) == 22 and 0 < apart[5][:64].mean() < 8


def test_clips_for_the_page_carry_no_tags(media, tmp_path):
    for name in ("one", "two"):
        tags = {"workflow": "secret words", "comment": "secret words"}
        with Mp4Writer(tmp_path / f"{name}.mp4", 96, 64, audio=media.sound, metadata=tags) as writer:
            writer.write(media.clip)
    compared = compare_files(tmp_path / "one.mp4", tmp_path / "two.mp4", tmp_path / "out")
    held = b"".join(path.read_bytes() for path in compared.folder.iterdir())
    assert b"secret words" in (tmp_path / "one.mp4").read_bytes() and b"secret words" not in held
    for proxy in compared.proxies:
        assert len(list(stream_frames(proxy))) == 22


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_the_page_is_whole_escaped_and_asks_for_nothing(made):
    text = made.page.read_text(encoding="utf-8")
    elements = Elements()
    elements.feed(text)
    scripts = [attributes for tag, attributes in elements.found if tag == "script"]
    assert len(scripts) == 4 and not any("src" in attributes for attributes in scripts)
    assert not [tag for tag, attributes in elements.found if tag in ("img", "iframe", "link", "object", "embed")]
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    links = [a[name] for _, a in elements.found for name in ("href", "src") if name in a]
    assert links and all(link.startswith("data:image/png") or "/" not in link for link in links)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    assert data["sides"]["B"]["name"] == ODD_NAME and data["frames"] == 22
    assert "default-src 'none'" in text.replace("&#x27;", "'")


def test_large_clips_are_linked(made, monkeypatch):
    monkeypatch.setattr(pages, "EMBED_BYTES", 100)
    text = pages.page(made, pages.plots_of(made), pages.spectra_of(made))
    assert 'id="clip-a"' not in text and '"a": "a.mp4"' in text and "Linked: a.mp4, b.mp4" in text


def test_the_json_is_the_report(made):
    data = json.loads((made.folder / "report.json").read_text(encoding="utf-8"))
    assert data == json.loads(json.dumps(made.data))
    assert len(data["per_frame"]["psnr"]) == 22 and data["verdict"]["passed"] is False
    costs = {cost["title"]: cost["value"] for cost in data["sides"]["B"]["costs"]}
    assert costs["denoise"] == 2.5 and costs["peak VRAM"] == "not measured: the report does not tell"
    assert "do not measure beauty" in data["says"]
    names = {path.name for path in made.folder.iterdir()}
    assert {"psnr.png", "ssim.png", "flicker.png", "spectrum_a.png", "spectrum_b.png", "b.mp4"} <= names


# ---- plots


def test_ticks_are_round():
    for low, high in ((0, 1), (27.3, 31.9), (0.9312, 0.9344), (0.99991, 0.99995), (-5, 1e5)):
        marks = ticks(low, high)
        assert 2 <= len(marks) <= 6 and all(low <= mark <= high + 1e-9 for mark in marks)
        steps = np.diff(marks)
        assert np.allclose(steps, steps[0])
        assert len(set(tick_words(marks))) == len(marks) and np.allclose([float(t) for t in tick_words(marks)], marks)


def test_long_curves_keep_their_extremes():
    values = [10.0] * 90_000
    values[31_234], values[70_001] = 2.0, 50.0
    kept = thinned(tuple(values))
    assert len(kept) <= 1400 and (31_234, 2.0) in kept and (70_001, 50.0) in kept
    plot = Plot('a <b> & "c"', "dB", (("x", tuple(values)),), mark=3)
    assert "&lt;b&gt;" in svg(plot) and "<b>" not in svg(plot) and png(plot).size[0] > 1000
    empty = Plot("none", "", (("x", (None, None)),))
    assert "nothing differs" in svg(empty) and np.asarray(png(empty)).min() < 128


# ---- in a browser


@pytest.mark.needs("browser")
def test_the_page_plays_without_network(made):
    script = Path(__file__).with_name("report_page.py")
    done = subprocess.run([find_python(), str(script), str(made.page)], capture_output=True, text=True, timeout=120)
    if done.returncode == NO_BROWSER:
        pytest.skip(f"needs browser: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    for look in told.values():
        states = look["states"]
        assert not look["wrong"] and all(url.startswith(("file:", "blob:", "data:")) for url in look["asked"])
        assert [states[key]["frame"] for key in ("End", "Home", "ArrowRight")] == [21, 0, 1]
        assert [states[key]["mode"] for key in ("d", "s", "w")] == ["difference", "side", "wipe"]
        assert states["2"]["muted"] == [True, False] and states["1"]["muted"] == [False, True]
        assert states["playing"]["sizes"] == [[96, 64], [96, 64]]
    assert told["light"]["paper"] == told["dark"]["other_paper"] != told["dark"]["paper"]


# ---- letters in captions


@pytest.fixture
def own_font_only(monkeypatch):
    """As on a system without fonts."""

    def forget():
        letters._fonts.cache_clear()
        letters._font_of.cache_clear()

    monkeypatch.setattr(letters, "SYSTEM_FONTS", ())
    forget()
    yield
    forget()


def test_letters_that_no_font_has_lose_their_marks_or_are_told(own_font_only):
    bare = letters.Letters(16)
    assert bare.drawable("a cat \u2013 100 %") == "a cat ? 100 %"
    assert bare.drawable("\u00e9t\u00e9 \u65e5") == "ete ?" and bare.drawable("e\u0301") == "e"
    (note,) = letters.replaced_note(bare.replaced)
    assert "\u00e9 as e" in note and "\u2013\u65e5 as ?" in note and "Noto Sans CJK" in note
    assert letters.replaced_note(letters.Letters(16).replaced) == []


def test_a_system_font_takes_what_pillow_lacks():
    if len(letters._fonts(16)) == 1:
        pytest.skip("needs os: this system has none of those that are asked")
    drawn = letters.Letters(16)
    assert drawn.drawable("\u00e9t\u00e9") == "\u00e9t\u00e9" and not drawn.replaced
    runs = drawn.runs("a\u00e9b")
    assert [part for _, part in runs] == ["a", "\u00e9", "b"] and runs[0][0] is runs[2][0] is not runs[1][0]
    pictures = []
    for text in ("\u00e9", "e"):
        picture = Image.new("L", (40, 40))
        drawn.write(ImageDraw.Draw(picture), (4, 4), text, 255)
        pictures.append(np.asarray(picture))
    rows = [np.flatnonzero(ink.any(1)) for ink in pictures]
    assert rows[0].max() == rows[1].max(), "both stand on one line"
    assert rows[0].min() < rows[1].min(), "the accent stands above the letter"


def test_what_a_caption_could_not_draw_is_told(media, tmp_path, own_font_only):
    one = side_of_frames(media.clip[:3], None, "\u65e5\u672c.mp4")
    made = compare_sides(one, side_of_frames(media.clip[:3], None, "plain.mp4"), tmp_path / "out")
    assert any("\u65e5\u672c as ?" in note for note in made.data["notes"])
    assert "\u65e5\u672c.mp4" in (tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_damaged_kept_frames_are_not_measured(media, tmp_path, damage):
    one, two = (save(tmp_path / name, media.clip, media.sound) for name in ("one.mp4", "two.mp4"))
    whole = kept_path(one).read_bytes()
    kept_path(one).write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "noise": b"noise" * 300}[damage])
    made = compare_files(one, two)
    assert made.data["basis"] == "after H.264/AAC"
    assert not any(flag["kind"] == "length" for flag in made.data["flags"])
    assert any("one.kept.mkv" in note and "was not used" in note for note in made.data["notes"])


@pytest.mark.parametrize(
    "edit",
    [
        {"machine": "x"}, {"machine": [1]}, {"fidelity": 3}, {"fidelity": {"parts": [1]}}, {"fidelity": {"parts": 1}},
        {"stats": 1}, {"stage_seconds": "x"}, {"request": []}, {"request": {"size": 3}}, {"environment": 1},
        {"models": [1]},
    ],
)  # fmt: skip
def test_an_edited_report_or_manifest_ends_no_comparison(media, tmp_path, edit):
    report = {"label": "LOSSLESS", "stage_seconds": {"denoise": 1.0}}
    one, two = (save(tmp_path / name, media.clip, media.sound, report=report) for name in ("one.mp4", "two.mp4"))
    one.with_suffix(".report.json").write_text(json.dumps(report | edit))
    one.with_suffix(".json").write_text(json.dumps({"h3_manifest": 1, "request": {}} | edit))
    two.with_suffix(".json").write_text(json.dumps({"h3_manifest": 1, "request": {"seed": 1}}))
    made = compare_files(one, two)
    if "stage_seconds" not in edit:
        assert any("not what a render writes" in note for note in made.data["notes"])


@pytest.mark.parametrize("older", [False, True])
def test_a_comparison_that_does_not_end_leaves_no_half_report(media, tmp_path, monkeypatch, older):
    out = tmp_path / "report"
    if older:
        out.mkdir()
        (out / "mine.txt").write_text("of the user's own")

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pages, "write_text", full)
    sides = [side_of_frames(media.clip, media.sound, name=name) for name in "AB"]
    with pytest.raises(H3Error, match="No space left on device"):
        compare_sides(*sides, out)
    assert (out / "mine.txt").is_file() if older else not out.exists()
