"""Settings of vLLM's engine that octavo has under another name, or lacks.

Of the latter, a value that asks for nothing is accepted; any other is an error that says what to
do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
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


class Unsupported(NamedTuple):
    """A setting that octavo lacks: what to do instead, and its values that ask for nothing."""

    instead: str
    nothing: tuple[Any, ...]


# As of vLLM 0.32, and some names of earlier versions: what to do instead, and the settings, each
# with its values that ask for nothing beside None, as JSON.
_UNSUPPORTED = (
    (
        "octavo runs no code from model folders",
        """
        code_revision io_processor_plugin scheduler_cls trust_remote_code=false
        worker_cls="auto" worker_extension_cls="" logits_processors=[]
        reasoning_parser_plugin="" model_class_overrides={}
        """,
    ),
    (
        "octavo reads and makes text alone; runner and pooling are its settings of embeddings",
        """
        pooler_config diffusion_config mm_encoder_attn_backend mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path ec_transfer_config
        disable_chunked_mm_input=false language_model_only=false enable_mm_embeds=false
        interleave_mm_strings=false mm_encoder_only=false skip_mm_profiling=false
        enable_mm_processor_stats=false enable_prompt_embeds=false
        convert="auto","none" task="auto","generate" allowed_local_media_path=""
        allowed_media_domains=[] limit_mm_per_prompt={} media_io_kwargs={}
        mm_processor_kwargs={} mm_processor_cache_gb=4,0 mm_processor_cache_type="lru"
        mm_hasher_algorithm="blake3" mm_shm_cache_max_object_size_mb=128
        mm_encoder_tp_mode="weights" mm_tensor_ipc="direct_rpc" mm_processor_device="auto"
        mm_ipc_gpu_memory_gb=0 mm_device_do_normalize=true video_pruning_method="evs"
        video_pruning_rate=0 ec_manager_config={} mm_encoder_fp8_scale_save_margin=1.5
        """,
    ),
    (
        "lora_memory bounds the adapters in memory, and all modules of an adapter are applied",
        """
        max_cpu_loras default_mm_loras lora_target_modules max_lora_cls_labels
        fully_sharded_loras=false enable_tower_connector_lora=false
        specialize_active_lora=false enable_mixed_moe_lora_format=false
        enable_moe_shared_loras=false
        """,
    ),
    (
        "one engine runs on one device",
        """
        distributed_executor_backend distributed_timeout_seconds device_ids
        cpu_distributed_timeout_seconds numa_bind_nodes numa_bind_cpus dcp_comm_backend
        dcp_q_replicate cp_kv_cache_interleave_size data_parallel_rank
        data_parallel_start_rank data_parallel_address data_parallel_rpc_port
        enable_batch_sharded_sampling elastic_ep_max_dp_size
        disable_nccl_for_dp_synchronization max_parallel_loading_workers numa_bind=false
        data_parallel_hybrid_lb=false data_parallel_external_lb=false enable_hc_sp=false
        data_parallel_multi_port_external_lb=false enable_ep_weight_filter=false
        enable_dbo=false enable_elastic_ep=false enable_eplb=false
        disable_custom_all_reduce=false enable_nccl_comm_suspend=false
        enable_shm_tensor_arena=false ray_workers_use_nsight=false
        enable_fault_tolerance=false nnodes=1 node_rank=0 master_addr="127.0.0.1"
        master_port=29501 prefill_context_parallel_size=1 decode_context_parallel_size=1
        dcp_kv_cache_interleave_size=1 data_parallel_size_local=1 data_parallel_backend="mp"
        all2all_backend="allgather_reducescatter" ubatch_size=0
        dbo_decode_token_threshold=32 dbo_prefill_token_threshold=512 dp_sync_interval=16
        expert_placement_strategy="linear" eplb_config={} fault_tolerance_config={}
        """,
    ),
    (
        "give a folder or a .gguf file as the model, with its tokenizer in it",
        """
        tokenizer hf_config_path revision tokenizer_revision download_dir hf_token
        safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size skip_tokenizer_init=false tokens_only=false
        model_weights="" tokenizer_mode="auto","hf" load_format="auto" config_format="auto"
        model_loader_extra_config={} ignore_patterns=[],["original/**/*"] hf_overrides={}
        pt_load_map_location="cpu" use_tqdm_on_load=true,false renderer_num_workers=1
        """,
    ),
    (
        "octavo's kernels are chosen by device, kernels, quantization and kv_cache_dtype",
        """
        cudagraph_capture_sizes max_cudagraph_capture_size quantization_config
        mamba_block_size mamba_ssu_algorithm engram_config enable_flashinfer_autotune
        gdn_prefill_backend kda_prefill_backend kda_decode_backend prefix_match_unit
        use_fp64_gumbel allow_deprecated_quantization=false jit_monitor_verbose=false
        use_replayssm=false enable_mamba_shared_prefix_checkpoint=false
        enable_mamba_cache_stochastic_rounding=false kv_sharing_fast_prefill=false
        calculate_kv_scales=false compilation_config={},0 attention_config={}
        kernel_config={} mamba_config={} ir_op_priority={} optimization_level=2
        performance_mode="balanced" moe_backend="auto" linear_backend="auto"
        sparse_indexer_topk_backend="auto" attention_backend="auto" mamba_backend="triton"
        mamba_cache_dtype="auto" mamba_ssm_cache_dtype="auto" mamba_cache_mode="none"
        mamba_cache_philox_rounds=0 replayssm_buffer_len=16 kv_cache_dtype_skip_layers=[]
        jit_monitor_mode="warn" swa_bounded_replay=true
        """,
    ),
    (
        "use swap_space and kv_offload, octavo's settings for KV that is evicted",
        """
        kv_transfer_config kv_events_config weight_transfer_config enable_sleep_mode=false
        sleep_mode_offload_cudagraph=false enable_cumem_allocator=false
        offload_backend="auto" cpu_offload_gb=0 cpu_offload_params=[],{}
        offload_group_size=0 offload_num_in_group=1 offload_prefetch_step=1
        offload_params=[],{} kv_offloading_size=0 kv_offloading_backend="native"
        sleep_preserve_parameter_names=[]
        """,
    ),
    (
        "octavo's scheduler has max_num_seqs, max_num_batched_tokens, itl_target_ms and batching",
        """
        max_num_scheduled_tokens max_num_active_seqs
        long_prefill_token_threshold_adaptive=false disable_sliding_window=false
        disable_hybrid_kv_cache_manager=false scheduling_policy="fcfs"
        scheduler_reserve_full_isl=true prefill_schedule_interval=1 watermark=0
        long_prefill_token_threshold=0 num_scheduler_steps=1 max_num_partial_prefills=1
        max_long_partial_prefills=1 stream_interval=1 max_seq_len_to_capture=8192
        prefix_caching_hash_algo="sha256","builtin" prefix_cache_retention_interval=0
        disable_cascade_attn=false,true use_v2_block_manager=true
        """,
    ),
    (
        "ask for it in SamplingParams, or in the request",
        """
        reasoning_config watermark_config enable_return_routed_experts=false
        return_sampling_mask=false enable_trace_replay=false max_logprobs=20
        logprobs_mode="raw_logprobs" generation_config="auto" override_generation_config={}
        structured_outputs_config={} guided_decoding_backend="auto" reasoning_parser=""
        aux_output_config={}
        """,
    ),
    (
        "octavo logs by --log-level and --log-format, and counts in /metrics",
        """
        show_hidden_metrics_for_version otlp_traces_endpoint logging_config
        custom_histogram_buckets log_config_file log_level enable_log_requests=false
        aggregate_engine_logging=false kv_cache_metrics=false cudagraph_metrics=false
        enable_layerwise_nvtx_tracing=false enable_mfu_metrics=false
        enable_logging_iteration_details=false fail_on_environ_validation=false
        disable_log_stats=false,true disable_log_requests=false,true
        per_request_spec_decode_metrics="none" kv_cache_metrics_sample=0.01
        profiler_config={} collect_detailed_traces=[] shutdown_timeout=0
        additional_config={}
        """,
    ),
    (
        "give served_model_name to octavo serve, and a template to LLM.chat or octavo serve",
        """
        served_model_name chat_template
        """,
    ),
)


@cache
def unsupported() -> dict[str, Unsupported]:
    """Return the settings of vLLM's that octavo lacks, by name."""
    found = {}
    for instead, settings in _UNSUPPORTED:
        for word in settings.split():
            name, _, values = word.partition("=")
            found[name] = Unsupported(instead, (None, *json.loads(f"[{values}]")))
    return found


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
        elif name in unsupported():
            _refuse(name, value)
        else:
            raise ConfigError(f"unknown engine setting {name!r}{_hint(name, defaults)}")
    return settings


def _refuse(name: str, value: Any) -> None:
    instead, nothing = unsupported()[name]
    told = plain_list(value)
    if isinstance(told, set | frozenset | tuple):
        told = list(told)
    if not any(told == each and type(told) in (type(each), int, float) for each in nothing):
        shown = ", ".join(repr(each) for each in nothing)
        raise ConfigError(
            f"{name}={value!r:.60} is not supported: {instead} (leave it out, or at {shown})"
        )


def _hint(name: str, defaults: Mapping[str, Any]) -> str:
    import difflib  # for a mistake, and not for every start

    near = difflib.get_close_matches(name, defaults, 1)
    return f"; did you mean {near[0]}?" if near else ""
