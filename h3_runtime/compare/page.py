"""report.html: one file that opens without network; light and dark, by keyboard, nothing in it unescaped.

Comparison ─▶ report.json, curves and spectra as PNG ─▶ report.html {viewer.js, both clips embedded or linked, tables}
"""

from __future__ import annotations

import base64
import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from ..errors import H3Error
from ..media.files import publish
from ..unfinished import drop, part_path
from . import sounds, verdict
from .clips import DIFFERENCE, SIDE_BY_SIDE
from .measured import is_number, shown
from .plots import Plot, heat, png, spectrogram_svg, svg
from .report import Comparison, dump

EMBED_BYTES = 20 * 2**20  # of both clips together; larger ones are linked
CURVES = (
    ("psnr", "PSNR", "dB"),
    ("ssim", "SSIM", ""),
    ("ms_ssim", "MS-SSIM", ""),
    ("flicker", "temporal flicker difference", "/255"),
)
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; media-src blob: file: "
    "'self'; base-uri 'none'; form-action 'none'"
)


def viewer_source() -> str:
    """The viewer's own code, which the page and ComfyUI's canvas share."""
    return resources.files(__package__).joinpath("viewer.js").read_text(encoding="utf-8")


def viewer_data(made: Comparison) -> dict[str, Any]:
    """What ``mountViewer`` takes: names, labels, costs, curves."""
    data = made.data
    worst = data["picture"]["worst_frame"]
    return {
        "fps": data["fps"],
        "frames": data["frames"],
        "width": data["size"][0],
        "height": data["size"][1],
        "basis": data["basis"],
        "worst": worst if isinstance(worst, int) else None,
        "sides": {
            letter: {
                "name": side["name"],
                "label": side["label"],
                "costs": [
                    {
                        "title": cost["title"],
                        "text": shown(cost["value"], cost["unit"]) if is_number(cost["value"]) else "",
                    }
                    for cost in side["costs"]
                ],
            }
            for letter, side in data["sides"].items()
        },
        "curves": [{"name": title, "unit": unit, "values": data["per_frame"][name]} for name, title, unit in CURVES],
    }


def write_files(made: Comparison) -> None:
    """report.json, the PNGs and report.html into the comparison's folder."""
    folder, plots = made.folder, plots_of(made)
    spectra = spectra_of(made)
    try:
        for name, plot in plots.items():
            _save(png(plot), folder / f"{name}.png")
        for name, (_, levels, _) in spectra.items():
            _save(heat(levels).resize((1200, 400), Image.Resampling.NEAREST), folder / f"{name}.png")
        write_text(folder / "report.json", dump(made.data))
        write_text(folder / "report.html", page(made, plots, spectra))
    except OSError as error:
        raise H3Error(f"the report could not be written to {folder} ({error}): check the free space") from None


def plots_of(made: Comparison) -> dict[str, Plot]:
    frames, worst = made.data["per_frame"], made.data["picture"]["worst_frame"]
    mark = worst if isinstance(worst, int) else None
    plots = {
        name: Plot(f"{title} per frame", unit, ((title, tuple(frames[name])),), mark) for name, title, unit in CURVES
    }
    changes = (("A", tuple(frames["change_a"])), ("B", tuple(frames["change_b"])))
    plots["change"] = Plot("change between frames", "/255", changes, mark)
    return plots


def spectra_of(made: Comparison) -> dict[str, tuple[str, Any, float]]:
    """{file name: (title, levels uint8 [rows, columns], seconds)}; of the sides that have sound."""
    spectra = {}
    for letter, side in zip("AB", made.sides):
        if side.sound is not None and side.sound.shape[1]:
            levels = sounds.spectrogram(side.sound).numpy()
            title = f"{letter}: spectrum in kHz over seconds (-100 to 0 dB)"
            spectra[f"spectrum_{letter.lower()}"] = (title, levels, side.sound.shape[1] / sounds.SAMPLE_RATE)
    return spectra


def _save(picture: Image.Image, path: Path) -> None:
    part = part_path(path, path.suffix)
    try:
        picture.save(part)
        publish(part, path)
    finally:
        drop(part)


def write_text(path: Path, text: str) -> None:
    """In one step: a page that is half written never stands there."""
    part = part_path(path, path.suffix)
    try:
        part.write_text(text, encoding="utf-8")
        publish(part, path)
    finally:
        drop(part)


