"""A page that no server answers reads a config as the planner does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.cost.catalogue import entries
from octavo.cost.family_facts import OF_RUNNING, families_json
from octavo.cost.spec_hf import spec_by_facts, spec_from_hf
from octavo.models.registry import FAMILIES, listed_of

TOLD = [
    name
    for name, entry in entries().items()
    if (listed := listed_of(entry["config"])) is not None and listed.model_type in OF_RUNNING
]


@pytest.mark.parametrize("name", TOLD)
def test_facts_of_families_that_run_are_what_their_modules_say(name):
    config = entries()[name]["config"]
    listed = listed_of(config)
    assert listed is not None
    by_facts = spec_by_facts(config, OF_RUNNING[listed.model_type], Path(name))
    assert replace(by_facts, notes=()) == replace(spec_from_hf(config, path=name), notes=())


def test_the_page_knows_families_by_all_of_their_names():
    found = families_json()
    for listed in FAMILIES:
        is_told = listed.model_type in found["families"]
        for other in (*listed.model_types[1:], *listed.alike):
            assert found["same"].get(other) == (listed.model_type if is_told else None)
    assert set(OF_RUNNING) <= set(found["families"])
