"""This machine's processor, the cores and memory that may be used, compiler and system calls.

Standard library only. Containers are taken into account: a process may see 64 cores and 512 GB, and
be allowed two and four. ``root`` arguments exist so that tests can show another machine.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Instruction sets that decide which kernels run, best last, in the kernel's own spelling.
ISA_FLAGS_X86 = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx_vnni_int8"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
)
ISA_FLAGS_ARM = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svei8mm", "sme")

# Control groups report "no limit" as a number of this order.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Cpu:
    """``isa`` holds the flags that matter to kernels. ``usable_cores`` is what threads can get:
    the scheduling affinity, cut by the control group's quota (rounded up), at least 1."""

    model: str
    architecture: str
    isa: tuple[str, ...]
    logical_cores: int
    physical_cores: int | None
    affinity: int
    quota: float | None

    @property
    def usable_cores(self) -> int:
        quota = self.affinity if self.quota is None else math.ceil(self.quota)
        return max(1, min(self.affinity, quota))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. ``available`` is what can be had without swapping, within the group's ``limit``."""

    total: int
    available: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Compiler:
    path: str
    version: str


def cpu(root: Path = Path("/")) -> Cpu:
    text = _read(root / "proc/cpuinfo")
    fields = _first_fields(text)
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    if not text:
        present = _isa_of_macos()
    arm = "Features" in fields or "asimd" in present
    model = fields.get("model name") or fields.get("Model") or platform.processor()
    return Cpu(
        model=model or "unknown",
        architecture=platform.machine(),
        isa=tuple(f for f in (ISA_FLAGS_ARM if arm else ISA_FLAGS_X86) if f in present),
        logical_cores=os.cpu_count() or 1,
        physical_cores=_physical_cores(text),
        affinity=_affinity(),
        quota=_cpu_quota(root),
    )


