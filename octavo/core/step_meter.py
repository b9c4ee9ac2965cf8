"""Meters of how near each step came to the limits of its device.

octavo.cost.roofline_meter      measures by the ceilings of the device and of the engine
NoMeter, SwitchableMeter        measure nothing; nothing until another meter is switched on
CountedExperts                  adds the tokens that the model's experts got, and their ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from octavo.core.batch import Batch
from octavo.core.executor import Probe


class StepMeter(Protocol):
    """Measures every step that an engine has run; by default, nothing is measured."""

    def measure(self, batch: Batch, num_multi_steps: int, seconds: float) -> None:
        """Take in a step of so many seconds (in a pipeline, of one stage), in which a request that
        was alone decoded ``num_multi_steps`` tokens (else 1)."""
        return None

    @property
    def figures(self) -> Mapping[str, Any]:
        """The meter's fields of `octavo.core.stats.StepStats`, by name."""
        return {}


class NoMeter(StepMeter):
    """A meter of engines whose steps are not measured."""


class SwitchableMeter:
    """A meter that measures nothing until ``switch_to`` gives it another one.

    It stands in an engine whose device is described only after the engine was made.
    """

    def __init__(self) -> None:
        self._meter: StepMeter = NoMeter()

    def switch_to(self, meter: StepMeter) -> None:
        """Measure the next steps with another meter."""
        self._meter = meter

    def measure(self, batch: Batch, num_multi_steps: int, seconds: float) -> None:
        self._meter.measure(batch, num_multi_steps, seconds)

    @property
    def figures(self) -> Mapping[str, Any]:
        return self._meter.figures


class CountedExperts:
    """Another meter, with the tokens of experts and of their ranks among its figures.

    The kernels count them in any case; they are read once a step.
    """

    def __init__(self, meter: StepMeter, probe: Probe):
        self._meter, self._probe = meter, probe

    def measure(self, batch: Batch, num_multi_steps: int, seconds: float) -> None:
        self._meter.measure(batch, num_multi_steps, seconds)

    @property
    def figures(self) -> Mapping[str, Any]:
        return {**self._meter.figures, **self._probe.expert_figures()}
