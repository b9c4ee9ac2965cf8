"""Finds the layout of a model over devices, and the number of devices that traffic takes, of which
kind, and at what price."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from octavo.base.errors import ConfigError
from octavo.cost.hardware import Device
from octavo.cost.layouts import fast_link_devices, layouts
from octavo.cost.parallel import Parallel
from octavo.cost.prediction import Prediction
from octavo.planner.deployment import Deployment
from octavo.planner.money import Price
from octavo.planner.slo import Slo
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict, judge

MOST_DEVICES = 1024  # that are ever advised
_PER_REPLICA = 8


def best_layout(base: Deployment, num_devices: int, traffic: Traffic, slo: Slo) -> Verdict:
    """Return the best layout of a deployment, with as many replicas as fill the devices."""
    verdicts = [
        judge(each.times(num_devices // each.num_devices), traffic, slo)
        for each in candidate_deployments(base, num_devices)
    ]
    return min(verdicts, key=lambda verdict: verdict.order)


def candidate_deployments(base: Deployment, num_devices: int) -> Iterator[Deployment]:
    """Yields one replica in each layout that the model and the device allow.

    Raises:
        ConfigError: not even one device can run it.
    """
    for parallel in layouts(base.spec, base.device, num_devices):
        deployment = replace(base, parallel=parallel, replicas=1)
        try:
            deployment.steps  # noqa: B018  (raises where it cannot be laid out so)
        except ConfigError:
            if parallel.num_devices == 1:
                raise
        else:
            yield deployment


@dataclass(frozen=True, slots=True)
class DeploymentOffer:
    """A feasible deployment. ``dollars_per_hour``: None where no price is known."""

    verdict: Verdict
    dollars_per_hour: Prediction | None

    @property
    def deployment(self) -> Deployment:
        return self.verdict.deployment


@dataclass(frozen=True, slots=True)
class SizingResult:
    """The result of a search. ``offers``: feasible deployments, the cheapest first. ``refused``:
    deployments that no number of replicas makes feasible, the nearest first; judged by a single
    request if that is too slow already, else by one replica."""

    offers: tuple[DeploymentOffer, ...]
    refused: tuple[Verdict, ...]


def search(
    bases: Iterable[Deployment],
    traffic: Traffic,
    slo: Slo,
    *,
    price_of: Callable[[Device], Price | None],
    most_devices: int = MOST_DEVICES,
    per_replica: int = _PER_REPLICA,
) -> SizingResult:
    """Return the least number of devices of each kind, and in each layout, that is feasible.

    Args:
        bases: one for each kind of device, precision and engine; their layouts do not matter.
        per_replica: devices that one replica may be laid out over.
    """
    offers: list[DeploymentOffer] = []
    refused: list[Verdict] = []
    for base in bases:
        for deployment in _all_laid_out(base, min(per_replica, most_devices)):
            alone = judge(deployment, _lone(traffic), slo)
            enough = None
            if alone.is_feasible:
                enough = fewest_replicas(deployment, traffic, slo, most_devices)
            if enough is None:
                refused.append(alone if not alone.is_feasible else judge(deployment, traffic, slo))
            else:
                offers.append(DeploymentOffer(enough, _dollars(enough.deployment, price_of)))
    offers.sort(key=_by_price)
    refused.sort(key=lambda verdict: verdict.order)
    return SizingResult(tuple(offers), tuple(refused))


def fewest_replicas(
    deployment: Deployment, traffic: Traffic, slo: Slo, most_devices: int = MOST_DEVICES
) -> Verdict | None:
    """Return the verdict on the least number of replicas that is feasible; None where that is too
    many.

    More replicas never make it worse: each has less to do.
    """
    most = most_devices // deployment.parallel.num_devices

    def judged(replicas: int) -> Verdict:
        return judge(deployment.times(replicas), traffic, slo)

    low, high = 0, 1
    while high <= most and not (verdict := judged(high)).is_feasible:
        low, high = high, min(2 * high, most) if high < most else most + 1
    if high > most:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if (at_middle := judged(middle)).is_feasible:
            high, verdict = middle, at_middle
        else:
            low = middle
    return verdict


def fewest_devices(
    deployment: Deployment, traffic: Traffic, slo: Slo, most_devices: int = MOST_DEVICES
) -> Verdict | None:
    """Return the same with each matrix on as many devices as it takes; None where no
    number does."""
    found: list[Verdict] = []
    linked, tp = min(fast_link_devices(deployment.device), most_devices), 1
    while tp <= linked:
        parallel = deployment.parallel.with_tp(tp)
        with suppress(ConfigError):  # such a model cannot be laid out so
            enough = fewest_replicas(
                replace(deployment, parallel=parallel, replicas=1), traffic, slo, most_devices
            )
            found += [] if enough is None else [enough]
        tp *= 2
    return min(found, key=lambda verdict: verdict.deployment.num_devices, default=None)


def highest_rate(deployment: Deployment, traffic: Traffic, slo: Slo) -> float:
    """Requests per second that are answered within the limits, to one per cent; 0.0 where not even
    a single request is."""
    if not judge(deployment, _lone(traffic), slo).is_feasible:
        return 0.0

    def keeps(rate: float) -> bool:
        return judge(deployment, replace(traffic, rate=rate), slo).is_feasible

    low, high = 0.0, 1.0
    while keeps(high):
        low, high = high, 2 * high
    while high - low > 0.01 * high and high > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _lone(traffic: Traffic) -> Traffic:
    """Return one request that has a deployment for itself: the least traffic of its kind."""
    return Traffic(traffic.input_len, traffic.output_len, concurrency=1)


def _all_laid_out(base: Deployment, num_devices: int) -> Sequence[Deployment]:
    """Return each layout once, over numbers of devices that are powers of two."""
    found: dict[Parallel, Deployment] = {}
    count = 1
    while count <= num_devices:
        found.update((each.parallel, each) for each in candidate_deployments(base, count))
        count *= 2
    return list(found.values())


def _dollars(
    deployment: Deployment, price_of: Callable[[Device], Price | None]
) -> Prediction | None:
    price = price_of(deployment.device)
    return None if price is None else price.per_hour(1.0) * deployment.num_devices


def _by_price(offer: DeploymentOffer) -> tuple[float, ...]:
    """Sort key: deployments without a price come last, the fewest devices first."""
    dollars = offer.dollars_per_hour
    service = offer.verdict.service
    assert service is not None
    return (
        math.inf if dollars is None else dollars.value,
        offer.deployment.num_devices,
        service.latency().e2e.value,
    )
