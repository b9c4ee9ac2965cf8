"""The table of all metrics, from which ``/metrics`` and docs/metrics.md are made.

Each family has a name ``octavo:…``. Where vLLM has the same quantity, the family carries
vLLM's labels and bucket edges too and is exposed a second time under vLLM's name, so that boards
and autoscalers made for vLLM work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Every series has these labels. Where several replicas serve, "engine" is the number of one in the
# metrics of engines, as in vLLM, and these also have it as "replica"; else it is always "0".
BASE_LABELS = ("model_name", "engine")
REPLICA_LABEL = "replica"

FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")
REJECTIONS = (
    "queue_requests",
    "queue_tokens",
    "work",
    "rate_requests",
    "rate_tokens",
    "concurrency",
    "work_of_key",
    "constraints",
    "predicted_ttft",
    "draining",
    "unavailable",
)


def _edges(vllm: tuple[float, ...], finer: tuple[float, ...]) -> tuple[float, ...]:
    """Return vLLM's edges, so that quantiles over its buckets stay the same, and finer ones
    between."""
    return tuple(sorted({*map(float, vllm), *map(float, finer)}))


# Small models answer within vLLM's lowest edges, which are made for large ones.
_LATENCY = _edges(
    (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
)
_FIRST_TOKEN = _edges(
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
    + (1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
    (0.0025, 0.03, 0.05, 0.15, 0.35),
)
_TOKEN = _edges(
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
    + (1, 2.5, 5, 7.5, 10, 20, 40, 80),
    (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.015, 0.02, 0.03, 0.04),
)
_STEP_TOKENS = _edges((1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384), (2, 4))
# Shares of a limit; above 1 where caches hold some of what a step reads.
_SHARES = tuple(number / 20 for number in range(1, 21)) + (1.25, 1.5, 2.0)
# Ratios of the real to the predicted value.
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_STEP_SAMPLES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_SAMPLES = _edges((1, 2, 5, 10, 20), (50, 100))
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# 1, 2, 5, 10, ... up to more than any context; vLLM has the same, up to the model's.
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)) + (1e6,)


@dataclass(frozen=True)
class MetricDefinition:
    """One metric.

    Args:
        name: without the prefix ``octavo:``; that of a counter without ``_total``, which the
            exposition adds.
        help: its definition, for ``# HELP`` and the documentation.
        labels: beside `BASE_LABELS`.
        buckets: upper edges of a histogram.
        vllm: vLLM's name after ``vllm:``, if vLLM has it; "=" is the same name.
        figure: the field of `StepStats` that it shows, if any: a gauge as it is, a counter by how
            much it has grown, a histogram at each step. With a label, a field for each of its
            values, or a field that has a value for each position.
        of_engine: it is of an engine, as all are that have a figure.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: str | None = None
    figure: str | Mapping[str, str] | None = None
    of_engine: bool = False

    @property
    def is_of_engine(self) -> bool:
        return self.of_engine or self.figure is not None

    @property
    def vllm_name(self) -> str | None:
        """The whole name of vLLM's metric, where there is one."""
        if self.vllm is None:
            return None
        return "vllm:" + (self.name if self.vllm == "=" else self.vllm)


def _of_kind(kind: Literal["counter", "gauge", "histogram"]) -> Callable[..., MetricDefinition]:
    """Return a function that defines metrics of a kind; labels come after the help text."""

    def define(name: str, help: str, *labels: str, **more: Any) -> MetricDefinition:
        return MetricDefinition(name, kind, help, labels, **more)

    return define


_counter, _gauge, _histogram = _of_kind("counter"), _of_kind("gauge"), _of_kind("histogram")

