"""ModelConfig from Hugging Face's ``config.json``: old and new spellings, and absent fields."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.layers.rope_config import SCALINGS, RopeConfig
from octavo.models.config import (
    MAX_LAYERS,
    Activation,
    ModelConfig,
    extended_length,
    sampling_defaults,
)
from octavo.models.family import Family
from octavo.models.registry import architecture_of, find_family
from octavo.models.unread_keys import check_hf_read, check_model_type, unread_sizes
from octavo.models.unsupported_models import check_generates, kinds_of, naming_features

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# Where a config has what rope is like: new ones, and old ones.
_ROPE_TABLES = ("rope_parameters", "rope_scaling")

# From generation_config.json, by the names of SamplingParams, which are the same.
_SAMPLING_FIELDS = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}


def config_from_hf(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    path: str | Path = "config.json",
) -> ModelConfig:
    """Read the contents of ``config.json``.

    Args:
        generation: the contents of ``generation_config.json``, if there is one.
        path: of ``config.json``, for error messages.

    Raises:
        UnsupportedModelError: octavo cannot run the architecture, or something the config asks for.
        ModelFileError: a value is missing or makes no sense.
    """
    path = Path(path)
    outer = Fields(path, config)
    check_generates(config, path)
    with naming_features(*kinds_of(config)):
        family = find_family(_architecture(config, outer), str(path))
        check_model_type(config, family, path)
    fields = _text_fields(config, family, path)
    read = _read(family, fields, Fields(path.with_name("generation_config.json"), generation or {}))
    check_hf_read(config, fields.asked, family, path)
    return read


class Sizes(NamedTuple):
    """A model by its sizes.

    Args:
        asked: the fields of its config that were read.
        unread: others, with their values, that its family does not know either.
    """

    config: ModelConfig
    asked: Collection[str]
    unread: list[tuple[str, Any]]


def sizes_from_hf(config: Mapping[str, Any], family: Family, *, path: Path) -> Sizes:
    """Read a ``config.json`` for the sizes of its model alone, to plan a model that may not run."""
    fields = _text_fields(config, family, path)
    read = _read(family, fields, Fields(path, {}))
    return Sizes(read, fields.asked, unread_sizes(config, fields.asked, family))


def _text_fields(config: Mapping[str, Any], family: Family, path: Path) -> Fields:
    """The fields of the text part. What that omits in the section of a multi-modal model is in the
    outer one."""
    inner = Fields(path, config).table("text_config", {})
    config = {**config, **{k: v for k, v in inner.items() if v is not None}}
    values = {**family.hf_defaults, **_without_nulls(config)}
    return Fields(path, values, names=family.hf_fields)


def _read(family: Family, fields: Fields, generation: Fields) -> ModelConfig:
    shared = _shared(family, fields, generation)
    return replace(shared, **family.from_hf(fields, shared)).check(fields.path)


def sizes_and_tokens(fields: Fields, generation: Fields) -> dict[str, Any]:
    """The fields of a `ModelConfig` that every config has under these names: sizes, the ids of
    tokens, recommended sampling."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    head_dim = fields.integer("head_dim", max(hidden_size // num_heads, 1))
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size", 4 * hidden_size),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size"),
        "layer_windows": (None,) * num_layers,
        "attention_scale": head_dim**-0.5,
        "bos_token_id": fields.integer("bos_token_id", None, minimum=0),
        "eos_token_ids": _eos_token_ids(generation, fields),
        "sampling_defaults": _sampling_fields(generation),
    }


def _shared(family: Family, fields: Fields, generation: Fields) -> ModelConfig:
    """Read the fields that most families share."""
    shared = sizes_and_tokens(fields, generation)
    max_position = fields.integer("max_position_embeddings", minimum=2)
    rope, local_rope = _ropes(fields, shared["head_dim"], max_position, family.hf_interleaved)
    attention_bias = fields.boolean("attention_bias", False)
    return ModelConfig(
        **shared,
        architecture=family.architecture,
        name=fields.path.parent.name or family.architecture,
        max_position=rope.max_position,
        rope=rope,
        local_rope=local_rope,
        norm_eps=fields.number("rms_norm_eps"),
        activation=_activation(fields, "hidden_act", family.activations),
        tie_embeddings=fields.boolean("tie_word_embeddings"),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        attention_softcap=fields.number("attn_logit_softcapping", None),
        logit_softcap=fields.number("final_logit_softcapping", None),
    )


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    # A null of these means that there is none, not that it has its default.
    absent = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    return {k: v for k, v in values.items() if v is not None or k in absent}


def _architecture(config: Mapping[str, Any], fields: Fields) -> str:
    """The first of ``architectures``, or that of the config's ``model_type``."""
    if config.get("architectures") is not None and not fields.each("architectures", Fields.text):
        raise fields.error("architectures", "does not name the model's architecture")
    name = architecture_of(config)
    if name is None:
        raise fields.error("architectures", "is missing, and no model_type tells the architecture")
    return name


def _activation(fields: Fields, name: str, possible: tuple[Activation, ...]) -> Activation:
    value = fields.text(name)
    found = _ACTIVATIONS.get(value)
    if found not in possible:
        known = [theirs for theirs, ours in _ACTIVATIONS.items() if ours in possible]
        raise UnsupportedModelError(
            f"{fields.path}: the activation {value!r:.80} is not one of {', '.join(known)}"
        )
    return found


