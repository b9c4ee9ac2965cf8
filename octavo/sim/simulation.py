"""Runs clients and a fleet of engines in virtual time, and records each request.

Everything that decides (scheduler, block manager, prefix cache, lookahead) is production's own.
Simulated are the time of a step, clients, and tokens that mean nothing. Nothing here reads a clock,
and the same arguments give the same result in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.base.gc_pause import no_collections
from octavo.base.renamed import RenamedAttribute
from octavo.measure.request_record import RequestRecord
from octavo.sim.agenda import Agenda
from octavo.sim.clients import Clients
from octavo.sim.fleet import Fleet, FleetSpec
from octavo.sim.prompts import PromptSpec
from octavo.sim.replica import ReplicaStepTimes, ReplicaTotals
from octavo.sim.request import SimRequest
from octavo.workload.plan import LoadPlan

Progress = Callable[[int, int], None]  # requests that have ended, and all


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The requests of a run, in the order of sending, and the counters of its replicas.
    ``makespan_s`` ends with the last request and the last step."""

    requests: Sequence[SimRequest]
    replicas: Sequence[ReplicaTotals]

    flights = RenamedAttribute("requests")

    @property
    def makespan_s(self) -> float:
        ends = [request.record.ended for request in self.requests]
        return max([*ends, *(each.last_step_s for each in self.replicas)], default=0.0)

    @property
    def records(self) -> list[RequestRecord]:
        return [request.record for request in self.requests]

    @property
    def num_preemptions(self) -> int:
        return sum(each.num_preemptions for each in self.replicas)


def simulate(
    prompts: Sequence[PromptSpec],
    plan: LoadPlan,
    spec: FleetSpec,
    *,
    watch: Callable[[ReplicaStepTimes], None] | None = None,
    progress: Progress | None = None,
) -> SimulationResult:
    """Serve requests by a simulated fleet, until all of them have ended.

    Args:
        plan: the times of sending of requests that follow no other; see ``Clients``.
        watch: called with every step, such as ``Timeline.note``.
        progress: called with every request that ends.

    Raises:
        ConfigError: plan and requests do not fit together.
        EngineError: the cost of a step cannot be computed.
    """
    agenda = Agenda()
    num_ended = 0

    def end(request: SimRequest) -> None:
        nonlocal num_ended
        num_ended += 1
        clients.ended(request)
        if progress is not None:
            progress(num_ended, len(prompts))

    fleet = Fleet(spec, agenda, end, watch)
    clients = Clients(prompts, plan, agenda, fleet.send, fleet.abort, end)
    clients.start()
    with no_collections():
        agenda.run(fleet.begin)
    for request in clients.requests:
        if not request.is_over:  # every replica that could serve it has failed for good
            request.fail(agenda.now, "no replica was left to serve it", status=503)
    return SimulationResult(clients.requests, fleet.totals())
