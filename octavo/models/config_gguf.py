"""ModelConfig from the metadata and the tensor table of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.base.fields import Fields, GGUFFields
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import MAX_LAYERS, ModelConfig, extended_length, sampling_defaults
from octavo.models.family import Family
from octavo.models.registry import find_gguf_family
from octavo.models.unread_keys import check_gguf_read
from octavo.models.unsupported_models import check_gguf_generates, naming_features

SAMPLING_FIELDS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

# Many files name one end token and leave out the one that ends a turn: its text gives it away.
_END_TOKENS = {
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|end|>",
}
_CONTROL_TOKEN, _USER_TOKEN = 3, 4


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    path: str | Path = "model.gguf",
) -> ModelConfig:
    """Read the metadata of a GGUF file and its table of tensors, each of which has a ``shape``.

    ``path`` is for error messages; for the errors see `config_hf.config_from_hf`.
    """
    path = Path(path)
    general = Fields(path, metadata, "general.")
    kind = general.text("architecture")
    check_gguf_generates(kind, path)
    with naming_features(kind):
        family = find_gguf_family(kind, str(path))
    fields = GGUFFields(path, metadata, f"{kind}.", family.gguf_fields, tensors)
    shared = _shared(family, fields, metadata, tensors)
    shared = replace(shared, name=general.text("name", "") or path.stem)
    config = replace(shared, **family.from_gguf(fields, shared))
    if config.experts is None and fields.integer("expert_count", 0, minimum=0) > 0:
        raise UnsupportedModelError(f"{path}: a {config.architecture} has no experts")
    if config.recurrence is None and gguf_recurrent_layers(fields):
        raise UnsupportedModelError(f"{path}: layers without heads")
    if config.latent is None:
        head_dim = shared.head_dim
        if fields.integer("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError(f"{path}: keys and values of different sizes")
    config = config.check(path)
    check_gguf_read(metadata, fields.asked, family, kind, path)
    return config


def _shared(
    family: Family, fields: GGUFFields, metadata: Mapping[str, Any], tensors: Mapping[str, Any]
) -> ModelConfig:
    """Read the keys that most families share."""
    path = fields.path
    vocabulary = Fields(path, metadata, "tokenizer.ggml.")
    hidden_size = fields.integer("embedding_length")
    num_layers = fields.integer("block_count", maximum=MAX_LAYERS)
    num_heads = _uniform(fields, "attention.head_count")
    head_dim = fields.integer("attention.key_length", max(hidden_size // num_heads, 1))
    rope = _rope(fields, family.gguf_interleaved, head_dim, tensors)
    window = fields.integer("attention.sliding_window", None, minimum=0) or None
    return ModelConfig(
        architecture=family.architecture,
        name=path.stem,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_uniform(fields, "feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=_uniform(fields, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(fields, vocabulary, tensors),
        max_position=rope.max_position,
        rope=rope,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
        qk_norm=fields.has_in_a_layer("attn_q_norm.weight"),
        attention_bias=fields.has_in_a_layer("attn_q.bias"),
        attention_output_bias=fields.has_in_a_layer("attn_output.bias"),
        mlp_bias=fields.has_in_a_layer("ffn_gate.bias"),
        layer_windows=(window,) * num_layers,
        attention_scale=fields.number("attention.scale", head_dim**-0.5),
        attention_softcap=fields.number("attn_logit_softcapping", None),
        logit_softcap=fields.number("final_logit_softcapping", None),
        bos_token_id=vocabulary.integer("bos_token_id", None, 0),
        eos_token_ids=_eos_token_ids(vocabulary),
        sampling_defaults=sampling_defaults(
            Fields(path, metadata, "general.sampling."), SAMPLING_FIELDS
        ),
    )


def _uniform(fields: Fields, name: str, default: int | None = None) -> int:
    """A number that some files give per layer; all layers must agree that have one above 0."""
    if fields.has_list(name):
        values = set(fields.each(name, partial(Fields.integer, minimum=0)))
        values.discard(0)
        if len(values) != 1:
            raise UnsupportedModelError(f"{fields.path}: {name} differs between layers")
        return values.pop()
    return fields.integer(name) if default is None else fields.integer(name, default)


def gguf_recurrent_layers(fields: Fields) -> tuple[int, ...]:
    """The layers that attend with no heads of keys, and so do not attend."""
    name = "attention.head_count_kv"
    if not fields.has_list(name):
        return ()
    counts = fields.each(name, partial(Fields.integer, minimum=0))
    return tuple(layer for layer, count in enumerate(counts) if count == 0)


def _vocab_size(fields: Fields, vocabulary: Fields, tensors: Mapping[str, Any]) -> int:
    """Rows of the embedding, which the tokenizer's list must not exceed."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(fields.path, "the tensor token_embd.weight is missing")
    rows = int(embedding.shape[0])
    count = len(vocabulary.entries("tokens")) if "tokens" in vocabulary else 0
    for source, name, size in (
        (fields, "vocab_size", fields.integer("vocab_size", rows)),
        (vocabulary, "tokens", count),
    ):
        if size > rows:
            raise source.error(name, f"{size} tokens, but the embedding has {rows} rows")
    return rows


