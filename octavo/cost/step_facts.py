"""Facts that an engine's step times are predicted from, as one process sends them to another.

The engine knows the matrices that it has loaded, and its server the device: each sends its part to
the other, and both compute with the same `StepModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.base.fields import Fields
from octavo.cost.hardware import Device
from octavo.cost.measured_steps import MeasuredSteps, calibrated
from octavo.cost.parallel import Parallel
from octavo.cost.rank_model import AttentionOp, Exchange, Experts, MatrixOp, RankModel
from octavo.cost.step_cost import StepModel

_WIRE = Path("a message")  # where fields are from, in errors


@dataclass(frozen=True, slots=True)
class StepFacts:
    """``measured``: None where no calibration holds for this engine."""

    model: RankModel
    device: Device
    measured: MeasuredSteps | None = None

    def step_model(self) -> StepModel:
        """ConfigError if the device has no peak for what the model computes in."""
        if self.measured is not None:
            return calibrated(self.model, self.device, self.measured)
        return StepModel.of(self.model, self.device)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": asdict(self.model),
            "device": asdict(self.device),
            "measured": None if self.measured is None else self.measured.as_json(),
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> StepFacts:
        """The inverse of ``as_json``."""
        device, measured = values["device"], values["measured"]
        return cls(
            rank_model_of_json(values["model"]),
            Device(**{**device, "aliases": tuple(device["aliases"])}),
            None if measured is None else MeasuredSteps.of_json(Fields(_WIRE, measured)),
        )


def rank_model_of_json(values: Mapping[str, Any]) -> RankModel:
    """The inverse of ``dataclasses.asdict``."""
    parts = {
        "matrices": tuple(
            MatrixOp(**{**op, "experts": op["experts"] and Experts(**op["experts"])})
            for op in values["matrices"]
        ),
        "attention": tuple(AttentionOp(**op) for op in values["attention"]),
        "parallel": Parallel(**values["parallel"]),
        "exchange": values["exchange"] and Exchange(**values["exchange"]),
    }
    return RankModel(**{**values, **parts})
