"""A resolved ``ModelConfig`` as JSON, and back, under its field names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from octavo.base.errors import ModelFileError
from octavo.base.fields import Fields
from octavo.layers.rope_angles import inverse_frequencies
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import MAX_LAYERS, MAX_POSITION, ModelConfig, sampling_defaults
from octavo.models.registry import check_architecture
from octavo.sources.engine_folder.plain_data import read_dataclass

# Sampling defaults of a model; see config_hf.py and config_gguf.py.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def config_json(config: ModelConfig) -> dict[str, Any]:
    return {**dataclasses.asdict(config), "sampling_defaults": dict(config.sampling_defaults)}


def read_config(fields: Fields) -> ModelConfig:
    """Return the config in the fields of a manifest's ``model``. ModelFileError if it cannot be
    one."""
    check_architecture(fields.text("architecture"), str(fields.path))
    recommended = fields.section("sampling_defaults", {})
    config = read_dataclass(
        fields,
        ModelConfig,
        num_layers=fields.integer("num_layers", maximum=MAX_LAYERS),
        max_position=fields.integer("max_position", maximum=MAX_POSITION),
        sampling_defaults=sampling_defaults(recommended, {name: name for name in _RECOMMENDED}),
    ).check(fields.path)
    for name in ("rope", "local_rope"):
        _check_angles(fields, name, getattr(config, name))
    return config


def _check_angles(fields: Fields, name: str, rope: RopeConfig | None) -> None:
    """Check that the fields of a rope fit each other, by using them."""
    if rope is None:
        return
    if rope.has_freq_factors and rope.scaling == "longrope":
        rope = rope.unscaled()  # its divisors are constants of the program, which checks them
    try:
        with np.errstate(all="ignore"):
            angles = inverse_frequencies(rope, np.arange(2))
    except (ArithmeticError, ValueError) as error:
        raise _bad_rope(fields, name, f"{error}") from error
    if angles.shape[-1] != rope.rotary_dim // 2 or not np.isfinite(angles).all():
        raise _bad_rope(fields, name, "some are no numbers, or not there")


def _bad_rope(fields: Fields, name: str, reason: str) -> ModelFileError:
    return fields.error(name, f"its angles cannot be computed: {reason:.200}")
