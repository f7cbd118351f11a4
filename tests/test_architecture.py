"""The house rules that a machine can keep: who may import whom, names, sizes, and what must not be in the tree.

Each rule is a function (path, tree of one file) -> complaints. The rules run over every Python file of the
repository, and over small bad files that each rule has to catch.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "h3_runtime"

# A module imports only from groups further left. Inside a group imports may point one way between two entries, never
# both ways; modules of one entry are free among themselves.
GROUPS = tuple(
    tuple(group.split())
    for group in (
        "errors fidelity geometry schedule solvers unfinished < models quant checkpoint/reader "
        "< request job media soundness mask_picture "
        "< layout < steps < checkpoint < lora memory/streaming memory/converted memory/probe memory/measure "
        "< memory/placement "
        "< text references encodings guides latents extend < accelerators < recovery < sampler decode "
        "< pressure memory/spent memory/rows memory/weights memory/moments memory/moments_media memory/plan "
        "memory/plan_lines "
        "< model < render < manifest < save embed < graph < forecast < compare engines ways < demo "
        "< verify bench bench_accelerators bench_text bench_quant bench_card bench_paths paths_table "
        "selftest bench_gpu inspection weight_commands accelerate_command plan_command recover_command compare_command "
        "bench_command engine_command typed terminal < cli < __main__"
    ).split(" < ")
)
RANK = {entry: rank for rank, group in enumerate(GROUPS) for entry in group}

FORBIDDEN_IMPORTS = re.compile(r"^(comfy(?!_kitchen$)\w*|folder_paths|server|nodes|diffusers)$")
FORBIDDEN_NAMES = set("manager managers handler handlers helper helpers util utils common shared impl v2".split())
HOUSE_FILES = 650  # lines of a file
HOUSE_FUNCTION = 80  # lines of a function, its docstring not counted
HOUSE_PARAMETERS = 8

# "complaint" -> why it stands. An entry that no rule complains about any more fails the suite.
EXCEPTIONS = {
    "h3_runtime/bench.py: imports diffusers": (
        "bench step times our denoise step against the reference in one process; the import stands inside that function"
    ),
}


# ---- reading imports


def imported(path: PurePosixPath, tree: ast.AST) -> list[tuple[int, str, tuple[str, ...]]]:
    """(level, module, names) of every import in the file, those inside functions included."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                text = node.args[0].value
                found.append((len(text) - len(text.lstrip(".")), text.lstrip("."), ()))
    return found


def package_of(path: PurePosixPath) -> tuple[str, ...]:
    return path.parent.parts


def entry_of(parts: tuple[str, ...]) -> str | None:
    """The entry of ``GROUPS`` that the module h3_runtime/``parts`` belongs to, or None when the list lacks it."""
    for entry in ("/".join(parts[:2]), parts[0]):
        if entry in RANK:
            return entry
    inside = [entry for entry in RANK if entry.startswith(parts[0] + "/")]
    return inside[0] if inside and len(parts) == 1 else None


def entry_of_file(path: PurePosixPath) -> str | None:
    own = path.with_suffix("").parts[1:]
    return entry_of(own[:-1] if own[-1] == "__init__" else own)


def is_module(parts: tuple[str, ...]) -> bool:
    where = ROOT.joinpath(*parts)
    return where.with_suffix(".py").is_file() or (where / "__init__.py").is_file()


def targets(path: PurePosixPath, level: int, module: str, names: tuple[str, ...]) -> list[tuple[tuple[str, ...], str]]:
    """(module as parts from the repository's root, name taken from it) for each name of a relative import."""
    package = package_of(path)
    base = package[: len(package) - (level - 1)] + tuple(filter(None, module.split(".")))
    return [(base + (name,) if is_module(base + (name,)) else base, name) for name in names or ("",)]


# ---- the rules


