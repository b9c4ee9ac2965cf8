"""A layer of models that have recurrent layers beside such that attend."""

from __future__ import annotations

from typing import Any, ClassVar

from octavo.errors import UnsupportedModelError
from octavo.fields import Fields
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import GatedDeltaNet, Mamba2, ShortConv
from octavo.models.config import ModelConfig
from octavo.models.decoder import make_attention


class HybridDecoderLayer(Module):
    """Attention as a Llama has it or, in its place, what a family names as its ``mixer_type``."""

    mixer_type: ClassVar[type[ShortConv | Mamba2 | GatedDeltaNet]]

    def __init__(self, config: ModelConfig, index: int):
        plus = float(config.norm_plus_one)
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
        return GatedMLP(
            config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias
        )

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        normed = self.input_layernorm(x, ctx)
        if self.self_attn is not None:
            mixed = self.self_attn(normed, cos_sin, ctx)
        else:
            assert self.mixer is not None
            mixed = self.mixer(normed, ctx)
        x = ctx.ops.add(x, mixed)
        fed: Activations = self.mlp(self.post_attention_layernorm(x, ctx), ctx)
        return ctx.ops.add(x, fed)


def mixer_names(theirs: str, parts: tuple[str, ...]) -> dict[str, str]:
    """From the names of a mixer's modules in files to those here, for ``TensorNames``; that of the
    mixer itself, whose parameters are ``A_log`` and the like, is among them."""
    names = {f"{theirs}.{part}": f"mixer.{part}" for part in parts}
    return {theirs: "mixer", **names}


def hf_layers_of(fields: Fields, num_layers: int, recurrent: str) -> tuple[int, ...]:
    """The layers that ``layer_types`` calls by this name; the others attend."""
    types = fields.each("layer_types", Fields.text, num_layers)
    if unknown := set(types) - {recurrent, "full_attention"}:
        raise UnsupportedModelError(
            f"{fields.path}: layers of type {', '.join(sorted(unknown))} are not supported"
        )
    return tuple(index for index, kind in enumerate(types) if kind == recurrent)
