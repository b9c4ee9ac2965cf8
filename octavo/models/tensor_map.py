"""The map from a model's parameters to the tensors of a checkpoint that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from octavo.base.errors import ModelFileError
from octavo.layers.module import named_parameters
from octavo.models.checkpoint import Checkpoint
from octavo.models.config import EMBEDDING, HEAD, ModelConfig
from octavo.models.family import EACH, Family, FileValues
from octavo.models.registry import family_of
from octavo.quantization.base import Weight, entry_of, stored_floats, transposed


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The place of a parameter in a file.

    Args:
        tensor: that has it, or its first part.
        further: its other parts, in their order; ``join`` makes the weight of all.
        start, stop, step: which rows of the tensor it is.
        is_transposed: the tensor lies as [inputs, outputs].
        order: the parameter's rows, by their numbers in the tensor.
        entry: (which, of how many) where a tensor has the same of several modules, one behind the
            other.
        values: how the tensor has values that the model has otherwise.
    """

    tensor: str
    start: int = 0
    stop: int | None = None
    step: int = 1
    is_transposed: bool = False
    order: np.ndarray | None = None
    entry: tuple[int, int] | None = None
    values: FileValues | None = None
    further: tuple[str, ...] = ()
    join: Callable[[list[Weight]], Weight] | None = None

    def read(self, checkpoint: Checkpoint) -> Weight:
        weight = checkpoint.read(self.tensor)
        if self.join is not None:
            weight = self._of_parts([weight, *map(checkpoint.read, self.further)], checkpoint)
        if self.values is not None:
            weight = stored_floats(self.values.read(weight.floats()))
        if self.entry is not None:
            weight = self._entry_of(weight, checkpoint)
        # Codes with scales of several modules are never turned.
        if self.is_transposed and (self.entry is None or not weight.is_quantized):
            weight = transposed(weight)
        if self.order is not None and len(self.order) == weight.shape[0]:
            weight = weight.select(self.order)
        is_whole = (self.start, self.stop, self.step) == (0, None, 1)
        return weight if is_whole else weight.narrow(self.start, self.stop, self.step)

    def shape(self, shape: tuple[int, ...], is_quantized: bool) -> tuple[int, ...]:
        """The shape that ``read`` makes of a tensor of this shape; the shape itself if it
        cannot."""
        try:
            if self.values is not None:  # which are few: vectors, and convolutions
                shape = self.values.read(np.full(shape, -1.0, dtype=np.float32)).shape
        except (ValueError, IndexError):
            return shape
        if self.entry is not None:
            count = self.entry[1]
            if shape[:1] == (count,):
                shape = shape[1:]
            elif len(shape) == 2 and shape[0] % count == 0:
                shape = (shape[0] // count, shape[1])
            else:
                return shape
        if self.is_transposed and (self.entry is None or not is_quantized):
            shape = shape[::-1]
        first, stop, step = slice(self.start, self.stop, self.step).indices(
            shape[0] if shape else 0
        )
        return (len(range(first, stop, step)), *shape[1:]) if shape else shape

    def _of_parts(self, parts: list[Weight], checkpoint: Checkpoint) -> Weight:
        assert self.join is not None
        try:
            return self.join(parts)
        except ValueError as error:
            path = checkpoint.tensors[self.tensor].path
            raise ModelFileError(path, f"{error}", field=self.tensor) from None

    def _entry_of(self, weight: Weight, checkpoint: Checkpoint) -> Weight:
        assert self.entry is not None
        index, count = self.entry
        try:
            return entry_of(weight, index, count)
        except ValueError as error:
            path = checkpoint.tensors[self.tensor].path
            raise ModelFileError(path, f"{error}", field=self.tensor) from None


def sources(
    checkpoint: Checkpoint, config: ModelConfig
) -> Iterator[tuple[str | None, TensorSource]]:
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
    tensor_of = {parameter: tensor for tensor, parameter in parameter_of.items()}
    for tensor, parameter in parameter_of.items():
        if parameter is None:
            yield None, TensorSource(tensor)
            continue
        if (found := names.joined_with(parameter)) is not None:
            whole, parts_of_it, joined = found
            first, *further = map(tensor_of.get, parts_of_it)
            is_there = first == tensor and None not in further  # a whole has one source
            source = TensorSource(tensor, further=tuple(filter(None, further)), join=joined.join)
            yield (whole, source) if is_there else (None, TensorSource(tensor))
            continue
        parts, order = family.parts(parameter, names), family.row_order(config, parameter)
        rows = _in_turn(parts) if names.is_interleaved(parameter) else _in_order(parts, sizes)
        for part, start, stop, step in rows:
            source = TensorSource(
                tensor,
                start,
                stop,
                step,
                names.is_transposed(tensor),
                order,
                values=names.values_of(part),
            )
            yield from _of_each_expert(part, source, config)


def source_of(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, TensorSource]:
    """The source of each parameter, by its name."""
    return {name: source for name, source in sources(checkpoint, config) if name is not None}


def _num_rows(family: Family, config: ModelConfig) -> Mapping[str, int]:
    """The shape of each parameter, computed when it is asked for."""
    if not family.fused:
        return {}
    return {name: p.shape[0] for name, p in named_parameters(family.model(config))}


def _in_order(
    parts: tuple[str, ...], sizes: Mapping[str, int]
) -> Iterator[tuple[str, int, int | None, int]]:
    """(parameter, first row, end, step) of each part. The last one has all that is left, so that a
    tensor of too many rows is noticed by its shape."""
    known = (sizes.get(part.replace(EACH, ".0."), 0) for part in parts[:-1])
    ends = list(accumulate(known, initial=0))
    for part, start, stop in zip(parts, ends, [*ends[1:], None], strict=True):
        yield part, start, stop, 1


def _in_turn(parts: tuple[str, ...]) -> Iterator[tuple[str, int, int | None, int]]:
    """The same of parts whose rows follow each other in turn."""
    yield from ((part, first, None, len(parts)) for first, part in enumerate(parts))


def _of_each_expert(
    part: str, source: TensorSource, config: ModelConfig
) -> Iterator[tuple[str, TensorSource]]:
    """The sources of all experts in a tensor that holds the same parameter of each."""
    if EACH not in part or config.experts is None:
        yield part, source
        return
    count = config.experts.routing.num_experts
    for index in range(count):
        yield part.replace(EACH, f".{index}."), replace(source, entry=(index, count))


def _next_token_modules(checkpoint: Checkpoint, config: ModelConfig) -> tuple[str, ...]:
    """Prefixes of the tensors of drafting modules (``speculation/mtp.py``), which follow the layers
    and are no part of the model itself."""
    found = ["mtp."] if "mtp.fc.weight" in checkpoint.tensors else []
    index = config.num_layers
    while (prefix := f"model.layers.{index}.") + "eh_proj.weight" in checkpoint.tensors:
        found.append(prefix)
        index += 1
    return tuple(found)


def _untangle_tied(parameter_of: dict[str, str | None]) -> dict[str, str | None]:
    """Names of the output head in files with tied weights, which may have either or both."""
    instead = None if EMBEDDING in parameter_of.values() else EMBEDDING
    return {
        tensor: instead if parameter == HEAD else parameter
        for tensor, parameter in parameter_of.items()
    }
