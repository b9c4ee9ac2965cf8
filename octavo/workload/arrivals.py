"""Arrival times of requests in an open loop, drawn before the run.

A renewal process: gaps between arrivals are independent, and the first arrival comes after one of
them. Gaps are gamma distributed with mean 1/rate and shape ``burstiness``, as in vLLM: 1 is
Poisson, less comes in bursts, more is steadier, infinity is a metronome. The variation of the gaps
(standard deviation over mean) is 1/sqrt(burstiness).

*Ramps* change the rate r(t) from r0 to r1 while the N requests come. They are the same process on
another clock: with the expected number of arrivals L(t), the integral of r from 0 to t, the k-th
arrival is where L(t) equals the k-th arrival of a process with rate 1. For Poisson gaps this is the
non-homogeneous Poisson process (Cinlar 1975); there is no first rate that lasts for a whole gap, as
there is when each gap is drawn at the rate of its index.

The ramp takes the time T in which N requests are expected, L(T) = N; the rate stays r1 after it.

    linear        r(t) = r0 + (r1 - r0) t/T      T = 2 N / (r0 + r1)
                  r^2 grows evenly with L:       r = sqrt(r0^2 + (r1^2 - r0^2) L/N)
                  inverse:                       t = 2 L / (r0 + r)
    exponential   r(t) = r0 (r1/r0)^(t/T)        T = N ln(r1/r0) / (r1 - r0)
                  r grows evenly with L:         r = r0 + (r1 - r0) L/N
                  inverse:                       t = ln(r/r0) N / (r1 - r0)

(So a rate that grows evenly from request to request, vLLM's "linear", is exponential in time.)

Arrivals are not stretched to end at N/rate, as vLLM does: that would make the number of arrivals in
a given time less random than it is in life, and queues shorter. ``rescaled`` does it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Literal

from octavo.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that changes, in requests per second. A linear one may start at 0.

    Raises:
        ConfigError: no such kind, or a rate is out of range.
    """

    kind: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "exponential"):
            raise ConfigError(f"a ramp is linear or exponential, not {self.kind!r}")
        if not 0 < self.end_rps < math.inf:
            raise ConfigError(f"a ramp ends at a positive rate, not {self.end_rps}")
        if not 0 <= self.start_rps < math.inf:
            raise ConfigError(f"a ramp starts at a rate from 0 on, not {self.start_rps}")
        if self.kind == "exponential" and self.start_rps == 0:
            raise ConfigError("an exponential ramp cannot start at 0: nothing would grow")

    def duration_s(self, num: int) -> float:
        """Seconds in which ``num`` requests are expected."""
        return self.time_of(num, num)

    def time_of(self, expected: float, num: int) -> float:
        """Seconds until ``expected`` arrivals are expected, of a ramp over ``num`` requests."""
        start, end = self.start_rps, self.end_rps
        if expected > num:
            return self.time_of(num, num) + (expected - num) / end
        share = expected / num if num else 0.0
        if share == 0:
            return 0.0
        if self.kind == "linear":
            rate = math.sqrt(start**2 + (end**2 - start**2) * share)
            return 2 * expected / (start + rate)
        growth = (end / start - 1) * share  # of the rate, relative to the start
        # log1p(x)/x, which is 1 where the ramp is flat
        return expected / start * (math.log1p(growth) / growth if growth else 1.0)


def arrival_times(
    num: int,
    rate: float,
    *,
    burstiness: float = 1.0,
    seed: int = 0,
    ramp: Ramp | None = None,
    rescaled: bool = False,
) -> list[float]:
    """Return the seconds from the start at which ``num`` requests are sent, in order.

    ``rate``: requests per second; infinity sends all at once, and goes with ``ramp``, which has
    rates of its own. ``rescaled``: the last request comes exactly at ``num / rate``, or at the end
    of the ramp.

    Raises:
        ConfigError: a number is out of range, or both a rate and a ramp are given.
    """
    if num < 0:
        raise ConfigError(f"the number of requests is {num}, and cannot be below 0")
    if not rate > 0:
        raise ConfigError(f"the request rate is {rate}, and must be positive (or inf)")
    if not burstiness > 0:
        raise ConfigError(f"the burstiness is {burstiness}, and must be positive (or inf)")
    if ramp is not None and rate != math.inf:
        raise ConfigError("a ramp has rates of its own: leave out the request rate")
    if num == 0 or (ramp is None and rate == math.inf):
        return [0.0] * num
    expected = list(accumulate(_unit_gaps(num, burstiness, random.Random(f"arrivals {seed}"))))
    if rescaled and expected[-1] > 0:
        expected = [count * num / expected[-1] for count in expected]
    if ramp is not None:
        return [ramp.time_of(count, num) for count in expected]
    return [count / rate for count in expected]


def _unit_gaps(num: int, burstiness: float, draws: random.Random) -> Iterator[float]:
    """Gaps with mean 1."""
    if burstiness == math.inf:
        return repeat(1.0, num)
    if burstiness == 1:
        return (draws.expovariate(1.0) for _ in range(num))
    return (draws.gammavariate(burstiness, 1 / burstiness) for _ in range(num))
