"""Which weight of a model has which type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from octavo.cost.weight_shape import Part, WeightShape
from octavo.cost.weight_type import WeightType

# What is quantized where nothing else is said; mxfp4 is of experts alone.
_LINEAR: tuple[Part, ...] = ("attention", "mlp", "experts")
_USUAL_PARTS: dict[str, tuple[Part, ...]] = {"mxfp4": ("experts",)}


class Rule(Protocol):
    """Says which weight has which type."""

    def type_of(self, weight: WeightShape) -> WeightType: ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """All have one."""

    type: WeightType

    def type_of(self, weight: WeightShape) -> WeightType:
        return self.type


@dataclass(frozen=True, slots=True)
class Recipe:
    """Matrices of some parts are quantized, but for those whose full names match what is ignored,
    which are regular expressions."""

    quantized: WeightType
    floats: WeightType
    parts: tuple[Part, ...]
    ignored: tuple[str, ...] = ()

    @classmethod
    def usual(
        cls, quantized: WeightType, floats: WeightType, ignored: tuple[str, ...] = ()
    ) -> Recipe:
        """With the parts that this type is of, in the models that people publish."""
        return cls(quantized, floats, _USUAL_PARTS.get(quantized.name, _LINEAR), ignored)

    def type_of(self, weight: WeightShape) -> WeightType:
        is_matrix = weight.inputs > 0 and weight.part in self.parts
        return self.quantized if is_matrix and not self._is_ignored(weight) else self.floats

    def _is_ignored(self, weight: WeightShape) -> bool:
        return any(re.search(pattern, weight.full_name) for pattern in self.ignored)
