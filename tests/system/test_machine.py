from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.system import machine

GIB = 1 << 30

CPUINFO_X86 = """\
processor\t: 0
model name\t: Test CPU @ 2.00GHz
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse4_2 avx avx2 amx_int8 amx_tile avx512_vnni

processor\t: 1
model name\t: Test CPU @ 2.00GHz
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse4_2 avx avx2 amx_int8 amx_tile avx512_vnni

processor\t: 2
model name\t: Test CPU @ 2.00GHz
physical id\t: 0
core id\t\t: 1
flags\t\t: fpu sse4_2
"""

CPUINFO_ARM = """\
processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes asimddp sve i8mm bf16
CPU implementer\t: 0x41
"""

MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_x86_flags_and_physical_cores(tmp_path: Path) -> None:
    cpu = machine.cpu(write(tmp_path, {"proc/cpuinfo": CPUINFO_X86}))
    assert cpu.model == "Test CPU @ 2.00GHz"
    assert cpu.isa == ("sse4_2", "avx", "avx2", "avx512_vnni", "amx_tile", "amx_int8")
    assert cpu.physical_cores == 2
    assert cpu.quota is None
    assert cpu.usable_cores == cpu.affinity


def test_arm_features(tmp_path: Path) -> None:
    cpu = machine.cpu(write(tmp_path, {"proc/cpuinfo": CPUINFO_ARM}))
    assert cpu.isa == ("asimd", "asimddp", "i8mm", "bf16", "sve")
    assert cpu.physical_cores is None


@pytest.mark.parametrize(
    ("told", "isa"),
    [
        ({"hw.optional.arm.FEAT_I8MM", "hw.optional.arm.FEAT_BF16"}, ("i8mm", "bf16")),
        (set(), ()),
    ],
)
def test_features_of_apple_processors(
    told: set[str], isa: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(machine, "_sysctl", lambda name: int(name in told))
    assert machine.cpu(tmp_path).isa == ("asimd", "asimddp", *isa)
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    assert machine.cpu(tmp_path).isa == ()


def test_without_proc_nothing_fails(tmp_path: Path) -> None:
    assert machine.cpu(tmp_path).isa == ()
    assert machine.memory(tmp_path).total > 0


@pytest.mark.parametrize(
    ("quota", "affinity", "usable"),
    [(None, 8, 8), (2.0, 8, 2), (1.5, 8, 2), (0.2, 8, 1), (16, 4, 4)],
)
def test_usable_cores(quota: float | None, affinity: int, usable: int) -> None:
    cpu = machine.Cpu("x", "x86_64", (), 64, 32, affinity, quota)
    assert cpu.usable_cores == usable


def test_memory_without_a_group(tmp_path: Path) -> None:
    memory = machine.memory(write(tmp_path, {"proc/meminfo": MEMINFO}))
    assert memory == machine.Memory(16 * GIB, 8 * GIB, None)


GROUP_V2 = {
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "0::/app/worker\n",
    "sys/fs/cgroup/app/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/app/worker/cpu.max": "200000 100000\n",
    "sys/fs/cgroup/cpu.max": "max 100000\n",
    "sys/fs/cgroup/app/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/app/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/app/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    "sys/fs/cgroup/app/worker/memory.max": "max\n",
}

GROUP_V1 = {
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "4:memory:/app\n3:cpu,cpuacct:/app\n0::/\n",
    "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/app/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/app/memory.usage_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/app/memory.stat": f"total_inactive_file {GIB}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}

# Inside a container the group's path may be the host's; the mount point is the own group.
GROUP_OF_THE_HOST = {
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "0::/../../docker/0123\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    "sys/cpu.max": "1 100000\n",  # no control group: only the way there by ../.. meets it
}


@pytest.mark.parametrize("files", [GROUP_V2, GROUP_V1, GROUP_OF_THE_HOST])
def test_limits_of_the_control_group(tmp_path: Path, files: dict[str, str]) -> None:
    root = write(tmp_path, files)
    assert machine.cpu(root).quota == 1.5
    assert machine.memory(root) == machine.Memory(16 * GIB, 2 * GIB, 4 * GIB)


def test_memory_as_windows_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(pointer: Any) -> int:
        assert pointer._obj[0] == 64  # its own size, which Windows looks at
        pointer._obj[1], pointer._obj[2] = 16 * GIB, 6 * GIB
        return 1

    assert not machine.tells_free_memory(tmp_path)
    monkeypatch.delattr(os, "sysconf")
    assert machine.memory(tmp_path) == machine.Memory(0, 0, None)
    kernel32 = SimpleNamespace(GlobalMemoryStatusEx=fill)
    monkeypatch.setattr("ctypes.windll", SimpleNamespace(kernel32=kernel32), raising=False)
    assert machine.memory(tmp_path) == machine.Memory(16 * GIB, 6 * GIB, None)
    assert machine.tells_free_memory(tmp_path)


def test_no_file_is_ones_own_where_users_have_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.is_own(tmp_path.stat())
    monkeypatch.delattr(os, "geteuid")
    assert not machine.is_own(tmp_path.stat())


def test_a_limit_of_open_files_that_cannot_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise ValueError("current limit exceeds maximum limit")  # as on macOS

    monkeypatch.setattr("resource.getrlimit", lambda which: (64, resource.RLIM_INFINITY))
    monkeypatch.setattr("resource.setrlimit", refuse)
    assert machine.allow_open_files(50) == 50
    assert machine.allow_open_files(100) == 64
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert machine.allow_open_files(100) == 100


def test_this_machine() -> None:
    assert machine.cpu().usable_cores >= 1
    assert 0 < machine.usable_memory_bytes() <= machine.memory().total


def test_a_driver_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert not machine.has_gpu_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert machine.has_gpu_driver(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").touch(mode=0o755)
    assert machine.has_gpu_driver(tmp_path / "elsewhere")


@pytest.mark.parametrize("before", [None, "3"])
def test_blas_without_threads(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """In this process, for as long as it takes; what the user has set stays."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if before is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", before)
    with machine.without_blas_threads():
        assert os.environ["OPENBLAS_NUM_THREADS"] == (before or "1")
    assert os.environ.get("OPENBLAS_NUM_THREADS") == before


def test_compiler_is_the_one_in_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "my-c++"
    fake.write_text("#!/bin/sh\necho my-c++ 1.2\necho more\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    assert machine.compiler() == machine.Compiler(str(fake), "my-c++ 1.2")


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert machine.compiler() is None