# --- the page --------------------------------------------------------------------------------------------------------


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element: no ``<``, ``>`` or ``&`` in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def escaped(text: Any) -> str:
    """``text`` as it may stand in an element or a quoted attribute."""
    return html.escape(str(text), quote=True)


_e = escaped


def page(made: Comparison, plots: dict[str, Plot], spectra: dict) -> str:
    """The whole page as text."""
    data = made.data
    embedded = sum(path.stat().st_size for path in made.proxies) <= EMBED_BYTES
    if embedded:
        clips = [base64.b64encode(path.read_bytes()).decode() for path in made.proxies]
        sources = "".join(f'<script type="text/plain" id="clip-{k}">{c}</script>' for k, c in zip("ab", clips))
    else:
        sources = ""
    links = {letter: path.name for letter, path in zip("ab", made.proxies)}
    told = script_json({**viewer_data(made), "links": links})
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    title = f"{data['sides']['A']['name']} and {data['sides']['B']['name']}"
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{_e(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{style}</style></head><body><main>",
        "<header><h1>A against B</h1>",
        '<button id="theme" type="button" aria-label="Light or dark">Light / dark (T)</button></header>',
        _verdict(data),
        _flags(data),
        '<section id="viewer" aria-label="Both clips"></section>',
        f'<p class="soft">{"Embedded" if embedded else "Linked"}: {_e(", ".join(links.values()))}. Beside this page: '
        f'<a href="{SIDE_BY_SIDE}">{SIDE_BY_SIDE}</a> (both sound tracks), <a href="{DIFFERENCE}">{DIFFERENCE}</a>, '
        f'<a href="report.json">report.json</a>. The clips are coded (H.264, AAC); the figures are measured '
        f"{_e(data['basis'])}.</p>",
        _picture(data),
        "".join(f"<figure>{svg(plot)}</figure>" for plot in plots.values()),
        _sound(data),
        "".join(f"<figure>{spectrogram_svg(*spectrum)}</figure>" for spectrum in spectra.values()),
        _costs(data),
        _context(data),
        _notes(data),
        f'<p class="soft">{_e(data["says"])}</p>',
        f'</main><script type="application/json" id="data">{told}</script>',
        f'{sources}<script type="module">{viewer_source()}\n{BOOT}{THEME}</script></body></html>\n',
    ]
    return "\n".join(part for part in parts if part)


THEME = """
const theme = () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
};
document.getElementById("theme").addEventListener("click", theme);
document.addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() === "t" && !event.ctrlKey && !event.metaKey && !event.altKey) theme();
});
"""
BOOT = """
const data = JSON.parse(document.getElementById("data").textContent);
const clip = (letter) => {
  const held = document.getElementById(`clip-${letter}`);
  if (!held) return data.links[letter];
  const bytes = Uint8Array.from(atob(held.textContent), (character) => character.charCodeAt(0));
  return URL.createObjectURL(new Blob([bytes], { type: "video/mp4" }));
};
const clips = { a: clip("a"), b: clip("b") };
window.viewer = mountViewer(document.getElementById("viewer"), data, clips, { keys: document });
"""


def _verdict(data: dict) -> str:
    passed, checks = data["verdict"]["passed"], data["verdict"]["checks"]
    word, kind = {True: ("All thresholds met", "good"), False: ("Not all thresholds met", "bad")}.get(
        passed, ("No thresholds were set", "plain")
    )
    marks = {"met": "good", "not met": "bad", "not measured": "warn"}
    rows = "".join(
        f'<li><span class="chip {marks[check["result"]]}">{_e(check["result"])}</span> {_e(check["demand"])}: '
        f"{_e(shown(check['value'], verdict.METRICS[check['metric']].unit))}</li>"
        for check in checks
    )
    same = " Every pixel and sample is identical." if data["identical"] else ""
    return (
        f'<section class="verdict {kind}"><h2>{_e(word)}</h2><p>Measured <b>{_e(data["basis"])}</b>, {data["frames"]} '
        f"frames of {data['size'][0]}x{data['size'][1]}.{same}</p><ul>{rows}</ul></section>"
    )


def _flags(data: dict) -> str:
    if not data["flags"]:
        return ""
    rows = "".join(
        f'<li><span class="chip warn">{_e(flag["side"])}: {_e(flag["kind"])}</span> {_e(flag["text"])}</li>'
        for flag in data["flags"]
    )
    return f'<section class="flags"><h2>Flags</h2><ul>{rows}</ul></section>'


def _cell(value: Any, unit: str) -> str:
    kind = "" if is_number(value) else ' class="words"'
    return f"<td{kind}>{_e(shown(value, unit))}</td>"


def _picture(data: dict) -> str:
    """Families as rows (mean, rest, first, worst), then the single figures."""
    made = data["picture"]
    rows = "".join(
        f'<tr><th scope="row">{_e(title)}</th>'
        + "".join(_cell(made[f"{name}{part}"], unit) for part in ("", "_rest", "_first", "_min"))
        + "</tr>"
        for name, title, unit in CURVES[:3]
    )
    singles = "".join(
        f'<tr><th scope="row" title="{_e(metric.meaning)}">{_e(metric.title)}</th>'
        f"{_cell(made[metric.name], metric.unit)}<td colspan='3' class='soft left'>{_e(metric.meaning)}</td></tr>"
        for metric in verdict.PICTURE
        if metric.name in ("worst_frame", "flicker", "change_a", "change_b", "sharpness", "frame_lag")
    )
    head = "".join(f"<th scope='col'>{words}</th>" for words in ("all frames", "all but the first", "first", "worst"))
    return (
        f"<section><h2>Picture <small>{_e(data['basis'])}</small></h2><table><tr><td></td>{head}</tr>{rows}{singles}"
        "</table></section>"
    )


def _sound(data: dict) -> str:
    channels = data["sound"]["channels"]
    title = f"<h2>Sound <small>{_e(data['basis'])}</small></h2>"
    if not channels:
        return f"<section>{title}<p>{_e(data['sound']['why'])}</p></section>"
    head = "".join(f"<th scope='col'>{_e(name)}</th>" for name in channels)
    rows = "".join(
        f'<tr><th scope="row">{_e(metric.title)}</th>'
        + "".join(_cell(figures[metric.name], metric.unit) for figures in channels.values())
        + f"<td class='soft left'>{_e(metric.meaning)}</td></tr>"
        for metric in verdict.SOUND
    )
    shift = _cell(data["sound"]["sync_shift_seconds"], "s")
    starts = "".join(
        f'<tr><th scope="row">{letter}: sound begins after the picture</th>'
        f"{_cell(side['sound_start_after_picture_seconds'], 's')}<td></td><td class='soft left'>by the file</td></tr>"
        for letter, side in data["sides"].items()
    )
    return (
        f"<section>{title}<table><tr><td></td>{head}<td></td></tr>{rows}<tr><th scope='row'>B's sound against its "
        f"picture, by A's</th>{shift}<td></td><td class='soft left'>positive: late</td></tr>{starts}</table></section>"
    )


def _costs(data: dict) -> str:
    rows = ""
    for one, two in zip(*(side["costs"] for side in data["sides"].values())):
        ratio = ""
        if is_number(one["value"]) and is_number(two["value"]) and one["value"]:
            ratio = f"{two['value'] / one['value']:.2f} x"
        rows += f'<tr><th scope="row">{_e(one["title"])}</th>{_cell(one["value"], one["unit"])}'
        rows += f"{_cell(two['value'], two['unit'])}<td>{ratio}</td></tr>"
    head = "<tr><td></td><th scope='col'>A</th><th scope='col'>B</th><th scope='col'>B over A</th></tr>"
    return f"<section><h2>Cost</h2><table>{head}{rows}</table></section>"


def _context(data: dict) -> str:
    made = "<section><h2>Context</h2>"
    for letter, side in data["sides"].items():
        rows = f"<tr><th scope='row'>label</th><td class='left'>{_e(side['label'])}</td></tr>"
        for row in side["context"]:
            rows += f"<tr><th scope='row'>{_e(row['title'])}</th><td class='left'>{_e(row['value'])}</td></tr>"
        made += f"<h3>{letter}: {_e(side['name'])}</h3><table class='pairs'>{rows}</table>"
    if data["differs"]:
        made += f"<h3>What differs</h3><ul>{''.join(f'<li>{_e(line)}</li>' for line in data['differs'])}</ul>"
    return made + "</section>"


def _notes(data: dict) -> str:
    if not data["notes"]:
        return ""
    return f"<section><h2>Notes</h2><ul>{''.join(f'<li>{_e(note)}</li>' for note in data['notes'])}</ul></section>"
