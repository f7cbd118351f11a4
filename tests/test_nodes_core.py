"""ComfyUI's own H3 is the same with the package and without: its functions, torch's switches, and a clip to the bit."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from h3_runtime.demo.maker import make_model

from .comfy_server import ROOT, find_checkout, find_python

pytestmark = pytest.mark.needs("comfyui")

CHECKOUT, WHY = find_checkout()
if CHECKOUT is None:
    pytest.skip(f"needs comfyui: {WHY}", allow_module_level=True)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    work = tmp_path_factory.mktemp("core")
    model = make_model(work / "small") / "dit.safetensors"
    package = work / "minimax-h3-runtime"
    package.symlink_to(ROOT, target_is_directory=True)
    script = ROOT / "tests" / "comfy_core.py"
    command = [find_python(), str(script), str(package), str(work), str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "H3_RECOVERY": str(work / "recovery")}
    ran = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=300)
    if ran.returncode != 0:
        last = (ran.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        if "H3Runtime" in ran.stderr or "h3_runtime" in ran.stderr:
            pytest.fail(ran.stderr[-3000:])
        pytest.skip(f"needs comfyui: it does not run here ({last})")
    return json.loads(ran.stdout.strip().splitlines()[-1])


def test_the_package_worked(told):
    assert told["loaded"] and told["ran"] == [[1, 24, 7, 4, 6], [1, 32, 2, 37]]


@pytest.mark.parametrize("when", ["imported", "after"])
def test_no_function_of_comfyui_or_torch_is_another(told, when):
    before, later = told["before"]["functions"], told[when]["functions"]
    assert len(before["comfy.samplers"]) > 50 and len(before["comfy.ldm.minimax.model"]) > 10
    assert set(before) <= set(later)
    for module, functions in before.items():
        changed = [name for name, code in functions.items() if later[module].get(name) != code]
        added = [name for name in later[module] if name not in functions]
        assert not changed and not added, f"{module}: changed {changed}, added {added}"


@pytest.mark.parametrize("when", ["imported", "after"])
def test_no_switch_of_torch_is_another(told, when):
    assert told[when]["switches"] == told["before"]["switches"]


def test_comfyuis_own_clip_is_the_same_to_the_bit(told):
    assert told["after"]["clip"] == told["before"]["clip"]