def _isa_of_macos() -> set[str]:
    """Return the flags of an Apple processor, in Linux's spelling; none for any other."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return set()
    more = {"i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}
    known = {flag for flag, name in more.items() if _sysctl(f"hw.optional.arm.{name}")}
    return {"asimd", "asimddp"} | known  # all of them have these two


def _sysctl(name: str) -> int:
    """Return a number that macOS tells; 0 if it does not know the name."""
    import ctypes

    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    arguments = (name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    ask = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    return 0 if ask is None or ask(*arguments) else value.value


def memory(root: Path = Path("/")) -> Memory:
    text = _read(root / "proc/meminfo")
    meminfo: dict[str, str] = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    if "MemTotal" in meminfo:
        total = int(meminfo["MemTotal"]) * 1024
        available = int(meminfo.get("MemAvailable", meminfo.get("MemFree", 0))) * 1024
    elif hasattr(os, "sysconf"):  # no /proc: macOS, BSD
        page = os.sysconf("SC_PAGE_SIZE")
        total = available = os.sysconf("SC_PHYS_PAGES") * page
    else:
        total, available = _memory_of_windows()
    limit, used = _memory_group(root)
    if limit is not None:
        available = min(available, max(0, limit - used))
    return Memory(total, available, limit)


def _memory_of_windows() -> tuple[int, int]:
    """Return (total, available) in bytes, from GlobalMemoryStatusEx; zeros if it fails."""
    import ctypes

    status = (ctypes.c_uint64 * 8)()  # MEMORYSTATUSEX, whose first eight bytes are two DWORDs
    status[0] = ctypes.sizeof(status)
    windll = getattr(ctypes, "windll", None)
    if windll is None or not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return 0, 0
    return status[1], status[2]


def tells_free_memory(root: Path = Path("/")) -> bool:
    """Return whether :func:`memory` knows what is free, not only the total."""
    return tells_in_proc("meminfo", root) or _memory_of_windows() != (0, 0)


def tells_in_proc(name: str, root: Path = Path("/")) -> bool:
    """Return whether the system has this file in /proc."""
    return bool(_read(root / "proc" / name))


def usable_memory_bytes() -> int:
    """Return the memory that this process can take without swapping, within its control group's
    limit."""
    return memory().available


def compiler() -> Compiler | None:
    """Return the C++ compiler that native kernels would be built with: ``$CXX``, or the first
    found."""
    import subprocess

    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        try:
            out = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if out.returncode == 0:
            return Compiler(path, out.stdout.partition("\n")[0].strip())
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _first_fields(cpuinfo: str) -> dict[str, str]:
    """Return ``name: value`` of every line; of repeated names (one for each core) the first."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _physical_cores(cpuinfo: str) -> int | None:
    """Return the number of distinct (socket, core) pairs; None where the kernel does not tell."""
    cores = set()
    for processor in cpuinfo.split("\n\n"):
        fields = _first_fields(processor)
        if "core id" in fields:
            cores.add((fields.get("physical id"), fields["core id"]))
    return len(cores) or None


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Return the folders of this process's control group and all of its parents, version 2 and
    version 1.

    Inside a container the path in /proc/self/cgroup may be the host's and not exist here; the
    parents then lead up to the mount point, which is the container's own group.
    """
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mount = base
        elif controller in controllers.split(","):
            mount = base / controllers
            mount = mount if mount.is_dir() else base / controller
        else:
            continue
        relative = PurePosixPath(path.lstrip("/"))
        if ".." in relative.parts:  # a group outside of the container's view
            relative = PurePosixPath()
        for folder in (relative, *relative.parents):
            if (mount / folder).is_dir():
                yield mount / folder


def _cpu_quota(root: Path) -> float | None:
    """Return the number of cores whose time the tightest control group allows."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_group(root: Path) -> tuple[int | None, int]:
    """Return (limit, use) in bytes of the control group that leaves the least room."""
    tightest: tuple[int | None, int] = (None, 0)
    room = _NO_LIMIT
    for folder in _group_folders(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if not limit.strip().isdecimal() or int(limit) >= _NO_LIMIT:
            continue
        # Cached file pages count as use, but are given back when memory is asked for.
        inactive = re.search(
            r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.M
        )
        busy = int(used.strip() or 0) - (int(inactive.group(1)) if inactive else 0)
        if int(limit) - busy < room:
            room = int(limit) - busy
            tightest = (int(limit), max(0, busy))
    return tightest


# The signal that ends a process at once. Windows has no signals: there any of them does.
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def boot_id(root: Path = Path("/")) -> str:
    """Return what tells this start of this machine from all others: what has the same has the same
    monotonic clock. Systems other than Linux do not say."""
    return _read(root / "proc/sys/kernel/random/boot_id").strip()


def has_parent_death_signal() -> bool:
    """Return whether prctl(PR_SET_PDEATHSIG) ends a process with the one that started it. Its
    number is part of Linux's interface, so the system's name is the only safe sign of it."""
    return sys.platform == "linux"


def can_have_native_kernels() -> bool:
    """Return whether csrc/build.py builds native kernels here: only on POSIX systems."""
    return os.name == "posix"


def can_hand_over_files() -> bool:
    """Return whether a new process can be given open files of this one (``pass_fds``)."""
    return importlib.util.find_spec("_posixsubprocess") is not None


def has_process_groups() -> bool:
    """Return whether processes can be stopped as a group, and tell at their end what they have
    used."""
    return hasattr(os, "killpg") and hasattr(os, "wait4")


def is_own(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user; False where users have no numbers."""
    return hasattr(os, "geteuid") and status.st_uid == os.geteuid()


def allow_open_files(wanted: int) -> int:
    """Return how many of the ``wanted`` open files this process may have, after raising its soft
    limit if it must and can."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):  # macOS grants less than its hard limit says
        return soft
    return raised


def has_gpu_driver(root: Path = Path("/")) -> bool:
    """Return whether there is a driver, of NVIDIA (in WSL too) or AMD, with which PyTorch can
    use a GPU: only then is it worth importing PyTorch, which takes a second."""
    devices = ("dev/nvidiactl", "dev/nvidia0", "dev/dxg", "dev/kfd")
    return any((root / path).exists() for path in devices) or bool(shutil.which("nvidia-smi"))


def num_gpus(root: Path = Path("/")) -> int:
    """Return the number of GPUs that a process may use, as far as that shows without PyTorch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(bool(each.strip()) and each.strip() != "-1" for each in visible.split(","))
    devices = [each for each in root.glob("dev/nvidia*") if each.name[6:].isdecimal()]
    return len(devices) or int(has_gpu_driver(root))


@contextmanager
def without_blas_threads() -> Iterator[None]:
    """Keep OpenBLAS from starting a thread for each core while numpy is imported, which takes a
    third of that import on two cores; octavo multiplies no matrices with it.

    Only for octavo's own processes; a program that uses octavo may want the threads.
    """
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def keep_openmp_patient() -> None:
    """Let torch's threads spin only for a moment before they sleep, when they wait for each other.

    A forward pass of reference ops has thousands of short parallel sections. With libgomp's own
    default, a thread spins at the end of each for milliseconds, which is fine on an idle machine;
    as soon as any other program wants the cores, steps take twenty times as long. Spinning for some
    microseconds keeps nearly all of the speed, and costs a factor of two to four there. libgomp
    reads this when torch is first imported; the user's own settings stay.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
