"""Llama 1 to 3, SmolLM 2, Mistral, Qwen 2 and Qwen 3 (dense).

One architecture with switches: biases of the projections (Qwen 2), norms of query and key heads
(Qwen 3), sliding windows (Mistral), tied embeddings. The config has them all resolved.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.embedding import Embedding
from octavo.layers.linear import LMHead
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RotaryEmbedding
from octavo.models.config import ModelConfig

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs.weight": "model.rotary_emb.freq_factors",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class LlamaDecoderLayer(Module):
    def __init__(self, config: ModelConfig, index: int):
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(
            index,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.attention_scale,
            window=config.layer_windows[index],
            softcap=config.attention_softcap,
            interleaved_rope=config.rope.interleaved,
            bias=config.attention_bias,
            output_bias=config.attention_output_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias
        )

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        attended = self.self_attn(self.input_layernorm(x, ctx), cos_sin, ctx)
        x = ctx.ops.add(x, attended)
        return ctx.ops.add(x, self.mlp(self.post_attention_layernorm(x, ctx), ctx))


class LlamaModel(Module):
    def __init__(self, config: ModelConfig):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.rotary_emb = RotaryEmbedding(config.rope)
        self.layers = [LlamaDecoderLayer(config, i) for i in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        x = self.embed_tokens(token_ids, ctx)
        cos_sin = self.rotary_emb(ctx)
        for layer in self.layers:
            x = layer(x, cos_sin, ctx)
        return self.norm(x, ctx)


class LlamaForCausalLM(Module):
    """See :class:`octavo.models.registry.CausalLM`."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)

    def forward(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        return self.model(token_ids, ctx)

    def compute_logits(self, hidden: Activations, ctx: ForwardContext) -> Activations:
        logits = self.lm_head(hidden, ctx)
        cap = self.config.logit_softcap
        return logits if cap is None else ctx.ops.softcap(logits, cap)

    def exit_after(self, num_layers: int) -> LlamaForCausalLM:
        changed = copy.copy(self)
        changed.model = copy.copy(self.model)
        changed.model.layers = self.model.layers[:num_layers]
        return changed

    @staticmethod
    def hf_name(name: str) -> str | None:
        """The parameter that a tensor of a Hugging Face checkpoint is for, None for no one."""
        return None if name.endswith("rotary_emb.inv_freq") else name

    @staticmethod
    def gguf_name(name: str) -> str | None:
        """The same for a tensor of a GGUF file."""
        return gguf_to_hf(name, _GGUF_NAMES, _GGUF_LAYER_NAMES)

    @staticmethod
    def to_gguf_name(parameter: str) -> str:
        """The name that a parameter has in a GGUF file."""
        return hf_to_gguf(parameter, _GGUF_NAMES, _GGUF_LAYER_NAMES)


def gguf_to_hf(name: str, names: dict[str, str], layer_names: dict[str, str]) -> str:
    """``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``; unknown ones stay."""
    if name in names:
        return names[name]
    stem, _, suffix = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in layer_names:
        return f"model.layers.{match[1]}.{layer_names[match[2]]}.{suffix}"
    return name


def hf_to_gguf(name: str, names: dict[str, str], layer_names: dict[str, str]) -> str:
    """The other way; ``model.layers.3.self_attn.q_proj.bias`` to ``blk.3.attn_q.bias``."""
    stem, _, suffix = name.rpartition(".")
    for theirs, ours in names.items():
        if ours == name:
            return theirs
        if ours == stem:
            return f"{theirs}.{suffix}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)", stem)
    assert match, name
    theirs = next(theirs for theirs, ours in layer_names.items() if ours == match[2])
    return f"blk.{match[1]}.{theirs}.{suffix}"
