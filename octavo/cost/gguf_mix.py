"""The types that weights have in a GGUF file of a target such as Q4_K_M."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from octavo.cost.mixers import Attention
from octavo.cost.model_spec import ModelSpec
from octavo.cost.rank_model import Arithmetic
from octavo.cost.weight_shape import WeightShape
from octavo.cost.weight_type import WeightType
from octavo.quantization.ggml_types import FLOAT_TYPES, GGMLType, block_shape
from octavo.quantization.gguf_mixes import (
    ModelFacts,
    type_of,
)

# How llama.cpp calls what a mix treats in a way of its own.
_NAMES = {
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.down_proj": "ffn_down",
    "mlp.experts.down_proj": "ffn_down",
    "mlp.shared_expert.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class GgufMix:
    """The mix of types that octavo's quantizer gives a model, and llama.cpp's, except for the key
    and value matrices of latents, which llama.cpp makes as small as others. Norms, biases and
    routers are float32."""

    target: str
    facts: ModelFacts

    @classmethod
    def of(cls, spec: ModelSpec, target: str) -> GgufMix:
        """``target``: one of ``gguf_mixes.MIXES``."""
        attention = [
            (mixer.heads, mixer.kv_heads)
            for layer in spec.layers
            for mixer in layer.mixers
            if isinstance(mixer, Attention)
        ]
        heads, kv_heads = attention[0] if attention else (1, 1)
        return cls(target, ModelFacts(spec.num_layers, heads, kv_heads, spec.tie_embeddings))

    def type_of(self, weight: WeightShape) -> WeightType:
        if not weight.inputs or weight.part == "router":
            return weight_type(GGMLType.F32)
        shape = weight.outputs, weight.inputs
        return weight_type(type_of(self._name(weight), shape, self.target, self.facts))

    def _name(self, weight: WeightShape) -> str:
        if weight.layer is None:
            is_output = weight.part == "head" and not self.facts.is_tied
            return "output.weight" if is_output else "token_embd.weight"
        return f"blk.{weight.layer}.{_NAMES.get(weight.name, 'other')}.weight"


@cache
def weight_type(type: GGMLType) -> WeightType:
    """A type of GGUF files. Products with quantized ones are computed in int8, on CPUs and GPUs."""
    values, size = block_shape(type)
    arithmetic: Arithmetic = "int8"
    if type in FLOAT_TYPES:
        arithmetic = "fp32" if type is GGMLType.F32 else "fp16"
    return WeightType(type.name, size * 8 / values, arithmetic)
