"""Deployments as documents that the page evaluates: a model on a device, laid out in several ways.

``python -m octavo.page.deployments`` reads a question with an uploaded ``config.json`` from its
input and writes the answer, or ``{error, status}``, as JSON; a server runs it as a process of its
own, since such a config may cost any amount of memory or time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.base.errors import ConfigError, ModelError
from octavo.cost.engine_profile import Limits, profile
from octavo.cost.find_device import AUTO
from octavo.cost.hardware import Device
from octavo.cost.hardware_table import named_device
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.planner.deployment import Deployment
from octavo.planner.formulas import deployment_document


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The engine, and the types of the numbers that it keeps; None is the usual one."""

    engine: str = "octavo"
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    limits: Limits = field(default_factory=Limits)


def deployment_of(
    spec: ModelSpec, device: Device, choice: EngineChoice, parallel: Parallel
) -> Deployment:
    """Return one replica.

    Raises:
        ConfigError, ModelError: a choice is unknown, or contradicts the model.
    """
    engine = profile(choice.engine)
    precision = precision_of(spec, choice.quantization, engine.kv_dtype(choice.kv_cache_dtype))
    return Deployment(spec, precision, device, parallel, engine, choice.limits)


def document_or_error(
    spec: ModelSpec, device: Device, choice: EngineChoice, degrees: Iterable[int]
) -> dict[str, Any]:
    """Return ``{document}`` of one layout, or as ``{error}`` why it is impossible.

    Args:
        degrees: tp, pp, ep and dp.
    """
    try:
        deployment = deployment_of(spec, device, choice, Parallel(*degrees))
        return {"document": deployment_document(deployment)}
    except (ConfigError, ModelError) as error:
        return {"error": str(error)}


def engine_device(kind: str) -> Device:
    """Return the device that an engine runs on, without the file of its measured peaks.

    Raises:
        ConfigError: nothing is known of it yet.
    """
    from octavo.cost.this_machine import device_of_engine  # it takes a while to import

    device = device_of_engine(kind)
    return replace(device, source="measured here") if device.is_measured else device


def device_by_name(name: str, engine_kind: str) -> Device:
    """Return a device of the table; ``auto`` is the one of the engine.

    Raises:
        ConfigError: the name means no device, or nothing is known of the engine's.
    """
    return engine_device(engine_kind) if name == AUTO else named_device(name)


def _answer(
    config: Mapping[str, Any],
    name: str,
    hardware: str,
    engine_kind: str,
    choice: Mapping[str, Any],
    layouts: Iterable[Iterable[int]],
) -> dict[str, Any]:
    from octavo.cost.spec_hf import spec_from_hf

    try:
        spec = replace(spec_from_hf(config, path=name), name=name)
        device = device_by_name(hardware, engine_kind)
        chosen = EngineChoice(**{**choice, "limits": Limits(**choice["limits"])})
    except (ConfigError, ModelError) as error:
        return {"error": str(error), "status": 400}
    return {"deployments": [document_or_error(spec, device, chosen, each) for each in layouts]}


if __name__ == "__main__":
    json.dump(_answer(**json.load(sys.stdin)), sys.stdout, separators=(",", ":"), allow_nan=False)
