"""What layers keep, for models that are not there."""

from __future__ import annotations

from octavo.models.config import KVSpec


def kv_layers(*windows: int | None, heads: int = 2) -> list[KVSpec]:
    """Layers that see so many positions, None: all."""
    return [
        KVSpec("full" if window is None else "window", heads, 64, 64, window) for window in windows
    ]
