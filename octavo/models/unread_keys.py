"""Keys of a model's file that no reader asked for: refused where they could change results.

A family that grew a feature says so in a key of its config, and a reader that does not know the key
would compute something else without a word. So readers note what they ask for (``Fields.asked``),
and whatever is left must be known here, or to the family, to mean nothing for what is computed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple

from octavo.base.errors import UnsupportedModelError
from octavo.models.family import Family
from octavo.models.ignored_keys import Meaningless, always, only
from octavo.models.registry import model_types_of

_log = logging.getLogger("octavo")


def check_hf_read(
    config: Mapping[str, Any], asked: Collection[str], family: Family, path: Path
) -> None:
    """UnsupportedModelError if ``config``, of a ``config.json``, has a key that was not ``asked``
    for, is not known to mean nothing, and could change what is computed. Of others that are not
    known there is a warning."""
    inner = _text_part(config)
    known = _known_hf(family)
    around = [*_HF_PATTERNS, *(_HF_AROUND_TEXT if inner else ())]
    values = {**config, **inner}
    outer = {key: value for key, value in config.items() if key != "text_config"}
    unread = [
        *_unread(outer, asked, known, around, values),
        *(
            each._replace(place=f"text_config.{each.place}")
            for each in _unread(inner, asked, known, _HF_PATTERNS, values)
        ),
    ]
    _refuse_or_warn(unread, family, path)


def unread_sizes(
    config: Mapping[str, Any], asked: Collection[str], family: Family
) -> list[tuple[str, Any]]:
    """The keys of a ``config.json``, with their values, that were not ``asked`` for and that are
    not known to mean nothing, sizes of weights among them."""
    inner, known = _text_part(config), _known_hf(family)
    outer = {key: value for key, value in config.items() if key != "text_config"}
    values = {**config, **inner}
    return [*_unread(outer, asked, known, (), values), *_unread(inner, asked, known, (), values)]


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


def _known_hf(family: Family) -> dict[str, Meaningless]:
    """Keys that mean nothing, or do so for some values."""
    # What has a default is read by the family, if only where other keys ask for it.
    known = {**_HF_KEYS, **dict.fromkeys(family.hf_defaults, always), **family.hf_ignored}
    if "hidden_act" in family.hf_fields:
        known["hidden_act"] = always  # such families go by a name of their own, and by it alone
    return known


def check_gguf_read(
    metadata: Mapping[str, Any], asked: Collection[str], family: Family, kind: str, path: Path
) -> None:
    """The same of a GGUF file's ``metadata``, of which those of the architecture ``kind`` count."""
    prefix = f"{kind}."
    values = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    asked = {name.removeprefix(prefix) for name in asked}
    known = {**_GGUF_KEYS, **family.gguf_ignored}
    unread = _unread(values, asked, known, (), values)
    _refuse_or_warn([each._replace(place=prefix + each.place) for each in unread], family, path)


def check_model_type(config: Mapping[str, Any], family: Family, path: Path) -> None:
    """UnsupportedModelError if ``config`` is said to be of another kind than its architecture: the
    text part where it has one, else the whole."""
    inner = config.get("text_config")
    within = "text_config." if isinstance(inner, Mapping) and inner else ""
    kind = inner.get("model_type") if within and isinstance(inner, Mapping) else None
    if not within:
        kind = config.get("model_type")
    if kind is None or kind in model_types_of(family.architecture):
        return
    raise UnsupportedModelError(
        f"{path}: {within}model_type is {shown(kind)}, and octavo runs {family.architecture} of "
        f"the model_type {family.model_type!r}: another kind may compute something else. If it is "
        f"one, write {family.model_type!r} there"
    )


class _Unread(NamedTuple):
    place: str
    value: Any


def _unread(
    values: Mapping[str, Any],
    asked: Collection[str],
    known: Mapping[str, Meaningless],
    patterns: Collection[re.Pattern[str]],
    beside: Mapping[str, Any],
    within: str = "",
) -> Iterator[_Unread]:
    """Yield keys that no reader asked for and that are not known; ``beside`` are all values of the
    file."""
    for key, value in values.items():
        name = f"{within}{key}"
        if value is None:
            continue
        if any(pattern.fullmatch(key) for pattern in patterns):
            continue
        if name in known and known[name](value, beside):
            continue
        if within.startswith(_ROPE_TABLES) and key in _ROPE_KEYS:
            continue
        if name not in asked:
            yield _Unread(name, value)
        elif isinstance(value, Mapping):
            yield from _unread(value, asked, known, patterns, beside, f"{name}.")


def _refuse_or_warn(unread: Collection[_Unread], family: Family, path: Path) -> None:
    if grave := [each for each in unread if _can_change(each.place, each.value)]:
        listed = ", ".join(f"{place} = {shown(value)}" for place, value in grave[:5])
        more = f" and {len(grave) - 5} more" if len(grave) > 5 else ""
        raise UnsupportedModelError(
            f"{path}: {listed}{more}: octavo does not know what this means for a "
            f"{family.architecture}, and would compute without it. If it changes nothing that is "
            "computed, take it out of the file; if it does, octavo cannot run this model yet"
        )
    for place, value in unread:
        _log.warning("%s: %s = %s is not read, as far as octavo knows", path, place, shown(value))


