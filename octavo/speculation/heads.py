"""Opens drafters that are heads on the target's hidden states, by method."""

from __future__ import annotations

from octavo import hub
from octavo.base.model_files import ModelFolder
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.drafter import Drafter, TargetModel
from octavo.speculation.head_folder import HeadFolder


def method_of(model: str) -> str:
    """The method that a model is used with: that of a folder's heads, or ``draft_model``."""
    from octavo.speculation import eagle, medusa, redrafter

    methods = {
        medusa.ARCHITECTURE: "medusa",
        redrafter.ARCHITECTURE: "recurrent",
        **dict.fromkeys(eagle.ARCHITECTURES, "eagle"),
    }
    path = hub.resolve(model)
    config = ModelFolder(path).read_json("config.json") if path.is_dir() else None
    names = (config or {}).get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return methods.get(str(first), "draft_model")


def open_heads(config: SpeculativeConfig, target: TargetModel) -> Drafter:
    """Open the drafter of ``config.method``. Raises as ``open_drafter`` does."""
    if config.method == "mtp":
        from octavo.speculation.mtp import MTPDrafter

        return MTPDrafter(config, target)
    assert config.model is not None, "SpeculativeConfig requires it for these methods"
    folder = HeadFolder(hub.resolve(config.model))
    match config.method:
        case "medusa":
            from octavo.speculation.medusa import MedusaDrafter

            return MedusaDrafter(config, target, folder)
        case "recurrent":
            from octavo.speculation.redrafter import ReDrafter

            return ReDrafter(config, target, folder)
        case "eagle":
            from octavo.speculation.eagle import EagleDrafter

            return EagleDrafter(config, target, folder)
    raise AssertionError(config.method)
