"""A layer of models that have recurrent layers beside such that attend."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import GatedDeltaNet, Mamba2, ShortConv
from octavo.models.config import ModelConfig
from octavo.models.decoder import add_scaled, make_attention, make_mlp
from octavo.models.family import FileValues


class HybridDecoderLayer(Module):
    """Attention as a Llama has it or, in its place, what a family names as its ``mixer_type``."""

    mixer_type: ClassVar[type[ShortConv | Mamba2 | GatedDeltaNet]]

    def __init__(self, config: ModelConfig, index: int):
        plus = float(config.norm_plus_one)
        self.residual_scale = config.residual_scale
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, plus)
        self.self_attn: Module | None = None
        self.mixer: Module | None = None
        if config.attends(index):
            self.self_attn = self.make_attention(config, index)
        else:
            assert config.recurrence is not None
            place = config.recurrence.layers.index(index)
            self.mixer = self.mixer_type(place, config.hidden_size, config.recurrence)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, plus)
        self.mlp = self.make_mlp(config, index)

    def make_attention(self, config: ModelConfig, index: int) -> Module:
        qk_norm_eps = config.norm_eps if config.qk_norm else None
        return make_attention(config, index, qk_norm_eps=qk_norm_eps)

    def make_mlp(self, config: ModelConfig, index: int) -> Module:
        return make_mlp(config, index)

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        normed = self.input_layernorm(x, ctx)
        if self.self_attn is not None:
            mixed = self.self_attn(normed, cos_sin, ctx)
        else:
            assert self.mixer is not None
            mixed = self.mixer(normed, ctx)
        x = add_scaled(x, mixed, self.residual_scale, ctx)
        fed = self.mlp(self.post_attention_layernorm(x, ctx), ctx)
        return add_scaled(x, fed, self.residual_scale, ctx)


def mixer_names(theirs: str, parts: tuple[str, ...]) -> dict[str, str]:
    """Names of a mixer's modules in files, to octavo's, for ``TensorNames``; with that of the mixer
    itself, whose parameters are ``A_log`` and the like."""
    names = {f"{theirs}.{part}": f"mixer.{part}" for part in parts}
    return {theirs: "mixer", **names}


def hf_layers_of(
    fields: Fields,
    num_layers: int,
    recurrent: Collection[str],
    attending: Collection[str] = ("full_attention",),
    name: str = "layer_types",
) -> tuple[int, ...]:
    """The layers that a list of types calls recurrent; the others attend."""
    types = fields.each(name, Fields.text, num_layers)
    if unknown := set(types) - {*recurrent, *attending}:
        raise UnsupportedModelError(
            f"{fields.path}: layers of type {', '.join(sorted(unknown))} are not supported"
        )
    return tuple(index for index, kind in enumerate(types) if kind in recurrent)


def hf_layer_types(
    config: ModelConfig, recurrent: str, attending: str = "full_attention"
) -> list[str]:
    """The list of layer types, as configs of Hugging Face have it."""
    layers = range(config.num_layers)
    return [attending if config.attends(layer) else recurrent for layer in layers]


def gguf_heads(config: ModelConfig) -> dict[str, Any]:
    """The layers that attend, as most GGUF files say it: the others have no key heads."""
    import numpy as np

    heads = [config.num_kv_heads * config.attends(layer) for layer in range(config.num_layers)]
    return {"attention.head_count_kv": np.array(heads, dtype=np.int32)}


GGUF_CONV = FileValues(lambda rows: rows[:, None, :], lambda rows: rows[:, 0, :])
"""A convolution, [channels, positions] in GGUF files."""
