"""Confirms a plan, by its traffic on production's own scheduler in virtual time.

Formulas approximate a queue; a simulation follows it, request by request, on the same costs of
steps. It takes a second or more, so that only the plan that was chosen is confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.base.errors import ConfigError
from octavo.core.scheduler import SchedulerConfig
from octavo.cost.kv import kv_bytes_per_token
from octavo.measure.metrics import latency_values
from octavo.measure.statistics import mean_or_percentile
from octavo.planner.deployment import Deployment
from octavo.planner.slo import Limit, Slo
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict
from octavo.settings.engine import CacheConfig, EngineConfig
from octavo.sim.fleet import FleetSpec
from octavo.sim.fleet_setup import disaggregation
from octavo.sim.prompts import PromptSpec
from octavo.sim.replica import ReplicaSpec
from octavo.sim.settings import TRANSFER_GB_S
from octavo.sim.simulation import SimulationResult, simulate
from octavo.workload.arrivals import arrival_times
from octavo.workload.plan import LoadPlan

# Enough for a 99th percentile, and few enough to be simulated within seconds.
NUM_REQUESTS = 300


@dataclass(frozen=True, slots=True)
class SimulatedLimit:
    """A limit, and the latency that a simulation found for it."""

    limit: Limit
    seconds: float

    @property
    def holds(self) -> bool:
        return self.seconds <= self.limit.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "limit": self.limit.name,
            "limit_ms": self.limit.seconds * 1e3,
            "simulated_ms": self.seconds * 1e3,
            "holds": self.holds,
        }


def confirm(
    verdict: Verdict, slo: Slo, *, num_requests: int = NUM_REQUESTS, seed: int = 0
) -> tuple[SimulatedLimit, ...]:
    """Simulate requests, and return the latency of each limit.

    Raises:
        ConfigError: the model or a request does not fit, so that there is nothing to simulate.
    """
    if verdict.service is None:
        raise ConfigError("what does not fit into memory cannot be simulated")
    result = simulated(verdict.deployment, verdict.traffic, num_requests, seed)
    return limits_of(result, slo)


def limits_of(result: SimulationResult, slo: Slo) -> tuple[SimulatedLimit, ...]:
    """Return the latency of each limit in a simulation."""
    values = latency_values(result.records)
    return tuple(
        SimulatedLimit(limit, mean_or_percentile(values[limit.latency], limit.percentile))
        for limit in slo
    )


def simulated(
    deployment: Deployment,
    traffic: Traffic,
    num_requests: int = NUM_REQUESTS,
    seed: int = 0,
    num_prefill: int = 0,
) -> SimulationResult:
    """Run requests that come at the rate of the traffic, or begin together; with so many replicas
    that compute prompts for the others."""
    if traffic.rate is None:
        times = [0.0] * (traffic.concurrency or 1)
    else:
        times = arrival_times(num_requests, traffic.rate, seed=seed)
    prompts = [_ask(number, traffic) for number in range(len(times))]
    copies = deployment.replicas * deployment.parallel.dp
    engine = _engine(deployment, traffic)
    kv_bytes = kv_bytes_per_token(deployment.spec, deployment.precision)
    fleet = FleetSpec(
        _replica(deployment, engine),
        copies,
        disaggregation=disaggregation(
            num_prefill, kv_bytes / (TRANSFER_GB_S * 1e9), deployment.steps, engine.scheduler
        ),
    )
    return simulate(prompts, LoadPlan(times, traffic.concurrency), fleet)


def _replica(deployment: Deployment, config: EngineConfig) -> ReplicaSpec:
    pipeline = deployment.pipeline
    if pipeline is None:
        return ReplicaSpec(config, deployment.steps.seconds)
    return ReplicaSpec.of_pipeline(config, pipeline)


def _ask(number: int, traffic: Traffic) -> PromptSpec:
    """Return a prompt that shares nothing with others."""
    first = number * traffic.input_len
    return PromptSpec(str(number), (range(first, first + traffic.input_len),), traffic.output_len)


def _engine(deployment: Deployment, traffic: Traffic) -> EngineConfig:
    limits, memory = deployment.settled, deployment.memory
    # Layers of other kinds than plain attention take blocks of other sizes: what counts is how many
    # requests have room.
    blocks = deployment.memory.max_concurrency(traffic.total_len) * -(
        -traffic.total_len // memory.block_size
    )
    return EngineConfig(
        model=deployment.spec.name,
        device=deployment.device.name,
        dtype=deployment.precision.name,
        seed=0,
        batching="continuous",
        cache=CacheConfig(
            *(memory.block_size, blocks, deployment.precision.kv.name, False),
            num_pools=memory.num_pools,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            target_step_seconds=deployment.target_step_seconds,
        ),
    )
