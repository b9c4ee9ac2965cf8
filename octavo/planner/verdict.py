"""Judges whether a deployment is feasible, and what binds if it is not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from octavo.cost.prediction import Prediction
from octavo.planner.deployment import Deployment
from octavo.planner.figures import gib, ms, ms_json
from octavo.planner.latency import ServiceEstimate
from octavo.planner.slo import Limit, Slo
from octavo.planner.traffic import Traffic

# What binds, from the farthest from feasible to the nearest.
_BY_NEARNESS = ("max_model_len", "weights", "kv", "throughput", "max_num_seqs", "ttft", "tpot")

# Beyond these, more streams in a step hardly make it yield more.
_MANY_SLOTS = 1024


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """A limit, and the latency that is predicted for it."""

    limit: Limit
    predicted: Prediction

    @property
    def holds(self) -> bool:
        return self.predicted.value <= self.limit.seconds

    @property
    def is_certain(self) -> bool:
        """True if it holds over the whole interval of the prediction, or nowhere in it."""
        return self.holds == (self.predicted.high <= self.limit.seconds) and self.holds == (
            self.predicted.low <= self.limit.seconds
        )

    @property
    def slack(self) -> float:
        """Share of the limit that is left; below 0 where it does not hold."""
        return 1 - self.predicted.value / self.limit.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "limit": self.limit.name,
            "limit_ms": self.limit.seconds * 1e3,
            "predicted_ms": ms_json(self.predicted),
            "holds": self.holds,
            "certain": self.is_certain,
        }


@dataclass(frozen=True, slots=True)
class Binding:
    """The reason why a deployment is not feasible.

    ``name``: ``max_model_len``, ``weights``, ``kv``, ``max_num_seqs``, ``throughput``, ``ttft`` or
    ``tpot``. ``violated``: the limits that are not kept because of it.
    """

    name: str
    why: str
    violated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judged deployment. ``service`` is None where the model, or a request, does not fit into
    memory; ``kept`` checks each limit."""

    deployment: Deployment
    traffic: Traffic
    service: ServiceEstimate | None
    kept: tuple[LimitCheck, ...]
    binding: Binding | None

    @property
    def is_feasible(self) -> bool:
        return self.binding is None

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key, the best first: feasible deployments by throughput, then by latency; then the
        others by how near they are to feasible."""
        service, binding = self.service, self.binding
        if service is not None and binding is None:
            return (0, -service.requests_per_second.value, service.latency().e2e.value)
        place = 0 if binding is None else _BY_NEARNESS.index(binding.name)
        slack = min((each.slack for each in self.kept), default=-math.inf)
        return (1, -place, -slack)

    @property
    def is_certain(self) -> bool:
        """True if no limit lies inside of an interval."""
        return all(each.is_certain for each in self.kept)


def judge(deployment: Deployment, traffic: Traffic, slo: Slo) -> Verdict:
    """Judge a deployment by formula. A limit is kept if the middle of its prediction keeps it."""
    binding = _does_not_fit(deployment, traffic)
    if binding is not None:
        return Verdict(deployment, traffic, None, (), binding)
    service = deployment.serve(traffic)
    if not service.is_stable:
        return Verdict(deployment, traffic, service, (), _overload(deployment, traffic))
    kept = tuple(
        LimitCheck(limit, service.latency(limit.percentile).of(limit.metric)) for limit in slo
    )
    return Verdict(deployment, traffic, service, kept, _late(kept, service, traffic))


# -- what binds -----------------------------------------------------------------------------------


def _does_not_fit(deployment: Deployment, traffic: Traffic) -> Binding | None:
    memory, total_len = deployment.memory, traffic.total_len
    most = deployment.settled.max_model_len
    if total_len > most:
        return Binding(
            "max_model_len",
            f"requests of {total_len:,} tokens are longer than the {most:,} that the model or "
            "max_model_len allows",
        )
    if memory.kv_bytes <= 0:
        return Binding(
            "weights",
            f"{gib(memory.weights_bytes)} of weights and {gib(memory.kept_back_bytes)} that the "
            f"engine keeps back leave nothing of the {gib(memory.usable_bytes)} that it may use "
            f"of each {deployment.device.name}",
        )
    fitting = deployment.max_concurrency(total_len)
    if not fitting:  # where some have room, others wait for it
        return Binding(
            "kv",
            f"{gib(memory.kv_bytes)} a device do not hold the KV cache of one request of "
            f"{total_len:,} tokens",
        )
    return None


def _overload(deployment: Deployment, traffic: Traffic) -> Binding:
    """Say why arrivals cannot be answered: for want of slots, of memory for more, or of speed."""
    limits, fitting = deployment.settled, deployment.max_concurrency(traffic.total_len)
    slots = deployment.slots(traffic.total_len)
    more = replace(slots, max_num_seqs=max(slots.max_num_seqs, _MANY_SLOTS))
    if not deployment.serve(traffic, more).is_stable:
        return Binding(
            "throughput",
            f"{traffic.rate:g} requests a second are more than {deployment.num_devices} "
            f"{deployment.device.name} answer, however many run at once",
        )
    if limits.max_num_seqs * deployment.num_groups < fitting:
        return Binding(
            "max_num_seqs",
            f"at most {limits.max_num_seqs:,} run at once, though memory has room for {fitting:,}",
        )
    return Binding(
        "kv",
        f"the KV cache of {fitting:,} requests of {traffic.total_len:,} tokens fits, and "
        f"{traffic.rate:g} requests a second make more than that run at once",
    )


def _late(kept: Iterable[LimitCheck], service: ServiceEstimate, traffic: Traffic) -> Binding | None:
    """Return the part of the worst limit that takes most of the time."""
    broken = [each for each in kept if not each.holds]
    if not broken:
        return None
    worst = min(broken, key=lambda each: each.slack)
    name, metric = worst.limit.name, worst.limit.metric
    why = f"{name} is {ms(worst.predicted.value)}, and may be {ms(worst.limit.seconds)}"
    if metric == "e2e":
        latency = service.latency(worst.limit.percentile)
        answer = (traffic.output_len - 1) * latency.tpot.value
        metric = "tpot" if answer > latency.ttft.value else "ttft"
        why += (
            f": {ms(latency.ttft.value)} to the first token, and {traffic.output_len - 1} times "
            f"{ms(latency.tpot.value)} for the others"
        )
    return Binding(metric, why, tuple(each.limit.name for each in broken))
