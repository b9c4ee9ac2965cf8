"""Rates, on a clock of our own."""

from __future__ import annotations

import time

import pytest

from octavo.cost.probing import best_bandwidth, best_rate


def test_a_rate_is_the_best_of_several(monkeypatch):
    now, speeds = [0.0], iter([*[1.0] * 8, 4.0, 2.0, *[1.0] * 1000])

    def run(rounds: int) -> float:
        now[0] += rounds / (next(speeds) * 1e6)
        return float(rounds)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert best_rate(run) == pytest.approx(4e6)


def test_a_bandwidth_is_the_best_of_four_reads(monkeypatch):
    now, seconds = [0.0], iter([2.0, 1.0, 4.0, 2.0])

    def read() -> float:
        now[0] += next(seconds)
        return 100.0

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert best_bandwidth(read) == 100.0
