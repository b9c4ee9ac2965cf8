"""Rates from probes: how fast something is, from runs of some milliseconds each."""

from __future__ import annotations

import time
from collections.abc import Callable

_PROBE_SECONDS = 0.05


def best_rate(run: Callable[[int], float]) -> float:
    """The rate of ``run(rounds)``, per second: the best of several runs."""
    rounds, seconds = 1, 0.0
    while seconds < _PROBE_SECONDS / 5:
        rounds *= 4
        seconds, _ = _timed(run, rounds)
    best, begin = 0.0, time.perf_counter()
    while time.perf_counter() - begin < _PROBE_SECONDS:
        seconds, done = _timed(run, rounds)
        best = max(best, done / seconds)
    return best


def best_bandwidth(read: Callable[[], float]) -> float:
    """Bytes a second: the best of some reads."""
    return max(done / seconds for seconds, done in (_timed(read) for _ in range(4)))


def _timed(run: Callable[..., float], *arguments: int) -> tuple[float, float]:
    begin = time.perf_counter()
    done = run(*arguments)
    return max(time.perf_counter() - begin, 1e-9), done