def relative_only(path, tree):
    """Inside the runtime imports are relative, and neither the host nor the reference is imported."""
    if path.parts[0] != PACKAGE:
        return []
    complaints = []
    for level, module, _ in imported(path, tree):
        top = module.split(".")[0]
        if level == 0 and top == PACKAGE:
            complaints.append(f"{path}: imports {module} by its absolute name")
        elif level == 0 and FORBIDDEN_IMPORTS.match(top):
            complaints.append(f"{path}: imports {top}")
        elif level > len(package_of(path)):
            complaints.append(f"{path}: imports from outside {PACKAGE}")
    return complaints


def direction(path, tree):
    """Imports point to the left in ``GROUPS``. The front door ``h3_runtime/__init__.py`` may name everything."""
    if path.parts[0] != PACKAGE or path == PurePosixPath(PACKAGE, "__init__.py"):
        return []
    source = entry_of_file(path)
    if source is None:
        return [f"{path}: has no place in GROUPS"]
    complaints = []
    for level, module, names in imported(path, tree):
        if level == 0 or level > len(package_of(path)):
            continue
        for target, name in targets(path, level, module, names):
            inner = target[1:]
            if not inner:
                if name != "__version__":
                    complaints.append(f"{path}: imports {name} from the front door")
                continue
            entry = entry_of(inner)
            if entry is None or RANK[entry] > RANK[source]:
                complaints.append(f"{path}: {source} imports {'/'.join(inner)}, which stands further right")
    return complaints


def nodes_see_the_front_door_only(path, tree):
    """nodes/ reaches the runtime through the names of h3_runtime/__init__.py and never imports the host's ``nodes``."""
    if path.parts[0] != "nodes":
        return []
    complaints = []
    for level, module, names in imported(path, tree):
        if level == 0:
            if module.split(".")[0] in (PACKAGE, "nodes"):
                complaints.append(f"{path}: imports {module} by its absolute name")
            continue
        for target, _ in targets(path, level, module, names):
            if PACKAGE in target and target != (PACKAGE,):
                complaints.append(f"{path}: imports {'/'.join(target)}, deeper than the front door")
    return complaints


def no_hidden_names(path, tree):
    complaints = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            complaints.append(f"{path}: line {node.lineno}: import *")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "globals":
            complaints.append(f"{path}: line {node.lineno}: globals()")
    return complaints


def plain_file_names(path, tree):
    words = {word for part in path.with_suffix("").parts for word in part.lower().split("_")}
    return [f"{path}: a file name with {word!r} says nothing" for word in sorted(words & FORBIDDEN_NAMES)]


def sizes(path, tree):
    complaints = []
    lines = max((getattr(node, "end_lineno", 0) or 0 for node in ast.walk(tree)), default=0)
    if lines >= HOUSE_FILES:
        complaints.append(f"{path}: {lines} lines, {HOUSE_FILES} is the limit")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0]
        docstring = 0
        if ast.get_docstring(node, clean=False) is not None:
            docstring = first.end_lineno - first.lineno + 1
        length = node.end_lineno - node.lineno + 1 - docstring
        if length >= HOUSE_FUNCTION:
            complaints.append(f"{path}: {node.name} has {length} lines, {HOUSE_FUNCTION} is the limit")
        given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        count = len([argument for argument in given if argument.arg not in ("self", "cls")])
        if count > HOUSE_PARAMETERS:
            complaints.append(f"{path}: {node.name} has {count} parameters, {HOUSE_PARAMETERS} is the limit")
    return complaints


RULES = (relative_only, direction, nodes_see_the_front_door_only, no_hidden_names, plain_file_names, sizes)


# ---- over the repository


@cache
def tracked() -> tuple[PurePosixPath, ...]:
    """The repository's files: those git knows, or (in an unpacked archive) all that are not made by a tool."""
    listed = None
    if (ROOT / ".git").exists():
        try:
            listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            listed = None
    if listed is not None:
        names = [PurePosixPath(name) for name in listed.stdout.split("\0") if name]
    else:
        names = [PurePosixPath(path.relative_to(ROOT).as_posix()) for path in ROOT.rglob("*") if path.is_file()]
    made = {".git", ".venv", "__pycache__", "build", "dist", ".ruff_cache", ".pytest_cache", "demo_out"}
    return tuple(name for name in names if not made & set(name.parts) and (ROOT / name).is_file())


