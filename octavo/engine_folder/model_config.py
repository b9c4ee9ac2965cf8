"""A resolved ``ModelConfig`` as JSON, and back: under the names that it has here."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from octavo.errors import ModelFileError
from octavo.fields import Fields
from octavo.layers.rope import inverse_frequencies
from octavo.layers.rope_config import SCALINGS, RopeConfig
from octavo.models.config import (
    ACTIVATIONS,
    MAX_LAYERS,
    MAX_POSITION,
    ModelConfig,
    sampling_defaults,
)
from octavo.models.registry import resolve_architecture

# What a model may recommend; see config_hf.py and config_gguf.py.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def config_json(config: ModelConfig) -> dict[str, Any]:
    return {**dataclasses.asdict(config), "sampling_defaults": dict(config.sampling_defaults)}


def read_config(fields: Fields) -> ModelConfig:
    """The config in the fields of a manifest's ``model``. ModelFileError if it cannot be one."""
    num_layers = fields.integer("num_layers", maximum=MAX_LAYERS)
    recommended = fields.section("sampling_defaults", {})
    config = ModelConfig(
        architecture=resolve_architecture(fields.text("architecture"), str(fields.path)),
        name=fields.text("name"),
        num_layers=num_layers,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=fields.integer("num_heads"),
        num_kv_heads=fields.integer("num_kv_heads"),
        head_dim=fields.integer("head_dim"),
        vocab_size=fields.integer("vocab_size"),
        max_position=fields.integer("max_position", maximum=MAX_POSITION),
        rope=_read_rope(fields.section("rope")),
        local_rope=_read_rope(fields.section("local_rope")) if "local_rope" in fields else None,
        norm_eps=fields.number("norm_eps"),
        norm_plus_one=fields.boolean("norm_plus_one"),
        activation=_one_of(fields, "activation", ACTIVATIONS),
        tie_embeddings=fields.boolean("tie_embeddings"),
        qk_norm=fields.boolean("qk_norm"),
        attention_bias=fields.boolean("attention_bias"),
        attention_output_bias=fields.boolean("attention_output_bias"),
        mlp_bias=fields.boolean("mlp_bias"),
        layer_windows=tuple(
            fields.each("layer_windows", lambda f, name: f.integer(name, None), num_layers)
        ),
        attention_scale=fields.number("attention_scale"),
        attention_softcap=fields.number("attention_softcap", None),
        logit_softcap=fields.number("logit_softcap", None),
        embedding_scale=fields.number("embedding_scale", None),
        bos_token_id=fields.integer("bos_token_id", None, minimum=0),
        eos_token_ids=tuple(
            fields.each("eos_token_ids", lambda f, name: f.integer(name, minimum=0))
        ),
        sampling_defaults=sampling_defaults(recommended, {name: name for name in _RECOMMENDED}),
    ).check(fields.path)
    for name in ("rope", "local_rope"):
        _check_angles(fields, name, getattr(config, name))
    return config


def _read_rope(fields: Fields) -> RopeConfig:
    return RopeConfig(
        theta=fields.number("theta"),
        rotary_dim=fields.integer("rotary_dim"),
        interleaved=fields.boolean("interleaved"),
        scaling=_one_of(fields, "scaling", SCALINGS),
        factor=fields.number("factor"),
        original_max_position=fields.integer("original_max_position", minimum=0),
        max_position=fields.integer("max_position", minimum=0),
        attention_factor=fields.number("attention_factor"),
        beta_fast=fields.number("beta_fast"),
        beta_slow=fields.number("beta_slow"),
        truncate=fields.boolean("truncate"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        short_factor=tuple(fields.each("short_factor", Fields.number)),
        long_factor=tuple(fields.each("long_factor", Fields.number)),
        has_freq_factors=fields.boolean("has_freq_factors"),
    )


def _one_of(fields: Fields, name: str, known: tuple[str, ...]) -> str:
    value: str = fields.text(name)
    if value not in known:
        raise fields.error(name, f"{value!r:.60} is none of {', '.join(known)}")
    return value


def _check_angles(fields: Fields, name: str, rope: RopeConfig | None) -> None:
    """That the fields of a rope fit each other is seen by using them."""
    if rope is None:
        return
    try:
        with np.errstate(all="ignore"):
            angles = inverse_frequencies(rope, np.arange(2))
    except (ArithmeticError, ValueError) as error:
        raise _bad_rope(fields, name, f"{error}") from error
    if angles.shape[-1] != rope.rotary_dim // 2 or not np.isfinite(angles).all():
        raise _bad_rope(fields, name, "some are no numbers, or not there")


def _bad_rope(fields: Fields, name: str, reason: str) -> ModelFileError:
    return fields.error(name, f"its angles cannot be computed: {reason:.200}")
