"""Drafters that go on from the target's hidden states, by method."""

from __future__ import annotations

from octavo import hub
from octavo.speculation.config import SpeculativeConfig
from octavo.speculation.drafters import Drafter, Target
from octavo.speculation.head_folder import HeadFolder


def open_heads(config: SpeculativeConfig, target: Target) -> Drafter:
    """The drafter of ``config.method``. Errors as of ``open_drafter``."""
    if config.method == "mtp":
        from octavo.speculation.mtp import MTPDrafter

        return MTPDrafter(config, target)
    assert config.model is not None  # as of all methods whose heads are in a folder
    folder = HeadFolder(hub.resolve(config.model))
    match config.method:
        case "medusa":
            from octavo.speculation.medusa import MedusaDrafter

            return MedusaDrafter(config, target, folder)
        case "recurrent":
            from octavo.speculation.recurrent import RecurrentDrafter

            return RecurrentDrafter(config, target, folder)
        case "eagle":
            from octavo.speculation.eagle import EagleDrafter

            return EagleDrafter(config, target, folder)
    raise AssertionError(config.method)
