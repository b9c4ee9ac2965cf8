"""Splits of the replicas of a plan between prompts and answers, compared by simulation.

Formulas of steps say nothing of who waits for whom, which is all that prompts apart change; so each
split runs the traffic on production's own scheduler, routers and rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import ConfigError
from octavo.planner.confirmation import NUM_REQUESTS, SimulatedLimit, limits_of, simulated
from octavo.planner.slo import Slo
from octavo.planner.verdict import Verdict
from octavo.sim.report import roles_json


@dataclass(frozen=True, slots=True)
class PrefillSplit:
    """A number of replicas that compute prompts; 0: each computes whole requests.

    ``limits``: what was found for each limit. ``roles``: of `octavo.sim.report.roles_json`.
    """

    num_prefill: int
    limits: tuple[SimulatedLimit, ...]
    roles: dict[str, Any]

    @property
    def worst(self) -> float:
        """The largest of the latencies, as a share of its limit: above 1, one is broken."""
        return max(each.seconds / each.limit.seconds for each in self.limits)

    def as_json(self) -> dict[str, Any]:
        return {
            "prefill_replicas": self.num_prefill,
            "worst": self.worst,
            "limits": [each.as_json() for each in self.limits],
            "roles": self.roles,
        }


def prefill_splits(
    verdict: Verdict, slo: Slo, *, num_requests: int = NUM_REQUESTS, seed: int = 0
) -> Sequence[PrefillSplit]:
    """Return every split of the replicas of a plan, the one that keeps furthest from all limits
    first.

    Raises:
        ConfigError: there is nothing to split, or no limit to judge by.
    """
    deployment = verdict.deployment
    copies = deployment.replicas * deployment.parallel.dp
    if not slo.limits:
        raise ConfigError("splits are compared by limits of latencies: give slo")
    if verdict.service is None:
        raise ConfigError("what does not fit into memory cannot be simulated")
    if copies < 2:
        raise ConfigError(
            "the plan has one replica, and prompts apart need two: give replicas, more devices, or "
            "a smaller tp"
        )
    found = []
    for num_prefill in range(copies):
        result = simulated(deployment, verdict.traffic, num_requests, seed, num_prefill)
        found.append(PrefillSplit(num_prefill, limits_of(result, slo), roles_json(result)))
    return sorted(found, key=lambda split: (split.worst, split.num_prefill))
