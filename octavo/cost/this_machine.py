"""This machine as a device: its GPU by name, or what its cores and its memory reach.

Cores are measured once, for a second, and what was found is kept in
``$OCTAVO_HOME/machine.json`` as long as the processor, the threads and the kernels are the same,
with its time, and how busy the machine was.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError
from octavo.base.files import replace_file
from octavo.cost.hardware import SHARED_MEMORY, Device, shared_memory_bandwidth
from octavo.cost.hardware_table import named_device
from octavo.cost.probing import best_bandwidth, best_rate
from octavo.cost.rank_model import Arithmetic
from octavo.system import machine, numa

_ROUNDS = 4  # of all probes, of which the best counts: others may use the machine for a while
_BUSY = 0.25  # of the cores, that others keep busy
# By what the native kernels call it.
_MEASURED: dict[Arithmetic, str] = {"int8": "int8", "fp16": "bfloat16", "fp32": "float32"}


def this_machine() -> Device:
    """Its GPU, if it has a driver for one; else its processor, with the memory that is free.

    ConfigError if the GPU is in no table, or there are no native kernels to measure with.
    """
    name = gpu_name() if machine.has_gpu_driver() else None
    return named_device(name) if name is not None else _processor(machine.cpu())


def device_of_engine(kind: str) -> Device:
    """The device that an engine runs on, ``cpu`` or ``cuda``, as far as it is known. Nothing is
    measured, since that would take a second of an engine that serves.

    ConfigError if it is not known; it says how it would be.
    """
    if kind == "cpu":
        return _processor(machine.cpu(), may_measure=False)
    name = gpu_name()
    if name is None:
        raise ConfigError("nvidia-smi does not name this machine's GPU")
    return named_device(name)


def measured_anew() -> Device:
    """Its processor, measured now, whatever is kept of before.

    ConfigError if there is nothing to measure with, or if what counts here is a GPU.
    """
    if machine.has_gpu_driver() and (name := gpu_name()) is not None:
        raise ConfigError(
            f"{name}: ceilings of GPUs are those of the table, or of a file of your own "
            "(--hardware-file); only processors are measured"
        )
    return _processor(machine.cpu(), anew=True)


def load_average() -> float | None:
    """Threads that wanted to run over the last minute, all processes together; None where the
    system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def is_busy(load: float, cores: int) -> bool:
    """Whether others run so much that what is measured beside them is too low."""
    return load > _BUSY * cores


def gpu_name() -> str | None:
    """Name of the first GPU by its driver; None if the driver cannot be asked."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def _processor(cpu: machine.Cpu, *, anew: bool = False, may_measure: bool = True) -> Device:
    from octavo.hub.store import home
    from octavo.kernels.cpu.library import Unavailable, choose

    try:
        isa = choose()
    except Unavailable as error:
        raise ConfigError(
            f"this machine cannot be measured: {error} Name the hardware that is nearest instead "
            "(`octavo hardware list`)"
        ) from error
    path = home() / "machine.json"
    key = {"cpu": cpu.model, "threads": cpu.usable_cores, "isa": isa}
    found = None if anew else _kept(path, key)
    if found is None and not may_measure:
        raise ConfigError(
            "this machine's ceilings have not been measured yet: `octavo hardware show auto` does "
            "it, in a second, and keeps them"
        )
    if found is None:
        found = {"measured_at": _now().isoformat(timespec="seconds"), "load": load_average()}
        found |= _measure()
        _keep(path, {**key, **found})
    return Device(
        name=f"{cpu.model}, {cpu.usable_cores} threads",
        kind="cpu",
        memory_bytes=machine.memory().available,
        memory_bandwidth=found["bytes_per_s"],
        peaks={name: found[f"{name}_per_s"] for name in _MEASURED},
        link_bandwidth=shared_memory_bandwidth(
            found["bytes_per_s"],
            cpu.usable_cores,
            is_between_sockets=numa.auto_ranks(numa.nodes()) > 1,
        ),
        link_kind=SHARED_MEMORY,
        note=f"Memory is what is free now. Kernels: {isa}.",
        source=f"measured here{_when(found, cpu.usable_cores)}; kept in {path}",
        is_measured=True,
        num_cores=cpu.usable_cores,
    )


def _measure() -> dict[str, float]:
    from octavo.kernels.cpu.library import Pool, load
    from octavo.kernels.cpu.probes import products, reads

    library = load()
    rates: dict[str, float] = {}
    with Pool(library) as pool:
        read = reads(library, pool)
        for _ in range(_ROUNDS):
            found = {"bytes_per_s": best_bandwidth(read)}
            for name, arithmetic in _MEASURED.items():
                found[f"{name}_per_s"] = best_rate(products(library, pool, arithmetic))
            rates = {name: max(rate, rates.get(name, 0.0)) for name, rate in found.items()}
    return rates


def _now() -> datetime:
    return datetime.now(UTC)


def _when(found: Mapping[str, Any], cores: int) -> str:
    """``, 2026-11-23, 3 days ago, beside others (load 2.9 on 2 cores)``; of the time nothing where
    an older version has kept it."""
    said = ""
    with suppress(KeyError, ValueError, TypeError):
        then = datetime.fromisoformat(found["measured_at"])
        days = (_now() - then).days
        ago = f"{days} day{'s' if days > 1 else ''} ago" if days > 0 else "today"
        said = f", {then:%Y-%m-%d}, {ago}"
    load = found.get("load")
    if isinstance(load, int | float) and is_busy(load, cores):
        said += f", beside others (load {load:.1f} on {cores} cores)"
    return said


def _kept(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Earlier measurements of this machine; None if there are none, or if they are damaged."""
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        names = ("bytes_per_s", *(f"{name}_per_s" for name in _MEASURED))
        rates = {name: float(kept[name]) for name in names}
        is_same = all(kept[name] == value for name, value in key.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {**kept, **rates} if is_same and min(rates.values()) > 0 else None


def _keep(path: Path, found: dict[str, Any]) -> None:
    with suppress(OSError):  # it is measured anew the next time
        replace_file(path, json.dumps(found, indent=2).encode())
