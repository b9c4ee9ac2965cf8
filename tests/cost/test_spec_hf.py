"""Shapes from configs, against what transformers makes of the same configs."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from checkpoint_sizes import checkpoint_bytes

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.cost.kv import attention_ops, sequence_bytes
from octavo.cost.mixers import Attention, LatentAttention
from octavo.cost.mlps import DenseMlp, ExpertMlp
from octavo.cost.model_spec import ModelSpec
from octavo.cost.open_spec import open_spec
from octavo.cost.precision import precision_of, weights_bytes
from octavo.cost.recurrences import GatedDeltaNet, Mamba2
from octavo.cost.spec_hf import spec_from_hf
from octavo.cost.weights import num_parameters
from octavo.cost.work import Span, decode_attention_work, passes

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
SMALL_EXPERTS = {**EXPERTS, "moe_intermediate_size": 24}
LATENT = {
    **SMALL_EXPERTS,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
LINEAR = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
INDEX = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 32}
DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}
CONVOLUTIONS = ["conv", "full_attention"] * 2
ALTERNATING = ["sliding_attention", "full_attention"] * 3
BORROWED = {
    "num_hidden_layers": 6,
    "layer_types": ALTERNATING,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
}
OLD = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
NO_HEADS = {"num_attention_heads": None, "num_key_value_heads": None, "head_dim": None}
NO_GROUPS = {"num_key_value_heads": None, "head_dim": None}
SHARED = {"shared_expert_intermediate_size": 40}

# (model type, what differs from SIZES); None takes a field away.
DENSE_LATENT = {k: v for k, v in LATENT.items() if "expert" not in k and "moe" not in k}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {}),
    ("mixtral", EXPERTS),
    ("qwen2", {}),
    ("qwen2_moe", {**SMALL_EXPERTS, **SHARED, "decoder_sparse_step": 2}),
    ("qwen3", {}),
    ("qwen3_moe", SMALL_EXPERTS),
    ("qwen3_next", {**SMALL_EXPERTS, **SHARED, **LINEAR}),
    ("qwen3_5_text", LINEAR),
    ("qwen3_5_moe_text", {**SMALL_EXPERTS, **SHARED, **LINEAR}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("phi", NO_GROUPS),
    ("phi3", {}),
    ("phimoe", {**EXPERTS, "attention_bias": True, "lm_head_bias": True}),
    ("gpt2", OLD),
    ("gpt_neox", NO_GROUPS),
    ("opt", {**NO_GROUPS, "intermediate_size": None, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("bloom", {"vocab_size": 320, "hidden_size": 64, "n_layer": 3, "n_head": 4}),
    ("starcoder2", {}),
    ("falcon", {**NO_GROUPS, "intermediate_size": None, "multi_query": True}),
    ("falcon_h1", {**MAMBA, "mamba_d_ssm": 128}),
    ("gptj", {**OLD, "rotary_dim": 8}),
    ("mpt", {"vocab_size": 320, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 128}),
    ("cohere", {"use_qk_norm": True}),
    ("cohere2", {}),
    ("olmo", {}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("exaone4", {}),
    ("ernie4_5", {}),
    ("hunyuan_v1_dense", {}),
    ("arcee", {}),
    ("dots1", {**SMALL_EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1}),
    ("olmoe", EXPERTS),
    ("deepseek_v2", LATENT),
    ("deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1}),
    ("glm4", {}),
    ("glm4_moe", {**SMALL_EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1}),
    ("gpt_oss", EXPERTS),
    (
        "llama4_text",
        {**EXPERTS, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
    ),
    ("granitemoeshared", {**EXPERTS, "shared_intermediate_size": 40}),
    (
        "granitemoehybrid",
        {
            **EXPERTS,
            **MAMBA,
            "shared_intermediate_size": 40,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
        },
    ),
    ("bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    ("nemotron", {}),
    ("minimax_m2", EXPERTS),
    ("seed_oss", {}),
    ("smollm3", {}),
    ("stablelm", {"use_qkv_bias": True}),
    ("deepseek_v32", {**LATENT, **INDEX}),
    ("glm_moe_dsa", {**LATENT, **INDEX}),
    ("kimi_linear", {**LATENT, **DELTA, "q_lora_rank": None}),
    ("minicpm3", DENSE_LATENT),
    ("youtu", DENSE_LATENT),
    ("mamba", {"intermediate_size": 128, "state_size": 8, "time_step_rank": 5, **NO_HEADS}),
    ("mamba", {"intermediate_size": 128, "use_bias": True, "use_conv_bias": False, **NO_HEADS}),
    ("falcon_mamba", {"intermediate_size": 128, **NO_HEADS}),
    ("mamba2", {**NO_HEADS, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}),
    ("jamba", {**EXPERTS, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 3}),
    ("minimax", {**EXPERTS, "layer_types": ["full_attention", "linear_attention"] * 2}),
    ("lfm2", {"layer_types": CONVOLUTIONS, "conv_bias": True, "intermediate_size": 500}),
    ("lfm2", {"layer_types": CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
    ("lfm2_moe", {**SMALL_EXPERTS, "layer_types": CONVOLUTIONS, "num_dense_layers": 1}),
    ("gemma3n_text", {**BORROWED, "laurel_rank": 4, "intermediate_size": [96] * 6}),
    ("gemma4_text", {**BORROWED, "global_head_dim": 32, "use_double_wide_mlp": True}),
    (
        "gemma4_text",
        {
            **SMALL_EXPERTS,
            "layer_types": ALTERNATING[:4],
            "top_k_experts": 2,
            "enable_moe_block": True,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
        },
    ),
    ("vaultgemma", {}),
    ("glm", {}),
    ("cwm", {}),
    ("jais2", {}),
    ("ernie4_5_moe", {**SMALL_EXPERTS, "moe_num_experts": 8, "moe_k": 2}),
    ("exaone_moe", {**SMALL_EXPERTS, "first_k_dense_replace": 1, "num_shared_experts": 1}),
    ("solar_open", {**SMALL_EXPERTS, "n_shared_experts": 1}),
    ("afmoe", {**SMALL_EXPERTS, "num_dense_layers": 1, "num_shared_experts": 2}),
    ("hunyuan_v1_moe", {**EXPERTS, "moe_topk": 2}),
    ("flex_olmo", EXPERTS),
]


def config_of(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    is_old = "n_layer" in changes or "n_layers" in changes
    values = {**({} if is_old else SIZES), **changes}
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("kind", "changes"), CASES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(CASES)]
)
def test_parameters_are_those_of_transformers(kind, changes):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.CONFIG_MAPPING[kind](**config_of(kind, changes))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {id(each): each.shape for each in model.parameters()}  # tied ones once
    names = ("correction_bias", "expert_bias", "layer_scalar")
    corrections = [each for name, each in model.named_buffers() if name.endswith(names)]
    expected = sum(map(prod, shapes.values())) + sum(each.numel() for each in corrections)

    written = {**config_of(kind, changes), "tie_word_embeddings": config.tie_word_embeddings}
    spec = spec_from_hf({**written, "model_type": kind})
    assert num_parameters(spec) == expected


SAVED = ("deepseek_v32", "kimi_linear", "lfm2_moe", "jamba", "gemma3n_text", "gemma4_text", "afmoe")


@pytest.mark.parametrize(
    ("kind", "changes"), [(kind, changes) for kind, changes in CASES if kind in SAVED]
)
def test_a_checkpoint_takes_what_its_files_have(kind, changes, tmp_path):
    """Its config as transformers writes it, and its tensors as they are called in files."""
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.CONFIG_MAPPING[kind](**config_of(kind, changes))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    spec = open_spec(tmp_path)
    assert weights_bytes(spec, precision_of(spec)) == checkpoint_bytes(tmp_path)
    shape = spec_of(kind, **changes, tie_word_embeddings=config.tie_word_embeddings)
    assert num_parameters(spec) == num_parameters(shape)


def spec_of(kind: str, **changes: Any) -> ModelSpec:
    return spec_from_hf({**config_of(kind, changes), "model_type": kind})


def test_heads_are_as_large_as_the_config_says_or_shared_out_evenly():
    config = {**SIZES, "model_type": "llama", "head_dim": None}
    assert spec_from_hf(config).layers[0].mixers[0].head_dim == 64 // 4
    assert spec_of("llama", head_dim=48).layers[0].mixers[0].head_dim == 48


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.mixers[0].window for layer in spec.layers]


def test_windows_are_where_each_family_has_them():
    assert windows(spec_of("mistral", sliding_window=32)) == [32] * 4
    without = {**config_of("mistral", {}), "model_type": "mistral", "sliding_window": None}
    assert windows(spec_from_hf(without)) == [None] * 4
    assert windows(spec_of("mistral")) == [4096] * 4  # what the field means where it is absent
    assert windows(spec_of("gemma2", sliding_window=32)) == [32, None, 32, None]
    six = spec_of("gemma3_text", sliding_window=32, num_hidden_layers=7)
    assert windows(six) == [32] * 5 + [None, 32]
    assert windows(spec_of("gpt_oss", sliding_window=32, **EXPERTS)) == [32, None, 32, None]
    assert windows(spec_of("qwen3", sliding_window=32)) == [None] * 4  # unless it is used
    used = spec_of("qwen3", sliding_window=32, use_sliding_window=True, max_window_layers=3)
    assert windows(used) == [None, None, None, 32]
    types = ["full_attention", "sliding_attention"] * 2
    assert windows(spec_of("cohere2", sliding_window=32, layer_types=types)) == [None, 32] * 2


def test_layers_of_hybrids_are_of_two_kinds():
    spec = spec_of("qwen3_next", **SMALL_EXPERTS, **SHARED, **LINEAR)
    kinds = [type(layer.mixers[0]) for layer in spec.layers]
    assert kinds == [GatedDeltaNet] * 3 + [Attention]
    spec = spec_of("bamba", **MAMBA, attn_layer_indices=[1])
    assert [type(layer.mixers[0]) for layer in spec.layers] == [Mamba2, Attention, Mamba2, Mamba2]


def kept(spec: ModelSpec) -> list[tuple[float, float]]:
    """Bytes of a token and of a sequence, in each layer on one device."""
    precision = precision_of(spec)
    return [
        (
            sum(op.kv_bytes_per_token for op in attention_ops([layer], precision)),
            sum(op.state_bytes for op in attention_ops([layer], precision)),
        )
        for layer in spec.layers
    ]


def test_what_new_kinds_of_layers_keep():
    latent, keys = (32 + 8) * 2, 2 * 2 * 16 * 2
    sparse = spec_of("deepseek_v32", **LATENT, **INDEX)
    assert kept(sparse) == [(latent + 16 * 2, 0)] * 4  # a key of the indexer more
    delta = spec_of("kimi_linear", **LATENT, **DELTA)
    assert kept(delta) == [(0, 4 * 4 * 16 * (3 * 3 + 16))] * 3 + [(latent, 0)]
    convolving = spec_of("lfm2", layer_types=CONVOLUTIONS)
    assert kept(convolving) == [(0, 4 * 64 * 2), (keys, 0)] * 2
    lightning = spec_of("minimax", **EXPERTS, attn_type_list=[0, 0, 0, 1])
    assert kept(lightning) == [(0, 4 * 4 * 16 * 16)] * 3 + [(keys, 0)]
    state = {"intermediate_size": 128, "state_size": 8}
    assert kept(spec_of("mamba", **state, **NO_HEADS)) == [(0, 4 * 128 * (3 + 8))] * 4


def test_layers_of_gemma_borrow_and_have_heads_of_two_sizes():
    """Keys that are values too are normed in another way, and kept twice."""
    spec = spec_of("gemma4_text", **BORROWED, global_head_dim=32, sliding_window=64)
    assert windows(spec) == [64, None] * 3
    assert [per_token for per_token, _ in kept(spec)] == [128, 256] * 2 + [0, 0]
    tied = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}
    spec = spec_of("gemma4_text", layer_types=ALTERNATING[:4], **tied)
    assert [per_token for per_token, _ in kept(spec)] == [128, 128] * 2


def test_a_selection_bounds_what_is_read_and_not_what_is_kept():
    spec = spec_of("glm_moe_dsa", **LATENT, **INDEX, indexer_types=["full", "shared"] * 2)
    ops = attention_ops(spec.layers, precision_of(spec))
    latent, index = ops
    assert (latent.selected, latent.reach, index.count) == (32, 32, 2)
    (far,) = passes([Span(1000, 1)])
    assert decode_attention_work(latent, far).bytes == 4 * (32 + 1) * latent.kv_bytes_per_token
    assert decode_attention_work(index, far).bytes == 2 * (1001 + 1) * index.kv_bytes_per_token
    assert sequence_bytes(ops, 1000) == 1000 * (4 * (32 + 8) * 2 + 2 * 16 * 2)


def test_layers_of_nemotron_h_are_of_one_thing_each():
    spec = spec_of(
        "nemotron_h",
        hybrid_override_pattern="M-*E",
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        conv_kernel=4,
        moe_shared_expert_intermediate_size=40,
        **SMALL_EXPERTS,
    )
    assert [len(layer.mixers) for layer in spec.layers] == [1, 0, 1, 0]
    assert [type(layer.mlp) for layer in spec.layers] == [
        *(type(None), DenseMlp, type(None), ExpertMlp)
    ]


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "MX*E"}, "hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": ["mamba"] * 3}, "layers_block_type"),
        ("bamba", {**MAMBA, "layer_types": ["mamba", "magic"] * 2}, "layer_types"),
        ("cohere2", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("qwen3_next", {**LINEAR, "layer_types": 4}, "layer_types"),
    ],
)
def test_layers_of_a_kind_that_nobody_knows_are_errors(kind, changes, name):
    with pytest.raises(ModelFileError, match=name):
        spec_of(kind, **changes)


def test_latent_attention_may_make_queries_in_one_step():
    whole = spec_of("deepseek_v2", **{**LATENT, "q_lora_rank": None}).layers[0].mixers[0]
    assert isinstance(whole, LatentAttention)
    assert whole.q_rank is None


def test_a_multimodal_config_has_its_text_model_inside():
    inner = {**SIZES, "model_type": "gemma3_text"}
    outer = spec_from_hf({"model_type": "gemma3", "text_config": inner})
    assert outer == spec_from_hf(inner)


def test_layers_alike_are_one_object():
    assert len({id(layer) for layer in spec_of("llama").layers}) == 1


def test_an_unknown_kind_is_refused_with_the_nearest():
    with pytest.raises(UnsupportedModelError, match="qwen3"):
        spec_of("qwen33")


def test_a_missing_field_is_named():
    with pytest.raises(ModelFileError, match="vocab_size"):
        spec_of("llama", vocab_size=None)
