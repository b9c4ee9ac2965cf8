"""Examines this machine for the kernels that octavo will use, the reasons, and what is missing.

``examine()`` collects; ``octavo doctor`` prints. Nothing here fails because something is absent: an
absent thing is a finding.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from octavo import __version__, hub
from octavo.base.optional_deps import ADD_TORCH, has_torch
from octavo.hub.wheels import has_pip
from octavo.system import machine, numa
from octavo.system.gpu_software import NO_DRIVER, GpuSoftware, gpu_software, lacks_of, why_no_gpu

GIB = 1 << 30
_NO_TORCH = "PyTorch is not installed"
# PyTorch may be missing, as long as nothing here needs it.
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "rich")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    name: str
    memory_bytes: int
    capability: str
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Cuda:
    """The CUDA devices that PyTorch can use, or the reason why there are none."""

    devices: tuple[CudaDevice, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The implementation that an op gets on a device, or whole steps on a GPU, and the reasons
    why better ones were refused."""

    device: str
    op: str
    chosen: str
    refused: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """Instruction set levels that were compiled, and the one in use; or the reason why there is
    none."""

    built: tuple[str, ...]
    chosen: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Storage:
    """The folder with models. ``free_bytes`` is of the disk that it is, or will be, on."""

    home: str
    free_bytes: int
    models: tuple[str, ...]
    models_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is missing or in the way: what it costs, and how to mend it."""

    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that other platforms offer to programs and this one does not, and the
    consequence."""

    missing: str
    consequence: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    octavo: str
    python: str
    python_path: str
    platform: str
    packages: dict[str, str | None]
    cpu: machine.Cpu
    usable_cores: int
    memory: machine.Memory
    numa_nodes: tuple[numa.Node, ...]
    cuda: Cuda
    gpu: GpuSoftware
    compiler: machine.Compiler | None
    native: NativeKernels
    storage: Storage
    kernels: tuple[KernelChoice, ...]
    findings: tuple[Finding, ...]
    platform_lacks: tuple[Lack, ...] = ()


def examine() -> DoctorReport:
    """Examine everything. Imports torch if it is there, so it takes a second or two."""
    cpu, memory, compiler = machine.cpu(), machine.memory(), machine.compiler()
    packages = {name: package_version(name) for name in PACKAGES}
    cuda = find_cuda()
    storage = look_at_storage()
    kernels, native, nodes = choose_kernels(cuda), find_native_kernels(), numa.nodes()
    return DoctorReport(
        octavo=__version__,
        python=platform.python_version(),
        python_path=sys.executable,
        platform=platform.platform(),
        packages=packages,
        cpu=cpu,
        usable_cores=cpu.usable_cores,
        memory=memory,
        numa_nodes=nodes,
        cuda=cuda,
        gpu=gpu_software(package_version),
        compiler=compiler,
        native=native,
        storage=storage,
        kernels=kernels,
        findings=(
            *missing_software(packages, compiler, native),
            *weak_hardware(cpu, memory, cuda, storage),
            *far_memory(nodes, native),
        ),
        platform_lacks=tuple(platform_lacks()),
    )


def in_one_line(report: DoctorReport) -> str:
    """Return one line: whether models run here, on what, and the first thing to mend."""
    if report.native.chosen is None and report.packages.get("torch") is None:
        first = next(each for each in report.findings if "no model runs" in each.problem)
        return f"not ready: {first.problem}; first: {first.remedy}"
    on = [device.name for device in report.cuda.devices]
    if report.native.chosen is not None:
        on.append(f"the CPU, with native kernels ({report.native.chosen})")
    else:
        on.append("the CPU, slowly, with operations of PyTorch")
    line = f"ready: models run on {' or '.join(on)}"
    if not report.findings:
        return line
    count = len(report.findings)
    what = "one thing is" if count == 1 else f"{count} things are"
    return f"{line}; {what} missing or in the way, first: {report.findings[0].remedy}"


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_cuda() -> Cuda:
    if not has_torch():
        return Cuda((), _NO_TORCH if machine.has_gpu_driver() else NO_DRIVER)
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return Cuda((), f"PyTorch cannot be imported: {error}")
    if (reason := why_no_gpu()) is not None:
        return Cuda((), reason)
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Cuda(tuple(map(_cuda_device, devices)), None)


