"""Public names of the release before still lead to what they named, and say so."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

import octavo.quantization
from octavo.base.renamed import MODULES, NAMES


@pytest.mark.parametrize("old", sorted(MODULES))
def test_a_renamed_module_is_imported_under_its_old_name(old):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=rf"{old} is now {MODULES[old]};"):
        module = import_module(old)
    there = import_module(MODULES[old])
    names = [name for name in dir(there) if not name.startswith("_")]
    assert names
    for name in names:
        assert getattr(module, name) is getattr(there, name)
    with pytest.raises(AttributeError):
        module.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize("old", sorted(NAMES))
def test_a_renamed_class_is_found_in_its_old_package(old):
    (package, _, name), (home, _, new) = old.rpartition("."), NAMES[old].rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"{old} is now {NAMES[old]};"):
        assert getattr(import_module(package), name) is getattr(import_module(home), new)


ATTRIBUTES = [
    ("octavo.planner.answer.Plan", "nearest", "feasible_alternatives"),
    ("octavo.sim.request.SimRequest", "ask", "prompt"),
    ("octavo.sim.setup.Simulation", "asks", "prompts"),
    ("octavo.sim.simulation.SimulationResult", "flights", "requests"),
]


@pytest.mark.parametrize(("name", "old", "new"), ATTRIBUTES)
def test_a_renamed_attribute_is_read_under_its_old_name(name, old, new):
    home, _, class_name = name.rpartition(".")
    there = type(class_name, (getattr(import_module(home), class_name),), {new: "there"})
    instance = object.__new__(there)
    with pytest.warns(DeprecationWarning, match=rf"{class_name}.{old} is now {class_name}.{new};"):
        assert getattr(instance, old) == "there"


def test_what_never_was_is_an_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        octavo.quantization.nothing  # noqa: B018
