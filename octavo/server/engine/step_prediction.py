"""The facts by which the times of an engine's steps are predicted before they are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from octavo.base.errors import ConfigError
from octavo.cost.measured_steps import MeasuredSteps
from octavo.cost.step_facts import StepFacts, rank_model_of_json
from octavo.cost.this_machine import device_of_engine
from octavo.server.engine.generation import EngineFacts


class Calibration(Protocol):
    """Measured steps of a model on this machine; ``about`` are the settings that they were measured
    with."""

    @property
    def about(self) -> Mapping[str, Any]: ...
    @property
    def steps(self) -> MeasuredSteps: ...


FindCalibration = Callable[[], Calibration | None]
"""Finds the calibration of the served model, if there is one; the command supplies it."""


def step_facts(engine: EngineFacts, calibration: Calibration | None) -> StepFacts:
    """Return the facts that predict an engine's steps.

    The calibration is used if its engine had the same settings as this one. Nothing is measured
    here.

    Raises:
        ConfigError: nothing is known, and why.
    """
    if not engine.rank_model.get("matrices"):
        raise ConfigError("the engine does not report its weights")
    device = device_of_engine(str(engine.runs_as["device"]))
    is_of_this = calibration is not None and engine.runs_as.items() <= calibration.about.items()
    return StepFacts(
        rank_model_of_json(engine.rank_model),
        device,
        calibration.steps if calibration is not None and is_of_this else None,
    )
