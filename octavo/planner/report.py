"""The JSON of ``octavo plan --json``: bytes and counts, milliseconds in keys that end in ``_ms``,
and predictions with their value, interval and source."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from octavo.cost.kv import kv_bytes_per_token
from octavo.cost.memory import MemoryPlan
from octavo.cost.step_cost import StepCost
from octavo.cost.weights import num_parameters, weights
from octavo.planner.answer import Plan
from octavo.planner.deployment import Deployment
from octavo.planner.figures import figure_json, ms_json
from octavo.planner.latency import Latency
from octavo.planner.money import watts_text


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return all of a plan; figures that do not exist are null."""
    deployment, traffic = plan.deployment, plan.traffic
    spec, memory = deployment.spec, deployment.memory
    return {
        "model": spec.name,
        "deployment": deployment_json(deployment),
        "runs": spec.why_not_run is None,
        "why_not_run": spec.why_not_run,
        "feasible": plan.is_feasible,
        "certain": plan.verdict.is_certain,
        **_binding_json(plan),
        "parameters": num_parameters(spec),
        "active_parameters": num_parameters(spec, active=True),
        "weights_bytes": round(sum(map(deployment.precision.num_bytes, weights(spec)))),
        "kv_bytes_per_token": kv_bytes_per_token(spec, deployment.precision),
        "kv_bytes_per_token_per_rank": memory.kv_bytes_per_token,
        "exchange": exchange_json(deployment),
        "memory": memory_json(memory),
        "kv_tokens": memory.kv_tokens * deployment.parallel.dp * deployment.replicas,
        "max_concurrency": deployment.max_concurrency(traffic.total_len),
        "input_len": traffic.input_len,
        "output_len": traffic.output_len,
        "request_rate": traffic.rate,
        "concurrency": traffic.concurrency,
        "prefill_ms": ms_json(plan.prefill),
        "decode_step_ms": ms_json(plan.decode_step),
        **_service_json(plan),
        "cost": _cost_json(plan),
        "bound": {"prefill": plan.prefill_cost.bound, "decode": plan.decode_cost.bound},
        "warnings": list(plan.warnings),
        "slo": [each.as_json() for each in plan.verdict.kept],
        "advice": [advice.as_json() for advice in plan.advice],
    }


def deployment_json(deployment: Deployment) -> dict[str, Any]:
    parallel, limits = deployment.parallel, deployment.settled
    return {
        "hardware": deployment.device.name,
        "num_devices": deployment.num_devices,
        "replicas": deployment.replicas,
        **asdict(parallel),
        "quantization": deployment.precision.name,
        "kv_cache_dtype": deployment.precision.kv.name,
        "profile": deployment.profile.name,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
    }


def exchange_json(deployment: Deployment) -> dict[str, int] | None:
    """Return the bytes that ranks on processors exchange, all together; None where they add up
    results, or there is one. ``meetings``: in a pass, without that of the
    logits."""
    exchange = deployment.steps.model.exchange
    if exchange is None:
        return None
    return {
        "bytes_per_token": exchange.token_bytes,
        "bytes_per_logits_row": exchange.row_bytes,
        "meetings": exchange.meetings,
    }


def memory_json(memory: MemoryPlan) -> dict[str, Any]:
    """Return the memory of one device. ``missing_bytes``: how much more it would need for the
    weights."""
    return {
        "total_bytes": memory.total_bytes,
        "usable_bytes": memory.usable_bytes,
        "weights_bytes": memory.weights_bytes,
        "activations_bytes": round(memory.activations.value),
        "non_torch_bytes": memory.non_torch_bytes,
        "graphs_bytes": memory.graphs_bytes,
        "kept_back_bytes": memory.kept_back_bytes,
        "kv_bytes": max(0, memory.kv_bytes),
        "missing_bytes": max(0, -memory.kv_bytes),
        "block_size": memory.block_size,
        "num_blocks": memory.num_blocks,
        "activations": memory.activations.as_json(),
    }


def latency_json(latency: Latency) -> dict[str, Any]:
    return {f"{name}_ms": ms_json(latency.of(name)) for name in ("ttft", "tpot", "e2e")}


def cost_json(cost: StepCost) -> dict[str, Any]:
    """Return the parts of the time of a step."""
    return {
        "total_ms": ms_json(cost.total),
        "bound": cost.bound,
        "ops": [op.as_json() for op in cost.ops],
        "communication_ms": ms_json(cost.comm),
        "overhead_ms": ms_json(cost.overhead),
    }


def _binding_json(plan: Plan) -> dict[str, Any]:
    binding, nearest = plan.verdict.binding, plan.feasible_alternatives
    return {
        "binding": None if binding is None else binding.name,
        "violated": [] if binding is None else list(binding.violated),
        "why": None if binding is None else binding.why,
        "nearest": None if nearest is None else nearest.as_json(),
    }


def _service_json(plan: Plan) -> dict[str, Any]:
    service = plan.service
    if service is None:
        names = ("ttft_ms", "tpot_ms", "e2e_ms", "p99", "requests_per_s", "output_tps", "streams")
        return dict.fromkeys(names)
    rate = service.requests_per_second
    return {
        **latency_json(service.latency()),
        "p99": latency_json(service.latency(99)),
        "requests_per_s": rate.as_json(),
        "output_tps": (rate * plan.traffic.output_len).as_json(),
        "streams": figure_json(service.streams),
    }


def _cost_json(plan: Plan) -> dict[str, Any]:
    if plan.bill is not None:
        return {**plan.bill.as_json(), "power": watts_text(plan.deployment.device) or None}
    return dict.fromkeys(("utilization", "per_request", "per_million_output_tokens", "per_day"))
