"""What has been measured of a model on this machine, for who has not loaded it."""

from __future__ import annotations

from pathlib import Path

from octavo import hub
from octavo.calibration.store import Profile, find, model_and_processor


def profile_here(model: str) -> Profile | None:
    """The newest calibration of a model on this machine's processor; None if there is none, or if
    the model is not here. Nothing is fetched."""
    path = Path(model).expanduser()
    if not path.exists():
        names = {each.name: each.path for each in hub.installed()}
        if model not in names:
            return None
        path = names[model]
    return find(model_and_processor(path))
