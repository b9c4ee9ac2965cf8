"""What has been measured of a model on this machine, for who has not loaded it."""

from __future__ import annotations

from pathlib import Path

from octavo import machine
from octavo.calibration.store import Profile, find, model_and_processor
from octavo.hub import store

# Of an engine on which nobody has set anything, as far as steps depend on it.
_USUAL = {"activations": "auto", "kv_dtype": "bfloat16"}


def profile_here(model: str) -> Profile | None:
    """The newest calibration of a model on this machine's processor, of an engine with the usual
    settings if there is one; None if there is none at all, or if the model is not here. Nothing is
    fetched."""
    path, fetched = Path(model).expanduser(), store.find(model)
    if fetched is not None:
        path = fetched.path
    if not path.exists():
        return None
    usual = {**_USUAL, "threads": machine.cpu().usable_cores}
    return find(model_and_processor(path), usual)
