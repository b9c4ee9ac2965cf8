"""Small fleets for tests: engines without a model, whose steps cost what a test says."""

from __future__ import annotations

from octavo.core.scheduler import SchedulerConfig
from octavo.cost.pipeline import StageTimes
from octavo.settings.engine import CacheConfig, EngineConfig
from octavo.sim.fleet import FleetSpec
from octavo.sim.prompts import PromptSpec
from octavo.sim.replica import ReplicaSpec
from octavo.sim.simulation import SimulationResult, simulate
from octavo.workload.plan import LoadPlan


def by_tokens(batch) -> float:
    """10 ms a step and 0.1 ms a token."""
    return 0.01 + 1e-4 * batch.num_tokens


def replica_spec(
    cost=by_tokens,
    *,
    num_blocks: int = 4096,
    block_size: int = 16,
    prefix_caching: bool = True,
    batching: str = "continuous",
    speculation=None,
    depth: int = 1,
    stages: int = 1,
    **limits,
) -> ReplicaSpec:
    config = EngineConfig(
        model="none",
        device="none",
        dtype="none",
        seed=0,
        batching=batching,
        cache=CacheConfig(block_size, num_blocks, "none", prefix_caching),
        scheduler=SchedulerConfig(**limits),
        speculation=speculation,
    )
    if stages > 1:
        return ReplicaSpec(config, cost, depth=stages, stage_cost=uneven_stages(cost, stages))
    return ReplicaSpec(config, cost, depth=depth, feeds_tokens=depth > 1)


def uneven_stages(cost, stages: int):
    """Times of a pipeline whose last stage takes twice as long as any other."""

    def times(batch) -> StageTimes:
        each = cost(batch) / (stages + 1)
        return StageTimes([each] * (stages - 1) + [2 * each], send=1e-4, overhead=1e-3)

    return times


def fleet_spec(cost=by_tokens, *, num_replicas=1, router="least_loaded", outages=(), apart=None,
               **replica) -> FleetSpec:  # fmt: skip
    return FleetSpec(replica_spec(cost, **replica), num_replicas, router, tuple(outages), apart)


def different_asks(
    num: int, input_len: int = 100, output_len: int = 20, **fields
) -> list[PromptSpec]:
    """Requests that share nothing."""
    return [
        PromptSpec(str(i), (range(i * input_len, (i + 1) * input_len),), output_len, **fields)
        for i in range(num)
    ]


def at_times(asks: list[PromptSpec], times, spec: FleetSpec, **arguments) -> SimulationResult:
    return simulate(asks, LoadPlan(list(times)), spec, **arguments)
