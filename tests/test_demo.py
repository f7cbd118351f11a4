"""The demo: one prompt exactly and by two shortcuts, compared before encoding, on one page; and ways by their names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from h3_runtime.cli import main
from h3_runtime.compare.measured import is_number
from h3_runtime.compare.plots import Scatter, scatter_svg
from h3_runtime.compare.table import Link, Shown, TablePage
from h3_runtime.demo.run import CLIPS, SHORTCUTS
from h3_runtime.errors import H3Error
from h3_runtime.request import RenderRequest
from h3_runtime.ways import Way

FORWARDS = 12


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, what it said, its results by name) of one demo with few forwards."""
    import contextlib
    import io

    out = tmp_path_factory.mktemp("demo") / "out"
    told, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(said):
        assert main(["demo", "--steps", str(FORWARDS), "--out", str(out), "--json"]) == 0
    return out, said.getvalue().splitlines(), json.loads(told.getvalue())["results"]


def test_the_demo_ends_with_its_page(ran):
    out, said, results = ran
    page = out / "report.html"
    assert said[-1] == str(page.resolve()) == {r["name"]: r["value"] for r in results}["report"]
    html = page.read_text(encoding="utf-8")
    for clip in CLIPS:
        assert f'src="{clip.file}.mp4"' in html and (out / f"{clip.file}.mp4").is_file()
    for link in re.findall(r'href="([^"]+)"', html):
        assert (out / link).is_file(), link
    assert not list(out.rglob("*.kept.mkv")), "frames are kept until they were compared"


def test_each_shortcut_is_told_in_one_line(ran):
    _, said, results = ran
    found = {row["name"]: row["value"] for row in results}
    lines = [row["value"] for row in results if row["name"] == "line"]
    assert said[-4:-1] == lines and len(lines) == 1 + len(SHORTCUTS)
    assert f"{FORWARDS} DiT calls" in lines[0] and "not the release's schedule" in lines[0]
    assert f"all {FORWARDS} DiT calls made" in lines[1] and "not exact (APPROXIMATE)" in lines[1]
    saved = FORWARDS - found["3_forecast/dit_calls"]
    assert 0 < saved and f"{saved} of {FORWARDS} DiT calls saved" in lines[2]
    for line in lines[1:]:
        assert re.search(r"PSNR \d+\.\d+ dB", line) and "sound distance" in line and "times as fast" in line


def test_the_shortcuts_are_measured_before_encoding(ran):
    """Both leave the prompt's shape: far from equal, and near to it."""
    rows = {row["name"]: row for row in ran[2]}
    for clip in SHORTCUTS:
        psnr = rows[f"{clip.file}/psnr"]
        assert psnr["basis"] == "before encoding" and psnr["unit"] == "dB"
        assert 25 < psnr["value"] < 100
        assert is_number(rows[f"{clip.file}/mr_stft"]["value"]) and rows[f"{clip.file}/mr_stft"]["value"] > 0
        report = json.loads((Path(rows[f"{clip.file}/report"]["value"]).parent / "report.json").read_text("utf-8"))
        assert report["picture"]["psnr"] == psnr["value"]
    assert rows["1_lossless/exact"]["value"] is False, "12 forwards are not the release's schedule"
    assert rows["2_int8/label"]["value"].startswith("APPROXIMATE")


# ---- ways


def test_a_way_is_its_name():
    way = Way.read("int8_convrot+forecast:calls=0.5+steps=24")
    request, loading, _ = way.on(RenderRequest("a"))
    assert (request.quantise, request.num_forwards, loading.quantise) == ("int8_convrot", 24, "int8_convrot")
    assert [name for name, _ in request.accelerators] == ["forecast"]
    assert dict(request.accelerators[0][1])["calls"] == 0.5
    plain, loading, _ = Way.read("lossless").on(RenderRequest("a", num_forwards=7))
    assert plain == RenderRequest("a", num_forwards=7) and loading.quantise is None
    assert re.fullmatch(r"[A-Za-z0-9.=_-]+", way.file_name)
    assert Way.read("second-order").on(RenderRequest("a"))[0].solver == "second-order"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int8+fp8", "quantises twice"),
        ("lossles", "part 'lossles'.*is not built.*lossless, lora, steps=N"),
        ("steps=0", "steps .forwards. is 0"),
        ("forecast:calls=7", "calls is 7"),
    ],
)
def test_a_way_that_cannot_be(name, words):
    with pytest.raises(H3Error, match=words):
        Way.read(name)


# ---- the page of many ways


def test_the_table_page_lets_nothing_out():
    bad = '</script><img src=x onerror=alert(1)> & "q"'
    html = TablePage(bad, [bad], [bad], [[bad, Link(bad, bad)]], [bad], [Shown(bad, bad, bad)]).html()
    assert "<img" not in html and html.count("<script") == 1
    assert html.count("&lt;img src=x") == 12


def test_the_front_is_what_no_other_beats():
    plot = Scatter(
        "t", "s", (("best", 1.0, 40.0), ("worse", 2.0, 30.0), ("equal", 3.0, float("inf")), ("slow", 4, 50.0))
    )
    assert [name for name, _, _ in plot.front()] == ["best", "equal"]
    svg = scatter_svg(plot)
    assert svg.count("<circle") == 4 and svg.count('class="dot best"') == 2 and "nan" not in svg and "inf" not in svg
    assert "nothing was measured" in scatter_svg(Scatter("t", "s", ()))
    names = re.findall(r'<text x="([\d.]+)" y="([\d.]+)">', scatter_svg(Scatter("t", "s", (("a", 1, 1), ("b", 1, 1)))))
    assert abs(float(names[0][1]) - float(names[1][1])) >= 12, "names of one place stand below each other"
