"""Rules that give each weight of a model its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.cost.module_names import ModulePatterns
from octavo.cost.weight_shape import Part, WeightShape
from octavo.cost.weight_type import WeightType

# What is quantized where nothing else is said; mxfp4 is of experts alone.
LINEAR: tuple[Part, ...] = ("attention", "mlp", "experts")
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
class Named:
    """Modules that a config names have a type of their own, whatever part they are; None is that
    they are left as they were."""

    modules: ModulePatterns
    type: WeightType | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """Matrices of some parts are quantized, but for those that are ``ignored``.

    Args:
        quantized: the type of matrices of the ``parts``, and what results call the whole.
        named: modules with types of their own: the first that names a matrix has the word, and
            ``ignored`` before all of them.
    """

    quantized: WeightType
    floats: WeightType
    parts: tuple[Part, ...]
    ignored: ModulePatterns = ModulePatterns()
    named: tuple[Named, ...] = ()

    @classmethod
    def usual(
        cls,
        quantized: WeightType,
        floats: WeightType,
        ignored: ModulePatterns = ModulePatterns(),  # noqa: B008  (it is immutable)
        named: tuple[Named, ...] = (),
    ) -> Recipe:
        """The rule for the parts that have this type in published models."""
        parts = _USUAL_PARTS.get(quantized.name, LINEAR)
        return cls(quantized, floats, parts, ignored, named)

    def type_of(self, weight: WeightShape) -> WeightType:
        if weight.inputs == 0 or self.ignored.match(weight):
            return self.floats
        for each in self.named:
            if each.modules.match(weight):
                return each.type or self.floats
        return self.quantized if weight.part in self.parts else self.floats

    @property
    def name(self) -> str:
        """The name of the types in use: ``nvfp4``, or ``fp8+nvfp4``."""
        types = [self.quantized] if self.parts else []
        types += [each.type for each in self.named if each.type is not None]
        return "+".join(dict.fromkeys(each.name for each in types)) or self.floats.name