@cache
def python_files() -> tuple[PurePosixPath, ...]:
    return tuple(path for path in tracked() if path.suffix == ".py")


@cache
def parsed(path: PurePosixPath) -> ast.AST:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@cache
def complaints_of(rule) -> tuple[str, ...]:
    return tuple(complaint for path in python_files() for complaint in rule(path, parsed(path)))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    assert len(python_files()) > 5
    open_complaints = [complaint for complaint in complaints_of(rule) if complaint not in EXCEPTIONS]
    assert not open_complaints, "\n".join(["", *open_complaints])


def neighbours() -> set[tuple[str, str]]:
    """(importing entry, imported entry) for every import between two entries of one group."""
    found = set()
    for path in python_files():
        if path.parts[0] != PACKAGE or path == PurePosixPath(PACKAGE, "__init__.py"):
            continue
        source = entry_of_file(path)
        for level, module, names in imported(path, parsed(path)):
            for target, _ in targets(path, level, module, names) if level else ():
                entry = entry_of(target[1:]) if target[1:] else None
                if None not in (source, entry) and source != entry and RANK[source] == RANK[entry]:
                    found.add((source, entry))
    return found


def circles(edges: set[tuple[str, str]]) -> list[str]:
    """The entries that stay when, again and again, those that import nothing of the rest are taken away."""
    rest = {entry for edge in edges for entry in edge}
    while free := {entry for entry in rest if not any(a == entry and b in rest for a, b in edges)}:
        rest -= free
    return sorted(rest)


def test_no_circle_inside_a_group():
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")}) == ["a", "b", "c", "d"]
    assert circles({("a", "b"), ("b", "c"), ("a", "c")}) == []
    assert ("geometry", "errors") in neighbours()
    assert circles(neighbours()) == []


def test_exceptions_are_argued_and_needed():
    made = {complaint for rule in RULES for complaint in complaints_of(rule)}
    for complaint, why in EXCEPTIONS.items():
        file = complaint.split(":")[0]
        assert len(why.split()) >= 8, f"{complaint}: say why"
        assert complaint in made or not (ROOT / file).exists(), f"{complaint}: no longer needed, take it out"


def test_reference_is_imported_only_inside_functions():
    for path in python_files():
        if path.parts[0] == PACKAGE:
            top = ast.Module([node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)], [])
            assert not [name for _, name, _ in imported(path, top) if name.startswith("diffusers")], path


BAD_FILES = [
    (relative_only, "h3_runtime/steps.py", "import h3_runtime.layout"),
    (relative_only, "h3_runtime/steps.py", "from h3_runtime import layout"),
    (relative_only, "h3_runtime/steps.py", "def f():\n    import comfy.utils"),
    (relative_only, "h3_runtime/models/dit.py", "from comfy_api.latest import io"),
    (relative_only, "h3_runtime/media.py", "import folder_paths"),
    (relative_only, "h3_runtime/media.py", "import importlib\nimportlib.import_module('diffusers.models')"),
    (relative_only, "h3_runtime/media.py", "from ..nodes import host"),
    (direction, "h3_runtime/geometry.py", "from .layout import PackedLayout"),
    (direction, "h3_runtime/geometry.py", "def f():\n    from .cli import main"),
    (direction, "h3_runtime/errors.py", "from .models.dit import DiT"),
    (direction, "h3_runtime/checkpoint/reader.py", "from .load import load"),
    (direction, "h3_runtime/models/dit.py", "from ..checkpoint.load import load"),
    (direction, "h3_runtime/memory/streaming.py", "from .plan import plan"),
    (direction, "h3_runtime/steps.py", "from . import H3Model"),
    (direction, "h3_runtime/newcomer.py", "x = 1"),
    (nodes_see_the_front_door_only, "nodes/render.py", "from ..h3_runtime.geometry import Canvas"),
    (nodes_see_the_front_door_only, "nodes/render.py", "from ..h3_runtime import geometry"),
    (nodes_see_the_front_door_only, "nodes/render.py", "import nodes"),
    (no_hidden_names, "dev.py", "from os import *"),
    (no_hidden_names, "dev.py", "x = globals()['y']"),
    (plain_file_names, "h3_runtime/memory/manager.py", ""),
    (plain_file_names, "h3_runtime/text_utils.py", ""),
    (plain_file_names, "h3_runtime/sampler_v2.py", ""),
    (sizes, "dev.py", "x = 1\n" * 650),
    (sizes, "dev.py", "def f():\n" + "    x = 1\n" * 80),
    (sizes, "dev.py", "def f(a, b, c, d, e, *, g, h, i, j): pass"),
]

