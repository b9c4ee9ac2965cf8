"""Environment, work and end of the processes that octavo starts."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from octavo.system.machine import KILL, has_parent_death_signal

# Environment: one more key that clients of a server may send.
KEY_VARIABLE = "OCTAVO_API_KEY"
ADMIN_KEY_VARIABLE = "OCTAVO_ADMIN_KEY"  # likewise, one more admin key

_PR_SET_PDEATHSIG = 1


def environment_without_keys() -> dict[str, str]:
    """Return the environment for a process that needs no key."""
    keys = (KEY_VARIABLE, ADMIN_KEY_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in keys}


def end_with_parent() -> None:
    """Have the system end this process, even if it hangs, when the thread that started it ends.

    Systems other than Linux cannot do that. A parent that has ended before is not noticed.
    """
    if has_parent_death_signal():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, KILL)


def work_of(pid: int, root: Path = Path("/")) -> tuple[int, ...]:
    """Return numbers of which one at least grows while a process computes, or reads a file that it
    has mapped: page faults, minor and major, and ticks of processors, its own and the system's.
    Empty where the system does not tell."""
    try:
        line = (root / f"proc/{pid}/stat").read_text()
    except OSError:
        return ()
    fields = line.rpartition(")")[2].split()  # from the third on: a name may have blanks
    return tuple(int(fields[index - 3]) for index in (10, 12, 14, 15))
