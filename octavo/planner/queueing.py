"""Queueing formulas for waiting times, and for the number of requests under way.

Rates are per second, times in seconds. An overloaded queue waits for ever: ``math.inf``.

Sources: M/D/1 and M/M/k as in Kleinrock, "Queueing Systems" (1975); the distribution of waiting
times of M/D/1 as in Franx (Operations Research Letters 29, 2001), whose sums have positive terms
only, unlike Crommelin's (1932).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from octavo.base.errors import ConfigError

# From this load on, waiting times of M/D/1 are taken for exponential (Kingman 1961): the exact sums
# grow with the square of the wait, and differ from it by less than three per cent.
_HEAVY = 0.97


# -- one server, the same time for every request: M/D/1 ------------------------------------------


def md1_wait(rate: float, service: float) -> float:
    """Mean wait before ``service`` seconds of service, with Poisson arrivals."""
    load = _load(rate, service)
    return math.inf if load >= 1 else load * service / (2 * (1 - load))


def md1_wait_quantile(rate: float, service: float, share: float) -> float:
    """The wait that a ``share`` of the requests do not exceed."""
    _check_share(share)
    load = _load(rate, service)
    if load >= 1:
        return math.inf
    if share <= 1 - load:  # this share finds an empty queue
        return 0.0
    if load > _HEAVY:
        return md1_wait(rate, service) * -math.log1p(-share) / load
    waits = _MD1Waits(rate, service)
    high = service
    while waits.share_up_to(high) < share:
        high *= 2
    return _root(lambda wait: waits.share_up_to(wait) - share, 0.0, high)


class _MD1Waits:
    """The distribution of waiting times of M/D/1."""

    def __init__(self, rate: float, service: float):
        self._rate = rate
        self._service = service
        self._load = rate * service
        self._in_system = [1 - self._load]  # probability of n requests
        self._up_to = [1 - self._load]  # and of at most n
        # Probabilities of n arrivals, or more, while one is served.
        self._arrivals = _poisson_tails(self._load)

    def share_up_to(self, wait: float) -> float:
        """Share of the requests that wait no longer."""
        services = int(wait / self._service) + 1
        past = self._rate * (services * self._service - wait)
        term, total = math.exp(-past), 0.0
        for count in range(services):
            # This number or fewer wait, beside the one that is served.
            total += term * self._at_most(services - count)
            term *= past / (count + 1)
        return total

    def _at_most(self, number: int) -> float:
        """The probability that ``number`` requests or fewer are in the system."""
        while len(self._up_to) <= number:
            self._add_one()
        return self._up_to[number]

    def _add_one(self) -> None:
        """Compute the probability of one request more: as many services lead from n - 1 requests,
        or fewer, to n or more as lead back."""
        number = len(self._in_system)
        upwards = self._in_system[0] * self._tail(number) + sum(
            self._in_system[before] * self._tail(number - before + 1) for before in range(1, number)
        )
        self._in_system.append(upwards / math.exp(-self._load))
        self._up_to.append(self._up_to[-1] + self._in_system[-1])

    def _tail(self, number: int) -> float:
        return self._arrivals[number] if number < len(self._arrivals) else 0.0


def _poisson_tails(mean: float) -> list[float]:
    """Probabilities of n or more, until they vanish."""
    shares = [math.exp(-mean)]
    while shares[-1] > 1e-18:
        shares.append(shares[-1] * mean / len(shares))
    tails = [0.0]
    for share in reversed(shares):
        tails.append(tails[-1] + share)
    return tails[:0:-1]


# -- a few servers, times at random: M/M/k --------------------------------------------------------


def erlang_c(servers: int, offered: float) -> float:
    """Share of the arrivals that have to wait. ``offered``: arrivals in the time of a service."""
    if servers < 1:
        raise ConfigError(f"a queue has one server or more, not {servers}")
    if offered >= servers:
        return 1.0
    blocked = 1.0  # Erlang's B, which has a recursion without factorials
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def mmk_wait(rate: float, service: float, servers: int) -> float:
    """Mean wait, where ``service`` is the mean of times that are exponential."""
    offered = _load(rate, service)
    if offered >= servers:
        return math.inf
    return erlang_c(servers, offered) * service / (servers - offered)


def mmk_wait_quantile(rate: float, service: float, servers: int, share: float) -> float:
    """The wait that a ``share`` of the requests do not exceed."""
    _check_share(share)
    offered = _load(rate, service)
    if offered >= servers:
        return math.inf
    waiting = erlang_c(servers, offered)
    if share <= 1 - waiting:
        return 0.0
    return service / (servers - offered) * math.log(waiting / (1 - share))


# -- how many are under way -----------------------------------------------------------------------


def balance(arriving: Callable[[float], float], most: float) -> float | None:
    """Return the number of streams at which the load settles: the least B = ``arriving(B)``.

    ``arriving``: how many would be under way if each went on as beside B others, such as ``rate *
    output_len * tpot(B)``. None: more than ``most`` would be, and the queue grows.
    """
    if arriving(0.0) <= 0.0:
        return 0.0
    low, high = 0.0, min(1.0, most)
    while arriving(high) > high:
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    return _root(lambda number: number - arriving(number), low, high)


def delays_quantile(mean: float, further: float, share: float) -> int:
    """Number of delays that a ``share`` of the streams meet at most.

    ``mean`` delays come at random during a stream without any, and each prolongs it so that
    ``further`` more come, on average: a generalized Poisson distribution (Consul and Jain,
    Technometrics 15, 1973), whose mean is ``mean / (1 - further)``.
    """
    _check_share(share)
    if not 0 <= further < 1:
        raise ConfigError(f"delays that bring {further} others each have no end")
    number, total = 0, math.exp(-mean)
    while total < share:
        number += 1
        rate = mean + number * further
        log = math.log(mean) + (number - 1) * math.log(rate) - rate - math.lgamma(number + 1)
        if (chance := math.exp(log)) < 1e-15 and number > mean / (1 - further):
            break  # rounding keeps the sum from ever coming nearer
        total += chance
    return number


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where an increasing function becomes 0, by bisection, to a part in 10^12."""
    for _ in range(80):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
        if high - low <= 1e-12 * high:
            break
    return high


def _load(rate: float, service: float) -> float:
    if rate < 0 or service < 0:
        raise ConfigError(f"rates and times are 0 or more, not {rate} and {service}")
    return rate * service


def _check_share(share: float) -> None:
    if not 0 <= share < 1:
        raise ConfigError(f"a share of the requests is from 0 to below 1, not {share}")
