"""Meters that are put around others."""

from __future__ import annotations

from octavo.core.executor import NoModel
from octavo.core.step_meter import CountedExperts


class Meter:
    def __init__(self):
        self.seen = []

    def measure(self, batch, num_multi_steps, seconds):
        self.seen.append((batch, num_multi_steps, seconds))

    @property
    def figures(self):
        return {"floor_seconds": 2.0}


class Probe(NoModel):
    def expert_figures(self):
        return {"expert_tokens": (5, 0, 3)}


def test_tokens_of_experts_stand_beside_what_a_meter_says():
    inner = Meter()
    meter = CountedExperts(inner, Probe())
    meter.measure("batch", 1, 0.5)
    assert inner.seen == [("batch", 1, 0.5)]
    assert meter.figures == {"floor_seconds": 2.0, "expert_tokens": (5, 0, 3)}
