"""System features that benchmarks need for the processes that they start."""

from __future__ import annotations

from octavo.base.errors import BenchmarkError
from octavo.system import machine


def need_process_groups(what: str) -> None:
    """Raise BenchmarkError where processes cannot be stopped as a group, or their resource use is
    not told."""
    if not machine.has_process_groups():
        raise BenchmarkError(
            f"{what} cannot run on this system, which has no groups of processes (os.killpg, "
            "os.wait4): run it on Linux or macOS, or in WSL 2"
        )
