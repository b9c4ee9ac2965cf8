"""Chooses the models that have to go so that another one has room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory.

    Args:
        last_used: when the last of its requests began or ended; a later one is greater.
        is_pinned: it stays, whatever else needs room.
        is_busy: it has requests, which are not interrupted.
    """

    name: str
    num_bytes: int
    last_used: float
    is_pinned: bool = False
    is_busy: bool = False


def models_to_unload(missing: int, residents: Iterable[Resident]) -> Sequence[Resident] | None:
    """Return models that free ``missing`` bytes; None if those that may go do not.

    Idle ones go before busy ones, whose requests have to end first, and of either the least
    recently used first. None goes that need not: what is freed without it would do.
    """
    may_go = sorted(
        (each for each in residents if not each.is_pinned),
        key=lambda each: (each.is_busy, each.last_used),
    )
    chosen: list[Resident] = []
    for each in may_go:
        if missing <= sum(one.num_bytes for one in chosen):
            break
        chosen.append(each)
    spare = sum(each.num_bytes for each in chosen) - missing
    if spare < 0:
        return None
    for each in reversed(chosen):
        if each.num_bytes <= spare:
            spare -= each.num_bytes
            chosen = [one for one in chosen if one is not each]
    return chosen
