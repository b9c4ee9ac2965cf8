from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.hardware import Device
from octavo.cost.prediction import Prediction
from octavo.planner import money

DEVICE = Device(
    name="H100 SXM",
    kind="gpu",
    memory_bytes=8e10,
    memory_bandwidth=3.35e12,
    peaks={"fp16": 1e15},
    tdp_watts=700,
    usd_per_hour=(2.0, 5.0),
)


def exactly(value: float) -> Prediction:
    return Prediction(value, value, value, "measured")


@pytest.mark.parametrize(
    "dollars, tokens, cost", [(2.5, 800, 0.868), (20, 3000, 1.852), (32, 8000, 1.111)]
)
def test_dollars_for_a_million_tokens(dollars, tokens, cost):
    """Reference case R31: hours that are full of work."""
    found = money.per_million(money.rented(dollars).per_hour_of_work(1.0), exactly(tokens))
    assert round(found.value, 3) == cost


def test_idle_hours_are_paid_for_by_the_others():
    busy, usual = (money.rented(3).per_hour_of_work(share).value for share in (1.0, 0.6))
    assert (busy, usual) == (3, pytest.approx(5))


def test_owned_hardware_is_not_free():
    """3,500 dollars over three years and 60 W, at 8 tokens a second."""
    price = money.owned(3500, years=3, watts=60, dollars_per_kwh=0.15)
    power, purchase = price.running, price.fixed.value
    per_million = 1e6 / (8 * 3600)
    assert power * per_million == pytest.approx(0.31, abs=0.005)
    assert purchase * per_million == pytest.approx(4.62, abs=0.005)
    # An idle hour costs what was paid for the machine, and no power.
    assert price.per_hour(0.5).value == pytest.approx(purchase + power / 2)


def test_a_bill_adds_up():
    rate = Prediction(2.0, 1.6, 2.5, "roofline")
    bill = money.bill(
        money.rented(3.6), 2, rate, 1000, 250, prefill_share=0.25, utilization=0.5, watts=700
    )
    assert bill.per_day.value == pytest.approx(3.6 * 2 * 24)
    requests_a_day = 2.0 * 0.5 * 86400
    assert bill.per_request.value * requests_a_day == pytest.approx(bill.per_day.value)
    assert bill.per_request.value == pytest.approx(bill.per_million_output_tokens.value * 250e-6)
    assert bill.per_request.value == pytest.approx(
        bill.input_per_million.value * 1000e-6 + bill.output_per_million.value * 250e-6
    )
    assert bill.per_million_tokens.value == pytest.approx(bill.per_request.value / 1250e-6)
    assert bill.joules_per_output_token.value == pytest.approx(1400 / 500)
    # It costs most where least comes out of it.
    assert bill.per_request.high == pytest.approx(bill.per_request.value * 2.0 / 1.6)
    assert bill.per_request.source == "roofline"


def test_prices_that_were_found_are_from_to():
    price = money.listed(DEVICE)
    assert price.fixed == Prediction(3.5, 2.0, 5.0, "published")
    assert money.watts_of(DEVICE) == 1730  # with its share of the machine around it


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: money.rented(0),
        lambda: money.rented(3).per_hour(0),
        lambda: money.rented(3).per_hour(1.5),
        lambda: money.owned(-5, 3, 60, 0.1),
        lambda: money.owned(5, 3, 60, 0.1, overhead=0.5),
    ],
)
def test_impossible_prices_are_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()
