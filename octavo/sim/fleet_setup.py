"""Makes the servers of a simulation from the settings of a fleet, with the configuration that
octavo's engine resolves on such a device, and the cost of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.base.errors import ConfigError
from octavo.core.disaggregation import HAND_OVER_SECONDS, LongerThan, PrefillRule
from octavo.core.lookahead import MAX_MULTI_STEPS
from octavo.core.scheduler import SchedulerConfig
from octavo.cost.engine_profile import EngineProfile, Limits, profile
from octavo.cost.find_device import find_device, ranks_of
from octavo.cost.hardware import Device
from octavo.cost.kv import kv_bytes_per_token
from octavo.cost.layouts import spread_over_devices
from octavo.cost.measured_steps import MeasuredSteps, calibrated
from octavo.cost.memory import MemoryPlan, memory
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.pipeline import Pipeline
from octavo.cost.precision import Precision, precision_of
from octavo.cost.rank import on_devices, rank_model
from octavo.cost.step_cost import StepModel
from octavo.offload.restore_rule import predicted_prefill_rule
from octavo.runtime.capacity import Capacity
from octavo.settings.engine import EngineArgs, EngineConfig, parse_bytes, resolve
from octavo.sim.costs import BatchCost, batch_costs
from octavo.sim.fleet import Disaggregation, FleetSpec
from octavo.sim.replica import ReplicaSpec
from octavo.sim.settings import TRANSFER_GB_S, FleetSettings


@dataclass(frozen=True, slots=True)
class _Placement:
    """A model laid out on devices: what its engine has there."""

    spec: ModelSpec
    device: Device
    parallel: Parallel
    replicas: int
    profile: EngineProfile
    precision: Precision
    memory: MemoryPlan


def simulated_fleet(
    spec: ModelSpec,
    settings: FleetSettings,
    engine: Mapping[str, Any],
    measured: MeasuredSteps | None,
) -> tuple[FleetSpec, dict[str, Any]]:
    """Return the replicas that serve a model, and the JSON by which a report describes them.

    Args:
        engine: settings of the engine that were asked for, of ``ENGINE_SETTINGS``.
        measured: step times on this hardware; None takes those of the roofline.

    Raises:
        ConfigError: settings contradict each other, or the model does not fit.
    """
    placement = _place(spec, settings, engine)
    config = _engine_config(placement, engine)
    is_eager = bool(engine.get("enforce_eager"))
    steps = _step_model(placement, measured, is_eager=is_eager)
    cost: BatchCost = steps.seconds
    if measured is not None:
        cost = batch_costs(steps, config.cache.block_size).value
    fleet = FleetSpec(
        _replica(placement, config, cost, is_eager=is_eager),
        placement.replicas * placement.parallel.dp,
        settings.router,
        settings.outages,
        disaggregation(
            settings.prefill_replicas,
            kv_bytes_per_token(spec, placement.precision)
            / ((settings.transfer_gb_s or TRANSFER_GB_S) * 1e9),
            steps,
            config.scheduler,
            settings.max_local_prefill_length,
        ),
    )
    return fleet, _setting_json(placement, settings, config, measured)


def _place(spec: ModelSpec, settings: FleetSettings, engine: Mapping[str, Any]) -> _Placement:
    ranks = (settings.tp or 1) * settings.pp * settings.dp
    device, count = ranks_of(*find_device(settings.hardware), ranks)
    parallel, replicas = spread_over_devices(
        count,
        tp=settings.tp,
        pp=settings.pp,
        ep=settings.ep,
        dp=settings.dp,
        replicas=settings.replicas,
        dp_attention=settings.dp_attention,
    )
    known = profile(settings.profile)
    parallel = on_devices(spec, parallel, device, known)
    precision = precision_of(
        spec, settings.quantization, known.kv_dtype(settings.kv_cache_dtype), settings.dtype
    )
    held = memory(spec, precision, parallel, device, known, limits_of(engine))
    return _Placement(spec, device, parallel, replicas, known, precision, held)


def limits_of(engine: Mapping[str, Any]) -> Limits:
    """Return the limits among an engine's settings that its memory depends on."""
    kv_memory, length = engine.get("kv_cache_memory"), engine.get("max_model_len")
    return Limits(
        max_num_seqs=engine.get("max_num_seqs"),
        max_num_batched_tokens=engine.get("max_num_batched_tokens"),
        max_model_len=None if length == "auto" else length,  # the model's, if it fits
        block_size=engine.get("block_size"),
        utilization=engine.get("gpu_memory_utilization"),
        kv_cache_memory=None if kv_memory is None else parse_bytes(kv_memory),
    )


