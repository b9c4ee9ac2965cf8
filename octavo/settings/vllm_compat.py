"""Settings of vLLM's engine that octavo has under another name, or lacks.

Of the latter, a value that asks for nothing is accepted; any other is an error that says what to
do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.base.errors import ConfigError
from octavo.base.plain_numbers import plain, plain_list

# vLLM's name: octavo's.
OTHER_NAMES = {
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "max_num_queued_reqs": "max_queued_requests",
    "max_num_queued_tokens": "max_queued_tokens",
}


class Group(NamedTuple):
    """Settings of one subject, each with its values that ask for nothing beside None."""

    instead: str  # what to do
    nothing: Mapping[str, tuple[Any, ...]]


def _unset(names: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), ())


def _off(names: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), (False,))


# As of vLLM 0.32, and some names of earlier versions.
GROUPS = (
    Group(
        "octavo runs no code from model folders",
        {
            **_off("trust_remote_code"),
            "code_revision": (),
            "worker_cls": ("auto",),
            "worker_extension_cls": ("",),
            "io_processor_plugin": (),
            "scheduler_cls": (),
            "logits_processors": ([],),
            "reasoning_parser_plugin": ("",),
            "model_class_overrides": ({},),
        },
    ),
    Group(
        "octavo generates text alone",
        {
            "runner": ("auto", "generate"),
            "convert": ("auto", "none"),
            "task": ("auto", "generate"),
            "pooler_config": (),
            "diffusion_config": (),
            "disable_chunked_mm_input": (False,),
            "allowed_local_media_path": ("",),
            "allowed_media_domains": ([],),
            "limit_mm_per_prompt": ({},),
            "media_io_kwargs": ({},),
            "mm_processor_kwargs": ({},),
            "mm_processor_cache_gb": (4, 0),
            "mm_processor_cache_type": ("lru",),
            "mm_hasher_algorithm": ("blake3",),
            "mm_shm_cache_max_object_size_mb": (128,),
            "mm_encoder_tp_mode": ("weights",),
            "mm_tensor_ipc": ("direct_rpc",),
            "mm_processor_device": ("auto",),
            "mm_ipc_gpu_memory_gb": (0,),
            "mm_device_do_normalize": (True,),
            "video_pruning_method": ("evs",),
            "video_pruning_rate": (0,),
            "ec_manager_config": ({},),
            **_off("language_model_only enable_mm_embeds interleave_mm_strings mm_encoder_only"),
            **_off("skip_mm_profiling enable_mm_processor_stats enable_prompt_embeds"),
            **_unset("mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path"),
            **_unset("mm_encoder_fp8_scale_save_path ec_transfer_config"),
            "mm_encoder_fp8_scale_save_margin": (1.5,),
        },
    ),
    Group(
        "octavo has no adapters: merge them into the model before",
        {
            **_off("enable_lora fully_sharded_loras enable_tower_connector_lora"),
            **_off("specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras"),
            "max_loras": (1,),
            "max_lora_rank": (16,),
            "lora_dtype": ("auto",),
            **_unset("max_cpu_loras default_mm_loras lora_target_modules max_lora_cls_labels"),
        },
    ),
    Group(
        "one engine runs on one device",
        {
            **_unset("distributed_executor_backend distributed_timeout_seconds device_ids"),
            **_unset("cpu_distributed_timeout_seconds numa_bind_nodes numa_bind_cpus"),
            **_unset("dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size"),
            **_unset("data_parallel_rank data_parallel_start_rank data_parallel_address"),
            **_unset("data_parallel_rpc_port enable_batch_sharded_sampling elastic_ep_max_dp_size"),
            **_unset("disable_nccl_for_dp_synchronization max_parallel_loading_workers"),
            **_off("numa_bind data_parallel_hybrid_lb data_parallel_external_lb enable_hc_sp"),
            **_off("data_parallel_multi_port_external_lb enable_ep_weight_filter enable_dbo"),
            **_off("enable_elastic_ep enable_eplb disable_custom_all_reduce"),
            **_off("enable_nccl_comm_suspend enable_shm_tensor_arena ray_workers_use_nsight"),
            **_off("enable_fault_tolerance"),
            "nnodes": (1,),
            "node_rank": (0,),
            "master_addr": ("127.0.0.1",),
            "master_port": (29501,),
            "prefill_context_parallel_size": (1,),
            "decode_context_parallel_size": (1,),
            "dcp_kv_cache_interleave_size": (1,),
            "data_parallel_size_local": (1,),
            "data_parallel_backend": ("mp",),
            "all2all_backend": ("allgather_reducescatter",),
            "ubatch_size": (0,),
            "dbo_decode_token_threshold": (32,),
            "dbo_prefill_token_threshold": (512,),
            "dp_sync_interval": (16,),
            "expert_placement_strategy": ("linear",),
            "eplb_config": ({},),
            "fault_tolerance_config": ({},),
        },
    ),
    Group(
        "give a folder or a .gguf file as the model, with its tokenizer in it",
        {
            "model_weights": ("",),
            "tokenizer_mode": ("auto", "hf"),
            "load_format": ("auto",),
            "config_format": ("auto",),
            "model_loader_extra_config": ({},),
            "ignore_patterns": ([], ["original/**/*"]),
            "hf_overrides": ({},),
            "pt_load_map_location": ("cpu",),
            "skip_tokenizer_init": (False,),
            "tokens_only": (False,),
            "use_tqdm_on_load": (True, False),
            "renderer_num_workers": (1,),
            **_unset("tokenizer hf_config_path revision tokenizer_revision download_dir hf_token"),
            **_unset("safetensors_load_strategy safetensors_prefetch_num_threads"),
            **_unset("safetensors_prefetch_block_size"),
        },
    ),
    Group(
        "octavo's kernels are chosen by device, kernels, quantization and kv_cache_dtype",
        {
            "cudagraph_capture_sizes": (),
            "max_cudagraph_capture_size": (),
            "compilation_config": ({}, 0),
            "attention_config": ({},),
            "kernel_config": ({},),
            "mamba_config": ({},),
            "ir_op_priority": ({},),
            "optimization_level": (2,),
            "performance_mode": ("balanced",),
            "moe_backend": ("auto",),
            "linear_backend": ("auto",),
            "sparse_indexer_topk_backend": ("auto",),
            "attention_backend": ("auto",),
            "mamba_backend": ("triton",),
            "mamba_cache_dtype": ("auto",),
            "mamba_ssm_cache_dtype": ("auto",),
            "mamba_cache_mode": ("none",),
            "mamba_cache_philox_rounds": (0,),
            "replayssm_buffer_len": (16,),
            "kv_cache_dtype_skip_layers": ([],),
            "jit_monitor_mode": ("warn",),
            "swa_bounded_replay": (True,),
            **_unset("quantization_config mamba_block_size mamba_ssu_algorithm engram_config"),
            **_unset("enable_flashinfer_autotune gdn_prefill_backend kda_prefill_backend"),
            **_unset("kda_decode_backend prefix_match_unit use_fp64_gumbel"),
            **_off("allow_deprecated_quantization jit_monitor_verbose use_replayssm"),
            **_off("enable_mamba_shared_prefix_checkpoint enable_mamba_cache_stochastic_rounding"),
            **_off("kv_sharing_fast_prefill calculate_kv_scales"),
        },
    ),
    Group(
        "use swap_space and kv_offload, octavo's settings for KV that is evicted",
        {
            "offload_backend": ("auto",),
            "cpu_offload_gb": (0,),
            "cpu_offload_params": ([], {}),
            "offload_group_size": (0,),
            "offload_num_in_group": (1,),
            "offload_prefetch_step": (1,),
            "offload_params": ([], {}),
            "kv_offloading_size": (0,),
            "kv_offloading_backend": ("native",),
            **_unset("kv_transfer_config kv_events_config weight_transfer_config"),
            **_off("enable_sleep_mode sleep_mode_offload_cudagraph enable_cumem_allocator"),
            "sleep_preserve_parameter_names": ([],),
        },
    ),
    Group(
        "octavo's scheduler has max_num_seqs, max_num_batched_tokens, itl_target_ms and batching",
        {
            "scheduling_policy": ("fcfs",),
            "scheduler_reserve_full_isl": (True,),
            "prefill_schedule_interval": (1,),
            "watermark": (0,),
            "long_prefill_token_threshold": (0,),
            "long_prefill_token_threshold_adaptive": (False,),
            "num_scheduler_steps": (1,),
            "max_num_partial_prefills": (1,),
            "max_long_partial_prefills": (1,),
            "stream_interval": (1,),
            "max_num_scheduled_tokens": (),
            "max_num_active_seqs": (),
            "max_seq_len_to_capture": (8192,),
            "prefix_caching_hash_algo": ("sha256", "builtin"),
            "prefix_cache_retention_interval": (0,),
            "disable_sliding_window": (False,),
            "disable_cascade_attn": (False, True),
            "disable_hybrid_kv_cache_manager": (False,),
            "use_v2_block_manager": (True,),
        },
    ),
    Group(
        "ask for it in SamplingParams, or in the request",
        {
            "max_logprobs": (20,),
            "logprobs_mode": ("raw_logprobs",),
            "generation_config": ("auto",),
            "override_generation_config": ({},),
            "structured_outputs_config": ({},),
            "guided_decoding_backend": ("auto",),
            "reasoning_config": (),
            "reasoning_parser": ("",),
            "watermark_config": (),
            "aux_output_config": ({},),
            **_off("enable_return_routed_experts return_sampling_mask enable_trace_replay"),
        },
    ),
    Group(
        "octavo logs by --log-level and --log-format, and counts in /metrics",
        {
            "disable_log_stats": (False, True),
            "disable_log_requests": (False, True),
            "enable_log_requests": (False,),
            "aggregate_engine_logging": (False,),
            "per_request_spec_decode_metrics": ("none",),
            "kv_cache_metrics_sample": (0.01,),
            "profiler_config": ({},),
            "collect_detailed_traces": ([],),
            "shutdown_timeout": (0,),
            "additional_config": ({},),
            **_unset("show_hidden_metrics_for_version otlp_traces_endpoint logging_config"),
            **_unset("custom_histogram_buckets log_config_file log_level"),
            **_off("kv_cache_metrics cudagraph_metrics enable_layerwise_nvtx_tracing"),
            **_off("enable_mfu_metrics enable_logging_iteration_details"),
            **_off("fail_on_environ_validation"),
        },
    ),
    Group(
        "give served_model_name to octavo serve, and a template to LLM.chat or octavo serve",
        _unset("served_model_name chat_template"),
    ),
)
UNSUPPORTED = {name: group for group in GROUPS for name in group.nothing}


def translated(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under octavo's names, of those given under octavo's or vLLM's names.

    None is the default of a setting, whatever that is; numbers of numpy become Python's.

    Args:
        defaults: octavo's settings, by name.

    Raises:
        ConfigError: a setting is unknown, or asks for what octavo lacks; names it.
    """
    settings: dict[str, Any] = {}
    for name, value in given.items():
        own, value = OTHER_NAMES.get(name, name), plain(value)
        if own in defaults:
            if value is not None or defaults[own] is None:
                settings[own] = value
        elif name in UNSUPPORTED:
            _refuse(name, value)
        else:
            raise ConfigError(f"unknown engine setting {name!r}{_hint(name, defaults)}")
    return settings


def _refuse(name: str, value: Any) -> None:
    nothing = (None, *UNSUPPORTED[name].nothing[name])
    told = plain_list(value)
    if isinstance(told, set | frozenset | tuple):
        told = list(told)
    if not any(told == each and type(told) in (type(each), int, float) for each in nothing):
        shown = ", ".join(repr(each) for each in nothing)
        raise ConfigError(
            f"{name}={value!r:.60} is not supported: {UNSUPPORTED[name].instead} "
            f"(leave it out, or at {shown})"
        )


def _hint(name: str, defaults: Mapping[str, Any]) -> str:
    import difflib  # for a mistake, and not for every start

    near = difflib.get_close_matches(name, defaults, 1)
    return f"; did you mean {near[0]}?" if near else ""
