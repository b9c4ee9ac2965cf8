"""What answers cost: a price by the hour, over what comes out of the hour.

Prices are US dollars. A device costs whether it works or not, so what a token costs depends on how
much of the time it has work: the utilisation, which is said with every figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.base.errors import ConfigError
from octavo.cost.hardware import Device
from octavo.cost.prediction import Prediction, worst
from octavo.planner.figures import figure_json

# Mean load over capacity, where nobody says how many come. Services that people use by day, and
# that have room for their best hour, are seldom above it.
USUAL_UTILIZATION = 0.6

HOURS_PER_YEAR = 8760
_SECONDS_PER_HOUR = 3600.0

# Watts of a device with its share of processors, network and cooling, as InferenceX counts them.
# Where a device is missing, its own power is all that is known.
_ALL_IN_WATTS = {
    "H100 SXM": 1730.0,
    "B200": 2170.0,
    "GB200": 2100.0,
    "MI300X": 1790.0,
    "MI355X": 2650.0,
}


@dataclass(frozen=True, slots=True)
class Price:
    """Of one device. ``fixed`` dollars an hour are due always, ``running`` ones while it works."""

    fixed: Prediction
    running: float = 0.0

    def per_hour_of_work(self, utilization: float) -> Prediction:
        """Dollars; an hour without work is paid for by those with."""
        return self.per_hour(utilization) * (1 / utilization)

    def per_hour(self, utilization: float) -> Prediction:
        """Dollars, of an hour of which it works a part."""
        if not 0 < utilization <= 1:
            raise ConfigError(f"utilization is above 0 and at most 1, not {utilization}")
        return self.fixed.map(lambda dollars: dollars + self.running * utilization)


def rented(dollars_per_hour: float) -> Price:
    """At a price that somebody states."""
    if not dollars_per_hour > 0:
        raise ConfigError(f"a price is above 0 dollars an hour, not {dollars_per_hour}")
    return Price(Prediction.around(dollars_per_hour, 0.0, "measured"))


def listed(device: Device) -> Price | None:
    """Between the prices at which it was found for rent; None where it was not."""
    if device.usd_per_hour is None:
        return None
    low, high = device.usd_per_hour
    return Price(Prediction((low + high) / 2, low, high, "published"))


def owned(
    dollars: float, years: float, watts: float, dollars_per_kwh: float, overhead: float = 1.0
) -> Price:
    """Bought, and paid for within so many years. ``overhead``: power drawn from the wall for each
    watt of the device (PUE)."""
    if not (dollars > 0 and years > 0 and watts >= 0 and dollars_per_kwh >= 0 and overhead >= 1):
        raise ConfigError(
            "owned hardware has a price and years above 0, power and its price of 0 or more, and "
            "an overhead of 1 or more"
        )
    fixed = Prediction.around(dollars / (years * HOURS_PER_YEAR), 0.0, "measured")
    return Price(fixed, watts / 1000 * dollars_per_kwh * overhead)


def watts_of(device: Device) -> float | None:
    """Of a device at work, with all that it needs where that is known; None where nothing is."""
    return _ALL_IN_WATTS.get(device.name, device.tdp_watts)


def watts_text(device: Device) -> str:
    """What ``watts_of`` a device counts, for people; empty where nothing is known."""
    watts = watts_of(device)
    if watts is None:
        return ""
    if device.name not in _ALL_IN_WATTS:
        return f"{watts:,.0f} W, the device alone"
    alone = "" if device.tdp_watts is None else f"; the device alone: {device.tdp_watts:,.0f} W"
    return f"{watts:,.0f} W with its share of the server, the network and cooling{alone}"


def per_million(dollars_per_hour: Prediction, tokens_per_second: Prediction) -> Prediction:
    """Dollars for a million tokens, of devices that together cost and yield so much."""
    each = _SECONDS_PER_HOUR / 1e6
    return _ratio(dollars_per_hour, tokens_per_second * each)


@dataclass(frozen=True, slots=True)
class Bill:
    """What is paid, by what is got; ``joules_per_output_token``: None where no power is known."""

    utilization: float
    per_hour: Prediction
    per_day: Prediction
    per_request: Prediction
    per_million_output_tokens: Prediction
    per_million_tokens: Prediction
    input_per_million: Prediction
    output_per_million: Prediction
    joules_per_output_token: Prediction | None = None

    def as_json(self) -> dict[str, Any]:
        joules = self.joules_per_output_token
        return {
            "utilization": self.utilization,
            "per_request": figure_json(self.per_request),
            "per_million_output_tokens": figure_json(self.per_million_output_tokens),
            "per_million_tokens": figure_json(self.per_million_tokens),
            "input_per_million": figure_json(self.input_per_million),
            "output_per_million": figure_json(self.output_per_million),
            "per_hour": figure_json(self.per_hour),
            "per_day": figure_json(self.per_day),
            "joules_per_output_token": None if joules is None else figure_json(joules),
        }


def bill(
    price: Price,
    num_devices: int,
    requests_per_second: Prediction,
    input_len: int,
    output_len: int,
    prefill_share: float,
    utilization: float = USUAL_UTILIZATION,
    watts: float | None = None,
) -> Bill:
    """Of devices that answer so many requests a second while they work.

    ``per_million_output_tokens`` has all of the cost, prompts included, and ``per_million_tokens``
    spreads it over both kinds; ``input_per_million`` and ``output_per_million`` split it by who
    takes the time: ``prefill_share`` of it are prompts.
    """
    working = price.per_hour_of_work(utilization) * num_devices
    outputs = requests_per_second * output_len
    all_tokens = requests_per_second * (input_len + output_len)
    inputs = requests_per_second * input_len
    by_clock = price.per_hour(utilization)
    return Bill(
        utilization,
        per_hour=by_clock * num_devices,
        per_day=by_clock * (num_devices * 24),
        per_request=_ratio(working, requests_per_second * _SECONDS_PER_HOUR),
        per_million_output_tokens=per_million(working, outputs),
        per_million_tokens=per_million(working, all_tokens),
        input_per_million=per_million(working * prefill_share, inputs),
        output_per_million=per_million(working * (1 - prefill_share), outputs),
        joules_per_output_token=(
            None if watts is None else outputs.map(lambda tokens: watts * num_devices / tokens)
        ),
    )


def _ratio(dollars: Prediction, amount: Prediction) -> Prediction:
    """Least where little is paid for much."""
    return Prediction(
        dollars.value / amount.value,
        dollars.low / amount.high,
        dollars.high / amount.low,
        worst((dollars.source, amount.source)),
    )
