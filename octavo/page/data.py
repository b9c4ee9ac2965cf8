"""Data of the page's formulas, such as models by name, devices, engines, and types of numbers.

docs/planning.md describes the fields.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from octavo.cost.catalogue import names, spec_of
from octavo.cost.efficiency import PROFILES
from octavo.cost.family_facts import families_json
from octavo.cost.hardware_table import devices
from octavo.planner.page_export import (
    engine_json,
    hardware_json,
    model_json,
    number_types_json,
)


@cache
def page_data() -> dict[str, Any]:
    """Return one JSON of all that comes with octavo, and of devices that the user has described."""
    return {
        "models": [model_json(spec_of(name)) for name in names()],
        **hardware_json(devices()),
        "engines": {name: engine_json(name) for name in PROFILES},
        "types": number_types_json(),
        "families": families_json(),
    }
