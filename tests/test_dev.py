"""The ways into the repository: dev.py, .ci/run, packaging, ComfyUI's door, and the report of unrun proofs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import types
from fnmatch import fnmatch
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def load(path: Path, name: str):
    """Run a Python file as a module of that name, as ComfyUI does with a custom node."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its module up there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


@pytest.fixture(scope="module")
def dev():
    return load(ROOT / "dev.py", "dev_under_test")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# ---- what was typed


def test_parse(dev):
    request = dev.parse(["test", "--strict", "-k", "layout", "--here"], {})
    assert (request.command, request.strict, request.here, request.rest) == ("test", True, True, ("-k", "layout"))
    assert request.torch == dev.TORCH
    assert dev.parse(["--torch", "2.13.0", "demo", "--out", "x"], {}).torch == "2.13.0"
    assert dev.parse(["demo", "--torch=2.9.1"], {"H3_TORCH": "2.13.0"}).torch == "2.9.1"
    assert dev.parse(["demo"], {"H3_TORCH": "2.13.0"}).torch == "2.13.0"
    assert dev.parse(["demo", "--", "--here", "--strict"], {}).rest == ("--here", "--strict")
    assert dev.parse(["demo", "--strict"], {}).rest == ("--strict",)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tset"], "'tset' is no command"),
        (["--here"], "None is no command"),
        (["--strict", "demo"], "--strict belongs to test"),
        (["test", "--install"], "--install belongs to --here"),
        (["test", "--torch"], "--torch needs a version"),
    ],
)
def test_parse_refuses(dev, argv, words):
    with pytest.raises(dev.Stop, match=words):
        dev.parse(argv, {})


def test_steps_in_order(dev):
    steps = dev.checks(dev.Request("test", strict=True, rest=("-x",)))
    assert [name for name, _, _ in steps] == ["ruff check", "ruff format", "pytest"]
    assert steps[2][2] == ["-q", "--durations=10", "--strict-proofs", "-x"]
    assert [name for name, _, _ in dev.checks(dev.Request("lint"))] == ["ruff check", "ruff format"]


