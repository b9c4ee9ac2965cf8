"""Phi-3 and Phi-4: Llama, whose files have queries, keys and values in one matrix, and gates and
ups in another; and LongRoPE, of only a part of each head in Phi-4 mini."""

from __future__ import annotations

from octavo.models.family import Family, TensorNames
from octavo.models.ignored_keys import only
from octavo.models.llama import GGUF_TOP, HF_DEFAULTS, LlamaForCausalLM
from octavo.models.sliding_windows import window_everywhere, window_size

FUSED_QKV = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
FUSED_GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    model=LlamaForCausalLM,
    gguf="phi3",
    gguf_names=TensorNames(
        {
            **GGUF_TOP,
            "rope_factors_short.weight": "model.rotary_emb.short_factors",
            "rope_factors_long.weight": "model.rotary_emb.long_factors",
        },
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    fused={**FUSED_QKV, **FUSED_GATE_UP},
    hf_defaults={
        **HF_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    },
    hf_ignored={
        "full_attn_mod": only(1),
        "interpolate_factor": only(1),
        "lm_head_bias": only(False),
    },
    from_hf=window_everywhere,
    to_hf=lambda config: {
        "sliding_window": window_size(config),
        "original_max_position_embeddings": config.rope.original_max_position,
        "pad_token_id": None,
    },
)
