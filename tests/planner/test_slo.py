from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.planner.slo import Limit, parse_slo, presets


@pytest.mark.parametrize(
    "text, limits",
    [
        ("ttft=500", [("ttft", 0.5, 99)]),
        ("ttft=500,tpot=50,e2e=10s@p99", [("ttft", 0.5, 99), ("tpot", 0.05, 99), ("e2e", 10, 99)]),
        ("ttft=2s@p50, tpot:30ms@p90", [("ttft", 2, 50), ("tpot", 0.03, 90)]),
        ("ttft_p99=500,tpot_mean=40", [("ttft", 0.5, 99), ("tpot", 0.04, None)]),
        ("ttft_p50=100,e2el=1s@p99.9", [("ttft", 0.1, 50), ("e2e", 1, 99.9)]),
        ("ITL=20@mean", [("tpot", 0.02, None)]),
        ("mlperf:llama-2-70b-interactive", [("ttft", 0.45, 99), ("tpot", 0.04, 99)]),
    ],
)
def test_limits_as_they_are_said(text, limits):
    assert list(parse_slo(text)) == [Limit(*limit) for limit in limits]


def test_a_percentile_at_the_end_is_that_of_those_before():
    slo = parse_slo("ttft=500,tpot=50@p90,e2e=9s")
    assert [limit.percentile for limit in slo] == [90, 90, 99]


def test_limits_of_mlperf():
    """Reference case R35."""
    expected = {
        "llama-2-70b": (2000, 200),
        "llama-2-70b-interactive": (450, 40),
        "mixtral-8x7b": (2000, 200),
        "llama-3.1-405b": (6000, 175),
        "llama-3.1-405b-interactive": (4500, 80),
        "llama-3.1-8b": (2000, 100),
        "llama-3.1-8b-interactive": (500, 30),
        "deepseek-r1": (2000, 80),
        "deepseek-r1-interactive": (1500, 15),
        "gpt-oss-120b": (3000, 80),
        "gpt-oss-120b-interactive": (2000, 20),
    }
    found = {name.removeprefix("mlperf:"): slo.as_json() for name, slo in presets().items()}
    assert found == {
        name: {"ttft_p99_ms": ttft, "tpot_p99_ms": tpot} for name, (ttft, tpot) in expected.items()
    }


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "nothing is limited"),
        ("fast", "'fast' is no limit"),
        ("ttft=-5", "no limit"),
        ("ttft=0", "above 0"),
        ("ttfb=500", "'ttfb' is none of ttft, tpot, e2e"),
        ("ttft=5,ttft=6", "ttft_p99 is limited twice"),
        ("ttft=5@p100", "between 0 and 100"),
        ("ttft_p99=5@p90", "says twice"),
        ("ttft=2s,e2e=1s", "e2e_p99 = 1000 ms contradicts ttft_p99 = 2000 ms"),
        ("tpot_p50=50,tpot_p99=40", "tpot_p99 = 40 ms contradicts tpot_p50 = 50 ms"),
        ("mlperf:llama-70b", "mlperf:llama-2-70b"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)
