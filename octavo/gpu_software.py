"""What stands around the kernels for GPUs: versions, packages that could take their place, and what
was tested where. ``octavo doctor`` shows it, on machines without a GPU too."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LEAST_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)

PackageVersion = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Kernels of others for an op of ours. ``version`` is None where they are not installed;
    ``why_not`` is why ours run all the same."""

    name: str
    package: str
    ops: str
    version: str | None
    why_not: str


@dataclass(frozen=True, slots=True)
class Trial:
    """Something, and where it was tested."""

    what: str
    where: str


@dataclass(frozen=True, slots=True)
class GpuSoftware:
    """None is what is not installed, or does not tell."""

    driver: str | None
    cuda: str | None  # that PyTorch is built with
    triton: str | None
    nvml: str | None  # the package nvidia-ml-py
    alternatives: tuple[Alternative, ...]
    tested: tuple[Trial, ...]


# By their packages. A candidate enters with the test that its kernels agree with ours; none has, so
# none of them is called, installed or not.
_ALTERNATIVES = (
    ("FlashInfer", "flashinfer-python", "attention, sampling"),
    ("FlashAttention 3", "flash-attn-3", "attention"),
    ("FlashAttention 4", "flash-attn-4", "attention"),
    ("DeepGEMM", "deep-gemm", "products of FP8"),
    ("humming (Marlin-class)", "humming-kernels", "products of 4 bits"),
)
_NO_ADAPTER = "octavo has no adapter for it yet: its own kernels run"

TRIALS = (
    Trial(
        "kernels in Triton",
        "in Triton's interpreter (3.6 and 3.9) against PyTorch, and compiled for compute 8.0, 8.9, "
        "9.0 and 10.0",
    ),
    Trial("steps, graphs, steps in flight", "on CPUs, with twins of the kernels in PyTorch"),
    Trial("all of it on a GPU", "never run on hardware: use scripts/bench-gpu, and tell us"),
    Trial("AMD and Intel", "not at all: kernels are compiled for NVIDIA only"),
)


def gpu_software(package_version: PackageVersion) -> GpuSoftware:
    """What is installed here. ``package_version`` gives that of a package, None without it."""
    return GpuSoftware(
        driver=driver_version(),
        cuda=_cuda_of_torch(),
        triton=package_version("triton"),
        nvml=package_version("nvidia-ml-py"),
        alternatives=tuple(
            Alternative(name, package, ops, package_version(package), _NO_ADAPTER)
            for name, package, ops in _ALTERNATIVES
        ),
        tested=TRIALS,
    )


def driver_version(root: Path = Path("/")) -> str | None:
    """Of NVIDIA's driver on Linux."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", text)
    return found and found[1]


def lacks_of(capability: str) -> list[str]:
    """What a GPU of this compute capability ("9.0") cannot do of what octavo has."""
    major, _, minor = capability.partition(".")
    version = int(major), int(minor)
    found = []
    if version < LEAST_CAPABILITY:
        found.append("kernels in Triton: they are for 8.0 (Ampere) and later")
    if version < FP8_CAPABILITY:
        found.append("arithmetic in FP8: weights of FP8 are multiplied as 16 bits")
    return found


def _cuda_of_torch() -> str | None:
    try:
        version = importlib.import_module("torch").version.cuda
    except ImportError:
        return None
    return None if version is None else str(version)
