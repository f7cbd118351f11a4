"""The float32 switches: all off inside the block, as they stood after it, whichever of PyTorch's two sets is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import warnings; warnings.simplefilter("ignore")
import torch
from h3_runtime.models.precision import SWITCHES, exact_float32, _owner

READS = [lambda o=o, n=n: getattr(_owner(o), n) for o, n, _ in (*SWITCHES, ("cuda.matmul", "allow_tf32", False))]
READS.append(torch.get_float32_matmul_precision)
WANTED = [value for _, _, value in SWITCHES] + [False, "highest"]

def read():
    found = []
    for one in READS:
        try:
            found.append(one())
        except (AttributeError, RuntimeError) as error:  # a switch this PyTorch lacks, or an old one it no longer reads
            found.append(type(error).__name__)
    return found

def as_the_host_has_it():
    pass

def matmul_in_bf16():
    torch.set_float32_matmul_precision("medium")

def tf32_by_the_old_switch():
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = True

def tf32_by_the_new_switch():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.fp32_precision = "tf32"

def bf16_on_the_cpu():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"

for host in (as_the_host_has_it, matmul_in_bf16, tf32_by_the_old_switch, tf32_by_the_new_switch, bf16_on_the_cpu):
    try:
        host()
    except AttributeError:  # PyTorch before 2.9
        continue
    before = read()
    try:
        with exact_float32():
            inside = read()
            raise KeyError
    except KeyError:
        pass
    assert read() == before, (host.__name__, before, read())
    for want, have in zip(WANTED, inside):
        assert have in (want, "AttributeError"), (host.__name__, inside)
"""


def test_switches_are_off_inside_and_put_back():
    """In a process of its own, because what a new switch does to the old ones cannot be undone."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
