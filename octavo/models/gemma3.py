"""Gemma 3, the text model.

Against Llama: five layers of six see a sliding window and turn positions by another rope; each half
of a layer has a norm before and one after it; query and key heads have norms; norm weights are
stored less one (but not in GGUF files); embeddings are scaled up by the root of their size.
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
from octavo.models.llama import gguf_to_hf, hf_to_gguf

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Gemma3DecoderLayer(Module):
    def __init__(self, config: ModelConfig, index: int):
        plus = 1.0 if config.norm_plus_one else 0.0
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, plus)
        self.self_attn = Attention(
            index,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.attention_scale,
            window=config.layer_windows[index],
            softcap=config.attention_softcap,
            bias=config.attention_bias,
            output_bias=config.attention_output_bias,
            qk_norm_eps=config.norm_eps,
            qk_norm_plus=plus,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, plus)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps, plus)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps, plus)

    def forward(self, x: Activations, cos_sin: Any, ctx: ForwardContext) -> Activations:
        attended = self.self_attn(self.input_layernorm(x, ctx), cos_sin, ctx)
        x = ctx.ops.add(x, self.post_attention_layernorm(attended, ctx))
        fed = self.mlp(self.pre_feedforward_layernorm(x, ctx), ctx)
        return ctx.ops.add(x, self.post_feedforward_layernorm(fed, ctx))


class Gemma3Model(Module):
    def __init__(self, config: ModelConfig):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.rotary_emb = RotaryEmbedding(config.rope)
        self.rotary_emb_local = RotaryEmbedding(config.local_rope or config.rope)
        self.layers = [Gemma3DecoderLayer(config, i) for i in range(config.num_layers)]
        self.layer_windows = config.layer_windows
        plus = 1.0 if config.norm_plus_one else 0.0
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, plus)

    def forward(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        x = self.embed_tokens(token_ids, ctx)
        everywhere, nearby = self.rotary_emb(ctx), self.rotary_emb_local(ctx)
        for layer, window in zip(self.layers, self.layer_windows, strict=True):
            x = layer(x, everywhere if window is None else nearby, ctx)
        return self.norm(x, ctx)


class Gemma3ForCausalLM(Module):
    """See :class:`octavo.models.registry.CausalLM`."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.model = Gemma3Model(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)

    def forward(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        return self.model(token_ids, ctx)

    def compute_logits(self, hidden: Activations, ctx: ForwardContext) -> Activations:
        logits = self.lm_head(hidden, ctx)
        cap = self.config.logit_softcap
        return logits if cap is None else ctx.ops.softcap(logits, cap)

    def exit_after(self, num_layers: int) -> Gemma3ForCausalLM:
        changed = copy.copy(self)
        changed.model = copy.copy(self.model)
        changed.model.layers = self.model.layers[:num_layers]
        changed.model.layer_windows = self.model.layer_windows[:num_layers]
        return changed

    @staticmethod
    def hf_name(name: str) -> str | None:
        """The parameter that a tensor of a Hugging Face checkpoint is for, None for no one.

        Checkpoints with an image part have the text model under ``language_model``, in two ways.
        """
        if re.match(r"(model\.)?(vision_tower|multi_modal_projector)\.", name):
            return None
        name = name.replace("model.language_model.", "model.", 1)
        name = name.removeprefix("language_model.")
        return None if name.endswith("rotary_emb.inv_freq") else name

    @staticmethod
    def gguf_name(name: str) -> str | None:
        """The same for a tensor of a GGUF file."""
        return gguf_to_hf(name, _GGUF_NAMES, _GGUF_LAYER_NAMES)

    @staticmethod
    def to_gguf_name(parameter: str) -> str:
        """The name that a parameter has in a GGUF file."""
        return hf_to_gguf(parameter, _GGUF_NAMES, _GGUF_LAYER_NAMES)
