"""Steps that were timed, where a plan may use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.cost.engine_profile import profile
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import Precision, precision_of

if TYPE_CHECKING:
    from octavo.cost.measured_steps import MeasuredSteps
    from octavo.planner.deployment import Deployment

_ENGINE = "octavo"


@dataclass(frozen=True, slots=True)
class CalibratedSteps:
    """``steps`` as octavo took them for a model on one device, and what they are true of: other
    bits, other devices or another layout make other steps.

    Args:
        device: its name; of a processor, that has its threads.
        precision: of the weights and of the cache.
    """

    steps: MeasuredSteps
    device: str
    precision: Precision

    @classmethod
    def of(
        cls, steps: MeasuredSteps, spec: ModelSpec, device: str, kv_dtype: str | None = None
    ) -> CalibratedSteps:
        """Of a model as its file has it, with keys and values of a type of octavo's."""
        return cls(steps, device, precision_of(spec, None, profile(_ENGINE).kv_dtype(kv_dtype)))

    def hold_for(self, deployment: Deployment) -> bool:
        """Whether it is that model, as it was timed."""
        return (
            deployment.device.name == self.device
            and deployment.precision == self.precision
            and deployment.parallel == Parallel()
            and deployment.profile.name == _ENGINE
        )
