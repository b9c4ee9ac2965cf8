"""What `octavo calibrate` has found of a model here, for those who plan and simulate it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.cost.measured_steps import MeasuredSteps


def steps_here(model: str, kv_cache_dtype: str | None) -> MeasuredSteps | None:
    """What steps take on this machine, with all threads that it has now, and settings that are not
    said as they usually are; None where that was not measured, or the model is not here.

    ConfigError for a type of the cache that is not known.
    """
    from octavo.calibration.known_profiles import profile_here
    from octavo.cost.kv_type import kv_type
    from octavo.system import machine

    profile = profile_here(
        model,
        device="cpu",  # of GPUs, nothing says which one was there
        threads=machine.cpu().usable_cores,
        kv_dtype=kv_type(kv_cache_dtype or "auto").name,
        activations="auto",
    )
    return None if profile is None else profile.steps