def _can_change(place: str, value: Any) -> bool:
    """Whether a value could change what is computed: none that says that something is off, and of
    texts those alone whose name is one of a part of the computation."""
    if place.rpartition(".")[2] in _OF_WINDOWS:
        return False
    if isinstance(value, str):
        return bool(value) and _OF_COMPUTATION.search(place) is not None
    if isinstance(value, Mapping):
        return any(_can_change(f"{place}.{key}", entry) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return any(_can_change(place, entry) for entry in value) or _has_any_number(value)
    if hasattr(value, "tolist"):  # an array of numpy's
        return _can_change(place, value.tolist())
    return bool(value)


def _has_any_number(values: Collection[Any]) -> bool:
    return any(isinstance(value, (int, float)) for value in values)


# Families with windows ask for these. Where they are left over in another, which has none, every
# implementation computes without.
_OF_WINDOWS = {
    *("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"),
    *("freq_base_swa", "key_length_swa", "value_length_swa", "dimension_count_swa"),
}
_OF_COMPUTATION = re.compile(
    "act|attn|attention|clip|conv|cap|embed|expert|ffn|func|gate|gating|head|impl|layer|mamba|mask"
    "|method|mlp|mode|moe|norm|pattern|pos|quant|rope|rotary|rout|scal|scor|sink|ssm|temp|topk|type"
    "|window"
)

_FULL = {"full_attention", "attention"}
_HF_KEYS: Mapping[str, Meaningless] = {
    # About the file, and programs that wrote or read it.
    **dict.fromkeys(
        (
            *("architectures", "model_type", "auto_map", "name_or_path", "transformers_version"),
            *("_name_or_path", "_commit_hash", "_attn_implementation_autoset", "tokenizer_class"),
            *("_attn_implementation", "attn_implementation", "_flash_attn_2_enabled"),
            *("_experts_implementation", "torch_dtype", "dtype", "torchscript", "use_bfloat16"),
            *("transformers.js_config", "is_llama_config", "unsloth_fixed", "unsloth_version"),
            *("use_cache", "cache_implementation", "return_dict", "output_hidden_states"),
            *("output_attentions", "output_router_logits", "num_logits_to_keep", "license"),
            *("chunk_size_feed_forward", "pretraining_tp", "ep_size", "use_mamba_kernels"),
            *("use_flash_attn", "mamba_chunk_size", "gradient_checkpointing", "model_max_length"),
            *("trust_remote_code", "custom_pipelines", "custom_object_supports"),
            *("tokenizer_model_max_length", "tokenizer_padding_side", "max_sequence_length"),
            "model_name",
            *("quantization_config", "compression_config"),  # which `quantized_hf.py` reads
        ),
        always,
    ),
    # Of other tasks than generation, and of training.
    **dict.fromkeys(
        (
            *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
            *("task_specific_params", "initializer_factor", "initializer_range", "init_std"),
            *("init_method", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "layerdrop"),
            *("router_z_loss_coef", "router_jitter_noise", "num_nextn_predict_layers", "prefix"),
            *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "tf_legacy_loss"),
        ),
        always,
    ),
    # Of sampling, which older releases of transformers kept here; octavo reads
    # generation_config.json.
    **dict.fromkeys(
        (
            *("temperature", "top_p", "top_k", "typical_p", "repetition_penalty", "length_penalty"),
            *("do_sample", "num_beams", "num_beam_groups", "diversity_penalty", "early_stopping"),
            *("max_length", "min_length", "max_new_tokens", "num_return_sequences"),
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
            *("output_scores", "return_dict_in_generate", "suppress_tokens"),
            *("begin_suppress_tokens", "exponential_decay_length_penalty"),
            "remove_invalid_values",
        ),
        always,
    ),
    # Off, or as every decoder has it.
    **dict.fromkeys(
        ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "use_mrope"),
        only(False),
    ),
    "is_decoder": always,
    "cross_attention_hidden_size": only(0),
    "pruned_heads": only({}),
    "is_causal": only(True),
    "use_bidirectional_attention": only(False, "none"),
    "layer_types": lambda value, values: isinstance(value, list) and set(value) <= _FULL,
    "use_sliding_window": only(False),
    "sliding_window": lambda value, values: (
        value in (0, False) or values.get("use_sliding_window") is False
    ),
    "max_window_layers": lambda value, values: not values.get("use_sliding_window"),
    "rope_interleaved": only(False),
}
# In a table of rope: what some kinds of scaling go by means nothing for others.
_ROPE_TABLES = ("rope_parameters.", "rope_scaling.")
_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"),
    "finetuned",
}
_HF_PATTERNS = (
    # Sizes of weights: where they are others, no tensor has the shape that is expected.
    re.compile(r"(.*_)?intermediate_size|(num|n)_(local_|routed_|shared_)?experts"),
    re.compile(r".*dropout.*|.*_pdrop"),
    re.compile(r".*(_token|_token_id|_token_ids|_token_index)"),
)
# Of what a model has beside its text part: it is not run.
_HF_AROUND_TEXT = (
    re.compile(r".*(vision|image|audio|video|visual|multimodal|projector|spatial|mm_tokens).*"),
)

_GGUF_KEYS: Mapping[str, Meaningless] = {
    "attention.causal": only(True),
    "tensor_data_layout": always,
    "rope.scaling.finetuned": always,
    "nextn_predict_layers": always,
    # Sizes of weights, which their shapes have to fit.
    "expert_feed_forward_length": always,
    "expert_shared_feed_forward_length": always,
    "pooling_type": always,
    # What families of experts do whose routers take the best by softmax, and no more.
    "expert_gating_func": only(1),
    "expert_weights_scale": only(0.0, 1.0),
    "expert_group_count": only(0, 1),
    "expert_group_used_count": only(0, 1),
    "leading_dense_block_count": only(0),
    "expert_shared_count": always,  # as the sizes above
}
