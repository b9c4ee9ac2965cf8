"""Old names of public modules and classes, which work for one more release and warn."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "octavo.config": "octavo.settings.engine",
    "octavo.errors": "octavo.base.errors",
    "octavo.outputs": "octavo.serving.outputs",
    "octavo.quantization.produce": "octavo.quantize",
}
NAMES = {
    "octavo.planner.Measured": "octavo.planner.CalibratedSteps",
    "octavo.sim.Ask": "octavo.sim.PromptSpec",
    **{
        f"octavo.quantization.{name}": f"octavo.quantize.{name}"
        for name in (
            *("QuantizedMatrix", "RotatedCheckpoint", "Scheme", "bits_against_error"),
            *("calibration_windows", "explore", "input_statistics", "quantize_gptq"),
            *("quantize_model", "quantize_to_nearest", "rows_of"),
        )
    },
}


class RenamedModules:
    """A finder for ``sys.meta_path``, and its loader, of modules under their old names."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MODULES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, Python's default: an empty module, which ``exec_module`` fills."""

    def exec_module(self, module: ModuleType) -> None:
        new = MODULES[module.__name__]
        _warn(module.__name__, new)
        there = import_module(new)
        module.__doc__ = f"``{new}``, under its old name."
        module.__dict__["__getattr__"] = lambda name: getattr(there, name)


def install() -> None:
    """Let the old names of modules be imported."""
    if not any(isinstance(finder, RenamedModules) for finder in sys.meta_path):
        sys.meta_path.append(RenamedModules())


def renamed(package: str, name: str) -> Any:
    """Return the object that a package called ``name`` in the release before; AttributeError if
    there was none."""
    new = NAMES.get(f"{package}.{name}")
    if new is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    _warn(f"{package}.{name}", new, stacklevel=5)
    home, _, new_name = new.rpartition(".")
    return getattr(import_module(home), new_name)


class RenamedAttribute:
    """An attribute or a method of a class under its old name: to read it warns."""

    def __init__(self, new: str):
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        _warn(self._old, f"{owner.__name__}.{self._new}")
        return getattr(instance, self._new)


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    message = f"{old} is now {new}; the old name will be gone in the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
