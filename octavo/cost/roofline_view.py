"""A roofline to look at: each operation of a phase, beside the ridge of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.cost.op_cost import Bound, OpCost
from octavo.cost.step_cost import StepModel
from octavo.cost.work import Span


@dataclass(frozen=True, slots=True)
class RooflineView:
    """A step of one phase, ``prefill`` or ``decode``, by operations; ``bound``: of most of its
    time."""

    phase: str
    ops: tuple[OpCost, ...]
    bound: Bound

    def as_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "bound": self.bound,
            "ops": [op.as_json() for op in self.ops],
        }


def prefill_view(steps: StepModel, num_tokens: int) -> RooflineView:
    """The roofline of a prompt of so many tokens, in one step."""
    return _view("prefill", steps, [Span(0, num_tokens)])


def decode_view(steps: StepModel, num_seqs: int, context: int) -> RooflineView:
    """The roofline of a step in which so many sequences decode, each after ``context`` tokens."""
    return _view("decode", steps, [Span(context, 1)] * num_seqs)


def _view(phase: str, steps: StepModel, chunks: list[Span]) -> RooflineView:
    cost = steps.cost(chunks)
    return RooflineView(phase, cost.ops, cost.bound)
