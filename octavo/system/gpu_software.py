"""Versions of the software around the GPU kernels, other packages with such kernels, and tests.

``octavo doctor`` shows it, on machines without a GPU too.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LEAST_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
# The oldest branch of NVIDIA's driver for Linux with which a major version of CUDA starts (CUDA
# Compatibility, minor version compatibility).
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
NO_DRIVER = "no NVIDIA driver (no nvidia-smi, no /dev/nvidia0)"

PackageVersion = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another package's kernels for an op. ``version`` is None where it is not installed;
    ``why_not`` is the reason why octavo's own run all the same."""

    name: str
    package: str
    ops: str
    version: str | None
    why_not: str


@dataclass(frozen=True, slots=True)
class GpuTrial:
    """A feature, and where it was tested."""

    what: str
    where: str


@dataclass(frozen=True, slots=True)
class GpuSoftware:
    """Versions of GPU software; None where it is not installed, or does not tell."""

    driver: str | None
    cuda: str | None  # version that PyTorch is built with
    triton: str | None
    nvml: str | None  # the package nvidia-ml-py
    alternatives: tuple[Alternative, ...]
    tested: tuple[GpuTrial, ...]


# By their packages. A candidate is used once a test shows that its kernels agree with octavo's;
# none has one, so none of them is called, installed or not.
_ALTERNATIVES = (
    ("FlashInfer", "flashinfer-python", "attention, sampling"),
    ("FlashAttention 3", "flash-attn-3", "attention"),
    ("FlashAttention 4", "flash-attn-4", "attention"),
    ("DeepGEMM", "deep-gemm", "products of FP8"),
    ("humming (Marlin-class)", "humming-kernels", "products of 4 bits"),
)
_NO_ADAPTER = "octavo has no adapter for it yet: its own kernels run"

TRIALS = (
    GpuTrial(
        "kernels in Triton",
        "in Triton's interpreter (3.6 and 3.9) against PyTorch, and compiled for compute 8.0, 8.9, "
        "9.0 and 10.0",
    ),
    GpuTrial("steps, graphs, steps in flight", "on CPUs, with twins of the kernels in PyTorch"),
    GpuTrial(
        "all of it on a GPU",
        "once, on an H200 with CUDA 13.0; what was changed after that has not run on one yet "
        "(docs/gpu.md): use scripts/bench-gpu, and tell us",
    ),
    GpuTrial("AMD and Intel", "not at all: kernels are compiled for NVIDIA only"),
)


def gpu_software(package_version: PackageVersion) -> GpuSoftware:
    """Return the software installed here. ``package_version`` returns a package's version, or
    None."""
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
    """Return the version of NVIDIA's driver on Linux."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", text)
    return found and found[1]


def why_no_gpu(device: str = "cuda") -> str | None:
    """Return the reason why the installed PyTorch cannot use a GPU, and the remedy; None if it
    can. ``device`` is ``cuda``, the first one, or ``cuda:N``."""
    torch = importlib.import_module("torch")
    with warnings.catch_warnings(record=True) as said:  # the driver's own words, if it is too old
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        count, index = torch.cuda.device_count(), int(device.partition(":")[2] or 0)
        if index < count:
            return None
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        return f"there is no such GPU: PyTorch sees {there}"
    has_driver = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
    if torch.version.cuda is None:
        build = f"PyTorch {torch.__version__} is built without CUDA"
        if not has_driver:
            return f"{NO_DRIVER}, and {build}"
        return f"{build}: pip install --force-reinstall torch installs one with it"
    if not has_driver:
        return NO_DRIVER
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") == "":
        return "CUDA_VISIBLE_DEVICES is empty, which hides every device"
    return _why_it_does_not_start(torch.version.cuda, [str(each.message) for each in said])


def _why_it_does_not_start(cuda: str, said: list[str]) -> str:
    """Return why CUDA does not start.

    Args:
        cuda: the version that PyTorch is built with.
        said: PyTorch's warnings.
    """
    major = int(cuda.partition(".")[0])
    least = _LEAST_DRIVER.get(major)
    found = driver_version()
    reason = f"PyTorch's CUDA {cuda} does not start with this driver"
    if found is not None and least is not None and int(found.partition(".")[0]) < least:
        return (
            f"{reason}: it is {found}, and CUDA {major} needs {least} or later: update the driver, "
            "or install a PyTorch that is built with an older CUDA"
        )
    words = next((text.partition("\n")[0] for text in said if "CUDA" in text), None)
    return reason if words is None else f"{reason}: {words[:300]}"


def lacks_of(capability: str) -> list[str]:
    """Return the features of octavo that a GPU of this compute capability ("9.0") lacks."""
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
