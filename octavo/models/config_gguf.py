"""ModelConfig from the metadata and the tensor table of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.fields import Fields
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import MAX_LAYERS, ModelConfig, extended_length, sampling_defaults
from octavo.models.registry import resolve_gguf_architecture

_SAMPLING_FIELDS = {
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

# Gemma 3's 27B is the one whose scores are not scaled by the size of a head.
_GEMMA_27B_LAYERS = 62
_GEMMA_PATTERN = 6
_GEMMA_LOCAL_THETA = 10_000.0


def parse(metadata: Mapping[str, Any], tensors: Mapping[str, Any], path: Path) -> ModelConfig:
    """See ``ModelConfig.from_gguf``."""
    general = Fields(path, metadata, "general.")
    kind = general.text("architecture")
    architecture = resolve_gguf_architecture(kind, str(path))
    fields = Fields(path, metadata, f"{kind}.")
    vocabulary = Fields(path, metadata, "tokenizer.ggml.")
    if "expert_count" in fields and fields.integer("expert_count", minimum=0) > 0:
        raise UnsupportedModelError(f"{path}: mixture-of-experts models are not supported")

    hidden_size = fields.integer("embedding_length")
    num_layers = fields.integer("block_count", maximum=MAX_LAYERS)
    num_heads = _uniform(fields, "attention.head_count")
    num_kv_heads = _uniform(fields, "attention.head_count_kv", num_heads)
    head_dim = fields.integer("attention.key_length", max(hidden_size // num_heads, 1))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{path}: keys and values of different sizes")
    is_gemma = architecture == "Gemma3ForCausalLM"
    rope = _rope(fields, kind, head_dim, "rope_freqs.weight" in tensors)
    scale_by = head_dim
    if is_gemma and num_layers == _GEMMA_27B_LAYERS:
        scale_by = hidden_size // num_heads
    return ModelConfig(
        architecture=architecture,
        name=general.text("name", "") or path.stem,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_uniform(fields, "feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(fields, vocabulary, tensors),
        max_position=rope.max_position,
        rope=rope,
        local_rope=_local_rope(fields, rope) if is_gemma else None,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if is_gemma else "silu",
        tie_embeddings="output.weight" not in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        layer_windows=_layer_windows(fields, is_gemma, num_layers),
        attention_scale=fields.number("attention.scale", scale_by**-0.5),
        attention_softcap=fields.number("attn_logit_softcapping", None),
        logit_softcap=fields.number("final_logit_softcapping", None),
        embedding_scale=math.sqrt(hidden_size) if is_gemma else None,
        bos_token_id=vocabulary.integer("bos_token_id", None, 0),
        eos_token_ids=_eos_token_ids(vocabulary),
        sampling_defaults=sampling_defaults(
            Fields(path, metadata, "general.sampling."), _SAMPLING_FIELDS
        ),
    ).check(path)


def _uniform(fields: Fields, name: str, default: int | None = None) -> int:
    """A number that some files give per layer; all layers must agree."""
    if not isinstance(fields.raw(name), (int, float, str, type(None))):
        values = set(fields.each(name, Fields.integer))
        if len(values) != 1:
            raise UnsupportedModelError(f"{fields.path}: {name} differs between layers")
        return values.pop()
    return fields.integer(name) if default is None else fields.integer(name, default)


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


def _rope(fields: Fields, kind: str, head_dim: int, has_freq_factors: bool) -> RopeConfig:
    max_position = fields.integer("context_length", minimum=2)
    scaling = fields.text("rope.scaling.type", "none")
    # An older spelling of linear scaling, by the factor alone.
    factor = fields.number("rope.scaling.factor", None) or fields.number("rope.scale_linear", 1.0)
    if scaling == "none" and "rope.scale_linear" in fields and factor != 1.0:
        scaling = "linear"
    rope = RopeConfig(
        theta=fields.number("rope.freq_base", 10_000.0, above=1.0),
        rotary_dim=fields.integer("rope.dimension_count", head_dim),
        # llama files have the rows of q and k reordered for pairs of neighbours.
        interleaved=kind == "llama",
        original_max_position=fields.integer(
            "rope.scaling.original_context_length", max_position, minimum=2
        ),
        max_position=max_position,
        has_freq_factors=has_freq_factors,
    )
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


def _local_rope(fields: Fields, rope: RopeConfig) -> RopeConfig:
    theta = fields.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA, above=1.0)
    return replace(rope, theta=theta, scaling="default", factor=1.0, attention_factor=1.0)


def _layer_windows(fields: Fields, is_gemma: bool, num_layers: int) -> tuple[int | None, ...]:
    window = fields.integer("attention.sliding_window", None, minimum=0) or None
    if not is_gemma:
        return (window,) * num_layers
    name = "attention.sliding_window_pattern"
    if not isinstance(fields.raw(name), (int, float, str, type(None))):
        is_local = fields.each(name, Fields.boolean, num_layers)
        return tuple(window if local else None for local in is_local)
    pattern = fields.integer(name, _GEMMA_PATTERN)
    return tuple(None if (i + 1) % pattern == 0 else window for i in range(num_layers))


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
