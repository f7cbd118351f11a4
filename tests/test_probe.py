"""What a machine has, told from stand-ins for its parts: control groups, Windows, a card, a disk."""

from __future__ import annotations

import builtins
import json
import sys

import pytest
import torch

from h3_runtime.errors import H3Error
from h3_runtime.memory import probe
from h3_runtime.memory.probe import GIB, Card, Host, Rates, cgroup_memory, probe_card, probe_disk, probe_host

MIB = 1 << 20


def group(folder, **files: str):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def in_groups(tmp_path, *lines: str):
    file = tmp_path / "membership"
    file.write_text("\n".join(lines) + "\n")
    return file


def much_memory():
    return 64 * GIB, 60 * GIB


# ---- host memory


def test_the_tightest_group_above_the_process_counts(tmp_path):
    """v2: the process's own group has no limit; the one above it has, and its page cache is not in use."""
    root = group(tmp_path / "cgroup", memory__max="max", memory__current=str(30 * GIB))
    group(root / "pods", memory__max=str(8 * GIB), memory__current=str(3 * GIB), memory__stat=f"inactive_file {GIB}\n")
    group(root / "pods" / "job", memory__max="max", memory__current=str(GIB))
    member = in_groups(tmp_path, "0::/pods/job")
    assert cgroup_memory(root, member) == (8 * GIB, 6 * GIB, "cgroup v2 limit")
    host = probe_host("linux", root, member, much_memory)
    assert (host.total, host.available, host.limit) == (8 * GIB, 6 * GIB, "cgroup v2 limit")
    assert host.pinnable == host.available


def test_the_smallest_room_wins_not_the_smallest_limit(tmp_path):
    root = group(tmp_path / "cgroup", memory__max=str(16 * GIB), memory__current=str(15 * GIB))
    group(root / "job", memory__max=str(8 * GIB), memory__current=str(2 * GIB))
    limit, available, _ = cgroup_memory(root, in_groups(tmp_path, "0::/job"))
    assert (limit, available) == (8 * GIB, GIB)


def test_the_first_version_of_control_groups(tmp_path):
    root = tmp_path / "cgroup"
    unlimited = str(2**63 - 4096)
    group(root / "memory", **{"memory__limit_in_bytes": unlimited, "memory__usage_in_bytes": str(GIB)})
    group(
        root / "memory" / "docker" / "abc",
        **{"memory__limit_in_bytes": str(4 * GIB), "memory__usage_in_bytes": str(3 * GIB)},
        memory__stat=f"cache 5\ntotal_inactive_file {2 * GIB}\n",
    )
    member = in_groups(tmp_path, "12:cpu,cpuacct:/docker/abc", "7:memory:/docker/abc", "0::/")
    assert cgroup_memory(root, member) == (4 * GIB, 3 * GIB, "cgroup v1 limit")


def test_a_path_that_the_container_cannot_see_falls_back_to_what_it_sees(tmp_path):
    root = group(tmp_path / "cgroup", memory__max=str(2 * GIB), memory__current="0")
    member = in_groups(tmp_path, "0::/system.slice/docker-abc.scope")
    assert cgroup_memory(root, member)[0] == 2 * GIB


@pytest.mark.parametrize("text", ["max", "nonsense", ""])
def test_no_limit_is_no_limit(tmp_path, text):
    root = group(tmp_path / "cgroup", memory__max=text, memory__current="5")
    member = in_groups(tmp_path, "0::/")
    assert cgroup_memory(root, member) is None
    assert probe_host("linux", root, member, much_memory) == Host(64 * GIB, 60 * GIB, 60 * GIB, "RAM")
    assert cgroup_memory(tmp_path / "none", tmp_path / "nothing") is None


def test_the_hosts_own_count_wins_when_it_is_smaller(tmp_path):
    root = group(tmp_path / "cgroup", memory__max=str(32 * GIB), memory__current="0")
    host = probe_host("linux", root, in_groups(tmp_path, "0::/"), lambda: (64 * GIB, 5 * GIB))
    assert (host.available, host.limit) == (5 * GIB, "RAM")


def test_windows_counts_its_commit_limit_and_pins_less(monkeypatch):
    monkeypatch.setattr(probe, "windows_commit", lambda: 10 * GIB)
    host = probe_host("win32", counts=much_memory)
    assert (host.available, host.limit) == (10 * GIB, "the commit limit (page file)")
    monkeypatch.setattr(probe, "windows_commit", lambda: None)
    host = probe_host("win32", counts=much_memory)
    assert host.available == 60 * GIB and host.pinnable == int(64 * GIB * 0.4)


def test_windows_is_asked_through_its_own_call(monkeypatch):
    class Kernel:
        @staticmethod
        def GlobalMemoryStatusEx(pointer):
            status = pointer._obj
            assert status.dwLength == 64
            status.ullAvailPageFile, status.ullTotalPhys, status.ullAvailPhys = 7 * GIB, 16 * GIB, 9 * GIB
            return 1

    class Libraries:
        kernel32 = Kernel

    monkeypatch.setattr(probe.ctypes, "windll", Libraries, raising=False)
    assert probe.windows_commit() == 7 * GIB
    monkeypatch.setattr(Kernel, "GlobalMemoryStatusEx", staticmethod(lambda pointer: 0))
    assert probe.windows_commit() is None


def test_memory_without_psutil(monkeypatch):
    real = builtins.__import__

    def without_psutil(name, *rest, **more):
        if name == "psutil":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_psutil)
    monkeypatch.delitem(sys.modules, "psutil", raising=False)
    if not sys.platform.startswith("linux"):
        pytest.skip("needs os: /proc/meminfo is Linux's")
    total, available = probe.system_memory()
    assert total > available > 0
    monkeypatch.setattr(probe.Path, "read_text", lambda self: "MemTotal: lots")
    with pytest.raises(H3Error, match="give --ram GIB"):
        probe.system_memory()


