"""Which tensors of a checkpoint the parameters of a model are in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from octavo.layers.module import named_parameters
from octavo.models.checkpoint import Checkpoint
from octavo.models.config import ModelConfig
from octavo.models.family import Family
from octavo.models.footprint import EMBEDDING, HEAD
from octavo.models.registry import family_of
from octavo.quantization.base import Weight, transposed


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter is: a tensor, or its rows from ``start`` to ``stop``, once it is turned
    from [inputs, outputs] where it ``is_transposed``, and its rows are in the order of ``rows``."""

    tensor: str
    start: int = 0
    stop: int | None = None
    is_transposed: bool = False
    rows: np.ndarray | None = None

    def read(self, checkpoint: Checkpoint) -> Weight:
        weight = checkpoint.read(self.tensor)
        if self.is_transposed:
            weight = transposed(weight)
        if self.rows is not None and len(self.rows) == weight.shape[0]:
            weight = weight.select(self.rows)
        is_whole = (self.start, self.stop) == (0, None)
        return weight if is_whole else weight.narrow(self.start, self.stop)


def sources(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[tuple[str | None, Source]]:
    """Every tensor of a checkpoint, in its order, with the parameter that it is for; None: for no
    one. One that is the rows of several parameters is there for each of them."""
    family = family_of(config.architecture)
    names = checkpoint.names(family)
    not_ours = _next_token_modules(checkpoint, config)
    parameter_of = {
        tensor: None if tensor.startswith(not_ours) else names.parameter(tensor)
        for tensor in checkpoint.tensors
    }
    if config.tie_embeddings:
        parameter_of = _untangle_tied(parameter_of)
    sizes = _num_rows(family, config)
    for tensor, parameter in parameter_of.items():
        if parameter is None:
            yield None, Source(tensor)
        else:
            is_transposed = names.is_transposed(tensor)
            rows = family.row_order(config, parameter)
            for part, start, stop in _rows_of_parts(family.parts(parameter), sizes):
                yield part, Source(tensor, start, stop, is_transposed, rows)


def source_of(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Source]:
    """Where each parameter is, by its name."""
    return {name: source for name, source in sources(checkpoint, config) if name is not None}


def _num_rows(family: Family, config: ModelConfig) -> Mapping[str, int]:
    """Of each parameter, where that is asked for."""
    if not family.fused:
        return {}
    return {name: p.shape[0] for name, p in named_parameters(family.model(config))}


def _rows_of_parts(
    parts: tuple[str, ...], sizes: Mapping[str, int]
) -> Iterator[tuple[str, int, int | None]]:
    """(parameter, first row, end) of each part. The last one has all that is left, so that a tensor
    of too many rows is noticed by its shape."""
    ends = list(accumulate((sizes.get(part, 0) for part in parts[:-1]), initial=0))
    yield from zip(parts, ends, [*ends[1:], None], strict=True)


def _next_token_modules(checkpoint: Checkpoint, config: ModelConfig) -> tuple[str, ...]:
    """How names of tensors begin that are modules for drafting (``speculation/mtp.py``), which
    follow the layers and are no part of the model itself."""
    found = ["mtp."] if "mtp.fc.weight" in checkpoint.tensors else []
    index = config.num_layers
    while (prefix := f"model.layers.{index}.") + "eh_proj.weight" in checkpoint.tensors:
        found.append(prefix)
        index += 1
    return tuple(found)


def _untangle_tied(parameter_of: dict[str, str | None]) -> dict[str, str | None]:
    """Of tied weights a file may have either or both; both are the embedding."""
    instead = None if EMBEDDING in parameter_of.values() else EMBEDDING
    return {
        tensor: instead if parameter == HEAD else parameter
        for tensor, parameter in parameter_of.items()
    }
