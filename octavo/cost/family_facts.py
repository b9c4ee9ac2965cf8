"""Families of Hugging Face's configs as JSON, for a page that reads a ``config.json`` by itself.

Only those are told whose layers are made by functions that the page has under the same names: most
of what people run. The page asks a server of octavo about others.
"""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

from octavo.cost.hf_config import SPELLINGS, ConfigFamily
from octavo.cost.hf_families import DEEPSEEK3, FAMILIES, USUAL, NormIfAsked, biased, family_like
from octavo.cost.hf_layers import (
    WindowsByType,
    deepseek_experts,
    experts_everywhere,
    latent_attention,
    qwen_experts,
    same_window,
    windows_if_used,
)
from octavo.models.registry import FAMILIES as REGISTERED

# The shapes of families that run, said once more for pages that no server answers. Tests hold them
# against what the families are made of.
_GEMMA3 = family_like(
    norms=4,
    qk_norm="head",
    tie=True,
    windows=WindowsByType(6, 4096),
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
)
OF_RUNNING: dict[str, ConfigFamily] = {
    "llama": USUAL,
    "mistral": family_like(windows=same_window),
    "mixtral": family_like(windows=same_window, mlp=experts_everywhere),
    "qwen2": family_like(qkv_bias=True, bias_field="", output_bias=False, windows=windows_if_used),
    "qwen2_moe": family_like(
        qkv_bias=True,
        bias_field="qkv_bias",
        output_bias=False,
        has_shared_gate=True,
        windows=windows_if_used,
        mlp=qwen_experts,
    ),
    "qwen3": family_like(qk_norm="head", windows=windows_if_used, defaults={"head_dim": 128}),
    "qwen3_moe": family_like(qk_norm="head", windows=windows_if_used, mlp=qwen_experts),
    "gemma2": family_like(norms=4, tie=True, windows=WindowsByType(2, 4096)),
    "gemma3_text": _GEMMA3,
    "phi3": family_like(windows=same_window),
    "gpt2": biased(tie=True, extra_positions=0),
    "opt": biased(tie=True, extra_positions=2),
    "starcoder2": biased(
        bias_field="use_bias", mlp_bias_field="use_bias", tie=True, windows=same_window
    ),
    "cohere2": family_like(norms=1, tie=True, windows=WindowsByType(4, 4096)),
    "olmo2": family_like(qk_norm="full"),
    "olmo3": family_like(qk_norm="full", windows=WindowsByType(4)),
    "olmoe": family_like(qk_norm="full", mlp=experts_everywhere),
    "deepseek_v2": family_like(mixers=latent_attention, mlp=deepseek_experts),
    "deepseek_v3": DEEPSEEK3,
    "glm4": family_like(norms=4, qkv_bias=True, output_bias=False),
    "glm4_moe": family_like(
        output_bias=False,
        qk_norm=NormIfAsked("use_qk_norm", "head"),
        mlp=deepseek_experts,
        router_bias=True,
    ),
    "gpt_oss": family_like(
        qkv_bias=True,
        mlp_bias=True,
        router_bias=True,
        has_sinks=True,
        windows=WindowsByType(2, 128),
        mlp=experts_everywhere,
    ),
    "granite": USUAL,
    "granitemoe": family_like(mlp=experts_everywhere),
    "smollm3": USUAL,
}

# Names of the functions that make parts of layers: the page has functions of the same names.
_MIXERS = ("attention", "latent_attention")
_MLPS = ("dense", "experts_everywhere", "qwen_experts", "deepseek_experts")
_WINDOWS = ("no_windows", "same_window", "windows_if_used")


def families_json() -> dict[str, Any]:
    """``families`` by ``model_type``, ``same``: other names of them, ``spellings`` of fields. What
    a family has as others do is left out."""
    told = {
        kind: _facts(family) for kind, family in (OF_RUNNING | FAMILIES).items() if _is_told(family)
    }
    return {
        "usual": _all_facts(USUAL),
        "families": told,
        "same": {
            other: listed.model_type
            for listed in REGISTERED
            for other in (*listed.model_types[1:], *listed.alike)
            if listed.model_type in told
        },
        "spellings": SPELLINGS,
    }


def _is_told(family: ConfigFamily) -> bool:
    is_plain = family.beside is USUAL.beside and family.inputs is USUAL.inputs
    windows = family.windows
    return (
        is_plain
        and _name(family.mixers) in _MIXERS
        and _name(family.mlp) in _MLPS
        and (isinstance(windows, WindowsByType) or _name(windows) in _WINDOWS)
    )


def _facts(family: ConfigFamily) -> dict[str, Any]:
    usual = _all_facts(USUAL)
    return {name: fact for name, fact in _all_facts(family).items() if fact != usual[name]}


def _all_facts(family: ConfigFamily) -> dict[str, Any]:
    return {
        field.name: _fact(getattr(family, field.name))
        for field in fields(family)
        if field.name not in ("beside", "inputs")
    }


def _fact(value: Any) -> Any:
    """Functions by their names, or with what they were made of."""
    if isinstance(value, (WindowsByType, NormIfAsked)):
        return list(astuple(value))
    return _name(value) if callable(value) else value


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", ""))
