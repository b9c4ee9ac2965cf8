"""Finds the calibration of a model on this machine without loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.calibration.store import CalibrationProfile, find, model_and_processor
from octavo.hub import store


def profile_here(model: str, **known: Any) -> CalibrationProfile | None:
    """Return the newest calibration of a model on this machine's processor; None if there is none,
    or if the model is not here. Nothing is fetched. ``known``: what else it must hold for, by the
    names of `CalibrationProfile.about`."""
    path, fetched = Path(model).expanduser(), store.find(model)
    if fetched is not None:
        path = fetched.path
    return find({**model_and_processor(path), **known}) if path.exists() else None
