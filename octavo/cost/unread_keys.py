"""Keys of a config that no reader asked for: an error where they may change sizes, a note
elsewhere.

A model that is sized by its config must not lose a field that changes its weights
(``moe_latent_size`` made 120 billion parameters 458). So readers remember the fields that they ask
for (`octavo.base.fields`), and the rest is checked here: most are known to change no shape; one
whose name and value look like a size is refused; for any other a plan notes that it was not read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from reprlib import repr as shown  # short, whatever the value is
from typing import Any

from octavo.base.errors import UnsupportedModelError

# Words of names that sizes have.
_SIZES = re.compile(
    r"(?:^|[_.])(?:num|n|size|sizes|dim|dims|rank|heads?|layers?|experts?|hidden|latent|inner|width|"
    r"depth|groups?|kernel|vocab|channels|mult|ratios?|blocks?|freq|pattern|configs?|expand|bits|"
    r"window|topk|repeats?|streams?|d|k|v|q|kv|ffn?|mlp|moe|attn|attention|modules?|dtype|algo)"
    r"(?:[_.]|$)"
)

_HARMLESS = re.compile(
    "|".join(
        (
            # Tokens, names, and what a library writes of itself.
            r".*_token(?:_id|_index|s)?|.*_token_ids?|.*_placeholder|ignore_index|_.*|architectures",
            r"model_type|auto_map|.*_?dtype|transformers(?:_version|\.js_config)|.*_version|version",
            r"id2label|label2id|num_labels|problem_type|task_specific_params|finetuning_task",
            r"tokenizer_class|unsloth.*|language|license|name|checkpoint_version|use_bfloat16|onnx",
            # How a library runs, generates or trains.
            r"use_cache|use_.*kernels?|use_flash.*|.*_implementation|ep_size|pretraining_tp|tp_plan",
            r"torchscript|return_dict.*|output_.*|chunk_size_feed_forward|gradient_checkpointing",
            r"max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|temperature",
            r"top_k|top_p|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|.*_penalty",
            r"encoder_no_repeat_ngram_size|bad_words_ids|num_return_sequences|prefix|suppress_tokens",
            r"begin_suppress_tokens|is_decoder|is_encoder_decoder|add_cross_attention|pruned_heads",
            r"cross_attention_hidden_size|tie_encoder_decoder|num_logits_to_keep|use_mem_.*|fused_.*",
            r"exponential_decay_length_penalty|remove_invalid_values|forced_.*|tf_legacy_loss",
            r".*dropout.*|.*_pdrop|.*drop_rate|initializer.*|.*_init_.*|init_.*|.*_init|.*init_std",
            r".*_loss.*|.*_coef|aux_.*|seq_aux|.*jitter.*|.*_noise|rescale_.*|residual_in_fp32|z_loss",
            r"summary_.*|scale_attn.*|scale_attention.*|reorder_and.*|fan_in|train.*|embd_pdrop",
            # Functions of values, and factors of them.
            r".*_act|.*activation.*|hidden_act.*|.*_eps|.*epsilon|.*_multipliers?|.*softcap.*",
            r".*_scaling|.*_scaling_(?:factor|beta)|scale_emb|dim_model_base|logit_scale|emb_scale",
            r".*_value_scale|clip_qkv|query_pre_attn_scalar|scale_depth|.*_limit|swiglu_.*|.*_alpha",
            r".*_lower_bound|mamba_dt_.*|time_step_(?!rank).*|.*_conv_act|embedding_scale|attn_scale",
            # Positions, unless they are of a head's size.
            r"rope(?:_theta|_scaling|_parameters|_interleave.*|_type|_traditional|_ratio|_base)?",
            r"rope_local_base_freq|rope_scaling_.*|rope_theta.*|.*_rope_theta|rotary_.*|.*rotary_pct",
            r"original_max_position.*|mrope.*|.*rope_interleave|partial_rotary_factor|use_.*rope",
            r"no_rope_layers?|no_rope_layer_interval|layer_rope.*|alibi.*|nope_.*|floor_scale",
            r"position_embedding_type|rope_pct|use_nope|llama_4.*|original_rope",
            # How experts are chosen, and among whom.
            r"scoring_func|topk_method|norm_topk_prob|norm_expert_.*|routed_scal.*|n_group|topk_group",
            r"num_expert_group|moe_renormalize|use_grouped_topk|router_.*|moe_router_.*|group_routed",
            r"moe_shared_expert_overlap|score_function|moe_softmax.*|use_expert_bias.*|num_hash_layers",
            # What only drafts, which a plan leaves out, and what only prefers.
            r".*mtp_.*|mtp.*|.*nextn.*|use_mtp|.*_mtp.*|index_share_for.*|index_skip_.*|index_topk_.*",
            r"scan_layers|chunk_size|mamba_chunk_size|mamba_ssm_cache_dtype|.*_chunk_size_.*",
            r"layer_types_override|bidirectional.*|use_bidirectional_attention|is_causal|causal",
            # Of a quantization.
            r"block_size|.*_(?:alpha|beta)_factor|.*normalize.*|.*_in_fp32|use_parallel_residual",
            r"do_layer_norm_before|enable_bias|layer_norm_elementwise_affine|parallel_attn|norm_type",
            r"mamba_norm_before_gate|new_decoder_architecture|embedding_fraction|attn_type|attn_impl",
            r"moe_norm_min|route_scale|ffn_act_fn|attn_temperature_tuning|use_associative_scan",
            r"mla_use_nope|use_qk_norm|learned_pos_emb|embedding_initializer_range|rope_finetuned",
            r"altup_coef_clip|altup_correct_scale|qk_norm_type|use_routing_bias|no_bias|rope_.*fn",
            r"quantization(?:_config|_status)?|compression_config|quant_method",
        )
    )
)
# Fields with a name as above that change shapes all the same, in a family that reads them.
_OF_SIZES = {"use_qk_norm", "block_ffn_dim_multiplier"}
# Of quantizations: what changes numbers, and not how many bits they have.
_HARMLESS_QUANTIZATION = re.compile(
    r"(?:.*\.)?(?:activation_scheme|fmt|scale_fmt|desc_act|sym|symmetric|damp.*|true_sequential|"
    r"static_groups|checkpoint_format|meta|producer|kv_cache_.*|format|quantization_status|version|"
    r"global_compression_ratio|zero_point|backend|observer.*|scale_dtype|zp_dtype|actorder|dynamic|"
    r"bnb_4bit_(?:compute_dtype|quant_type|quant_storage)|llm_int8_(?!skip).*|_?load_in_.*bit|"
    r"provider|packing_format|autoround_version|iters|seqlen|nsamples|batch_size|.*_version|"
    r"low_gpu_mem_usage|enable_.*|lr|minmax_lr|amp|data_type|super_.*|model_file_base_name|"
    r"model_name_or_path|use_.*|exllama.*|max_input_length|dataset|tokenizer|cache_.*|pad_token_id|"
    r"is_marlin_format|pack_mode|transform_config|output_activations|targets|strategy|type|"
    r"quant_method|num_bits|dequantize|run_.*|pack_dtype|hyb_act|block_structure|input_activations"
    r"(?:\..*)?)"
)
# Parts of a model beside its text.
_BESIDE = re.compile(
    r"(?:.*_)?(?:vision|audio|image|video|visual|speech|mm|vq|projector|projection|multimodal|"
    r"spatial|img|merge)(?:_.*)?|.*_tower.*"
)
# Fields that say again what others do, or that count where these others are not there.
_SAID_OTHERWISE = frozenset(
    (
        *("head_dim", "qk_head_dim", "num_key_value_heads", "num_kv_heads", "intermediate_size"),
        "num_attention_heads",
        *("intermediate_size_mlp", "moe_layers", "first_k_dense_replace", "moe_layer_freq"),
        *("full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern"),
        *("global_attn_every_n_layers", "max_window_layers", "full_attn_idxs", "conv_L_cache"),
        *("vocab_size_per_layer_input", "expand", "mamba_d_head", "time_step_rank"),
        *("linear_attn_config.kda_layers", "mlp_only_layers", "num_hidden_layers"),
    )
)
# Of families that see everything whatever a config has.
_OF_ATTENTION = ("sliding_window", "use_sliding_window", "sliding_window_size")


def changes_no_shape(name: str) -> bool:
    """True if a field of this name changes no shape in any family."""
    return name not in _OF_SIZES and _HARMLESS.fullmatch(name) is not None


def unread(
    values: Mapping[str, Any], asked: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield names and values that no reader asked for; for a table that was read by its entries,
    its other entries, as ``table.entry``."""
    for key, value in values.items():
        name = prefix + key
        if value is None:
            continue
        if name not in asked:
            yield name, value
        elif isinstance(value, Mapping) and any(each.startswith(f"{name}.") for each in asked):
            yield from unread(value, asked, f"{name}.")


