"""ModelConfig to the metadata of a GGUF file, by llama.cpp's keys (``src/llama-arch.cpp``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import ModelConfig
from octavo.models.config_gguf import SAMPLING_FIELDS, config_from_gguf
from octavo.models.registry import family_of, gguf_architecture
from octavo.models.sliding_windows import window_size

_SAMPLING_KEYS = {ours: theirs for theirs, ours in SAMPLING_FIELDS.items()}


def gguf_config(config: ModelConfig) -> dict[str, Any]:
    """The metadata of a model, without that of its tokenizer and of what its tensors are.

    ``config``: in the layout of GGUF files, as ``Parameters`` has it.
    """
    family, kind = family_of(config.architecture), gguf_architecture(config)
    values: dict[str, Any] = {
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        **_rope(config.rope),
        **_window(config),
    }
    if config.attention_softcap is not None:
        values["attn_logit_softcapping"] = config.attention_softcap
    if config.logit_softcap is not None:
        values["final_logit_softcapping"] = config.logit_softcap
    values = {family.gguf_fields.get(name, name): value for name, value in values.items()}
    values |= family.to_gguf(config)
    return {
        "general.architecture": kind,
        "general.type": "model",
        "general.name": config.name,
        **{f"{kind}.{key}": value for key, value in values.items()},
        **{
            f"general.sampling.{_SAMPLING_KEYS[name]}": value
            for name, value in config.sampling_defaults.items()
        },
    }


def rewritten_entries(config: ModelConfig) -> dict[str, Any]:
    """Metadata on the tensors of the new file, in place of that of the GGUF file it is made
    from."""
    kind = gguf_architecture(config)
    entries = family_of(config.architecture).written_gguf_entries(config)
    return {f"{kind}.{key}": value for key, value in entries.items()}


def check_gguf_config(
    config: ModelConfig, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """UnsupportedModelError unless what is read of a file to be is the same model.

    ``metadata``: all of it. ``shapes``: of each tensor, by its name in the file.
    """
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    read = config_from_gguf(metadata, tensors, path=Path(f"{config.name}.gguf"))
    but = ["name", "eos_token_ids"]
    if family_of(read.architecture).gguf == gguf_architecture(config):
        but.append("architecture")  # of families that share a kind of file, by what the model has
    if config.bos_token_id is None:  # the tokenizer may have one all the same
        but.append("bos_token_id")
    differing = config.differences(read, but=but)
    if not set(config.eos_token_ids) <= set(read.eos_token_ids):
        differing.append("eos_token_ids")
    if differing:
        raise UnsupportedModelError(
            f"{config.name}: a GGUF file of a {gguf_architecture(config)} cannot say "
            f"its {', '.join(differing)}"
        )


def _rope(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rope.freq_base": rope.theta,
        "rope.dimension_count": rope.rotary_dim,
    }
    if rope.scaling in ("linear", "yarn"):
        values["rope.scaling.type"] = rope.scaling
        values["rope.scaling.factor"] = rope.factor
    if rope.scaling == "longrope":
        values["rope.scaling.original_context_length"] = rope.original_max_position
        values["rope.scaling.attn_factor"] = rope.attention_factor
    if rope.scaling == "yarn":
        strength = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        values["rope.scaling.original_context_length"] = rope.original_max_position
        values["rope.scaling.attn_factor"] = rope.attention_factor / strength
        values["rope.scaling.yarn_beta_fast"] = rope.beta_fast
        values["rope.scaling.yarn_beta_slow"] = rope.beta_slow
    return values


def _window(config: ModelConfig) -> dict[str, Any]:
    size = window_size(config)
    return {} if size is None else {"attention.sliding_window": size}
