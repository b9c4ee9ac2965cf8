"""Modules: the parts that models are built of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

from octavo.layers.parameter import Parameter


class Module:
    """A part of a model, whose attributes are its parameters, modules, lists of modules, and
    settings.

    It is not a ``torch.nn.Module``: it cannot be trained, and needs no torch.
    """

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yields the direct submodules by name, in the order of definition; those in lists as
        ``layers.3``."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif _is_list_of_modules(value):
                yield from ((f"{name}.{i}", module) for i, module in enumerate(value))

    def named_modules(self, name: str = "") -> Iterator[tuple[str, Module]]:
        """Yields this module and all of its submodules with their dotted names."""
        yield name, self
        for child_name, child in self.children():
            yield from child.named_modules(f"{name}.{child_name}".lstrip("."))

    def with_parameters(self, change: Callable[[Parameter], Parameter]) -> Self:
        """Return a copy of the module with other parameters; this one stays unchanged."""
        changed = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                setattr(changed, name, change(value))
            elif isinstance(value, Module):
                setattr(changed, name, value.with_parameters(change))
            elif _is_list_of_modules(value):
                setattr(changed, name, [module.with_parameters(change) for module in value])
        return changed


def named_parameters(module: Module) -> Iterator[tuple[str, Parameter]]:
    """Yields every parameter of a module with its dotted name, in the order of definition."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Parameter):
                yield f"{prefix}.{name}".lstrip("."), value


def _is_list_of_modules(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Module) for entry in value)