def test_every_step_runs_and_a_failure_shows(dev, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(dev, "run_module", lambda python, module, arguments, cwd: ran.append(module) or len(ran) % 2)
    assert dev.run_checks(["python"], dev.Request("test")) == 1
    assert ran == ["ruff", "ruff", "pytest"]
    assert "ruff check FAILED (1)" in capsys.readouterr().out


# ---- what is needed


def test_pins_cover_the_dependencies(dev, project):
    listed = project["project"]["dependencies"]
    assert dev.dependencies() == listed
    for python in ((3, 10), (3, 11), (3, 12), (3, 13)):
        pins = [f"torch=={dev.TORCH}", *dev.PINS]
        pinned = {dev.name_of(pin): pin.split(";")[0] for pin in pins if dev.applies(pin, python)}
        assert set(pinned) == {dev.name_of(line) for line in listed}
        for line in listed:
            bound = line.partition(">=")[2]
            version = pinned[dev.name_of(line)].split("==")[1]
            assert not bound or dev.release(version) >= dev.release(bound), line


def test_test_tools_are_pinned(dev):
    assert {dev.name_of(tool) for tool in dev.test_tools()} == {"pytest", "pytest-xdist", "ruff", "gguf", "diffusers"}
    assert all("==" in tool for tool in dev.test_tools())


def test_requirements_never_touch_the_host(dev):
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted
    assert all(">=" in line and "<" not in line and "==" not in line for line in wanted)
    assert not {dev.name_of(line) for line in wanted} & {"torch", "torchvision", "torchaudio"}


def test_missing_here(dev):
    have = {"torch": "2.8.0+cu128", "transformers": "4.50.3", "ruff": "0.1"}
    asked = ["torch", "transformers>=4.57.1", "einops", "ruff==9.9", "numpy==1; python_version < '3.0'"]
    assert dev.missing_here(asked, have.get) == ["transformers>=4.57.1", "einops"]
    assert dev.missing_here(["transformers>=4.57.1"], {"transformers": "4.100.0.dev0"}.get) == []


def test_here_names_what_is_missing_and_the_command(dev, monkeypatch):
    monkeypatch.setattr(dev, "missing_here", lambda needed: ["av>=14"])
    with pytest.raises(dev.Stop, match=r"lacks av>=14(.|\n)*-m pip install ['\"]av>=14['\"]"):
        dev.ready_here(dev.Request("demo", here=True))
    monkeypatch.setattr(dev, "missing_here", lambda needed: ["torch", "av>=14"])
    with pytest.raises(dev.Stop, match=r"never installs it.*also lacks av>=14"):
        dev.ready_here(dev.Request("demo", here=True, install=True))


def test_command_can_be_pasted(dev, monkeypatch):
    monkeypatch.setattr(dev, "os", types.SimpleNamespace(name="nt"))
    assert dev.quoted(["C:\\my app\\python.exe", "-m", "pip", "av>=14"]) == '"C:\\my app\\python.exe" -m pip "av>=14"'
    monkeypatch.setattr(dev, "os", types.SimpleNamespace(name="posix"))
    assert dev.quoted(["/my app/python", "av>=14"]) == "'/my app/python' 'av>=14'"


def test_here_installs_on_request_and_holds_torch(dev, monkeypatch):
    asked = []
    monkeypatch.setattr(dev, "missing_here", lambda needed: ["av>=14"])
    monkeypatch.setattr(dev, "installed_version", {"torch": "2.8.0+cu128"}.get)
    monkeypatch.setattr(dev, "pip_install", lambda python, requirements, log: asked.append(requirements))
    assert dev.ready_here(dev.Request("demo", here=True, install=True))[0] == sys.executable
    assert asked == [["av>=14", "torch==2.8.0+cu128"]]


# ---- .venv


class Builder:
    """Stands in for `python -m venv` and pip, and counts them."""

    def __init__(self, dev):
        self.dev, self.made, self.installed = dev, 0, []

    def make(self, folder, stamp, identity):
        self.made += 1
        python = self.dev.venv_python(folder)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()
        stamp.write_text(json.dumps({"python": identity, "installed": []}))

    def install(self, python, requirements, log):
        self.installed.append(requirements)

    def ready(self, folder, wanted):
        return self.dev.ready_venv(folder, wanted, make=self.make, install=self.install)


def test_venv_is_filled_once(dev, tmp_path):
    builder, folder = Builder(dev), tmp_path / ".venv"
    full = ["torch==2", "einops==1", "ruff==3", "old==1; python_version < '3.0'"]
    assert builder.ready(folder, full) == [str(dev.venv_python(folder))]
    builder.ready(folder, full)
    builder.ready(folder, full[:2])  # a demo after a test run
    assert (builder.made, builder.installed) == (1, [full[:3]])


def test_venv_follows_its_list_and_python(dev, tmp_path):
    builder, folder = Builder(dev), tmp_path / ".venv"
    builder.ready(folder, ["torch==1", "ruff==3"])
    builder.ready(folder, ["torch==2"])
    builder.ready(folder, ["torch==2", "ruff==3"])
    assert (builder.made, len(builder.installed)) == (1, 2)
    builder.ready(folder, ["torch==1"])
    assert len(builder.installed) == 3
    stamp = folder / "dev-stamp.json"
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "python": "2.7 linux"}))
    builder.ready(folder, ["torch==1"])
    assert (builder.made, len(builder.installed)) == (2, 4)
    dev.venv_python(folder).unlink()
    builder.ready(folder, ["torch==1"])
    assert builder.made == 3


def test_broken_install_is_repeated(dev, tmp_path):
    builder, folder = Builder(dev), tmp_path / ".venv"
    builder.ready(folder, ["torch==1"])

    def fail(python, requirements, log):
        raise dev.Stop("pip ended")

    with pytest.raises(dev.Stop):
        dev.ready_venv(folder, ["torch==2"], make=builder.make, install=fail)
    builder.ready(folder, ["torch==1"])
    assert builder.installed == [["torch==1"], ["torch==1"]]


def test_foreign_venv_is_left_alone(dev, tmp_path):
    (tmp_path / ".venv").mkdir()
    with pytest.raises(dev.Stop, match="was not made by dev"):
        Builder(dev).ready(tmp_path / ".venv", ["torch==1"])


def test_pip_failure_is_one_sentence(dev, tmp_path):
    # -c takes the rest as its own arguments, so this stands in for a pip that fails.
    python = [sys.executable, "-c", "import sys; print('ERROR: No matching distribution for x'); sys.exit(3)"]
    with pytest.raises(dev.Stop, match=r"status 3 \(ERROR: No matching distribution for x\)") as stop:
        dev.pip_install(python, ["x==1"], tmp_path / "pip.log")
    assert "--here" in str(stop.value)
    assert "No matching" in (tmp_path / "pip.log").read_text()


