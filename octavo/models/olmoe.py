"""OLMoE: Llama's layers with experts in all of them, and norms of queries and keys that are over
all heads of a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.layers.attention import Attention
from octavo.models import experts as moe
from octavo.models.config import ModelConfig
from octavo.models.decoder import DecoderForCausalLM, make_attention
from octavo.models.family import Family
from octavo.models.llama import GGUF_EXPERT_NAMES, HF_DEFAULTS, LlamaDecoderLayer


class OlmoeDecoderLayer(LlamaDecoderLayer):
    @staticmethod
    def make_attention(config: ModelConfig, index: int) -> Attention:
        return make_attention(config, index, qk_norm_eps=config.norm_eps, whole_qk_norm=True)


class OlmoeForCausalLM(DecoderForCausalLM):
    layer_type = OlmoeDecoderLayer


# -- files ----------------------------------------------------------------------------------------


def _from_hf(fields: Fields, config: ModelConfig) -> Mapping[str, Any]:
    if "clip_qkv" in fields:
        raise UnsupportedModelError(f"{fields.path}: clip_qkv is not supported")
    routing = {"normalize": fields.boolean("norm_topk_prob", False)}
    experts = moe.from_hf(fields, config, inner="intermediate_size", routing=routing)
    return {"qk_norm": True, "experts": experts}


def _to_hf(config: ModelConfig) -> Mapping[str, Any]:
    assert config.experts is not None
    return {
        **moe.to_hf(config, "num_experts"),
        "norm_topk_prob": config.experts.routing.normalize,
    }


OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    model=OlmoeForCausalLM,
    gguf="olmoe",
    gguf_needs_head=True,
    gguf_names=GGUF_EXPERT_NAMES,
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    from_hf=_from_hf,
    to_hf=_to_hf,
    from_gguf=lambda fields, config: {"experts": moe.from_gguf(fields, config, normalize=False)},
    to_gguf=moe.to_gguf,
)
