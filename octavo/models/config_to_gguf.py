"""ModelConfig to the metadata of a GGUF file, by llama.cpp's keys (``src/llama-arch.cpp``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from octavo.errors import UnsupportedModelError
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import ModelConfig
from octavo.models.parameters import gguf_architecture

# What a reader takes for granted of Gemma 3, in which not all layers have a window.
_GEMMA_PATTERN = 6
_GEMMA_LOCAL_THETA = 10_000.0

_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def gguf_config(config: ModelConfig) -> dict[str, Any]:
    """The metadata of a model, without that of its tokenizer and of what its tensors are.

    ``config``: in the layout of GGUF files, as ``Parameters`` has it.
    """
    kind = gguf_architecture(config.architecture)
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
        **(_gemma(config) if kind == "gemma3" else _window(config)),
    }
    if config.attention_softcap is not None:
        values["attn_logit_softcapping"] = config.attention_softcap
    if config.logit_softcap is not None:
        values["final_logit_softcapping"] = config.logit_softcap
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


def check_gguf_config(
    config: ModelConfig, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """UnsupportedModelError unless what is read of a file to be is the same model.

    ``metadata``: all of it. ``shapes``: of each tensor, by its name in the file.
    """
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    read = ModelConfig.from_gguf(metadata, tensors, path=Path(f"{config.name}.gguf"))
    but = ["name", "eos_token_ids"]
    if config.bos_token_id is None:  # the tokenizer may have one all the same
        but.append("bos_token_id")
    differing = config.differences(read, but=but)
    if not set(config.eos_token_ids) <= set(read.eos_token_ids):
        differing.append("eos_token_ids")
    if differing:
        raise UnsupportedModelError(
            f"{config.name}: a GGUF file of a {gguf_architecture(config.architecture)} cannot say "
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
    if rope.scaling == "yarn":
        strength = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        values["rope.scaling.original_context_length"] = rope.original_max_position
        values["rope.scaling.attn_factor"] = rope.attention_factor / strength
        values["rope.scaling.yarn_beta_fast"] = rope.beta_fast
        values["rope.scaling.yarn_beta_slow"] = rope.beta_slow
    return values


def _window(config: ModelConfig) -> dict[str, Any]:
    """Of all layers; no file but Gemma's says more."""
    windows = [window for window in config.layer_windows if window is not None]
    return {"attention.sliding_window": windows[0]} if windows else {}


def _gemma(config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = _window(config)
    is_local = [window is not None for window in config.layer_windows]
    period = is_local.index(False) + 1 if False in is_local else len(is_local) + 1
    if is_local != [(i + 1) % period != 0 for i in range(len(is_local))]:
        values["attention.sliding_window_pattern"] = np.array(is_local)
    elif period != _GEMMA_PATTERN:
        values["attention.sliding_window_pattern"] = period
    if config.local_rope is not None and config.local_rope.theta != _GEMMA_LOCAL_THETA:
        values["rope.freq_base_swa"] = config.local_rope.theta
    default_scale = config.head_dim**-0.5
    if not math.isclose(config.attention_scale, default_scale, rel_tol=1e-6):
        values["attention.scale"] = config.attention_scale
    return values
