"""Models and devices by name, and KV cache types, that the page's pictures offer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from octavo.cost.catalogue import names
from octavo.cost.hardware_table import devices
from octavo.cost.kv_type import kv_types


def page_data() -> dict[str, Any]:
    """Return all that comes with octavo, and the devices that the user has described."""
    return {
        "models": names(),
        "devices": [device.name for device in devices()],
        "kv_types": {
            of.name: {"keys": asdict(of.keys), "values": asdict(of.values)} for of in kv_types()
        },
    }
