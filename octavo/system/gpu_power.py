"""The energy that a GPU has used, from NVIDIA's management library (NVML).

NVML is called through the package nvidia-ml-py (``pip install 'octavo[gpu]'``), which is optional:
without it, or without a driver, :func:`open_energy` says why nothing is known. Energies are the
counter of the board (Volta and later, millijoules since the driver was loaded), and so include
other programs on the same GPU.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

from octavo.base.optional_deps import ADD_GPU

_PACKAGE = "pynvml"  # the module of nvidia-ml-py
_WITHOUT = f"nvidia-ml-py is not installed: {ADD_GPU}"


class NotMetered(Exception):
    """A GPU's energy is not known; the message says why."""


class Draw(NamedTuple):
    """The energy that a GPU has used over some time."""

    joules: float
    seconds: float

    @property
    def watts(self) -> float:
        return self.joules / self.seconds if self.seconds > 0 else 0.0


class EnergyMeter:
    """The counter of one GPU. It stays valid as long as the process."""

    def __init__(self, nvml: ModuleType | Any, handle: Any):
        self._nvml, self._handle = nvml, handle

    @property
    def joules(self) -> float:
        """Energy since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

    @property
    def watts(self) -> float:
        """Power now: the mean over a time that the board chooses, up to a second."""
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3

    @property
    def limit_watts(self) -> float:
        """Largest power that the board may take."""
        return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)) / 1e3


def open_energy(uuid: str) -> EnergyMeter:
    """Return the meter of the GPU with this UUID (``GPU-...``), by which PyTorch and NVML name
    the same one whatever CUDA_VISIBLE_DEVICES hides. NotMetered where there is none."""
    try:
        nvml = importlib.import_module(_PACKAGE)
    except ImportError:
        raise NotMetered(_WITHOUT) from None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(_full_uuid(uuid))
        meter = EnergyMeter(nvml, handle)
        _ = meter.joules  # older boards have no counter
    except nvml.NVMLError as error:
        raise NotMetered(f"NVML: {error}") from None
    return meter


def _full_uuid(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
