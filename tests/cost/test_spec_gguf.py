from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.base.errors import ModelFileError
from octavo.cost.mixers import Attention, LatentAttention
from octavo.cost.model_spec import ModelSpec
from octavo.cost.recurrences import GatedDeltaNet, Mamba1, Mamba2, ShortConvolution
from octavo.cost.spec_gguf import spec_from_gguf
from octavo.cost.weights import num_parameters

HIDDEN, VOCAB = 64, 320
NORMS = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
ATTENTION = {
    "attn_q.weight": (64, HIDDEN),
    "attn_k.weight": (32, HIDDEN),
    "attn_v.weight": (32, HIDDEN),
    "attn_output.weight": (HIDDEN, 64),
}
MLP = {
    "ffn_gate.weight": (96, HIDDEN),
    "ffn_up.weight": (96, HIDDEN),
    "ffn_down.weight": (HIDDEN, 96),
}
EXPERTS = {
    "ffn_gate_inp.weight": (8, HIDDEN),
    "ffn_gate_exps.weight": (8, 24, HIDDEN),
    "ffn_up_exps.weight": (8, 24, HIDDEN),
    "ffn_down_exps.weight": (8, HIDDEN, 24),
}
SHARED = {
    "ffn_gate_shexp.weight": (40, HIDDEN),
    "ffn_up_shexp.weight": (40, HIDDEN),
    "ffn_down_shexp.weight": (HIDDEN, 40),
}
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2}


def parsed(
    kind: str,
    layers: list[dict[str, tuple[int, ...]]],
    tied: bool = True,
    model: dict[str, tuple[int, ...]] | None = None,
    **metadata: Any,
) -> tuple[ModelSpec, int]:
    """A spec, and the parameters of all its tensors; ``model`` are those outside of the layers."""
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= model or {}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for index, layer in enumerate(layers):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    values = {"block_count": len(layers), "context_length": 128, **metadata}
    table = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    entries = {f"{kind}.{name.replace('__', '.')}": value for name, value in values.items()}
    spec = spec_from_gguf({"general.architecture": kind, **entries}, table)
    return spec, sum(map(prod, shapes.values()))


def test_a_llama():
    spec, count = parsed("llama", [{**ATTENTION, **MLP, **NORMS}] * 3, tied=False, **HEADS)
    assert num_parameters(spec) == count
    assert spec.num_layers == 3
    assert not spec.tie_embeddings
    (attention,) = spec.layers[0].mixers
    assert attention == Attention(heads=4, kv_heads=2, head_dim=16)


def test_biases_norms_and_sinks_are_found_by_their_tensors():
    layer = {
        **ATTENTION,
        **MLP,
        **NORMS,
        "attn_q.bias": (64,),
        "attn_k.bias": (32,),
        "attn_v.bias": (32,),
        "attn_q_norm.weight": (16,),
        "attn_k_norm.weight": (16,),
        "attn_sinks.weight": (4,),
        "post_ffw_norm.weight": (HIDDEN,),
    }
    spec, count = parsed("gpt-oss", [layer], **HEADS)
    assert num_parameters(spec) == count


def test_fused_matrices_and_old_mlps():
    fused = {
        "attn_qkv.weight": (128, HIDDEN),
        "attn_output.weight": (HIDDEN, 64),
        "ffn_up.weight": (2 * 96, HIDDEN),
        "ffn_down.weight": (HIDDEN, 96),
    }
    spec, count = parsed("phi3", [{**fused, **NORMS}], **HEADS)
    assert num_parameters(spec) == count
    assert spec.layers[0].mlp.is_gated
    old = {**ATTENTION, **NORMS, **{k: v for k, v in MLP.items() if "gate" not in k}}
    spec, count = parsed("starcoder2", [old], **HEADS)
    assert num_parameters(spec) == count
    assert not spec.layers[0].mlp.is_gated


def test_experts_beside_what_is_shared():
    dense = {**ATTENTION, **MLP, **NORMS}
    sparse = {**ATTENTION, **EXPERTS, **SHARED, **NORMS, "exp_probs_b.bias": (8,)}
    spec, count = parsed("glm4moe", [dense, sparse], expert_used_count=2, **HEADS)
    assert num_parameters(spec) == count
    assert [layer.mlp.num_experts for layer in spec.layers] == [0, 8]
    inactive = 6 * 3 * 24 * HIDDEN
    assert num_parameters(spec, active=True) == count - inactive