FAMILIES = (
    # -- the engine at this moment --
    _gauge(
        "num_requests_running",
        "Samples that are running: they take part in steps.",
        vllm="=",
        figure="num_running",
    ),
    _gauge("num_requests_waiting", "Samples in the queue.", vllm="=", figure="num_waiting"),
    _gauge(
        "num_requests_waiting_by_reason",
        "Samples in the queue: capacity, for lack of slots or KV blocks; deferred is always 0.",
        "reason",
        vllm="=",
        figure={"capacity": "num_waiting"},
    ),
    _gauge(
        "num_tokens_waiting",
        "Tokens of the samples in the queue: prompts, and what was generated before preemption.",
        figure="num_waiting_tokens",
    ),
    _gauge(
        "kv_cache_usage_perc",
        "Share of the KV cache's blocks that requests hold, 0 to 1.",
        vllm="=",
        figure="kv_utilisation",
    ),
    _gauge(
        "kv_blocks",
        "KV blocks: free + cached + used is the whole pool.",
        "state",
        figure={
            "free": "num_free_blocks",
            "cached": "num_cached_blocks",
            "used": "num_used_blocks",
        },
    ),
    _gauge(
        "kv_waste",
        "Share of the slots in blocks of running samples that carry no token, 0 to 1.",
        figure="kv_waste",
    ),
    _gauge(
        "engine_state",
        "1 for the engine's current state, 0 for the others.",
        "state",
        of_engine=True,
    ),
    _gauge(
        "cache_config_info",
        "Always 1; its labels are the block size and the number of blocks, on any device.",
        "block_size",
        "num_gpu_blocks",
        vllm="=",
        of_engine=True,
    ),
    # -- what the engine has done --
    _counter(
        "engine_restarts", "Times that the engine died and was started again.", of_engine=True
    ),
    _gauge(
        "num_requests_unplaced",
        "Samples that wait in the server until one of several replicas has a place for them.",
    ),
    _counter(
        "routed_requests",
        "Requests that were sent to a replica, of several; those that are sent again count again.",
        REPLICA_LABEL,
    ),
    _counter(
        "replica_scalings",
        "Replicas that were started (up) or drained (down) since the load asked for it.",
        "direction",
    ),
    _counter(
        "prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
        vllm="=",
        figure="prefix_tokens_queried",
    ),
    _counter(
        "prefix_cache_hits",
        "Prompt tokens that were found in the prefix cache.",
        vllm="=",
        figure="prefix_tokens_hit",
    ),
    _counter(
        "prefix_cache_restored_tokens",
        "Tokens whose KV was copied into the pool, from the host KV cache, the disk, or replicas "
        "that computed it (peers).",
        "place",
        figure={
            "memory": "prefix_tokens_from_memory",
            "disk": "prefix_tokens_from_disk",
            "peers": "prefix_tokens_from_peers",
        },
    ),
    _counter(
        "kv_transfer_bytes",
        "Bytes of KV that a replica wrote for others, and that it read of theirs.",
        "what",
        figure={"sent": "kv_transfer_bytes_sent", "received": "kv_transfer_bytes_received"},
    ),
    _counter(
        "kv_transfer_seconds",
        "Time that these transfers took, beside the steps.",
        "what",
        figure={"sent": "kv_transfer_seconds_sent", "received": "kv_transfer_seconds_received"},
    ),
    _counter(
        "kv_transfer_misses",
        "KV blocks of others that were computed again: late, not there in time; overwritten, by "
        "newer ones; peer_ended, the replica died; damaged; or unreachable.",
        "reason",
        figure={
            "late": "kv_transfer_misses_late",
            "overwritten": "kv_transfer_misses_overwritten",
            "peer_ended": "kv_transfer_misses_peer_ended",
            "damaged": "kv_transfer_misses_damaged",
            "unreachable": "kv_transfer_misses_unreachable",
        },
    ),
    _counter(
        "kv_offload_blocks",
        "KV blocks that were copied out of the pool, written to the disk, copied back, or dropped "
        "for lack of room or time.",
        "what",
        figure={
            "stored": "kv_blocks_stored",
            "written": "kv_blocks_written",
            "restored": "kv_blocks_restored",
            "dropped": "kv_blocks_dropped",
        },
    ),
    _counter(
        "kv_offload_bytes",
        "Bytes of KV that were copied out of the pool, and back.",
        "what",
        figure={"stored": "kv_bytes_stored", "restored": "kv_bytes_restored"},
    ),
    _counter(
        "kv_offload_errors",
        "KV blocks that could not be written, or not be read as they were written.",
        figure="kv_store_errors",
    ),
    _counter(
        "prefix_cache_misses",
        "Requests, by why no longer prefix was found; block_border: all whole blocks were.",
        "reason",
    ),
    _counter(
        "num_preemptions",
        "Times that a running sample was preempted: its KV blocks went to others.",
        vllm="=",
        figure="num_preemptions",
    ),
    _counter("spec_decode_num_drafts", "Drafts that were verified.", vllm="=", figure="num_drafts"),
    _counter(
        "spec_decode_num_draft_tokens",
        "Draft tokens that were verified.",
        vllm="=",
        figure="draft_tokens",
    ),
    _counter(
        "spec_decode_num_accepted_tokens",
        "Draft tokens that were accepted.",
        vllm="=",
        figure="draft_tokens_accepted",
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafts whose tokens were accepted up to a position, counted from 0.",
        "position",
        vllm="=",
        figure="draft_accepted_by_position",
    ),
    _counter(
        "spec_decode_draft_seconds",
        "Time that drafters took, while no step ran.",
        figure="draft_seconds",
    ),
    _counter(
        "structured_outputs_compiled",
        "Schemas, expressions and grammars that were compiled or refused; equal ones once.",
        figure="constraints_compiled",
    ),
    _counter(
        "structured_output_compile_seconds",
        "Time that this took, beside the steps.",
        figure="constraint_compile_seconds",
    ),
    _counter(
        "structured_output_masks",
        "Masks of allowed tokens that were computed of them.",
        figure="constraint_masks",
    ),
    _counter(
        "structured_output_mask_seconds",
        "Time that these masks took.",
        figure="constraint_mask_seconds",
    ),
    _counter(
        "expert_tokens",
        "Tokens routed to each expert of the model, in all layers.",
        "expert",
        figure="expert_tokens",
    ),
    _gauge(
        "expert_imbalance",
        "Tokens of the expert that got most in a layer since the engine began, to the mean of all. "
        "Layers are those that have experts, from 0 on; of a pipeline, those of its last stage.",
        "layer",
        figure="expert_imbalance",
    ),
    _counter(
        "expert_rank_tokens",
        "Tokens that each rank with whole experts computed, once for each of their experts.",
        "rank",
        figure="expert_rank_tokens",
    ),
    _counter(
        "expert_busiest_rank_tokens",
        "In each step, the tokens of the rank that had most in a layer, for which the others wait.",
        "layer",
        figure="expert_busiest_rank_tokens",
    ),
    _counter(
        "invariant_violations",
        "Times that an audit found the block pool damaged: a bug, please report it.",
        figure="num_invariant_violations",
    ),
    _counter(
        "prompt_tokens",
        "Prompt tokens, counted when the first output token comes; each request once.",
        vllm="=",
    ),
    _counter(
        "prompt_tokens_by_source",
        "prompt_tokens by where their KV came from; external_kv_transfer is always 0.",
        "source",
        vllm="=",
    ),
    _counter(
        "prompt_tokens_cached",
        "Tokens of prompt_tokens that were found in the prefix cache.",
        vllm="=",
    ),
    _counter(
        "generation_tokens",
        "Generated tokens; a request that runs again after a crash counts its tokens again.",
        vllm="=",
    ),
    _histogram(
        "iteration_tokens",
        "Tokens in a step, of prompts and answers.",
        buckets=_STEP_TOKENS,
        vllm="iteration_tokens_total",
        figure="num_tokens",
    ),
    _histogram(
        "iteration_samples",
        "Samples that took part in a step.",
        buckets=_STEP_SAMPLES,
        figure="num_seqs",
    ),
    # -- steps, and what bounds them; all but their time need a known device --
    _histogram(
        "step_seconds",
        "Time of a step, from when it could start to when its results were there.",
        buckets=_TOKEN,
        figure="seconds",
    ),
    _histogram(
        "step_roofline_ratio",
        "The least time that the device needs for a step's bytes and operations, to its time.",
        buckets=_SHARES,
        figure="roofline_share",
    ),
    _counter(
        "step_floor_seconds",
        "The least times of all steps; divided by step_seconds_sum, the share of the roofline.",
        figure="floor_seconds",
    ),
    _counter(
        "step_predicted_seconds",
        "Predicted times of all steps, by a calibration or by the roofline.",
        figure="predicted_seconds",
    ),
    _counter(
        "step_bound",
        "Steps by what bound them: memory, compute, or overhead, which is everything else.",
        "limit",
        figure={
            "memory": "num_memory_bound",
            "compute": "num_compute_bound",
            "overhead": "num_overhead_bound",
        },
    ),
    # -- requests, when they are over --
    _counter("requests_submitted", "Requests that were accepted."),
    _counter(
        "request_success",
        "Finished requests, by how they ended; with several samples, how the first one did.",
        "finished_reason",
        vllm="=",
    ),
    _counter(
        "admission_rejections",
        "Requests refused for overload, by the limit that was reached.",
        "reason",
        vllm="=",
    ),
    _counter("tool_calls", "Tool calls in answers, by the format of the model.", "format"),
    _counter(
        "malformed_tool_calls",
        "Texts in answers that were to be tool calls and are none, by what is wrong.",
        "reason",
    ),
    _counter(
        "structured_output_requests",
        "Requests whose answers had to follow a constraint, by its kind.",
        "kind",
    ),
    _counter(
        "structured_output_refusals",
        "Requests that were refused for their constraint: it is none (invalid), has a part that is "
        "not supported, no text has it (unsatisfiable), the model cannot write it (unwritable), or "
        "it is too complex.",
        "reason",
    ),
    _counter("ignored_fields", "Request fields without effect here, which were dropped."),
    _counter(
        "corrupted_requests",
        "Requests with a sample that ended because the model's logits held NaN or infinity.",
        vllm="=",
    ),
    _histogram("request_prompt_tokens", "Tokens of a request's prompt.", buckets=_TOKENS, vllm="="),
    _histogram(
        "request_generation_tokens", "Tokens generated for a request.", buckets=_TOKENS, vllm="="
    ),
    _histogram(
        "request_max_num_generation_tokens",
        "Tokens of a request's longest sample.",
        buckets=_TOKENS,
        vllm="=",
    ),
    _histogram("request_params_n", "The n of a request.", buckets=_SAMPLES, vllm="="),
    _histogram(
        "request_params_max_tokens",
        "The max_tokens of a request, where it has one.",
        buckets=_TOKENS,
        vllm="=",
    ),
    _histogram(
        "request_num_preemptions",
        "Times that a request was preempted.",
        buckets=_PREEMPTIONS,
        vllm="=",
    ),
    _histogram(
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of a request without cached ones, if it got a token.",
        buckets=_TOKENS,
        vllm="=",
    ),
    # -- times --
    _histogram(
        "time_to_first_token_seconds",
        "TTFT: from arrival to the first token.",
        buckets=_FIRST_TOKEN,
        vllm="=",
    ),
    _histogram(
        "predicted_time_to_first_token_seconds",
        "TTFT predicted at admission, of admitted requests; with max_predicted_ttft.",
        buckets=_FIRST_TOKEN,
    ),
    _histogram(
        "time_to_first_token_prediction_ratio",
        "Ratio of TTFT to the predicted TTFT.",
        buckets=_RATIOS,
    ),
    _histogram(
        "inter_token_latency_seconds",
        "ITL: the time between two steps that brought tokens of a sample.",
        buckets=_TOKEN,
        vllm="=",
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "TPOT: mean time per token after the first; none for fewer than two tokens.",
        buckets=_TOKEN,
        vllm="=",
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "E2E: from arrival to the last token.",
        buckets=_LATENCY,
        vllm="=",
    ),
    _histogram(
        "request_queue_time_seconds",
        "From arrival to the first step that computed something of the request.",
        buckets=_LATENCY,
        vllm="=",
    ),
    _histogram(
        "request_prefill_time_seconds",
        "From that step to the first token.",
        buckets=_LATENCY,
        vllm="=",
    ),
    _histogram(
        "request_decode_time_seconds",
        "From the first token to the last.",
        buckets=_LATENCY,
        vllm="=",
    ),
    _histogram(
        "request_inference_time_seconds",
        "Prefill and decode time together.",
        buckets=_LATENCY,
        vllm="=",
    ),
    # -- around the engine --
    _counter("response_cache_hits", "Requests answered from the response cache."),
    _counter("client_disconnects", "Clients that disconnected before their answer had ended."),
    _counter("slow_readers_cut", "Streams cut because the client did not read them."),
    _counter(
        "http_requests",
        "HTTP requests, by the matched route; 499: the client left before the answer.",
        "route",
        "method",
        "status",
    ),
    _histogram(
        "http_request_duration_seconds",
        "From an HTTP request's header to the end of its answer.",
        "route",
        buckets=_LATENCY,
    ),
)


def to_markdown() -> str:
    """Return the families as the table of docs/metrics.md."""
    lines = ["| metric | type | labels | what | vLLM's name |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        suffix = "_total" if family.kind == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in family.labels)
        alias = f"`{family.vllm_name}{suffix}`" if family.vllm_name else ""
        row = (f"`octavo:{family.name}{suffix}`", family.kind, labels, family.help, alias)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"
