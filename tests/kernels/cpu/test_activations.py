"""Which linears have activations in two parts."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.config import EngineArgs
from octavo.kernels.cpu.activations import ACTIVATIONS, split_activations
from octavo.kernels.cpu.fusion import Attention, Head, Linear, Phase, Segment
from octavo.kernels.recorder import Tape, Value
from octavo.quantization.base import Weight
from octavo.quantization.ggml_types import GGMLType


def step() -> list[Phase]:
    """A layer and the head: attention reads views of what the projections make."""
    weight = Weight(GGMLType.F32, np.zeros((8, 32), dtype=np.uint8), (8, 8))
    x, q, k, v, attended, gate, up = (Value(Tape(), None, (8,)) for _ in range(7))
    return [
        Linear(x, [Segment(weight, None, out) for out in (q, k, v)]),
        Attention(
            0, *(value.view(-1, 2, 4) for value in (q, k, v)), attended, 1.0, None, None, None
        ),
        Linear(attended, [Segment(weight, None, x)], residual=x),
        Linear(x, [Segment(weight, None, out) for out in (gate, up)], activation="silu"),
        Linear(gate, [Segment(weight, None, x)]),  # as in Gemma, where the sum comes later
        Head(x, weight),
    ]


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        ("auto", [1, 1, 1, 1, 1]),
        ("int8", [1, 1, 1, 1, 1]),
        ("mixed", [2, 1, 1, 1, 2]),
        ("int16", [2, 2, 2, 2, 2]),
    ],
)
def test_choices(activations, expected):
    phases = step()
    split_activations(phases, "int16")  # what was said before does not count
    split_activations(phases, activations)
    linears = [phase for phase in phases if not isinstance(phase, Attention)]
    assert [phase.parts for phase in linears] == expected


def test_all_of_them_can_be_asked_for():
    for activations in ("auto", *ACTIVATIONS):
        assert EngineArgs(activations=activations).activations == activations
