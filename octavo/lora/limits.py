"""Bounds of adapters, and the adapters that an engine is started with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.base.errors import ConfigError, UnsupportedModelError
from octavo.lora.request import LoRARequest

MAX_RANK = 256  # as kMaxLoraRank of csrc/lora.h


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Bounds of the adapters of one engine.

    Args:
        max_loras: adapters that the requests of one step may have.
        max_rank: of any matrix.
        max_bytes: of all that are in memory.
    """

    max_loras: int
    max_rank: int
    max_bytes: int


def check_rank(path: str, parameter: str, rank: int, limit: int) -> None:
    """Raise UnsupportedModelError if the change of a parameter has a rank above a limit."""
    if rank > limit:
        raise UnsupportedModelError(
            f"{path}: the change of {parameter} has the rank {rank}, and max_lora_rank is {limit}: "
            "raise it"
        )


def named_adapters(settings: Iterable[str]) -> tuple[LoRARequest, ...]:
    """Return the adapters of texts ``name=path``, numbered from 1 on.

    Raises:
        ConfigError: a text is of another kind, or a name comes twice.
    """
    found: dict[str, LoRARequest] = {}
    for text in settings:
        name, equals, path = str(text).partition("=")
        if not equals or not name.strip() or not path.strip():
            raise ConfigError(
                f"lora {text!r:.200} is not NAME=PATH, a name and a folder: sql=adapters/sql (the "
                "model stands before --lora)"
            )
        if name in found:
            raise ConfigError(f"lora names {name!r} twice: give each adapter a name of its own")
        found[name] = LoRARequest(name, len(found) + 1, str(Path(path).expanduser()))
    return tuple(found.values())