def test_this_machine_can_be_probed():
    host = probe_host()
    assert 0 < host.available <= host.total and host.pinnable <= host.available


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_given_sizes_are_checked(value):
    for made in (Card.given, Host.given):
        with pytest.raises(H3Error, match="give gibibytes above 0"):
            made(value)


def test_given_sizes_leave_the_systems_own_part_out():
    assert Card.given(12).free == 12 * GIB - GIB // 2 and not Card.given(12).measured
    assert Host.given(32).available == 30 * GIB and Host.given(1).available == 0
    rates = Card("real", 24 * GIB, 20 * GIB, 1.0, 2.0, 3.0, 4.0, measured=True)
    other = Card.given(8, rates)
    assert (other.total, other.copy_rate, other.float32_rate, other.measured) == (8 * GIB, 1.0, 4.0, True)


# ---- the card


class FakeCuda:
    """What the probe asks of torch.cuda, on the CPU."""

    driver = "13.0"

    def __init__(self, free: int = 10 * GIB, there: bool = True):
        self.free, self.there, self.waits = free, there, 0

    def is_available(self):
        return self.there

    def mem_get_info(self, device):
        return self.free, 12 * GIB

    def get_device_properties(self, device):
        return type("Properties", (), {"name": "Card 12"})

    def synchronize(self, device):
        self.waits += 1


@pytest.fixture
def quick(monkeypatch):
    """Measurements over small things, in hundredths of a second."""
    monkeypatch.setattr(probe, "MEASURE_SECONDS", 0.005)
    monkeypatch.setattr(probe, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(probe, "MATMUL_SIZE", 64)


def test_a_card_is_measured_once(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(probe, "_repeated", lambda work, cuda, device, seconds=0: (work(), 2.0)[1])
    file = tmp_path / "deep" / "rates.json"
    cuda = FakeCuda(free=3 * GIB)
    card = probe_card("cpu", cuda, file)
    assert (card.name, card.total, card.free, card.measured) == ("Card 12", 12 * GIB, 3 * GIB, True)
    assert card.copy_rate == card.pageable_rate == 2 * (1 << 20)
    assert card.matmul_rate == card.float32_rate == 2 * 2 * 64**3
    (key,) = json.loads(file.read_text())
    assert "Card 12" in key and "driver 13.0" in key and torch.__version__ in key
    monkeypatch.setattr(probe, "_measure_card", lambda *arguments: pytest.fail("measured again"))
    again = probe_card("cpu", FakeCuda(free=GIB), file)
    assert again.free == GIB and again.matmul_rate == card.matmul_rate
    FakeCuda.driver = "14.0"
    with pytest.raises(pytest.fail.Exception):  # another driver is another card
        probe_card("cpu", cuda, file)
    FakeCuda.driver = "13.0"


def test_rates_are_real_figures(quick):
    rates = probe._measure_card("cpu", FakeCuda(), 10 * GIB)
    assert set(rates) == set(probe.RATES) and all(rate > 0 for rate in rates.values())


def test_repeating_waits_for_the_card(quick):
    cuda, calls = FakeCuda(), []
    assert probe._repeated(lambda: calls.append(1), cuda, "cpu") > 0
    assert cuda.waits >= 2 and len(calls) >= 2


def test_without_a_card_there_is_none(tmp_path):
    assert probe_card(cuda=FakeCuda(there=False), cache=tmp_path / "rates.json") is None
    cpu = probe.probe_cpu(Host(16 * GIB, 8 * GIB, 8 * GIB))
    assert cpu.is_host and cpu.free == 8 * GIB and cpu.matmul_rate > 0


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"card": {"copy": -1}}', '{"card": {"copy": true}}'])
def test_a_damaged_cache_is_measured_anew(tmp_path, damage):
    file = tmp_path / "rates.json"
    file.write_text(damage)
    assert Rates(file).get("card", ("copy",), lambda: {"copy": 5.0}) == {"copy": 5.0}
    assert json.loads(file.read_text())["card"] == {"copy": 5.0}


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    rates = Rates(tmp_path / "file" / "rates.json")
    assert rates.get("card", ("copy",), lambda: {"copy": 5.0}) == {"copy": 5.0}
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_cache_lies_in_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert Rates().path == tmp_path / "h3_runtime" / "rates.json"


# ---- the disk


def test_a_disk_is_read_for_a_while_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "DISK_BLOCK", 4096)
    monkeypatch.setattr(probe, "DISK_SECONDS", 2.0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "dit.safetensors").write_bytes(bytes(4096 * 40))
    ticks = iter(range(10_000))
    file = tmp_path / "rates.json"
    # each block takes one tick of one second: two blocks fill the time
    assert probe_disk(tmp_path / "model", file, lambda: float(next(ticks))) == 4096.0
    assert probe_disk(tmp_path / "model" / "dit.safetensors", file, lambda: pytest.fail("read again")) == 4096.0
    host = Host(GIB, GIB, GIB).with_disk(tmp_path / "model", file)
    assert (host.disk_rate, host.disk_measured) == (4096.0, True)


def test_a_small_file_does_not_tell(tmp_path):
    (tmp_path / "small.safetensors").write_bytes(bytes(100))
    assert probe_disk(tmp_path, tmp_path / "rates.json") is None
    assert probe_disk(tmp_path / "absent", tmp_path / "rates.json") is None
    assert Host(GIB, GIB, GIB).with_disk(None) == Host(GIB, GIB, GIB)