GOOD_FILES = [
    ("h3_runtime/geometry.py", "import math\n\nfrom .errors import H3Error"),
    ("h3_runtime/models/dit.py", "from ..geometry import Canvas\nfrom .attention import attend"),
    ("h3_runtime/checkpoint/load.py", "from .reader import read\nfrom ..models.dit import DiT"),
    ("h3_runtime/manifest.py", "from . import __version__, errors"),
    ("h3_runtime/memory/plan.py", "from .streaming import Pool\nfrom ..sampler import sample"),
    ("h3_runtime/__init__.py", "from .cli import main"),
    ("nodes/render.py", "import folder_paths\nfrom comfy_api.latest import io\nfrom ..h3_runtime import RenderRequest"),
    ("dev.py", 'def f(self, a, b, c, d, e, g, h, i):\n    """' + "word\n" * 90 + '"""'),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD_FILES)
def test_rule_catches(rule, path, source):
    assert rule(PurePosixPath(path), ast.parse(source))


@pytest.mark.parametrize(("path", "source"), GOOD_FILES)
def test_rules_accept(path, source):
    for rule in RULES:
        assert not rule(PurePosixPath(path), ast.parse(source))


# ---- what importing costs, and what must not be in the tree


def test_import_is_light():
    """`import h3_runtime` runs when ComfyUI starts: under 0.3 s, and torch stays unimported."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); start = time.perf_counter(); import h3_runtime; "
        "print(time.perf_counter() - start, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, cwd=ROOT.anchor)
        assert done.returncode == 0, done.stderr
        runs.append(done.stdout.split())
    assert all(run[1:] == ["False", "False"] for run in runs), runs
    assert min(float(run[0]) for run in runs) < 0.3, runs


MACHINE_PATHS = re.compile(r"(?<![\w.)}\]-])/(work/|tmp/dl\b|root\b)")


def test_machine_path_pattern():
    slash = "/"
    for text in ("work/main", "tmp/dl/diffusers", "root/.cache", "root"):
        assert MACHINE_PATHS.search(f"see '{slash}{text}'")
    for text in (f"h3{slash}work/x", "a/root", "the work/play balance", f"{slash}workspace"):
        assert not MACHINE_PATHS.search(text)


def test_no_machine_paths():
    read = 0
    for path in tracked():
        data = (ROOT / path).read_bytes()
        if path.suffix == ".safetensors" or b"\0" in data[:8192]:
            continue
        read += 1
        found = MACHINE_PATHS.search(data.decode("utf-8", errors="replace"))
        assert found is None, f"{path}: names a path of one machine, {found.group()!r}"
    assert read > 10


def test_the_map_names_every_room():
    rooms = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Rooms")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)/?`", rooms))
    entries = [path for path in (ROOT / "h3_runtime").iterdir() if not path.name.startswith("_")]
    modules = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert modules <= named, f"CONTRIBUTING's map lacks {sorted(modules - named)}"
    assert len(modules) > 40


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda page: page.name)
def test_no_link_of_a_page_is_dead(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
