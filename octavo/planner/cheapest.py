"""The cheapest hardware that does what is asked: found by formula, confirmed by simulation, or the
reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from octavo.cost.hardware import Device
from octavo.cost.hardware_table import devices, find_device
from octavo.planner.confirmation import Confirmed, confirm
from octavo.planner.deployment import Deployment
from octavo.planner.money import Price, listed
from octavo.planner.plan import Plan, Question, deployment_of
from octavo.planner.sizing import Offer, Search, search

ANY = "any"  # hardware of the table that is for rent
MOST_DEVICES = 64
_QUANTIZATIONS = (None, "fp8", "int4")
_TRIED = 5  # offers that are simulated before the first is taken as it is


@dataclass(frozen=True, slots=True)
class Solution:
    """``plan`` is that of the best offer, or of what comes nearest. ``confirmed`` is empty where
    there is no offer, and where no limit was given."""

    plan: Plan
    search: Search
    confirmed: tuple[Confirmed, ...] = ()

    @property
    def is_confirmed(self) -> bool:
        return bool(self.search.offers) and all(each.holds for each in self.confirmed)


def cheapest(question: Question, most_devices: int = MOST_DEVICES) -> Solution:
    """Of the hardware that the question names (joined by commas, or ``any``), in any layout, with
    weights as they are, in fp8 and in int4 if it names none.

    Raises:
        ConfigError: see `octavo.planner.plan.plan`.
    """
    slo = question.limits_of_answers
    found = search(
        _bases(question),
        question.traffic,
        slo,
        price_of=lambda device: _price(question, device),
        most_devices=most_devices,
    )
    if not found.offers:
        return Solution(Plan(question, found.refused[0], slo), found)
    for offer in found.offers[:_TRIED]:
        confirmed = confirm(offer.verdict, slo)
        if all(each.holds for each in confirmed):
            return Solution(Plan(question, offer.verdict, slo), found, confirmed)
    best = found.offers[0].verdict
    return Solution(Plan(question, best, slo), found, confirm(best, slo))