def _cuda_device(found: Any) -> CudaDevice:
    """Return a device from the properties that PyTorch gives."""
    uuid = getattr(found, "uuid", None)
    return CudaDevice(
        found.name,
        found.total_memory,
        f"{found.major}.{found.minor}",
        None if uuid is None else str(uuid),
    )


def find_native_kernels() -> NativeKernels:
    from octavo.kernels.cpu import library

    try:
        return NativeKernels(tuple(library.built()), library.load().isa, None)
    except library.Unavailable as unavailable:
        return NativeKernels(tuple(library.built()), None, unavailable.reason)


def look_at_storage() -> Storage:
    home = hub.home()
    existing = next(folder for folder in (home, *home.parents) if folder.is_dir())
    models = hub.installed()
    return Storage(
        home=str(home),
        free_bytes=shutil.disk_usage(existing).free,
        models=tuple(model.name for model in models),
        models_bytes=sum(model.num_bytes for model in models),
    )


def choose_kernels(cuda: Cuda) -> tuple[KernelChoice, ...]:
    """Return the choice that is made for every kind of device that there is."""
    from octavo.kernels import dispatch

    on_cpu = _chosen("native", dispatch.why_not_native("cpu"))
    choices = [KernelChoice("cpu", op, *on_cpu) for op in dispatch.OP_NAMES]
    if cuda.devices:
        from octavo.runtime.backends import why_not_fused
        from octavo.runtime.capacity import RankSpec

        reason = why_not_fused(RankSpec(Path(), "cuda", "bfloat16"))
        choices.append(KernelChoice("cuda", "whole steps", *_chosen("fused", reason)))
    return tuple(choices)