def _engine_config(placement: _Placement, engine: Mapping[str, Any]) -> EngineConfig:
    """The configuration that production resolves from the same settings, with that memory."""
    held, on_cpu = placement.memory, placement.device.kind == "cpu"
    is_ours = placement.profile.name == "octavo"
    args = EngineArgs.from_kwargs(placement.spec.name, **_engine_settings(placement, engine))
    if is_ours:
        args = args.serving()
    elif "max_queued_requests" not in engine:
        args = replace(args, max_queued_requests=None)
    capacity = Capacity(
        device="cpu" if on_cpu else "cuda",
        dtype=placement.precision.name,
        model_max_len=held.limits.max_model_len,
        kv_bytes_per_token=int(held.kv_bytes_per_token),
        kv_memory_bytes=max(0, held.kv_bytes),
        kv_dtype=placement.precision.kv.name,
        # Tokens of a pipeline come back to its first stage only after a step.
        max_multi_steps=MAX_MULTI_STEPS if is_ours and on_cpu and placement.parallel.pp == 1 else 1,
        num_pools=placement.parallel.num_pools,
    )
    return resolve(args, capacity)


def _engine_settings(placement: _Placement, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were asked for, and those that follow from the memory."""
    spec, device, held = placement.spec, placement.device, placement.memory
    num_blocks = engine.get("num_blocks") or held.num_blocks
    if num_blocks < 1:
        raise ConfigError(
            f"{spec.name} does not fit {device.name}: of {held.usable_bytes / 1e9:.1f} GB that may "
            f"be used, its weights take {held.weights_bytes / 1e9:.1f} GB, and nothing is left for "
            "the KV cache: choose more devices (--tp), larger ones, or a --quantization"
        )
    settings = {name: value for name, value in engine.items() if name != "kv_cache_memory"}
    settings |= {"num_blocks": num_blocks, "block_size": held.block_size}
    settings["max_num_seqs"] = held.limits.max_num_seqs
    if settings.get("enable_chunked_prefill", True):
        settings["max_num_batched_tokens"] = held.limits.max_num_batched_tokens
    return settings


def _replica(
    placement: _Placement, config: EngineConfig, cost: BatchCost, *, is_eager: bool
) -> ReplicaSpec:
    if placement.parallel.pp == 1:
        return ReplicaSpec(config, cost)
    pipeline = Pipeline.of(
        placement.spec,
        placement.precision,
        placement.parallel,
        placement.device,
        placement.profile.name,
        eager=is_eager,
    )
    return ReplicaSpec.of_pipeline(config, pipeline)


def _step_model(
    placement: _Placement, measured: MeasuredSteps | None, *, is_eager: bool
) -> StepModel:
    ranks = rank_model(placement.spec, placement.precision, placement.parallel)
    if measured is None:
        return StepModel.of(ranks, placement.device, placement.profile.name, eager=is_eager)
    return calibrated(ranks, placement.device, measured)


def disaggregation(
    num_prefill: int,
    token_seconds: float,
    steps: StepModel,
    limits: SchedulerConfig,
    most_local: int | None = None,
) -> Disaggregation | None:
    """Return how prompts are computed apart; None for no prefill replicas.

    Args:
        token_seconds: of passing on the KV of a token.
        steps: by whose time prompts stay where they are answered, if ``most_local`` does not say.
    """
    if not num_prefill:
        return None
    rule: PrefillRule
    if most_local is not None:
        rule = LongerThan(most_local)
    else:
        rule = predicted_prefill_rule(
            steps, limits.max_num_batched_tokens, limits.max_model_len, token_seconds
        )
    return Disaggregation(
        num_prefill, lambda tokens: HAND_OVER_SECONDS + tokens * token_seconds, rule
    )


def _setting_json(
    placement: _Placement,
    settings: FleetSettings,
    config: EngineConfig,
    measured: MeasuredSteps | None,
) -> dict[str, Any]:
    parallel, replicas, limits = placement.parallel, placement.replicas, config.scheduler
    return {
        "hardware": placement.device.name,
        "devices": parallel.num_devices * replicas,
        "profile": placement.profile.name,
        "step_times": "roofline" if measured is None else "measured",
        "precision": placement.precision.name,
        **{name: getattr(parallel, name) for name in ("tp", "pp", "ep", "dp")},
        **({"dp_attention": True} if parallel.dp_attention else {}),
        "layout": parallel.text(replicas),
        "router": settings.router,
        "kv_blocks": config.cache.num_blocks,
        "block_size": config.cache.block_size,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
    }
