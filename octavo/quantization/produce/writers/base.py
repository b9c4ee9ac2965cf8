"""What a quantized matrix becomes in a Hugging Face folder: tensors, and a ``quantization_config``.

A writer knows one format, and nothing of how the codes were found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from octavo.errors import ConfigError
from octavo.quantization.coded import CodedWeight


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A tensor of a file to be: ``dtype`` as safetensors spells it, and the array that has its
    bytes: of that type, or of one that is as wide where numpy has none."""

    dtype: str
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class Kind:
    """What all quantized matrices of a checkpoint have in common.

    ``group_size`` is None where a row has one scale.
    """

    bits: int
    group_size: int | None
    symmetric: bool

    def group(self, num_inputs: int) -> int:
        return num_inputs if self.group_size is None else self.group_size


class Writer(Protocol):
    name: str

    def check(self, name: str, shape: tuple[int, int], kind: Kind) -> None:
        """ConfigError if the format has no room for such a matrix."""
        ...

    def tensors(self, weight: CodedWeight, kind: Kind) -> Mapping[str, NewTensor]:
        """By what comes behind the module's name: "qweight", "scales"."""
        ...

    def config(self, kind: Kind, left_out: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config``; ``left_out``: the linear modules that stay as they are."""
        ...


def need(name: str, format: str, is_so: bool, what: str) -> None:
    """ConfigError unless a matrix is as a format needs it."""
    if not is_so:
        raise ConfigError(f"{format} cannot hold {name}: {what}")


def need_whole_groups(name: str, format: str, shape: tuple[int, int], kind: Kind) -> None:
    group = kind.group(shape[1])
    need(
        name, format, shape[1] % group == 0,
        f"its {shape[1]} inputs are no multiple of the group size {group}; give one that divides "
        "them, such as 64 or 32",
    )  # fmt: skip


def table(values: np.ndarray | float, weight: CodedWeight) -> np.ndarray:
    """Scales or zeros, float32 [N, groups]."""
    return np.broadcast_to(np.float32(values), (weight.shape[0], weight.num_groups))


def all_codes(weight: CodedWeight) -> np.ndarray:
    return weight.codes.rows(0, weight.shape[0])