def _chosen(best: str, reason: str | None) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the kernels that are chosen, and those refused, given the reason against the best."""
    return (best, ()) if reason is None else ("reference", ((best, reason),))


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# What octavo uses where it is there: a sign of it, and what its absence means for a user. The signs
# are capabilities, not names of platforms: no table of systems is needed.
_FACILITIES: tuple[tuple[str, Callable[[], bool], str], ...] = (
    (
        "native CPU kernels (they are built on POSIX systems only)",
        machine.can_have_native_kernels,
        f"models run on reference ops of PyTorch, slowly ({ADD_TORCH})",
    ),
    (
        "handing open files to a new process (pass_fds)",
        machine.can_hand_over_files,
        "octavo serve does not start; octavo generate, octavo chat and LLM do",
    ),
    (
        "a signal to a process whose parent has died (prctl)",
        machine.has_parent_death_signal,
        "an engine that hangs may outlive a server that was killed: end it by hand",
    ),
    ("uvloop", lambda: _has_module("uvloop"), "asyncio's own event loop is used, which is slower"),
    (
        "file locks (fcntl)",
        lambda: _has_module("fcntl"),
        "do not fetch one model twice at a time; *.octavo.part files of killed processes stay",
    ),
    (
        "users by number (os.geteuid)",
        lambda: hasattr(os, "geteuid"),
        "octavo trusts no packed weights that it finds, and packs at every start",
    ),
    (
        "folders as files (os.O_DIRECTORY)",
        lambda: hasattr(os, "O_DIRECTORY"),
        "a new engine folder may be incomplete after a power failure: build it again",
    ),
    (
        "asking the disk for space (posix_fallocate)",
        lambda: hasattr(os, "posix_fallocate"),
        "zeros are written first, so that the first start of a model takes longer",
    ),
    (
        "the cores that a process may use (sched_getaffinity)",
        lambda: hasattr(os, "sched_getaffinity"),
        "octavo takes all cores: set --threads where it should not",
    ),
    (
        "what the processor can do (/proc/cpuinfo)",
        lambda: machine.tells_in_proc("cpuinfo"),
        "kernels may be slower than they could be; those for Apple's processors are found anyway",
    ),
    (
        "how much memory is free (/proc/meminfo)",
        machine.tells_free_memory,
        "memory in use by others may count as free: set --kv-cache-memory where it runs short",
    ),
    (
        "limits and use of resources (resource)",
        lambda: _has_module("resource"),
        "the limit of open files stays as it is, and benchmarks report no peak memory",
    ),
    (
        "processor time of all processes (/proc/stat)",
        lambda: machine.tells_in_proc("stat"),
        "benchmarks cannot say whether other programs disturbed them",
    ),
    (
        "groups of processes, and what each used (os.killpg, os.wait4)",
        machine.has_process_groups,
        "octavo bench compare and octavo bench startup do not run, nor does octavo bench serve "
        "where it has to start a server",
    ),
    (
        "dropping files from the system's memory (posix_fadvise)",
        lambda: hasattr(os, "posix_fadvise"),
        "the cold starts of octavo bench startup find the model's files in memory",
    ),
    (
        "terminals that a program may read key by key (termios)",
        lambda: _has_module("termios") or _has_module("msvcrt"),
        "octavo chat has no history, and edits lines as the terminal does",
    ),
)


def platform_lacks() -> list[Lack]:
    """Return what this platform lacks of all that octavo can use; on Linux nothing."""
    return [
        Lack(name, consequence) for name, is_there, consequence in _FACILITIES if not is_there()
    ]


def missing_software(
    packages: dict[str, str | None], compiler: machine.Compiler | None, native: NativeKernels
) -> list[Finding]:
    missing = [name for name, version in packages.items() if version is None]
    found = [
        Finding(f"the package {name} is not installed", f"pip install {name}")
        for name in missing
        if name != "torch"
    ]
    if native.chosen is None:
        problem = "no native CPU kernels, so answers are slow"
        if "torch" in missing:
            problem = f"neither native CPU kernels nor PyTorch ({ADD_TORCH}), so no model runs"
        remedy = "pip install --force-reinstall --no-deps octavo, from its folder"
        if not machine.can_have_native_kernels():
            remedy = "for native kernels, run octavo on Linux, or in WSL 2"
            if "torch" in missing:
                remedy = f"{ADD_TORCH}; {remedy}"
        elif compiler is None:
            remedy = f"apt-get install g++ (or xcode-select --install on macOS), then {remedy}"
        found.append(Finding(f"{problem}: {native.reason}", remedy))
    if not has_pip():
        found.append(
            Finding(
                "this Python has no pip: octavo's own aliases cannot be fetched",
                f"{sys.executable} -m ensurepip, or uv pip install pip",
            )
        )
    return found


def weak_hardware(
    cpu: machine.Cpu, memory: machine.Memory, cuda: Cuda, storage: Storage
) -> list[Finding]:
    found = []
    # A processor without a description in /proc may have AVX2 or not.
    if cpu.architecture in {"x86_64", "AMD64"} and cpu.isa and "avx2" not in cpu.isa:
        found.append(
            Finding(
                "the processor shows no AVX2: CPU kernels will be slow",
                "in a virtual machine, pass the host's processor through (QEMU: -cpu host)",
            )
        )
    if cpu.quota is not None and cpu.quota < cpu.affinity:
        found.append(
            Finding(
                f"the container may use {cpu.quota:g} of the {cpu.affinity} cores it sees",
                f"raise its CPU limit; until then {cpu.usable_cores} threads are the best",
            )
        )
    if not cuda.devices and shutil.which("nvidia-smi") is not None:
        found.append(
            Finding(
                f"there is an NVIDIA driver, but no usable CUDA device: {cuda.reason}",
                ADD_TORCH
                if cuda.reason == _NO_TORCH
                else "pip install --force-reinstall torch (a CUDA build), or check the driver",
            )
        )
    for device in cuda.devices:
        if lacks := lacks_of(device.capability):
            found.append(
                Finding(
                    f"{device.name} (compute {device.capability}) lacks {'; '.join(lacks)}",
                    "there is nothing to mend: what runs in its place is in docs/gpu.md",
                )
            )
    for what, free, remedy in (
        ("memory", memory.available, "close other programs, or raise the container's limit"),
        ("disk", storage.free_bytes, "octavo rm NAME, or set OCTAVO_HOME to another disk"),
    ):
        if free < GIB:
            found.append(Finding(f"only {free / 2**20:,.0f} MiB of {what} are free", remedy))
    return found


def far_memory(nodes: Sequence[numa.Node], native: NativeKernels) -> list[Finding]:
    """Return what there is to say of several NUMA nodes: one rank a node reads near memory only."""
    ranks = numa.auto_ranks(nodes)
    if ranks == 1 or native.chosen is None:
        return []
    return [
        Finding(
            f"processors and memory are divided into {ranks} NUMA nodes: a single rank reads most "
            "weights from the far ones",
            f"--tensor-parallel-size auto: {ranks} ranks, each pinned to a node, with its part of "
            "the weights and of the KV there",
        )
    ]
