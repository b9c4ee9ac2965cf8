"""Step times of a model that `octavo calibrate` has measured here, for plans and simulations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.cost.measured_steps import MeasuredSteps


def steps_here(model: str, kv_cache_dtype: str | None) -> MeasuredSteps | None:
    """Return the measured step times of a model on this machine, with all its threads and default
    settings; None if they were not measured, or if the model is not here.

    Raises:
        ConfigError: the type of the KV cache is unknown.
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
