"""What is known of the steps of an engine before they are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from octavo.base.errors import ConfigError
from octavo.cost.measured_steps import MeasuredSteps
from octavo.cost.step_facts import StepFacts, rank_model_of_json
from octavo.cost.this_machine import device_of_engine
from octavo.server.engine.generation import EngineFacts


class Calibration(Protocol):
    """Steps of a model that were measured on this machine; ``about`` is what they hold for."""

    @property
    def about(self) -> Mapping[str, Any]: ...
    @property
    def steps(self) -> MeasuredSteps: ...


FindCalibration = Callable[[], Calibration | None]
"""Of the model that is served; what is known of calibrations is for the command to know."""


def step_facts(engine: EngineFacts, calibration: Calibration | None) -> StepFacts:
    """What an engine's steps can be foreseen by. The calibration counts if it was made of an engine
    that ran as this one does. Nothing is measured here.

    ConfigError, which says why, if nothing is known.
    """
    if not engine.rank_model.get("matrices"):
        raise ConfigError("the engine does not tell of its weights")
    device = device_of_engine(str(engine.runs_as["device"]))
    is_of_this = calibration is not None and engine.runs_as.items() <= calibration.about.items()
    return StepFacts(
        rank_model_of_json(engine.rank_model),
        device,
        calibration.steps if calibration is not None and is_of_this else None,
    )
