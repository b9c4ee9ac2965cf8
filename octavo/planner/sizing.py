"""How to lay a model out over devices, and how many of which do what is asked.

Rules of layouts: tensor parallelism shares out matrices within an island of fast links, and divides
the heads; pipelines go across islands, or where links are slow; experts are shared out by those
that share the rest, or by copies of it. Whatever these leave is judged, and the best is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from octavo.cost.hardware import Device
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.prediction import Prediction
from octavo.errors import ConfigError
from octavo.planner.deployment import Deployment
from octavo.planner.money import Price
from octavo.planner.slo import Slo
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict, judge

MOST_DEVICES = 1024  # nobody is told to buy more

_ISLAND = 8  # devices of a machine, whose links are fast
_LARGE_ISLANDS = {"NVL72": 72}
_SLOW_LINK = 100e9  # bytes a second; PCIe is below, and NVLink above

# What is in the way, from what is farthest from an answer to what is nearest.
_BY_NEARNESS = ("max_model_len", "weights", "kv", "throughput", "max_num_seqs", "ttft", "tpot")


# -- layouts --------------------------------------------------------------------------------------


def layouts(spec: ModelSpec, device: Device, num_devices: int) -> Iterator[Parallel]:
    """Ways to lay one replica out over at most so many devices."""
    has_experts = any(layer.mlp is not None and layer.mlp.num_experts for layer in spec.layers)
    island = island_of(device)
    for tp in _divisors(num_devices):
        if tp > island:
            continue
        yield Parallel(tp=tp)
        if has_experts and tp > 1:
            yield Parallel(tp=tp, ep=tp)
            yield Parallel(dp=tp, ep=tp)
        if tp == island or has_slow_link(device):
            for pp in _divisors(num_devices // tp)[1:]:
                if pp <= spec.num_layers:
                    yield Parallel(tp=tp, pp=pp)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def island_of(device: Device) -> int:
    for words, size in _LARGE_ISLANDS.items():
        if words in device.link_kind:
            return size
    return _ISLAND


def has_slow_link(device: Device) -> bool:
    return device.link_bandwidth is None or device.link_bandwidth < _SLOW_LINK


def best_layout(base: Deployment, num_devices: int, traffic: Traffic, slo: Slo) -> Verdict:
    """The best of the layouts of a deployment over so many devices, with as many replicas as there
    are devices for."""
    verdicts = [
        judge(each.times(num_devices // each.num_devices), traffic, slo)
        for each in _laid_out(base, num_devices)
    ]
    return min(verdicts, key=_order)


def _laid_out(base: Deployment, num_devices: int) -> Iterator[Deployment]:
    """One replica in each layout that the model allows.

    Raises:
        ConfigError: there is none.
    """
    refusal = None
    is_any = False
    for parallel in layouts(base.spec, base.device, num_devices):
        try:
            deployment = replace(base, parallel=parallel, replicas=1)
            deployment.steps  # noqa: B018  (raises where the model cannot be laid out so)
        except ConfigError as error:
            refusal = error
            continue
        is_any = True
        yield deployment
    if not is_any and refusal is not None:
        raise refusal


def _order(verdict: Verdict) -> tuple[float, ...]:
    """Less is better: what does what is asked before what does not, then who answers most, then
    who is soonest; of those that do not, who is nearest to it."""
    service, binding = verdict.service, verdict.binding
    if service is None or binding is not None:
        place = _BY_NEARNESS.index(binding.name) if binding else 0
        slack = min((each.slack for each in verdict.kept), default=-math.inf)
        return (1, -place, -slack)
    return (0, -service.requests_per_second.value, service.latency().e2e.value)


# -- how many -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offer:
    """A deployment that does what is asked. ``dollars_per_hour``: None where no price is known."""

    verdict: Verdict
    dollars_per_hour: Prediction | None

    @property
    def deployment(self) -> Deployment:
        return self.verdict.deployment


@dataclass(frozen=True, slots=True)
class Search:
    """``offers``: the cheapest first. ``refused``: what no number of replicas makes good, the
    nearest to an answer first: judged by a single request that has all for itself."""

    offers: tuple[Offer, ...]
    refused: tuple[Verdict, ...]


def search(
    bases: Iterable[Deployment],
    traffic: Traffic,
    slo: Slo,
    *,
    price_of: Callable[[Device], Price | None],
    most_devices: int = MOST_DEVICES,
    per_replica: int = _ISLAND,
) -> Search:
    """The least number of devices of each kind, and in each layout, that does what is asked.

    Args:
        bases: one for each kind of device, precision and engine; their layouts do not matter.
        per_replica: devices that one replica may be laid out over.
    """
    offers: list[Offer] = []
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
                offers.append(Offer(enough, _dollars(enough.deployment, price_of)))
    offers.sort(key=_by_price)
    refused.sort(key=_order)
    return Search(tuple(offers), tuple(refused))


def fewest_replicas(
    deployment: Deployment, traffic: Traffic, slo: Slo, most_devices: int = MOST_DEVICES
) -> Verdict | None:
    """What the least number of replicas makes of the traffic; None where that is too many.

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


