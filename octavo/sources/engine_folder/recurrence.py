"""Fused ops of recurrent layers as JSON, and back; ``program.py`` has the others.

What they are told is not said again: it is in the model's config, which has been checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.base.fields import Fields
from octavo.kernels.fused_ops import FusedRecurrence
from octavo.kernels.recorder import Value
from octavo.kernels.recurrence_specs import ConvSpec, GatedNormSpec, RecurrentSpec
from octavo.layers.recurrence_config import RecurrenceConfig

_OPS = ("conv", "scan", "norm")  # of a RecurrenceConfig


def recurrence_json(
    op: FusedRecurrence,
    value: Callable[[Value], Any],
    constant: Callable[[np.ndarray | None], int | None],
) -> dict[str, Any]:
    """``value`` and ``constant``: what stands for these."""
    arrays = [None if each is None else each.reshape(-1) for each in op.constants]
    return {
        "kind": "recurrence",
        "op": _op_of(op.spec),
        "layer": op.layer,
        **{f"input_{i}": value(each) for i, each in enumerate(op.inputs)},
        **{f"constant_{i}": constant(each) for i, each in enumerate(arrays)},
        "out": value(op.out),
    }


class RecurrenceReader:
    """Reads such ops; ``taken`` has the layer and the op of each that was read.

    Args:
        read: gives the value of a field. constant: the array of one, if it has this size. out: the
            value that is written, if it has this width.
    """

    def __init__(
        self,
        config: RecurrenceConfig | None,
        read: Callable[[Fields, str], Value],
        constant: Callable[[Fields, str, int], np.ndarray],
        out: Callable[[Fields, str, int], Value],
    ):
        self._config = config
        self._read, self._constant, self._out = read, constant, out
        self._taken: set[tuple[int, str]] = set()

    def op(self, fields: Fields) -> FusedRecurrence:
        op = fields.text("op")
        spec: RecurrentSpec | None = getattr(self._config, op) if op in _OPS else None
        if spec is None:
            raise fields.error("op", f"the model has no {op!r:.60}")
        layer = None
        if not isinstance(spec, GatedNormSpec):
            layer = self._layer(fields, op)
        inputs = [self._input(fields, i, width) for i, width in enumerate(spec.reads)]
        constants = [
            self._constant(fields, name, size) if name in fields or not _may_miss(spec, i) else None
            for i, size in enumerate(spec.constants)
            for name in [f"constant_{i}"]
        ]
        out = self._out(fields, "out", spec.width)
        return FusedRecurrence(spec, layer, tuple(inputs), tuple(constants), out)

    def _layer(self, fields: Fields, op: str) -> int:
        assert self._config is not None
        most = len(self._config.layers) - 1
        layer: int = fields.integer("layer", minimum=0, maximum=most)
        if (layer, op) in self._taken:
            raise fields.error("layer", f"layer {layer} has its {op} already")
        self._taken.add((layer, op))
        return layer

    def _input(self, fields: Fields, index: int, width: int) -> Value:
        name = f"input_{index}"
        value = self._read(fields, name)
        if value.width < width:
            raise fields.error(name, f"has {value.width} numbers, and {width} are read")
        return value.view(-1, value.width)


def _op_of(spec: RecurrentSpec) -> str:
    if isinstance(spec, ConvSpec):
        return "conv"
    return "norm" if isinstance(spec, GatedNormSpec) else "scan"


def _may_miss(spec: RecurrentSpec, index: int) -> bool:
    """Whether a constant is a bias, which not every model has."""
    return isinstance(spec, ConvSpec) and index == 1
