"""Slots of recurrent states, as batches and requests name them; ``state_slots.py`` owns them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

NO_STATE = -1  # in place of a slot: the state before the first token of a sequence


class StateStep(NamedTuple):
    """The two state slots of one request in one step.

    ``source`` is the slot that the step reads (``NO_STATE`` where a sequence begins), ``target``
    the one that it writes; no other item of the batch writes the same target.
    """

    source: int
    target: int


@dataclass(slots=True)
class StateChain:
    """The state slots that a running request holds."""

    slots: list[int]  # the state after its computed tokens, then one for each step in flight
    spare: list[int] = field(default_factory=list)
    # (block, slot) of its latest snapshots, which newer ones will replace.
    passing: list[tuple[int, int]] = field(default_factory=list)
