"""The cheapest hardware for a question, found by formula and confirmed by simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.cost.engine_profile import profile
from octavo.cost.find_device import find_device
from octavo.cost.hardware import Device
from octavo.cost.hardware_table import devices
from octavo.planner.answer import Plan, Question, deployment_of
from octavo.planner.confirmation import SimulatedLimit, confirm
from octavo.planner.deployment import Deployment
from octavo.planner.money import Price, listed
from octavo.planner.report import deployment_json, latency_json
from octavo.planner.sizing import DeploymentOffer, SizingResult, search
from octavo.planner.verdict import Verdict

ANY = "any"  # hardware of the table that is for rent
MOST_DEVICES = 64
_QUANTIZATIONS = (None, "fp8", "int4")
_TRIED = 3  # offers that are simulated before the first is taken as it is


@dataclass(frozen=True, slots=True)
class CheapestPlan:
    """The best offer of a search, as a plan.

    Args:
        plan: of the best offer. Where there is none, of the deployment nearest to an answer,
            for as much of the traffic as proves it infeasible: if one request alone is too
            slow, for that.
        confirmed: the limits in simulation; empty where there is no offer, and where no limit
            was given.
    """

    plan: Plan
    search: SizingResult
    confirmed: tuple[SimulatedLimit, ...] = ()

    @property
    def is_confirmed(self) -> bool:
        return bool(self.search.offers) and all(each.holds for each in self.confirmed)

    def as_json(self) -> dict[str, Any]:
        """Return the keys that the JSON of its plan does not have."""
        return {
            "confirmed": self.is_confirmed,
            "simulated": [each.as_json() for each in self.confirmed],
            "offers": [_offer_json(offer) for offer in self.search.offers],
            "refused": [_refusal_json(verdict) for verdict in self.search.refused],
        }


def cheapest(question: Question, most_devices: int = MOST_DEVICES) -> CheapestPlan:
    """Search the hardware that the question names (joined by commas, or ``any``), in any layout,
    with weights as they are, in fp8 and in int4 if it names no quantization.

    Raises:
        ConfigError: see `octavo.planner.plan`.
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
        return CheapestPlan(Plan(question, found.refused[0], slo), found)
    for offer in found.offers[:_TRIED]:
        confirmed = confirm(offer.verdict, slo)
        if all(each.holds for each in confirmed):
            return CheapestPlan(Plan(question, offer.verdict, slo), found, confirmed)
    best = found.offers[0].verdict
    return CheapestPlan(Plan(question, best, slo), found, confirm(best, slo))


def _bases(question: Question) -> Iterator[Deployment]:
    spec, given = question.spec, question.quantization
    for device, _ in named(question):
        for quantization in _QUANTIZATIONS if given is None else (given,):
            yield deployment_of(question, spec, device, quantization)


def named(question: Question) -> list[tuple[Device, str]]:
    """Return the devices that a question names, with the names it uses; for ``any``, those that are
    for rent and that its engine runs on."""
    own = question.hardware_file
    if is_any(question.hardware):
        runs_on = profile(question.engine).runs_on
        return [(each, each.name) for each in _for_rent(own) if runs_on(each)]
    return [(find_device(name, own)[0], name) for name in question.hardware.split(",")]


def left_out(question: Question) -> list[str]:
    """Return the names of devices for rent that the engine does not run on, where any will do."""
    if not is_any(question.hardware):
        return []
    runs_on = profile(question.engine).runs_on
    return [each.name for each in _for_rent(question.hardware_file) if not runs_on(each)]


def is_any(hardware: str) -> bool:
    return hardware.strip().lower() == ANY


def _for_rent(own: str | None) -> list[Device]:
    return [device for device in devices(own) if device.usd_per_hour is not None]


def _price(question: Question, device: Device) -> Price | None:
    return question.price or listed(device)


def _offer_json(offer: DeploymentOffer) -> dict[str, Any]:
    dollars, service = offer.dollars_per_hour, offer.verdict.service
    assert service is not None
    return {
        **deployment_json(offer.deployment),
        "per_hour": None if dollars is None else dollars.as_json(),
        **latency_json(service.latency()),
        "slo": [each.as_json() for each in offer.verdict.kept],
    }


def _refusal_json(verdict: Verdict) -> dict[str, Any]:
    binding = verdict.binding
    assert binding is not None
    return {**deployment_json(verdict.deployment), "binding": binding.name, "why": binding.why}
