"""The cost of answers, from the price of an hour and the tokens and requests of that hour.

Prices are US dollars. A device costs money whether it works or not, so that the cost of a token
depends on the utilisation, which is told with every figure.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from octavo.base.errors import ConfigError
from octavo.cost.hardware import Device
from octavo.cost.prediction import Prediction, worst
from octavo.planner.figures import figure_json

# Mean load over capacity, where no rate is given. Services that people use by day, and that have
# capacity for their peak hour, are seldom above it.
USUAL_UTILIZATION = 0.6

HOURS_PER_YEAR = 8760
_SECONDS_PER_HOUR = 3600.0

# Watts of a device with its share of processors, network and cooling, as InferenceX counts them.
# For other devices, only their own power is known.
_ALL_IN_WATTS = {
    "H100 SXM": 1730.0,
    "B200": 2170.0,
    "GB200": 2100.0,
    "MI300X": 1790.0,
    "MI355X": 2650.0,
}


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one device. ``fixed`` dollars an hour are due always, ``running`` ones while it
    works."""

    fixed: Prediction
    running: float = 0.0

    def per_hour_of_work(self, utilization: float) -> Prediction:
        """Dollars; hours without work are charged to those with."""
        return self.per_hour(utilization) * (1 / utilization)

    def per_hour(self, utilization: float) -> Prediction:
        """Dollars of an hour in which it works for a part of the time."""
        if not 0 < utilization <= 1:
            raise ConfigError(f"utilization is above 0 and at most 1, not {utilization}")
        return self.fixed.map(lambda dollars: dollars + self.running * utilization)


def rented(dollars_per_hour: float) -> Price:
    """Return the price of a rented device."""
    if not dollars_per_hour > 0:
        raise ConfigError(f"a price is above 0 dollars an hour, not {dollars_per_hour}")
    return Price(Prediction.around(dollars_per_hour, 0.0, "measured"))


def listed(device: Device) -> Price | None:
    """Return the price between those at which a device was found for rent; None without any."""
    if device.usd_per_hour is None:
        return None
    low, high = device.usd_per_hour
    return Price(Prediction((low + high) / 2, low, high, "published"))


def owned(
    dollars: float, years: float, watts: float, dollars_per_kwh: float, overhead: float = 1.0
) -> Price:
    """Return the price of a device that is bought, and paid for within ``years``. ``overhead``:
    power drawn from the wall for each watt of the device (PUE)."""
    if not (dollars > 0 and years > 0 and watts >= 0 and dollars_per_kwh >= 0 and overhead >= 1):
        raise ConfigError(
            "owned hardware has a price and years above 0, power and its price of 0 or more, and "
            "an overhead of 1 or more"
        )
    fixed = Prediction.around(dollars / (years * HOURS_PER_YEAR), 0.0, "measured")
    return Price(fixed, watts / 1000 * dollars_per_kwh * overhead)


def watts_of(device: Device) -> float | None:
    """Power of a device at work, with its share of the server, network and cooling where known;
    None where nothing is known."""
    return _ALL_IN_WATTS.get(device.name, device.tdp_watts)


def watts_text(device: Device) -> str:
    """Describe what ``watts_of`` a device counts; empty where nothing is known."""
    watts = watts_of(device)
    if watts is None:
        return ""
    if device.name not in _ALL_IN_WATTS:
        return f"{watts:,.0f} W, the device alone"
    alone = "" if device.tdp_watts is None else f"; the device alone: {device.tdp_watts:,.0f} W"
    return f"{watts:,.0f} W with its share of the server, the network and cooling{alone}"


def per_million(dollars_per_hour: Prediction, tokens_per_second: Prediction) -> Prediction:
    """Return the dollars for a million tokens, of devices with that cost and throughput in all."""
    each = _SECONDS_PER_HOUR / 1e6
    return _ratio(dollars_per_hour, tokens_per_second * each)


@dataclass(frozen=True, slots=True)
class Bill:
    """The cost by hour, request and token; ``joules_per_output_token``: None where no power is
    known."""

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
        figures = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: figure_json(value) if isinstance(value, Prediction) else value
            for name, value in figures.items()
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
    """Return the bill of devices that answer so many requests per second while they work.

    ``per_million_output_tokens`` has all of the cost, prompts included, and ``per_million_tokens``
    spreads it over both kinds; ``input_per_million`` and ``output_per_million`` split it by time:
    ``prefill_share`` of it goes to prompts.
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
    """Dollars over an amount; lowest where little is paid for much."""
    return Prediction(
        dollars.value / amount.value,
        dollars.low / amount.high,
        dollars.high / amount.low,
        worst((dollars.source, amount.source)),
    )
