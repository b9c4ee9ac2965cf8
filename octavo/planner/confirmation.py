"""What production's own scheduler makes of the traffic of a plan, in virtual time.

Formulas approximate what a queue does; a simulation follows it, request by request, on the same
costs of steps. It takes a second or more, so it is for the plan that is going to be followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.base.errors import ConfigError
from octavo.core.scheduler import SchedulerConfig
from octavo.measure.metrics import latency_values
from octavo.measure.statistics import percentile
from octavo.planner.deployment import Deployment
from octavo.planner.slo import Limit, Slo
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict
from octavo.settings.engine import CacheConfig, EngineConfig
from octavo.sim.fleet import FleetSpec
from octavo.sim.prompts import PromptSpec
from octavo.sim.replica import ReplicaSpec
from octavo.sim.simulation import SimulationResult, simulate
from octavo.workload.arrivals import arrival_times
from octavo.workload.plan import LoadPlan

# Of which one per cent are a few, and which take a few seconds to simulate.
NUM_REQUESTS = 300

_NAMES = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}


@dataclass(frozen=True, slots=True)
class SimulatedLimit:
    """A limit, and what became of it in simulation."""

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
    """What simulated requests make of each limit.

    Raises:
        ConfigError: what is asked does not fit, so that there is nothing to simulate.
    """
    if verdict.service is None:
        raise ConfigError("what does not fit into memory cannot be simulated")
    result = simulated(verdict.deployment, verdict.traffic, num_requests, seed)
    values = latency_values(result.records)
    return tuple(SimulatedLimit(limit, _of(values[_NAMES[limit.metric]], limit)) for limit in slo)


def simulated(
    deployment: Deployment, traffic: Traffic, num_requests: int = NUM_REQUESTS, seed: int = 0
) -> SimulationResult:
    """A run of requests that come at the rate of the traffic, or begin together."""
    if traffic.rate is None:
        times = [0.0] * (traffic.concurrency or 1)
    else:
        times = arrival_times(num_requests, traffic.rate, seed=seed)
    prompts = [_ask(number, traffic) for number in range(len(times))]
    copies = deployment.replicas * deployment.parallel.dp
    fleet = FleetSpec(
        ReplicaSpec(
            _engine(deployment, traffic), deployment.steps.seconds, depth=deployment.parallel.pp
        ),
        copies,
    )
    return simulate(prompts, LoadPlan(times, traffic.concurrency), fleet)


def _ask(number: int, traffic: Traffic) -> PromptSpec:
    """A prompt that shares nothing with others."""
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
        cache=CacheConfig(memory.block_size, blocks, deployment.precision.kv.name, False),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            target_step_seconds=deployment.target_step_seconds,
        ),
    )


def _of(values: list[float], limit: Limit) -> float:
    if limit.percentile is None:
        return sum(values) / len(values)
    return percentile(values, limit.percentile)
