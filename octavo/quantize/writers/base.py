"""The interface of writers, which store quantized matrices in the formats of Hugging Face folders.

A writer makes the tensors of a matrix, and the ``quantization_config`` of a model, in one format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from octavo.base.errors import ConfigError
from octavo.quantization.coded import CodedWeight
from octavo.quantize.scheme import Scheme


class WrittenPart(NamedTuple):
    """A tensor of a file: ``dtype`` in safetensors' spelling; ``data`` of a type as wide."""

    dtype: str
    data: np.ndarray


class Writer(Protocol):
    """Stores quantized matrices in a format."""

    name: str
    """The name of the format, as of ``--format``."""

    def check(self, shape: tuple[int, int], scheme: Scheme) -> None:
        """Raise a ConfigError if the format cannot hold such a matrix."""
        ...

    def parts(self, weight: CodedWeight, scheme: Scheme) -> Mapping[str, WrittenPart]:
        """The tensors of a matrix by the suffix of their names: "qweight", "scales"."""
        ...

    def config(self, scheme: Scheme, left_out: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config``; ``left_out``: the linear modules that are not quantized."""
        ...


class MixedWriter(Writer, Protocol):
    """A writer of a format whose matrices may have different schemes."""

    def num_bits(self, shape: tuple[int, int], scheme: Scheme) -> int:
        """Bits of all tensors of a matrix."""
        ...

    def mixed_config(
        self, schemes: Mapping[str, Scheme], left_out: Sequence[str]
    ) -> dict[str, Any]:
        """The ``quantization_config`` of modules with different schemes."""
        ...


def need(format: str, is_so: bool, what: str) -> None:
    """Raise a ConfigError with the reason ``what`` if a format cannot hold a matrix."""
    if not is_so:
        raise ConfigError(f"{format} cannot hold it: {what}")


def table(values: np.ndarray | float, weight: CodedWeight) -> np.ndarray:
    """Broadcast scales or zeros to float32 [N, groups]."""
    return np.broadcast_to(np.float32(values), (weight.shape[0], weight.num_groups))


def all_codes(weight: CodedWeight) -> np.ndarray:
    return weight.codes.rows(0, weight.shape[0])


def group_size(scheme: Scheme) -> int | None:
    """The group size; None if a row has one scale."""
    return scheme.group_size if isinstance(scheme.group_size, int) else None
