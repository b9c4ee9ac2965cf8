"""Deployments of some models, devices and layouts, for pages that no server answers.

One JSON::

    {choices: {model, hardware, precision, kv, tp, pp, ep, dp},
     fields, parts: [...],
     deployments: {"model|hardware|precision|kv|tp,pp,ep,dp": [place of each field] or "error"}}

``parts`` has each value once. A document is the values of ``fields`` (docs/planning.md) by their
places in it, and so are ``ops``, ``communication``, the matrices and the attention of ``rank``, all
these of the ``kinds`` of ``stages``, and the attention of ``memory``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

from octavo.cost.catalogue import spec_of
from octavo.cost.hardware_table import named_device
from octavo.page.deployments import EngineChoice, document_or_error

MODELS = (
    "llama-3.1-8b",
    "llama-3.3-70b",
    "gemma-3-12b",
    "mixtral-8x7b",
    "gpt-oss-120b",
    "deepseek-v3",
)
DEVICES = ("H100 SXM", "RTX 4090", "MI300X", "M4 Max (40c)")
# By the names of the controls; None is the usual type.
PRECISIONS = {"published": None, "fp8": "fp8", "Q4_K_M": "Q4_K_M"}
KV_TYPES = {"auto": None, "fp8": "fp8"}


def layouts(kv: str) -> Iterator[tuple[int, int, int, int]]:
    """Yields the layouts that pictures compare, as tp, pp, ep and dp; other types of the KV cache
    than the usual one have fewer."""
    yield from ((tp, 1, 1, 1) for tp in (1, 2, 4, 8, 16, 32))
    if kv != "auto":
        return
    yield from ((tp, pp, 1, 1) for pp in (2, 4) for tp in (1, 2, 4, 8))
    yield from ((tp, 1, tp, 1) for tp in (2, 4, 8))
    yield from ((1, 1, dp, dp) for dp in (2, 4, 8))


@cache
def recorded_deployments() -> dict[str, Any]:
    """Return the recording; takes some seconds."""
    parts = _Parts()
    specs = {name: spec_of(name) for name in MODELS}
    devices = [named_device(name) for name in DEVICES]
    deployments: dict[str, Any] = {}
    for name, (precision, quantization), (kv, kv_type) in product(
        MODELS, PRECISIONS.items(), KV_TYPES.items()
    ):
        choice = EngineChoice(quantization=quantization, kv_cache_dtype=kv_type)
        for degrees in layouts(kv):
            layout = ",".join(map(str, degrees))
            for device in devices:
                found = document_or_error(specs[name], device, choice, degrees)
                key = f"{name}|{device.name}|{precision}|{kv}|{layout}"
                deployments[key] = found.get("error") or parts.row(found["document"])
    all_degrees = zip(*layouts("auto"), strict=True)
    return {
        "choices": {
            "model": MODELS,
            "hardware": DEVICES,
            "precision": list(PRECISIONS),
            "kv": list(KV_TYPES),
            **{
                name: sorted(set(degrees))
                for name, degrees in zip(("tp", "pp", "ep", "dp"), all_degrees, strict=True)
            },
        },
        "fields": parts.fields,
        "parts": parts.values,
        "deployments": deployments,
    }


class _Parts:
    """Values, each once."""

    def __init__(self) -> None:
        self.fields: list[str] = []
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def row(self, document: dict[str, Any]) -> list[int]:
        """Return the places of the fields of a document."""
        memory, stages = document["memory"], document["stages"]
        found = {
            **self._computed(document),
            "memory": {**memory, "attention": self._all(memory["attention"])},
        }
        if stages is not None:
            found["stages"] = {**stages, "kinds": list(map(self._computed, stages["kinds"]))}
        self.fields = list(found)
        return self._all(found.values())

    def _computed(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return what a rank computes and says, of all stages or of one, by places."""
        rank = document["rank"]
        return {
            **document,
            "ops": self._all(document["ops"]),
            "communication": self._all(document["communication"]),
            "rank": {
                **rank,
                "matrices": self._all(rank["matrices"]),
                "attention": self._all(rank["attention"]),
            },
        }

    def _all(self, values: Any) -> list[int]:
        return [self._place(value) for value in values]

    def _place(self, value: Any) -> int:
        text = json.dumps(value, separators=(",", ":"))
        if text not in self._places:
            self._places[text] = len(self.values)
            self.values.append(value)
        return self._places[text]
