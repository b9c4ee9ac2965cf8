"""Models and devices as JSON.

A field that has its default is left out of the parts of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, fields
from itertools import groupby
from typing import Any, TypeVar, get_args

from octavo.base.errors import ConfigError
from octavo.base.json_values import finite_or_none
from octavo.cost.communication import link_of
from octavo.cost.efficiency import PROFILES, Efficiency, efficiency_of
from octavo.cost.engine_profile import Limits, profile
from octavo.cost.file_weights import StoredRule, stored_rule
from octavo.cost.hardware import Device
from octavo.cost.mixers import Mixer
from octavo.cost.mlps import Mlp
from octavo.cost.model_spec import LayerSpec, ModelSpec
from octavo.cost.quantization_config import read
from octavo.cost.rank_model import Arithmetic
from octavo.cost.recurrences import Recurrence
from octavo.cost.weight_rules import Recipe
from octavo.cost.weight_type import FLOAT_ALIASES, FLOATS, WeightType
from octavo.cost.weights import num_parameters
from octavo.planner.money import watts_of, watts_text

T = TypeVar("T")

# -- models ---------------------------------------------------------------------------------------


def model_json(spec: ModelSpec) -> dict[str, Any]:
    """Return the shape of a model. Equal ``layers`` are told once, with their ``count``; ``order``
    has them from the first to the last, as pairs of an index and of how many of it follow."""
    kinds = Counter(spec.layers)
    indices = {layer: index for index, layer in enumerate(kinds)}
    order = groupby(indices[layer] for layer in spec.layers)
    made_of = [_layer_json(layer, count, spec) for layer, count in kinds.items()]
    return {
        **{name: value for name, value in _given(spec).items() if name not in _TOLD_OTHERWISE},
        **_weights_json(spec),
        "num_layers": spec.num_layers,
        "parameters": num_parameters(spec),
        "active_parameters": num_parameters(spec, active=True),
        "layers": made_of,
        "order": [[index, len(list(same))] for index, same in order],
    }


_TOLD_OTHERWISE = ("layers", "inputs", "dtype", "quantization", "source", "why_not_run")


def _weights_json(spec: ModelSpec) -> dict[str, Any]:
    """Number types of the weights as published, and weights before the layers."""
    floats = FLOATS[FLOAT_ALIASES.get(spec.dtype, spec.dtype)]
    found: dict[str, Any] = {"dtype": floats.name}
    if spec.source is not None:
        found["published"] = _stored_json(stored_rule(spec))
    elif spec.quantization:
        found["published"] = _recipe_json(read(spec, floats))
    if spec.inputs:
        found["inputs"] = [_given(weight) for weight in spec.inputs]
    return found


def _layer_json(layer: LayerSpec, count: int, spec: ModelSpec) -> dict[str, Any]:
    found = {
        "count": count,
        "mixers": [_mixer_json(mixer, spec) for mixer in layer.mixers],
        "mlp": None if layer.mlp is None else _part_json(layer.mlp),
        "norm_size": layer.norm_size,
    }
    if layer.beside:
        found["beside"] = [_given(weight) for weight in layer.beside]
    return found


def _mixer_json(mixer: Mixer, spec: ModelSpec) -> dict[str, Any]:
    """Attention by its fields; a recurrent mixer by the weights and the state that follow from its
    fields."""
    if not isinstance(mixer, Recurrence):
        return _part_json(mixer)
    return {
        "kind": type(mixer).__name__,
        "heads": mixer.heads,
        "weights": [_given(weight) for weight in mixer.weights(spec.hidden_size)],
        "state_parts": [(part.pieces, part.values) for part in mixer.state_parts],
        "activations": mixer.activations,
    }


def _part_json(part: Mixer | Mlp) -> dict[str, Any]:
    found = {"kind": type(part).__name__, **_given(part)}
    if (shared := getattr(part, "shared", None)) is not None:
        found["shared"] = _given(shared)
    return found


def _given(part: Any) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    return {
        field.name: getattr(value, "name", value).lower() if field.name == "split" else value
        for field in fields(part)
        if field.default is MISSING or getattr(part, field.name) != field.default
        for value in [getattr(part, field.name)]
    }


# -- devices and engines --------------------------------------------------------------------------


def hardware_json(devices: Iterable[Device]) -> dict[str, Any]:
    """Return devices, and what engines reach on each and default to: ``efficiencies`` and
    ``limits``, which many devices have in common, by their places in the two lists."""
    efficiencies: list[Efficiency] = []
    limits: list[Limits] = []
    found = [
        {
            **_device_json(device),
            "engines": {
                name: (
                    _place(efficiency_of(name, device), efficiencies),
                    _place(profile(name).on(device).defaults(device), limits),
                )
                for name in PROFILES
            },
        }
        for device in devices
    ]
    return {
        "devices": found,
        "efficiencies": [efficiency_json(each) for each in efficiencies],
        "limits": [_given(each) for each in limits],
    }


def _place(value: T, values: list[T]) -> int:
    """Return the index of a value in a list, which it is added to if it is missing."""
    if value not in values:
        values.append(value)
    return values.index(value)


def _device_json(device: Device) -> dict[str, Any]:
    """``computes``: the arithmetic and the speed of products of each type."""
    link = None if device.link_bandwidth is None else asdict(link_of(device))
    return {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth": device.memory_bandwidth,
        "computes": dict(_computes(device)),
        "link": link,
        "link_kind": device.link_kind,
        "watts": watts_of(device),
        "watts_text": watts_text(device),
        "usd_per_hour": device.usd_per_hour,
        "trust": device.trust,
        "source": device.source,
    }


def _computes(device: Device) -> Iterator[tuple[str, tuple[str, float]]]:
    for arithmetic in get_args(Arithmetic):
        try:
            yield arithmetic, (device.computed_in(arithmetic), device.peak(arithmetic))
        except ConfigError:
            continue


def efficiency_json(efficiency: Efficiency) -> dict[str, Any]:
    """Return an efficiency without the link, which is told with the device. JSON has no infinity:
    None stands for it."""
    found = {name: value for name, value in asdict(efficiency).items() if name != "link"}
    return {**found, "sharpness": finite_or_none(efficiency.sharpness)}


# -- types of numbers -----------------------------------------------------------------------------


def _recipe_json(recipe: Recipe) -> dict[str, Any]:
    return {
        "kind": "recipe",
        "type": _type_json(recipe.quantized),
        "parts": recipe.parts,
        "ignored": recipe.ignored.as_regexes(),
    }


def _stored_json(rule: StoredRule) -> dict[str, Any]:
    """Bits of a number of each part, by layer; "" is outside of the layers."""
    bits: dict[str, dict[str, float]] = {}
    for (layer, part), each in rule.bits.items():
        bits.setdefault(part, {})["" if layer is None else str(layer)] = each
    return {"kind": "stored", "name": "as stored", "quantized": rule.quantized, "bits": bits}


def _type_json(of: WeightType) -> dict[str, Any]:
    return asdict(of)