def test_pip_output_is_plain(dev, tmp_path, capsys):
    lines = "  Downloading big-1.whl (812.3 MB)\n  Downloading small-1.whl (1.2 MB)\nWARNING: x"
    dev.pip_install([sys.executable, "-c", f"print({lines!r})"], ["x==1"], tmp_path / "pip.log")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "dev:   downloading big-1.whl, 812.3 MB"
    assert len(out) == 2 and out[1].startswith("dev: installed in ")


def test_venv_module_missing(dev, tmp_path, monkeypatch):
    monkeypatch.setattr(dev.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(dev.Stop, match="run it again with --here"):
        dev.make_venv(tmp_path / ".venv", tmp_path / ".venv" / "dev-stamp.json", "3.10 linux")
    assert not (tmp_path / ".venv").exists()


def test_module_runs_from_any_folder(dev, tmp_path, monkeypatch):
    """An embedded Python ignores PYTHONPATH and the current folder; -I stands in for it."""
    (tmp_path / "probe.py").write_text(
        "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[1:]))"
    )
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    told = tmp_path / "told"
    assert dev.run_module([sys.executable, "-I"], "probe", [str(told), "--x"], cwd=Path(tmp_path.anchor)) == 0
    assert told.read_text() == f"{told} --x"


def test_stop_is_a_sentence_on_stderr():
    done = subprocess.run([sys.executable, str(ROOT / "dev.py"), "nothing"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dev: 'nothing' is no command") and "Traceback" not in done.stderr


def test_ci_runs_the_strict_suite():
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
    assert "dev.py test --strict" in text
    assert os.name == "nt" or os.access(ROOT / ".ci" / "run", os.X_OK)


# ---- packaging


def test_package_holds_every_module_and_data_file(project):
    tools = project["tool"]["setuptools"]
    assert tools["packages"]["find"]["include"] == ["h3_runtime*"]
    patterns = tools["package-data"]["h3_runtime"]
    files = [path for path in (ROOT / "h3_runtime").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 5
    for path in files:
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has modules but no __init__.py"
        else:
            assert any(fnmatch(path.name, pattern.split("/")[-1]) for pattern in patterns), f"{path} is not packaged"


def test_extra_is_the_pinned_list(project):
    dynamic = project["tool"]["setuptools"]["dynamic"]["optional-dependencies"]
    assert dynamic == {"test": {"file": ["requirements-test.txt"]}}


def test_licence_is_whole(project):
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert project["project"]["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


# ---- ComfyUI's door

DOOR = str(ROOT).replace(".", "_x_")  # the host names the module after its path


def test_door_in_the_host(monkeypatch, caplog):
    class ComfyExtension:
        pass

    latest = types.ModuleType("comfy_api.latest")
    latest.ComfyExtension = ComfyExtension
    nodes = types.ModuleType(f"{DOOR}.nodes")
    nodes.node_classes = lambda: ["a node class"]
    monkeypatch.setitem(sys.modules, "comfy_api", types.ModuleType("comfy_api"))
    monkeypatch.setitem(sys.modules, "comfy_api.latest", latest)
    monkeypatch.setitem(sys.modules, f"{DOOR}.nodes", nodes)
    with caplog.at_level(logging.INFO, "h3_runtime"):
        door = load(ROOT / "__init__.py", DOOR)
        monkeypatch.setitem(sys.modules, DOOR, door)  # the host keeps it there while it asks for the nodes
        extension = asyncio.run(door.comfy_entrypoint())
        assert asyncio.run(extension.get_node_list()) == ["a node class"]
    assert isinstance(extension, ComfyExtension)
    assert not hasattr(door, "NODE_CLASS_MAPPINGS")
    assert hasattr(door, "WEB_DIRECTORY") == (ROOT / "web").is_dir()
    assert not caplog.records


def test_door_without_a_host(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "comfy_api", None)
    monkeypatch.setitem(sys.modules, "comfy_api.latest", None)
    door = load(ROOT / "__init__.py", DOOR)
    assert not hasattr(door, "comfy_entrypoint")
    assert len(caplog.records) == 1 and "needs ComfyUI" in caplog.text


# ---- proofs that did not run

SAMPLE = """
import pytest

def test_runs(): pass
def test_plain(): pytest.skip("no reason to run")
def test_gpu(): pytest.skip("needs gpu: no CUDA device")
@pytest.mark.needs("browser")
def test_page(): pytest.skip("no Chromium")
@pytest.mark.xfail(reason="known wrong")
def test_wrong(): assert False
def test_library(): pytest.importorskip("a_library_nobody_has")
@pytest.mark.skipif(True, reason="marked")
def test_marked(): pass
@pytest.mark.parametrize("case", [1, 2])
def test_later(incomplete, case): incomplete("a later proof", "not built")
def test_host(incomplete): incomplete("door in the host", "no checkout", needs="comfyui")
"""


@pytest.fixture
def suite(tmp_path):
    """Run pytest over ``files`` with this repository's conftest. Returns (exit status, lines of output)."""

    def run(files: dict[str, str], *options: str) -> tuple[int, list[str]]:
        (tmp_path / "tests").mkdir()
        (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
        conftest = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
        named = re.sub(r"^LATER.*", 'LATER = ("a later proof",)', conftest, flags=re.MULTILINE)
        assert named != conftest
        (tmp_path / "tests" / "conftest.py").write_text(named, encoding="utf-8")
        for name, text in files.items():
            (tmp_path / "tests" / name).write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, (done.stdout + done.stderr).splitlines()

    return run


def told(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("PROOF INCOMPLETE", "proofs:"))]


def test_every_skip_is_told(suite):
    status, lines = suite({"test_sample.py": SAMPLE})
    assert status == 0
    assert told(lines) == [
        "PROOF INCOMPLETE: tests/test_sample.py::test_plain, no reason to run",
        "PROOF INCOMPLETE: tests/test_sample.py::test_wrong, expected to fail: known wrong",
        "PROOF INCOMPLETE: tests/test_sample.py::test_library, could not import 'a_library_nobody_has': "
        "No module named 'a_library_nobody_has'",
        "PROOF INCOMPLETE: tests/test_sample.py::test_marked, marked",
        "proofs: 4 incomplete that can run on a plain machine, which a strict run does not accept",
        "proofs: 5 incomplete that are accepted (comes later: 2, needs browser: 1, needs comfyui: 1, needs gpu: 1)",
        "PROOF INCOMPLETE: tests/test_sample.py::test_gpu, no CUDA device (needs gpu)",
        "PROOF INCOMPLETE: tests/test_sample.py::test_page, no Chromium (needs browser)",
        "PROOF INCOMPLETE: a later proof, not built [2 times] (comes later)",
        "PROOF INCOMPLETE: door in the host, no checkout (needs comfyui)",
    ]
    assert "1 passed" in lines[-1]


def test_strict_fails_on_a_proof_that_can_run(suite):
    source = "import pytest\ndef test_runs(): pass\ndef test_plain(): pytest.skip('why not')\n"
    status, lines = suite({"test_sample.py": source}, "--strict-proofs")
    assert status == 1
    assert told(lines)[0] == "PROOF INCOMPLETE: tests/test_sample.py::test_plain, why not"
    assert "fails this strict run" in told(lines)[1]


def test_strict_fails_on_a_module_that_skips_itself(suite):
    source = "import pytest\npytest.importorskip('a_library_nobody_has')\n"
    status, lines = suite({"test_a.py": source, "test_b.py": "def test_runs(): pass\n"}, "--strict-proofs")
    assert status == 1
    assert told(lines)[0].startswith("PROOF INCOMPLETE: tests/test_a.py, could not import 'a_library_nobody_has'")


def test_strict_accepts_what_a_plain_machine_lacks(suite):
    source = SAMPLE.replace("def test_plain", "def plain").replace("def test_wrong", "def wrong")
    source = source.replace("def test_library", "def library").replace("def test_marked", "def marked")
    status, lines = suite({"test_sample.py": source}, "--strict-proofs")
    assert status == 0, lines
    assert told(lines)[0].startswith("proofs: 5 incomplete that are accepted")


def test_unknown_need_is_refused(suite):
    status, lines = suite({"test_a.py": "import pytest\n@pytest.mark.needs('luck')\ndef test_x(): pass\n"})
    assert status == 4
    assert any("needs('luck',) is unknown" in line for line in lines)


def test_all_ran_is_told(suite):
    status, lines = suite({"test_a.py": "def test_runs(): pass\n"}, "--strict-proofs")
    assert (status, told(lines)) == (0, ["proofs: none, every proof ran"])
