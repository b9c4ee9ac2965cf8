"""The conditions of a measurement, kept with every result: a figure without them cannot be
repeated.

A `Recorder` is entered when the engine is warm and left after the last sample. It records date,
software, settings and machine of the run, and whether the machine was quiet.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from octavo import __version__
from octavo.bench.noise import (
    OTHERS_BUSY,
    CpuUse,
    NoiseProbe,
    has_moved,
    probe_machine,
    watch_cpu,
)
from octavo.doctor import find_cuda, package_version
from octavo.system import machine
from octavo.system.gpu_power import Draw, EnergyMeter, NotMetered, open_energy

if TYPE_CHECKING:
    import resource

    from octavo.bench.offline.session import OfflineSession

_PACKAGES = ("torch", "numpy", "transformers")
# They decide how threads run, and which kernels.
_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "OCTAVO_ISA", "OCTAVO_FAULTS")


class Recorder:
    """Records the conditions of a run.

    Args:
        settings: those of the user, as JSON.
        threads: of the bandwidth probe; None takes as many as an engine would.
        owns_work: whether the work is done by this process and its ended children, so that
            other use of the processors is a disturbance. A server that is measured from outside
            would count as one.
    """

    def __init__(
        self, settings: Mapping[str, Any], threads: int | None = None, *, owns_work: bool = True
    ):
        self.settings = dict(settings)
        self.warnings: list[str] = []
        self.samples: dict[str, Any] = {}
        self.engine: dict[str, Any] | None = None
        self._owns_work = owns_work
        self._threads = threads or machine.cpu().usable_cores
        self._probes: list[NoiseProbe] = []
        self._cpu_use: CpuUse | None = None
        self._energy = GpuEnergy()
        self._stack = ExitStack()
        self.started = datetime.now(UTC)
        self._begin = time.monotonic()

    @classmethod
    def of(cls, session: OfflineSession, settings: Mapping[str, Any]) -> Recorder:
        """Make a recorder of work on the engine of a session."""
        recorder = cls(settings, session.args.threads)
        recorder.engine = session.info
        return recorder

    def __enter__(self) -> Recorder:
        self._probes.append(probe_machine(self._threads))
        self._cpu_use = self._stack.enter_context(watch_cpu())
        self._energy.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self._energy.end()
        self._stack.close()
        if exception[0] is None:
            self._probes.append(probe_machine(self._threads))
            self.warnings += self._doubts(*self._probes)

    @property
    def read_bandwidth(self) -> float:
        """Bytes per second: the best of the probes of this run."""
        return max(probe.read_gbytes_per_s for probe in self._probes) * 1e9

    def as_json(self) -> dict[str, Any]:
        """Return the "run" object of a result."""
        return {
            "date": self.started.isoformat(timespec="seconds"),
            "elapsed_s": round(time.monotonic() - self._begin, 3),
            "versions": versions(),
            "machine": machine_facts(),
            "environment": environment(),
            "threads": self._threads,
            "settings": self.settings,
            "engine": self.engine,
            "noise": self._noise(),
            "gpu_energy": self._energy.as_json(),
            "warnings": list(self.warnings),
            "samples": self.samples,
        }

    def _noise(self) -> dict[str, Any]:
        before, after = [*self._probes, None, None][:2]
        return {
            "before": before and asdict(before),
            "after": after and asdict(after),
            "other_processors": self._other_processors,
        }

    @property
    def _other_processors(self) -> float | None:
        if not self._owns_work or self._cpu_use is None:
            return None
        return self._cpu_use.others

    def _doubts(self, before: NoiseProbe, after: NoiseProbe) -> list[str]:
        """Return reasons to doubt the run, a line each."""
        found = []
        if has_moved(before.read_gbytes_per_s, after.read_gbytes_per_s):
            found.append(
                f"memory bandwidth moved from {before.read_gbytes_per_s:.0f} to "
                f"{after.read_gbytes_per_s:.0f} GB/s"
            )
        if has_moved(before.gemm_gflops, after.gemm_gflops):
            found.append(
                f"arithmetic moved from {before.gemm_gflops:.0f} to {after.gemm_gflops:.0f} GFLOP/s"
            )
        others = self._other_processors
        if others is not None and others > OTHERS_BUSY:
            found.append(f"other processes kept {others:.1f} processors busy")
        return found


class GpuEnergy:
    """Energy of the first GPU that this process may use between two points, idling included.

    Where torch is not loaded, no GPU has worked, and none is looked for.
    """

    def __init__(self) -> None:
        self._meter: EnergyMeter | None = None
        self._why_not = "no GPU is in use"
        self._joules = self._time = 0.0
        self.draw: Draw | None = None

    def begin(self) -> None:
        devices = find_cuda().devices if "torch" in sys.modules else ()
        if not devices:
            return
        try:
            self._meter = open_energy(devices[0].uuid or "")
        except NotMetered as reason:
            self._why_not = str(reason)
            return
        self._joules, self._time = self._meter.joules, time.monotonic()

    def end(self) -> None:
        if self._meter is not None:
            self.draw = Draw(self._meter.joules - self._joules, time.monotonic() - self._time)

    def as_json(self) -> dict[str, Any]:
        if self.draw is None:
            return {"joules": None, "watts": None, "why_not": self._why_not}
        return {"joules": self.draw.joules, "watts": self.draw.watts, "why_not": None}


def columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Return samples, instances of one dataclass, as a list for each of its fields."""
    return {field.name: [getattr(row, field.name) for row in rows] for field in fields(rows[0])}


def versions() -> dict[str, str | None]:
    """Return the versions of octavo, Python, and the packages that compute; None where one is not
    installed."""
    found: dict[str, str | None] = {"octavo": __version__, "python": platform.python_version()}
    return found | {name: package_version(name) for name in _PACKAGES}


def machine_facts() -> dict[str, Any]:
    """Describe processor, memory and GPUs. GPUs are looked for only where torch is loaded
    anyway."""
    cpu = machine.cpu()
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": asdict(cpu),
        "usable_cores": cpu.usable_cores,
        "memory": asdict(machine.memory()),
        "gpus": [],
    }
    if "torch" in sys.modules:
        facts["gpus"] = [asdict(device) for device in find_cuda().devices]
    return facts


def environment() -> dict[str, str]:
    """Return the variables that change how fast, or what, is computed."""
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def peak_rss_bytes(usage: resource.struct_rusage | None = None) -> int:
    """Return the most memory that a process has had, mapped model files included; None is this one,
    so far. 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # there is none for Windows
        return 0
    peak = (usage or resource.getrusage(resource.RUSAGE_SELF)).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