@pytest.mark.parametrize("q_rank", [24, 0, None])
@pytest.mark.parametrize("is_in_two", [False, True])
def test_latent_attention(q_rank, is_in_two):
    """Keys and values made by one tensor, as in files from before 2025-04, or by two; queries by
    two or by one, of which a file may say nothing, or that their rank is 0."""
    queries = {
        "attn_q_a.weight": (24, HIDDEN),
        "attn_q_a_norm.weight": (24,),
        "attn_q_b.weight": (4 * 24, 24),
    }
    halves = {"attn_k_b.weight": (4, 32, 16), "attn_v_b.weight": (4, 12, 32)}
    layer = {
        **(queries if q_rank else {"attn_q.weight": (4 * 24, HIDDEN)}),
        **(halves if is_in_two else {"attn_kv_b.weight": (4 * 28, 32)}),
        "attn_kv_a_mqa.weight": (40, HIDDEN),
        "attn_kv_a_norm.weight": (32,),
        "attn_output.weight": (HIDDEN, 48),
        **MLP,
        **NORMS,
    }
    sizes = {
        "attention.head_count": 4,
        "attention.kv_lora_rank": 32,
        **({} if q_rank is None else {"attention.q_lora_rank": q_rank}),
        "attention.key_length": 24,
        "attention.value_length": 12,
        "rope.dimension_count": 8,
    }
    if is_in_two:
        of_heads = {"attention.key_length_mla": 24, "attention.value_length_mla": 12}
        of_latents = {"attention.key_length": 40, "attention.value_length": 32}
        sizes |= {**of_latents, **of_heads, "attention.head_count_kv": 1}
    spec, count = parsed("deepseek2", [layer], **sizes)
    assert num_parameters(spec) == count
    (latent,) = spec.layers[0].mixers
    assert isinstance(latent, LatentAttention)
    assert (latent.nope_dim, latent.rope_dim, latent.value_dim) == (16, 8, 12)
    assert latent.q_rank == (q_rank or None)


def test_recurrences_are_told_apart():
    state = {
        "ssm.time_step_rank": 8,
        "ssm.inner_size": 64,
        "ssm.state_size": 16,
        "ssm.group_count": 4,
        "ssm.conv_kernel": 4,
    }
    delta = {"ssm_conv1d.weight": (192, 4), "ssm_ba.weight": (16, HIDDEN), **MLP, **NORMS}
    gated = {**ATTENTION, "attn_q.weight": (128, HIDDEN), **MLP, **NORMS}
    spec, _ = parsed("qwen3next", [delta, gated], **HEADS, **state)
    first, second = (layer.mixers[0] for layer in spec.layers)
    assert first == GatedDeltaNet(heads=8, key_heads=4, key_dim=16, value_dim=8, kernel=4)
    assert second.has_output_gate
    mamba = {"ssm_conv1d.weight": (192, 4), "ssm_conv1d.bias": (192,), **NORMS}
    spec, _ = parsed("granitehybrid", [mamba], **state)
    assert isinstance(spec.layers[0].mixers[0], Mamba2)


def test_the_first_mamba_and_short_convolutions():
    mamba = {
        "ssm_in.weight": (128, HIDDEN),
        "ssm_conv1d.weight": (64, 4),
        "ssm_conv1d.bias": (64,),
        "ssm_x.weight": (5 + 2 * 16, 64),
        "ssm_dt.weight": (64, 5),
        "ssm_dt.bias": (64,),
        "ssm_a": (64, 16),
        "ssm_d": (64,),
        "ssm_out.weight": (HIDDEN, 64),
        **NORMS,
    }
    state = {"ssm.time_step_rank": 5, "ssm.inner_size": 64, "ssm.state_size": 16}
    spec, count = parsed("mamba", [mamba], **state, **{"ssm.conv_kernel": 4})
    assert spec.layers[0].mixers == (Mamba1(inner=64, state_dim=16, step_rank=5, kernel=4),)
    assert num_parameters(spec) == count
    convolution = {
        "shortconv.conv.weight": (HIDDEN, 3),
        "shortconv.in_proj.weight": (3 * HIDDEN, HIDDEN),
        "shortconv.out_proj.weight": (HIDDEN, HIDDEN),
        **MLP,
        **NORMS,
    }
    spec, count = parsed("lfm2", [convolution])
    assert spec.layers[0].mixers == (ShortConvolution(size=HIDDEN, kernel=3),)
    assert num_parameters(spec) == count


