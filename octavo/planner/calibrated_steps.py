"""Step times that `octavo calibrate` measured, and the deployments that they are valid for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.cost.engine_profile import profile
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import Precision, precision_of

if TYPE_CHECKING:
    from octavo.cost.measured_steps import MeasuredSteps

_ENGINE = "octavo"


@dataclass(frozen=True, slots=True)
class CalibratedSteps:
    """Step times of one model, measured with octavo on one device.

    With another precision, device or layout steps take other times.

    Args:
        device: its name; that of a processor includes its number of threads.
        precision: of the weights and of the KV cache.
    """

    steps: MeasuredSteps
    device: str
    precision: Precision

    @classmethod
    def of(
        cls, steps: MeasuredSteps, spec: ModelSpec, device: str, kv_dtype: str | None = None
    ) -> CalibratedSteps:
        """Steps of a model in the precision of its file, with a KV cache type of octavo's."""
        return cls(steps, device, precision_of(spec, None, profile(_ENGINE).kv_dtype(kv_dtype)))

    def hold_for(self, device: str, precision: Precision, parallel: Parallel, engine: str) -> bool:
        """True if these are the times of that engine, on that device, in that precision."""
        return (
            device == self.device
            and precision == self.precision
            and parallel == Parallel()
            and engine == _ENGINE
        )
