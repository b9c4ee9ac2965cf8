"""A model's shape from a ``config.json`` that somebody has sent, as JSON.

``python -m octavo.page.spec_reader`` reads ``{config, name}`` from its input and writes the shape,
or ``{error, status}``; a server has it run so, since nobody knows what such a config asks for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from octavo.base.errors import ConfigError, ModelError
from octavo.cost.spec_hf import spec_from_hf
from octavo.planner.building_blocks import model_json


def read_spec(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The shape, or ``{error, status}`` for a config that makes no sense, or of a kind that is not
    known."""
    try:
        found = model_json(spec_from_hf(config, path=name))
    except (ConfigError, ModelError) as error:
        return {"error": str(error), "status": 400}
    return {**found, "name": name}


if __name__ == "__main__":
    json.dump(read_spec(**json.load(sys.stdin)), sys.stdout, separators=(",", ":"))