def test_layers_of_gemma_borrow_and_have_more_beside():
    own = {**ATTENTION, **MLP, **NORMS}
    beside = {
        "inp_gate.weight": (8, HIDDEN),
        "proj.weight": (HIDDEN, 8),
        "post_norm.weight": (HIDDEN,),
        "laurel_l.weight": (4, HIDDEN),
        "laurel_r.weight": (HIDDEN, 4),
        "altup_router.weight": (4, HIDDEN),
        "altup_predict_coef.weight": (16, 4),
    }
    borrowing = {name: shape for name, shape in own.items() if name[:6] not in ("attn_k", "attn_v")}
    model = {
        "per_layer_token_embd.weight": (VOCAB, 24),
        "per_layer_model_proj.weight": (24, HIDDEN),
        "per_layer_proj_norm.weight": (8,),
        "altup_proj.weight": (3, HIDDEN, HIDDEN),
    }
    heads = {**HEADS, "attention.key_length": 16, "attention.shared_kv_layers": 1}
    layers = [{**own, **beside}, {**own, **beside}, {**borrowing, **beside}]
    spec, count = parsed("gemma3n", layers, model=model, **heads)
    assert num_parameters(spec) == count
    assert [layer.mixers[0].borrows_kv for layer in spec.layers] == [False, False, True]


def test_heads_of_windows_may_be_smaller_and_keys_may_be_values():
    local = {**ATTENTION, **MLP, **NORMS}
    wide = {"attn_q.weight": (128, HIDDEN), "attn_output.weight": (HIDDEN, 128)}
    full = {**local, **wide, "attn_k.weight": (64, HIDDEN)}
    del full["attn_v.weight"]
    lengths = {f"attention.{name}_length": 32 for name in ("key", "value")}
    lengths |= {f"attention.{name}_length_swa": 16 for name in ("key", "value")}
    spec, count = parsed(
        "gemma4",
        [local, full],
        **{"attention.sliding_window": 32, "attention.sliding_window_pattern": 2},
        **HEADS,
        **lengths,
    )
    assert num_parameters(spec) == count
    first, second = (layer.mixers[0] for layer in spec.layers)
    assert (first.head_dim, first.value_is_key, first.window) == (16, False, 32)
    assert (second.head_dim, second.value_is_key, second.window) == (32, True, None)


@pytest.mark.parametrize(
    ("kind", "pattern", "expected"),
    [
        ("llama", None, [None] * 4),
        ("phi3", None, [32] * 4),
        ("gemma2", None, [32, None, 32, None]),
        ("cohere2", 4, [32, 32, 32, None]),
        ("gemma3", np.array([1, 1, 0, 1], bool), [32, 32, None, 32]),
    ],
)
def test_windows(kind, pattern, expected):
    window = {"attention.sliding_window": 32} if kind != "llama" else {}
    if pattern is not None:
        window["attention.sliding_window_pattern"] = pattern
    spec, _ = parsed(kind, [{**ATTENTION, **MLP, **NORMS}] * 4, **HEADS, **window)
    assert [layer.mixers[0].window for layer in spec.layers] == expected


def test_a_number_may_be_of_each_layer():
    per_layer = {"attention.head_count": [4, 4], "attention.head_count_kv": np.array([2, 1])}
    small = {**ATTENTION, "attn_k.weight": (16, HIDDEN), "attn_v.weight": (16, HIDDEN)}
    layers = [{**ATTENTION, **MLP, **NORMS}, {**small, **MLP, **NORMS}]
    spec, count = parsed("openelm", layers, **{"attention.key_length": 16}, **per_layer)
    assert num_parameters(spec) == count
    assert [layer.mixers[0].kv_heads for layer in spec.layers] == [2, 1]


def test_a_file_without_an_embedding_is_damaged():
    with pytest.raises(ModelFileError, match=r"token_embd\.weight"):
        spec_from_gguf({"general.architecture": "llama"}, {})


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ({**ATTENTION, "ffn_down.weight": (HIDDEN, 96)}, "ffn_up"),
        ({**ATTENTION, "ffn_gate_inp.weight": (8, HIDDEN)}, "ffn_up_exps"),
        ({**ATTENTION, **EXPERTS, "ffn_up_exps.weight": (24, HIDDEN)}, "3 dimensions"),
    ],
)
def test_tensors_that_do_not_fit_together_are_errors(layer, name):
    with pytest.raises(ModelFileError, match=name):
        parsed("llama", [layer], **HEADS)
