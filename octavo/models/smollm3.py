"""SmolLM 3: Llama, in which every fourth layer turns nothing by its position (arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.models.config import ModelConfig
from octavo.models.family import Family
from octavo.models.llama import GGUF_NAMES, HF_DEFAULTS, LlamaForCausalLM
from octavo.models.sliding_windows import hf_windows

_PERIOD = 4  # of which the last layer turns nothing


def _unrotated(num_layers: int, period: int) -> tuple[int, ...]:
    return tuple(range(period - 1, num_layers, period))


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    unrotated = _unrotated(config.num_layers, fields.integer("no_rope_layer_interval", _PERIOD))
    if "no_rope_layers" in fields:
        turns = fields.each("no_rope_layers", lambda f, name: f.integer(name, minimum=0))
        unrotated = tuple(i for i, does in enumerate(turns[: config.num_layers]) if not does)
    has_windows = fields.boolean("use_sliding_window", False)
    return {
        "unrotated_layers": unrotated,
        "layer_windows": hf_windows(fields, config.num_layers, lambda layer: layer not in unrotated)
        if has_windows
        else config.layer_windows,
    }


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    if any(config.layer_windows):
        raise UnsupportedModelError(f"{config.name}: windows in a SmolLM 3 are not written")
    return {
        "no_rope_layers": [
            int(layer not in config.unrotated_layers) for layer in range(config.num_layers)
        ],
        "no_rope_layer_interval": _PERIOD,
        "use_sliding_window": False,
        "sliding_window": None,
        "pad_token_id": None,
    }


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    model=LlamaForCausalLM,
    gguf="smollm3",
    gguf_names=GGUF_NAMES,
    gguf_interleaved=True,
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
    # llama.cpp has the period in its code: a file with another one cannot be written.
    from_gguf=lambda fields, config: {"unrotated_layers": _unrotated(config.num_layers, _PERIOD)},
)