def highest_rate(deployment: Deployment, traffic: Traffic, slo: Slo) -> float:
    """Requests a second that are answered within the limits, to one per cent; 0.0 where not even a
    single one is."""
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


@dataclass(frozen=True, slots=True)
class Nearest:
    """What could be had where what is asked cannot.

    Args:
        num_devices: of the same kind that would do, None where no number does.
        rate: requests a second that these devices answer within the limits, where a rate is asked.
        concurrency: requests that have room at once.
        output_len: tokens of answers that end in time; None where no limit is of whole answers, or
            not even one token does.
        limits: seconds that limits would have to be for what is asked, by their names.
    """

    num_devices: int | None
    rate: float | None
    concurrency: int
    output_len: int | None
    limits: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        return {
            "num_devices": self.num_devices,
            "rate": self.rate,
            "concurrency": self.concurrency,
            "output_len": self.output_len,
            "slo": {f"{name}_ms": seconds * 1e3 for name, seconds in self.limits.items()},
        }


def nearest(verdict: Verdict, slo: Slo) -> Nearest:
    """Of a deployment that does not do what is asked."""
    deployment, traffic = verdict.deployment, verdict.traffic
    enough = fewest_replicas(deployment, traffic, slo)
    return Nearest(
        num_devices=None if enough is None else enough.deployment.num_devices,
        rate=None if traffic.rate is None else highest_rate(deployment, traffic, slo),
        concurrency=deployment.max_concurrency(traffic.total_len),
        output_len=longest_answer(verdict, slo),
        limits={
            each.limit.name: max(each.limit.seconds, each.predicted.value) for each in verdict.kept
        },
    )


def longest_answer(verdict: Verdict, slo: Slo) -> int | None:
    """Tokens of an answer that keeps the limits where that of the traffic ends too late."""
    if not any(each.limit.metric == "e2e" and not each.holds for each in verdict.kept):
        return None

    def keeps(output_len: int) -> bool:
        shorter = replace(verdict.traffic, output_len=output_len)
        return judge(verdict.deployment, shorter, slo).is_feasible

    low, high = 0, verdict.traffic.output_len
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low or None


def _lone(traffic: Traffic) -> Traffic:
    """A request that has a deployment for itself: the least that its kind takes."""
    return Traffic(traffic.input_len, traffic.output_len, concurrency=1)


def _all_laid_out(base: Deployment, num_devices: int) -> Sequence[Deployment]:
    """By numbers of devices that are powers of two, each layout once."""
    found: dict[Parallel, Deployment] = {}
    count = 1
    while count <= num_devices:
        with suppress(ConfigError):  # it cannot be laid out over as many
            found.update((each.parallel, each) for each in _laid_out(base, count))
        count *= 2
    return list(found.values())


def _dollars(
    deployment: Deployment, price_of: Callable[[Device], Price | None]
) -> Prediction | None:
    price = price_of(deployment.device)
    return None if price is None else price.per_hour(1.0) * deployment.num_devices


def _by_price(offer: Offer) -> tuple[float, ...]:
    """Those without a price come last, the fewest devices first."""
    dollars = offer.dollars_per_hour
    service = offer.verdict.service
    assert service is not None
    return (
        math.inf if dollars is None else dollars.value,
        offer.deployment.num_devices,
        service.latency().e2e.value,
    )
