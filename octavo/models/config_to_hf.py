"""ModelConfig to Hugging Face's ``config.json`` and ``generation_config.json``.

Rope and windows are spelled as transformers 4 did, which transformers 5, vLLM and llama.cpp's
converter still read; nothing that is absent is left to anybody's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import ModelConfig
from octavo.models.config_hf import config_from_hf
from octavo.models.registry import family_of

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def hf_config(
    config: ModelConfig, dtype: str, quantization_config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The contents of ``config.json``.

    Args:
        config: in the layout of Hugging Face, as ``Parameters`` has it.
        dtype: what most weights have, or had before they were quantized: F32, F16 or BF16.
        quantization_config: how they are quantized, put in as it is.

    Raises:
        UnsupportedModelError: such a file cannot say all that ``config`` says.
    """
    family = family_of(config.architecture)
    values: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": _ACTIVATIONS[config.activation],
        "rms_norm_eps": shortest(config.norm_eps),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_output_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "torch_dtype": _TORCH_NAMES[dtype],
        "use_cache": True,
        **rope_entries(config.rope, config.head_dim),
    }
    if config.attention_softcap is not None:
        values["attn_logit_softcapping"] = config.attention_softcap
    if config.logit_softcap is not None:
        values["final_logit_softcapping"] = config.logit_softcap
    values = {family.hf_fields.get(name, name): value for name, value in values.items()}
    values |= family.to_hf(config)
    _check(config, values)
    if quantization_config is not None:
        values["quantization_config"] = dict(quantization_config)
    return values


def generation_config(config: ModelConfig) -> dict[str, Any]:
    """The contents of ``generation_config.json``: ends, and what the authors recommend."""
    values: dict[str, Any] = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
    }
    if config.sampling_defaults:
        values["do_sample"] = config.sampling_defaults.get("temperature") != 0
        values.update(config.sampling_defaults)
    return {name: value for name, value in values.items() if value is not None}


def _check(config: ModelConfig, values: Mapping[str, Any]) -> None:
    """UnsupportedModelError unless what is read of ``values`` is the same model."""
    read = config_from_hf(values, path=Path(config.name) / "config.json")
    differing = config.differences(read, but=("name", "sampling_defaults"))
    if differing:
        raise UnsupportedModelError(
            f"{config.name}: a config.json of a {config.architecture} cannot say its "
            f"{', '.join(differing)}"
        )


def rope_entries(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """The entries on rope, and on the positions that there are."""
    values: dict[str, Any] = {
        "max_position_embeddings": rope.max_position,
        "rope_theta": shortest(rope.theta),
    }
    if rope.rotary_dim != head_dim:
        values["partial_rotary_factor"] = rope.rotary_dim / head_dim
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": shortest(rope.factor)}
    match rope.scaling:
        case "dynamic":
            values["max_position_embeddings"] = rope.original_max_position
        case "llama3":
            scaling["original_max_position_embeddings"] = rope.original_max_position
            scaling["low_freq_factor"] = rope.low_freq_factor
            scaling["high_freq_factor"] = rope.high_freq_factor
        case "yarn":
            scaling["original_max_position_embeddings"] = rope.original_max_position
            scaling["attention_factor"] = rope.attention_factor
            scaling["beta_fast"] = rope.beta_fast
            scaling["beta_slow"] = rope.beta_slow
            scaling["truncate"] = rope.truncate
        case "longrope":
            scaling["original_max_position_embeddings"] = rope.original_max_position
            scaling["attention_factor"] = rope.attention_factor
            scaling["short_factor"] = list(rope.short_factor)
            scaling["long_factor"] = list(rope.long_factor)
    if rope.scaling != "default":
        values["rope_scaling"] = scaling
    return values


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


def shortest(value: float) -> float:
    """The number as somebody would have written it, where a GGUF file had it in 32 bits."""
    import numpy as np

    single = np.float32(value)
    return float(str(single)) if value == float(single) else value
