"""Sliding windows in model files: which layers have one, and of how many positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields

if TYPE_CHECKING:  # plans read windows too, and make no model
    from octavo.models.config import ModelConfig

Windows = tuple[int | None, ...]
_TYPES = {"full_attention": False, "sliding_attention": True}


def hf_windows(fields: Fields, num_layers: int, is_local: Callable[[int], bool]) -> Windows:
    """The window of each layer by ``sliding_window`` and ``layer_types``. Configs that were written
    before these leave it to the family: ``is_local(layer)`` says which layers have it."""
    window, has_types = fields.integer("sliding_window", None), "layer_types" in fields
    if window is None:
        return (None,) * num_layers
    return windows_of(window, fields, num_layers, is_local if not has_types else None)


def windows_of(
    window: int, fields: Fields, num_layers: int, is_local: Callable[[int], bool] | None
) -> Windows:
    """The window of each layer: ``window`` or None, by ``layer_types``, or ``is_local`` if that is
    given."""
    if is_local is not None:
        return tuple(window if is_local(layer) else None for layer in range(num_layers))
    types = fields.each("layer_types", Fields.text, num_layers)
    if unknown := set(types) - set(_TYPES):
        raise UnsupportedModelError(
            f"{fields.path}: layers of type {', '.join(sorted(unknown))} are not supported"
        )
    return tuple(window if _TYPES[kind] else None for kind in types)


def window_everywhere(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """A ``ReadConfig`` of families whose layers all have the window of ``config.json``."""
    return {"layer_windows": hf_windows(fields, config.num_layers, lambda layer: True)}


def hf_window_entries(config: ModelConfig) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types``."""
    windows = config.layer_windows
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"sliding_window": window_size(config), "layer_types": kinds}


def gguf_windows(fields: Fields, num_layers: int, period: int, size: int | None = None) -> Windows:
    """The window of each layer by ``attention.sliding_window``, and its ``pattern``: a list for all
    layers, or the period in which the last layer sees all, 0 if none does. ``period`` and ``size``
    are the family's own."""
    window = fields.integer("attention.sliding_window", size, minimum=0) or None
    name = "attention.sliding_window_pattern"
    if fields.has_list(name):
        is_local = fields.each(name, Fields.boolean, num_layers)
        return tuple(window if local else None for local in is_local)
    is_local_at = all_but_last_of(fields.integer(name, period, minimum=0) or num_layers + 1)
    return tuple(window if is_local_at(i) else None for i in range(num_layers))


class WindowPattern(NamedTuple):
    """The layers that have a sliding window in a family: in each ``period`` of layers, all but the
    last. Files may say otherwise."""

    period: int

    def from_hf(self, fields: Fields, config: ModelConfig, period: int | None = None) -> Windows:
        """The window of each layer by ``config.json``; ``period``: as it says, if it does."""
        return hf_windows(fields, config.num_layers, all_but_last_of(period or self.period))

    def from_gguf(self, fields: Fields, config: ModelConfig) -> Windows:
        """The window of each layer by GGUF metadata."""
        return gguf_windows(fields, config.num_layers, self.period)

    def to_gguf(self, config: ModelConfig) -> dict[str, Any]:
        """Write the keys that ``from_gguf`` reads; no pattern if it is the family's own."""
        size = window_size(config)
        if size is None:
            return {}
        entries: dict[str, Any] = {"attention.sliding_window": size}
        is_local = [window is not None for window in config.layer_windows]
        found = _period_of(is_local)
        if found is None:
            import numpy as np

            entries["attention.sliding_window_pattern"] = np.array(is_local)
        elif found != self.period:
            entries["attention.sliding_window_pattern"] = found
        return entries

    def to_fixed_gguf(self, config: ModelConfig) -> dict[str, Any]:
        """Write the same for a family whose readers know no other period than its own."""
        entries = self.to_gguf(config)
        if "attention.sliding_window_pattern" in entries:
            raise UnsupportedModelError(
                f"{config.name}: in a GGUF file of a {config.architecture}, all of {self.period} "
                "layers but the last have a sliding window; these layers are others"
            )
        return entries


def all_but_last_of(period: int) -> Callable[[int], bool]:
    """Whether a layer is not the last one of each so many."""
    return lambda layer: (layer + 1) % period != 0


def window_size(config: ModelConfig) -> int | None:
    """The window of the layers that have one; None if none has."""
    return max((window for window in config.layer_windows if window is not None), default=None)


def _period_of(is_local: Sequence[bool]) -> int | None:
    """The period of layers whose last one has no window; one more than there are layers if all have
    windows; None if there is no period."""
    period = list(is_local).index(False) + 1 if False in is_local else len(is_local) + 1
    regular = [all_but_last_of(period)(layer) for layer in range(len(is_local))]
    return period if list(is_local) == regular else None
