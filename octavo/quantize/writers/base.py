"""What a quantized matrix becomes in a Hugging Face folder: tensors, and a ``quantization_config``.

A writer knows one format, and nothing of how the codes were found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from octavo.base.errors import ConfigError
from octavo.quantization.coded import CodedWeight
from octavo.quantize.scheme import Scheme


class WrittenPart(NamedTuple):
    """A tensor: ``dtype`` as safetensors spells it; ``data`` of that type, or of one as wide."""

    dtype: str
    data: np.ndarray


class Writer(Protocol):
    name: str
    """Of the format, as ``--format`` has it."""

    def check(self, shape: tuple[int, int], scheme: Scheme) -> None:
        """ConfigError if the format has no room for such a matrix."""
        ...

    def parts(self, weight: CodedWeight, scheme: Scheme) -> Mapping[str, WrittenPart]:
        """By what comes behind the module's name: "qweight", "scales"."""
        ...

    def config(self, scheme: Scheme, left_out: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config``; ``left_out``: the linear modules that stay as they are."""
        ...


class MixedWriter(Writer, Protocol):
    """Of a format in which matrices may have different schemes."""

    def num_bits(self, shape: tuple[int, int], scheme: Scheme) -> int:
        """Of all parts of a matrix."""
        ...

    def mixed_config(
        self, schemes: Mapping[str, Scheme], left_out: Sequence[str]
    ) -> dict[str, Any]:
        """The ``quantization_config`` where each module has a scheme of its own."""
        ...


def need(format: str, is_so: bool, what: str) -> None:
    """ConfigError, with what is wrong, unless a format has room for a matrix."""
    if not is_so:
        raise ConfigError(f"{format} has no room for it: {what}")


def table(values: np.ndarray | float, weight: CodedWeight) -> np.ndarray:
    """Scales or zeros, float32 [N, groups]."""
    return np.broadcast_to(np.float32(values), (weight.shape[0], weight.num_groups))


def all_codes(weight: CodedWeight) -> np.ndarray:
    return weight.codes.rows(0, weight.shape[0])


def group_size(scheme: Scheme) -> int | None:
    """None where a row has one scale."""
    return scheme.group_size if isinstance(scheme.group_size, int) else None
