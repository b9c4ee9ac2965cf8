"""Read a model's shape from an uploaded ``config.json``.

``python -m octavo.page.spec_reader`` reads ``{config, name}`` from its input and writes the shape,
or ``{error, status}``, as JSON; a server runs it as a process of its own, since such a config may
cost any amount of memory or time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from octavo.base.errors import ConfigError, ModelError
from octavo.cost.spec_hf import spec_from_hf
from octavo.planner.page_export import model_json


def read_spec(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the shape, or ``{error, status}`` for a config that is wrong or of an unknown kind."""
    try:
        found = model_json(spec_from_hf(config, path=name))
    except (ConfigError, ModelError) as error:
        return {"error": str(error), "status": 400}
    return {**found, "name": name}


if __name__ == "__main__":
    json.dump(read_spec(**json.load(sys.stdin)), sys.stdout, separators=(",", ":"))
