from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.measure.slo import Attainment, RequestSlo, goodput
from octavo.measure.statistics import wilson_interval


@pytest.mark.parametrize(
    "texts",
    [
        ["ttft:200", "tpot:50", "e2el:5000"],
        ["ttft=200ms,tpot=0.05s,e2e=5s"],
        ["TTFT:200 tpot:50. e2el:5e3".replace("5e3", "5000")],
    ],
)
def test_limits_are_read(texts):
    slo = RequestSlo.from_texts(texts)
    assert slo.as_json() == pytest.approx({"ttft_ms": 200, "tpot_ms": 50, "e2el_ms": 5000})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft", "no limit"),
        ("ttft:fast", "no limit"),
        ("ttft:-1", "no limit"),
        ("itl:10", "none of ttft, tpot, e2el"),
        ("ttft:0", "above 0"),
        ("ttft:1,ttft:2", "twice"),
    ],
)
def test_what_is_no_limit_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        RequestSlo.from_texts([text])


def test_no_limits():
    assert RequestSlo.from_texts([]) is None


def test_a_good_request_meets_every_limit(record):
    slo = RequestSlo(ttft=0.2, tpot=0.1, e2el=1.0)
    records = [
        record(0.0, 0.2, 0.3, 0.4),  # good, at the limit
        record(0.0, 0.3, 0.35),  # late
        record(0.0, 0.1, 0.3),  # slow
        record(0.0, 0.15, *[0.15 + 0.09 * i for i in range(1, 11)]),  # long: 1.05
        record(0.0, 0.1, output_tokens=1),  # one token has no TPOT, which is 0 here
        record(0.0),  # refused
        record(0.0, unfinished=True),  # nobody knows
    ]
    found = goodput(records, slo, duration=4.0)
    assert found.attainment == Attainment(2, 6, wilson_interval(2, 6))
    assert found.attainment.share == pytest.approx(1 / 3)
    assert {name: each.good for name, each in found.attainment_by_limit.items()} == {
        "ttft": 4,
        "tpot": 4,
        "e2el": 4,
    }
    assert found.request_goodput == 0.5 and found.token_goodput == 1.0  # 3 + 1 tokens in 4 s


def test_waiting_to_be_sent_counts_from_the_scheduled_time(record):
    records = [record(1.0, 1.1, 1.2, scheduled=0.9), record(1.0, 1.1, 1.2, scheduled=1.0)]
    slo = RequestSlo(ttft=0.15, tpot=0.15)
    assert goodput(records, slo, 1.0).attainment.good == 2
    assert goodput(records, slo, 1.0, from_scheduled=True).attainment.good == 1
    assert goodput(records, RequestSlo(e2el=0.25), 1.0, from_scheduled=True).attainment.good == 1


def test_nothing_was_sent():
    found = goodput([], RequestSlo(ttft=1.0), 0.0)
    assert found.request_goodput == 0 and found.attainment.share is None
    assert found.as_json()["attainment"]["interval"] == [0.0, 1.0]
