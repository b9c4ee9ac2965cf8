"""Ranks hardware, by a plan of the same question for each device that it names."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from octavo.base.errors import ConfigError
from octavo.planner.answer import Plan, Question, answer
from octavo.planner.cheapest import is_any, named
from octavo.planner.report import deployment_json, latency_json


def is_of_several(hardware: str) -> bool:
    """True if a text names several devices: ``any``, or names joined by commas."""
    return is_any(hardware) or "," in hardware


def ranked(question: Question) -> list[Plan]:
    """Return the plans, the best first: feasible ones by the cost of their tokens, then the others
    by how near they are to feasible. The number of each device is that of the question, or 1.

    Raises:
        ConfigError: the question has no answer on any of the devices.
    """
    plans: list[Plan] = []
    refused: ConfigError | None = None
    for _, name in named(question):
        try:
            plans.append(answer(replace(question, hardware=name)))
        except ConfigError as error:  # nothing is known of what this one would compute it in
            refused = error
    if not plans:
        raise refused or ConfigError(f"{question.engine} runs on none of {question.hardware}")
    return sorted(plans, key=_place)


def ranked_json(plans: list[Plan]) -> list[dict[str, Any]]:
    """Return the figures that tell the plans apart."""
    return [
        {
            **deployment_json(plan.deployment),
            "feasible": plan.is_feasible,
            "binding": None if plan.verdict.binding is None else plan.verdict.binding.name,
            **({} if plan.service is None else latency_json(plan.service.latency())),
            "usd_per_million_output_tokens": dollars_of(plan),
        }
        for plan in plans
    ]


def dollars_of(plan: Plan) -> float | None:
    """Dollars for a million output tokens."""
    return None if plan.bill is None else plan.bill.per_million_output_tokens.value


def _place(plan: Plan) -> tuple[float, ...]:
    if not plan.is_feasible:
        return (1, *plan.verdict.order)
    dollars = dollars_of(plan)
    return (0, math.inf if dollars is None else dollars, *plan.verdict.order)
