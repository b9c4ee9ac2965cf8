"""A word to who measures while others use the machine."""

from __future__ import annotations

from octavo.cli import terminal


def warn_if_busy() -> None:
    """Says so on stderr; what is measured now is likely wrong."""
    from octavo.cost.this_machine import is_busy, load_average
    from octavo.system import machine

    load, cores = load_average(), machine.cpu().usable_cores
    if load is not None and is_busy(load, cores):
        terminal.say(
            f"octavo: warning: others use this machine (a load of {load:.1f} on {cores} cores over "
            "the last minute): what is measured now is likely too slow"
        )
