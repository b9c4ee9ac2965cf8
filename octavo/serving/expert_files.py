"""Files about the experts of a model, as JSON: the tokens that each got, and the ranks that have
it.

    {"format": "octavo expert loads 1", "model": "…", "architecture": "…", "loads": [[…], …]}
    {"format": "octavo expert placement 1", "model": …, "architecture": …, "num_ranks": 2,
     "ranks": [[[0], [0, 1], …], …]}

Both have a list for each layer that has experts, and in it an entry for each expert: its tokens, or
the ranks that have it, ascending.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.base.errors import ConfigError
from octavo.base.files import replace_file
from octavo.core.executor import Executor
from octavo.kernels.expert_places import ExpertPlaces, deal_out
from octavo.models.config import ModelConfig

_log = logging.getLogger("octavo")

_LOADS, _PLACEMENT = "octavo expert loads 1", "octavo expert placement 1"
_MOST_BYTES = 64 << 20

# The places of experts on so many ranks. ConfigError if there cannot be so many.
PlaceExperts = Callable[[int], ExpertPlaces]


class ExpertLoads(NamedTuple):
    """The tokens that each expert of each layer got, with names of the model."""

    model: str
    architecture: str
    loads: list[list[int]]


def num_experts_of(model: ModelConfig) -> int | None:
    """Return the number of experts of a layer; None if the model has no such layers."""
    if model.experts is None or not any(model.experts.layers):
        return None
    return model.experts.routing.num_experts


def placement_of(path: str | None, model: ModelConfig) -> PlaceExperts:
    """Return the places of a model's experts: those of a file, or equal runs of them.

    Raises:
        ConfigError: the model has no experts, or the file is not about them.
    """
    num_experts = num_experts_of(model)
    if num_experts is None or model.experts is None:
        raise ConfigError(
            f"enable_expert_parallel: {model.name} ({model.architecture}) has no experts; leave it "
            "off, and tensor_parallel_size shares its matrices"
        )
    num_layers = sum(model.experts.layers)
    if path is None:
        return lambda num_ranks: ExpertPlaces((deal_out(num_experts, num_ranks),) * num_layers)
    document = _read(path, _PLACEMENT)
    layers, made_for = document.get("ranks"), document.get("num_ranks")
    shape = _shape(path, layers, lambda ranks: isinstance(ranks, list) and len(ranks) > 0)
    if document.get("architecture") != model.architecture or shape != (num_layers, num_experts):
        raise ConfigError(
            f"{path}: it places {shape[1]} experts in each of {shape[0]} layers of "
            f"{document.get('architecture')!s:.40}, and {model.name} ({model.architecture}) has "
            f"{num_experts} in {num_layers}"
        )
    if document.get("model") != model.name:
        _log.warning(
            "%s was made for %.60s, and places the experts of %s",
            path,
            document.get("model"),
            model.name,
        )
    assert isinstance(layers, list)
    _check_ranks(path, layers, made_for)

    def place(num_ranks: int) -> ExpertPlaces:
        if num_ranks != made_for:
            raise ConfigError(
                f"{path}: it is a placement on {made_for} ranks, and these are {num_ranks}: set "
                f"tensor_parallel_size={made_for}, or make another (octavo place-experts)"
            )
        return ExpertPlaces.of(layers)

    return place


def write_placement(
    path: str | Path, loads: ExpertLoads, places: ExpertPlaces, num_ranks: int
) -> None:
    """Write a placement; an existing file is replaced."""
    _write(
        path,
        {
            "format": _PLACEMENT,
            "model": loads.model,
            "architecture": loads.architecture,
            "num_ranks": num_ranks,
            "ranks": places.layers,
        },
    )


def write_loads(path: str | Path, model: ModelConfig, loads: Sequence[Sequence[int]]) -> None:
    """Write the tokens that each expert got; an existing file is replaced."""
    names = {"model": model.name, "architecture": model.architecture}
    _write(path, {"format": _LOADS, **names, "loads": loads})


def save_at_the_end(path: str, model: ModelConfig, rank: Executor) -> None:
    """Write the tokens that each expert has got when ``rank`` goes, with the process at the latest.

    Raises:
        ConfigError: nothing counts them, or the file cannot be written now.
    """
    loads = rank.probe().expert_loads()
    if not loads:
        raise ConfigError(
            f"save_expert_loads: nothing counts tokens of experts: {model.name} has none, or does "
            "not run on the native CPU kernels; leave it out"
        )
    path = str(Path(path).absolute())

    def save() -> None:
        write_loads(path, model, [[int(load) for load in layer] for layer in loads])

    save()  # so that a file that cannot be written is an error now
    weakref.finalize(rank, save)


def read_loads(path: str | Path) -> ExpertLoads:
    """Return the loads of a file. ConfigError if it has none."""
    document = _read(path, _LOADS)
    loads = document.get("loads")
    _shape(path, loads, lambda load: type(load) is int and 0 <= load < 1 << 62)
    assert isinstance(loads, list)
    return ExpertLoads(str(document.get("model")), str(document.get("architecture")), loads)


def _shape(path: str | Path, layers: object, is_entry: Callable[[Any], bool]) -> tuple[int, int]:
    """Return the number of layers and of experts in each. ConfigError if they are no such lists."""
    if (
        not isinstance(layers, list)
        or not all(isinstance(layer, list) and layer for layer in layers)
        or len({len(layer) for layer in layers}) != 1
        or not all(is_entry(entry) for layer in layers for entry in layer)
    ):
        raise ConfigError(f"{path}: it is damaged: no entry for each expert of each layer")
    return len(layers), len(layers[0])


def _check_ranks(path: str, layers: list[list[list[int]]], num_ranks: object) -> None:
    if type(num_ranks) is not int or num_ranks < 1:
        raise ConfigError(f"{path}: num_ranks is {num_ranks!r:.40}, and must be at least 1")
    for number, layer in enumerate(layers):
        for expert, ranks in enumerate(layer):
            are_ranks = all(type(rank) is int and 0 <= rank < num_ranks for rank in ranks)
            if not are_ranks or sorted(set(ranks)) != ranks:
                raise ConfigError(
                    f"{path}: expert {expert} of layer {number} is on {ranks!r:.60}, and must "
                    f"be on ranks 0 to {num_ranks - 1}, in ascending order"
                )
        if idle := set(range(num_ranks)).difference(*layer):
            raise ConfigError(f"{path}: in layer {number}, rank {min(idle)} has no expert")


def _read(path: str | Path, format: str) -> dict[str, Any]:
    try:
        if (size := Path(path).stat().st_size) > _MOST_BYTES:
            raise ConfigError(f"{path}: {size:,} bytes are more than such a file has")
        document = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: it cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != format:
        raise ConfigError(f"{path}: it does not say that it is {format!r}")
    return document


def _write(path: str | Path, document: dict[str, Any]) -> None:
    try:
        replace_file(path, json.dumps(document).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be written: {error}") from error