def _ropes(
    fields: Fields, head_dim: int, max_position: int, interleaved: bool
) -> tuple[RopeConfig, RopeConfig | None]:
    """Rope of all layers, and that of layers with a window if it is another.

    New configs have ``rope_parameters``, either flat or one per layer type; old ones
    ``rope_theta``, ``rope_scaling`` (with ``rope_type`` or ``type``), ``partial_rotary_factor``
    and for layers with a window ``rope_local_base_freq``.
    """
    shared = {
        name: fields.raw(name)
        for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        if name in fields
    }
    given, old = (fields.table(name, {}) for name in _ROPE_TABLES)
    if given and old and given != old:
        raise fields.error("rope_scaling", "says something else than rope_parameters: keep one")
    name = _ROPE_TABLES[0 if given else 1]
    given = given or old
    local_theta = fields.raw("rope_local_base_freq")
    local = None if local_theta is None else {"rope_theta": local_theta}
    local_name = name
    if "full_attention" in given or "sliding_attention" in given:
        by_type = fields.of_table(given, name)
        local = {**(local or shared), **_without_nulls(by_type.table("sliding_attention", {}))}
        given = by_type.table("full_attention", {})
        name, local_name = f"{name}.full_attention", f"{name}.sliding_attention"
    values = {**shared, **_without_nulls(given)}
    rope = _rope(fields.of_table(values, name), head_dim, max_position)
    rope = replace(rope, interleaved=interleaved)
    if local is None:
        return rope, None
    local_rope = _rope(fields.of_table(local, local_name), head_dim, max_position)
    # Windows are short: only the rope of all positions decides how many can be served.
    local_rope = replace(local_rope, interleaved=interleaved, max_position=rope.max_position)
    if local_rope.scaling == "default":
        local_rope = local_rope.unscaled()
    return rope, None if local_rope == rope else local_rope


def _rope(fields: Fields, head_dim: int, max_position: int) -> RopeConfig:
    """Rope by the ``fields`` of its own table."""
    scaling = fields.text("rope_type", None) or fields.text("type", "default")
    scaling = {"su": "longrope", "none": "default"}.get(scaling, scaling)
    if scaling not in SCALINGS:
        raise UnsupportedModelError(
            f"{fields.path}: rope scaling {scaling!r:.80} is not supported, but "
            f"{', '.join(SCALINGS)} are"
        )
    rope = RopeConfig(
        theta=fields.number("rope_theta", above=1.0),
        rotary_dim=int(head_dim * fields.number("partial_rotary_factor", 1.0)),
        scaling=scaling,
        original_max_position=max_position
        if scaling == "default"
        else fields.integer("original_max_position_embeddings", max_position, minimum=2),
        max_position=max_position,
    )
    if scaling in ("linear", "llama3", "dynamic"):
        rope = replace(rope, factor=fields.number("factor"))
    if scaling == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if low >= high:
            raise fields.error("high_freq_factor", f"{high} is not above low_freq_factor {low}")
        return replace(rope, low_freq_factor=low, high_freq_factor=high)
    if scaling == "dynamic":
        longest = extended_length(fields, "factor", rope.factor * max_position)
        return replace(rope, original_max_position=max_position, max_position=longest)
    if scaling == "yarn":
        return _yarn(rope, fields)
    if scaling == "longrope":
        return _longrope(rope, fields)
    return rope


def _yarn(rope: RopeConfig, fields: Fields) -> RopeConfig:
    factor = fields.number("factor", None) or rope.max_position / rope.original_max_position
    mscale, mscale_all = fields.number("mscale", None), fields.number("mscale_all_dim", None)

    def strength(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = strength(mscale) / strength(mscale_all) if mscale and mscale_all else strength(1.0)
    return replace(
        rope,
        factor=factor,
        # Some configs give the extended length, some the trained one.
        max_position=extended_length(
            fields, "factor", max(rope.max_position, rope.original_max_position * factor)
        ),
        attention_factor=fields.number("attention_factor", attention),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.boolean("truncate", True),
    )


def _longrope(rope: RopeConfig, fields: Fields) -> RopeConfig:
    trained = rope.original_max_position
    factor = fields.number("factor", None) or rope.max_position / trained
    attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return replace(
        rope,
        factor=rope.max_position / trained,
        attention_factor=fields.number("attention_factor", attention),
        short_factor=tuple(fields.each("short_factor", Fields.number, rope.rotary_dim // 2)),
        long_factor=tuple(fields.each("long_factor", Fields.number, rope.rotary_dim // 2)),
    )


def _eos_token_ids(*files: Fields) -> tuple[int, ...]:
    """The end-of-text ids of both config files: chat models often have the end of a turn in only
    one."""
    ids: list[int] = []
    name = "eos_token_id"
    for fields in files:
        if isinstance(fields.raw(name), list):
            ids += fields.each(name, partial(Fields.integer, minimum=0))
        elif name in fields:
            ids.append(fields.integer(name, minimum=0))
    return tuple(dict.fromkeys(ids))


def _sampling_fields(generation: Fields) -> dict[str, float]:
    """The sampling parameters that the authors recommend, by the names of SamplingParams."""
    if generation.raw("do_sample") is False:
        return {}
    return sampling_defaults(generation, _SAMPLING_FIELDS)