def _rope(
    fields: Fields, interleaved: bool, head_dim: int, tensors: Mapping[str, Any]
) -> RopeConfig:
    max_position = fields.integer("context_length", minimum=2)
    scaling = fields.text("rope.scaling.type", "none")
    # An older spelling of linear scaling, by the factor alone.
    old_factor = fields.number("rope.scale_linear", 1.0)
    factor = fields.number("rope.scaling.factor", old_factor)
    if scaling == "none" and "rope.scale_linear" in fields and factor != 1.0:
        scaling = "linear"
    rope = RopeConfig(
        theta=fields.number("rope.freq_base", 10_000.0, above=1.0),
        rotary_dim=fields.integer("rope.dimension_count", head_dim),
        interleaved=interleaved,
        original_max_position=fields.integer(
            "rope.scaling.original_context_length", max_position, minimum=2
        ),
        max_position=max_position,
        has_freq_factors="rope_freqs.weight" in tensors,
    )
    if "rope_factors_long.weight" in tensors:
        return _longrope(rope, fields)
    if scaling == "none":
        return rope
    if scaling == "linear":
        return replace(rope, scaling="linear", factor=factor)
    if scaling == "yarn":
        strength = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return replace(
            rope,
            scaling="yarn",
            factor=factor,
            max_position=extended_length(
                fields,
                "rope.scaling.factor",
                max(max_position, rope.original_max_position * factor),
            ),
            attention_factor=strength * fields.number("rope.scaling.attn_factor", 1.0),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    raise UnsupportedModelError(
        f"{fields.path}: rope scaling {scaling!r:.80} is not supported in GGUF files, but none, "
        "linear and yarn are"
    )


def _longrope(rope: RopeConfig, fields: Fields) -> RopeConfig:
    """No key says so: there are two tensors of divisors."""
    return replace(
        rope,
        scaling="longrope",
        factor=rope.max_position / rope.original_max_position,
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
        has_freq_factors=True,
    )


def _eos_token_ids(vocabulary: Fields) -> tuple[int, ...]:
    ids = [
        vocabulary.integer(name, minimum=0)
        for name in ("eos_token_id", "eot_token_id", "eom_token_id")
        if name in vocabulary
    ]
    if "tokens" in vocabulary and "token_type" in vocabulary:
        ids += end_ids_by_text(vocabulary.texts("tokens"), vocabulary.entries("token_type"))
    return tuple(dict.fromkeys(ids))


def end_ids_by_text(tokens: Iterable[str], kinds: Iterable[int]) -> list[int]:
    """The tokens that are known to end a text, or a turn, by what they are called."""
    return [
        index
        for index, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if text in _END_TOKENS and kind in (_CONTROL_TOKEN, _USER_TOKEN)
    ]
