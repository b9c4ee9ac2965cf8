"""ModelConfig of a model that transformers runs: what an engine has to know of it, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import ModelConfig
from octavo.models.config_hf import sizes_and_tokens

ARCHITECTURE = "TransformersForCausalLM"


@dataclass(frozen=True, slots=True)
class SeenAttention:
    """The arguments of a layer's attention: KV heads, head sizes, the window."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


def config_of(config: Any, generation: dict[str, Any], path: Path) -> ModelConfig:
    """Make a config from transformers' own, whose attributes have the same names in most families.

    What layers keep is as far as the config says it; ``with_attention`` knows better, once the
    model is loaded. Positions are turned, or learned, by transformers.
    """
    values = {
        **{name: _size(config, name, path) for name in _SIZES},
        **{name: getattr(config, name, None) for name in _TOKENS},
    }
    fields = Fields(path / "config.json", {k: v for k, v in values.items() if v is not None})
    generation_fields = Fields(path / "generation_config.json", generation)
    max_position = fields.integer("max_position_embeddings", minimum=2)
    return ModelConfig(
        **sizes_and_tokens(fields, generation_fields),
        architecture=ARCHITECTURE,
        name=path.name or ARCHITECTURE,
        max_position=max_position,
        rope=RopeConfig(10_000.0, 2, max_position=max_position),
        norm_eps=0.0,
    )


def _size(config: Any, name: str, path: Path) -> Any:
    """An attribute that all layers must share. UnsupportedModelError if they do not: some configs
    have a list of it, others raise an error of their own when they are asked for one value."""
    try:
        value = getattr(config, name, None)
    except Exception:
        value = []
    if isinstance(value, (list, tuple)):
        if len(set(value)) != 1:
            raise UnsupportedModelError(
                f"{path}: {name} differs between layers, which octavo does not run by way of "
                "transformers"
            )
        return value[0]
    return value


def with_attention(config: ModelConfig, seen: Sequence[SeenAttention], path: Path) -> ModelConfig:
    """The config with what the layers of the loaded model were seen to keep.

    UnsupportedModelError if they do not all keep heads of one size.
    """
    sizes = {(layer.num_kv_heads, layer.key_dim) for layer in seen}
    if len(sizes) > 1:
        told = ", ".join(f"{heads} heads of {size} values" for heads, size in sorted(sizes))
        raise UnsupportedModelError(f"{path}: layers keep keys of different sizes: {told}")
    ((num_kv_heads, key_dim),) = sizes
    return replace(
        config,
        num_layers=len(seen),
        num_kv_heads=num_kv_heads,
        head_dim=key_dim,
        layer_windows=tuple(layer.window for layer in seen),
    )


_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_TOKENS = ("bos_token_id", "eos_token_id")
