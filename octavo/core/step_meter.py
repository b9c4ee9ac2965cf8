"""Who says how near each step came to what the device allows, as the engine sees it.

octavo.cost.roofline_meter      by the ceilings of the device, and what is known of the engine
CountedExperts                  and besides, how many tokens each expert of the model got
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from octavo.core.batch import Batch
from octavo.core.executor import Probe


class StepMeter(Protocol):
    """Is shown every step that ran, and asked for what came of it at the step's end."""

    def measure(self, batch: Batch, num_multi_steps: int, seconds: float) -> None:
        """A step took so long, of so many decode steps in one call (else 1)."""
        ...

    @property
    def figures(self) -> Mapping[str, Any]:
        """The fields of `octavo.core.stats.StepStats` that are the meter's, by name."""
        ...


class CountedExperts:
    """Another meter, with the tokens of experts among its figures. The kernels count them in any
    case; only to look costs some microseconds a step."""

    def __init__(self, meter: StepMeter, probe: Probe):
        self._meter, self._probe = meter, probe

    def measure(self, batch: Batch, num_multi_steps: int, seconds: float) -> None:
        self._meter.measure(batch, num_multi_steps, seconds)

    @property
    def figures(self) -> Mapping[str, Any]:
        return {**self._meter.figures, "expert_tokens": self._probe.expert_tokens()}