def check(kind: str, path: Path, left: Iterable[tuple[str, Any]]) -> list[str]:
    """Remarks on fields that were not read.

    Args:
        kind: of the model: its ``model_type``.
        left: names and values, as ``unread`` has them.

    Raises:
        UnsupportedModelError: one of them may change the sizes of weights or of the KV cache.
    """
    notes = []
    for name, value in left:
        if (
            not value
            or _says_the_usual(value)
            or name in _SAID_OTHERWISE
            or _HARMLESS.fullmatch(name.rpartition(".")[2])
        ):
            continue
        if _BESIDE.fullmatch(name):
            if isinstance(value, Mapping):
                notes.append(f"{name}: what it tells of is not counted, the text model alone is")
        elif name not in _OF_ATTENTION and _may_be_size(name, value):
            raise UnsupportedModelError(
                f"{path}: {name} = {shown(value)}: octavo does not know what that does to sizes "
                f"of a model of type {kind!r:.80}, so it cannot be planned"
            )
        else:
            notes.append(f"{name} = {shown(value)}: was not read")
    return notes


def check_quantization(name: str, values: Mapping[str, Any], asked: Collection[str]) -> None:
    """Raise UnsupportedModelError for a field of a quantization config that may change the bits of
    weights and that no reader asked for."""
    for key, value in unread(values, asked):
        if value and not _HARMLESS_QUANTIZATION.fullmatch(key) and not isinstance(value, str):
            raise UnsupportedModelError(
                f"{name}: the quantization says {key} = {shown(value)}, and octavo does not "
                "know what that does to the sizes of weights, so it cannot be planned"
            )


def _may_be_size(name: str, value: Any) -> bool:
    """Whether a value is of numbers, and its name as sizes are called."""
    if isinstance(value, Mapping):
        return any(_may_be_size(f"{name}.{key}", each) for key, each in value.items() if each)
    if isinstance(value, (list, tuple)):
        return bool(_SIZES.search(name))
    is_whole = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_whole and float(value).is_integer() and bool(_SIZES.search(name))


def _says_the_usual(value: Any) -> bool:
    """Whether a list says of all layers that they are of the usual kind."""
    is_list = isinstance(value, (list, tuple))
    return is_list and all(each in (1, "full_attention") for each in value)
