"""What the page shows in English and Chinese: locales/en says what the nodes say, locales/zh translates all of it.

After a change of a node's texts: ``python tests/test_nodes_locales.py`` writes locales/en anew and names what
locales/zh lacks.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from node_pack import loaded  # noqa: E402


def shown(name: str) -> str:
    """``video_shift`` -> "video shift"; the inputs of a growing list, ``image_0`` -> "image 1"."""
    return re.sub(r" (\d+)$", lambda number: f" {int(number[1]) + 1}", name.replace("_", " "))


def described(classes) -> dict:
    """The nodes' own texts, laid out as nodeDefs.json. Growing inputs are named ``list_name_0``, as the page does."""
    texts = {}
    for node in classes:
        schema = node.define_schema()
        inputs = {}
        for field in schema.inputs:
            inputs[field.id] = {"name": shown(field.id), "tooltip": field.tooltip}
            for name in field.template.names if hasattr(field, "template") else ():
                inputs[f"{field.id}_{name}"] = {"name": shown(name), "tooltip": field.template.input.tooltip}
            for choice in getattr(field, "options", None) or ():
                for inner in getattr(choice, "inputs", ()):  # of a combo whose choices have widgets of their own
                    text = {"name": shown(inner.id), "tooltip": inner.tooltip}
                    assert inputs.setdefault(f"{field.id}_{inner.id}", text) == text, "one name, two meanings"
        outputs = {}
        for index, output in enumerate(schema.outputs):
            outputs[str(index)] = {"name": output.display_name}
            if output.tooltip:
                outputs[str(index)]["tooltip"] = output.tooltip
        texts[schema.node_id] = {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": inputs,
            "outputs": outputs,
        }
    return texts


def read(language: str, file: str = "nodeDefs.json") -> dict:
    return json.loads((ROOT / "locales" / language / file).read_text(encoding="utf-8"))


def leaves(texts: dict, path: str = "") -> dict[str, str]:
    flat = {}
    for key, value in texts.items():
        flat |= leaves(value, f"{path}{key} > ") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> dict:
    with loaded(tmp_path_factory.mktemp("locales")) as pack:
        import importlib

        return described(importlib.import_module(f"{pack.name}.nodes").node_classes())


def test_english_is_what_the_nodes_say(nodes):
    assert read("en") == nodes, "run python tests/test_nodes_locales.py"


def test_every_text_has_a_translation():
    english, chinese = leaves(read("en")), leaves(read("zh"))
    assert list(chinese) == list(english)
    for path, text in chinese.items():
        assert text.strip(), path
        assert len(text) < 12 or re.search(r"[\u4e00-\u9fff]", text) or path.split(" > ")[-2].isdigit(), path


def test_translations_keep_what_is_typed():
    """File names, choices, numbers and marks that have to be typed as they are stand in both languages."""
    chinese = leaves(read("zh"))
    for path, text in leaves(read("en")).items():
        for typed in re.findall(r"<[^>]+>|models/\w+|%\w+%|\d+k \+ 5|\d+=\d(?:\.\d+)?|\[[\d, THWAhw]+\]", text):
            if not typed.startswith("<d>"):
                assert typed in chinese[path], (path, typed)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_texts_are_plain_for_the_page(language):
    """The page reads texts as message formats, in which these characters mean something."""
    for path, text in leaves(read(language)).items():
        assert not re.search(r"[{}@|]", text), path


def test_names_of_nodes_are_told_apart():
    for language in ("en", "zh"):
        names = [texts["display_name"] for texts in read(language).values()]
        assert len(set(names)) == len(names)
        assert all(name.startswith("H3 ") for name in names)


def main() -> None:
    import importlib

    with tempfile.TemporaryDirectory() as folder, loaded(Path(folder)) as pack:
        texts = described(importlib.import_module(f"{pack.name}.nodes").node_classes())
    file = ROOT / "locales" / "en" / "nodeDefs.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(texts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    there = ROOT / "locales" / "zh" / "nodeDefs.json"
    chinese = leaves(read("zh")) if there.exists() else {}
    print("\n".join(f"zh lacks: {path}" for path in leaves(texts) if path not in chinese) or "zh has every text")


if __name__ == "__main__":
    main()
