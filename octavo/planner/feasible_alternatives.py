"""Feasible alternatives to a deployment or traffic that is not feasible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.planner.sizing import fewest_devices, highest_rate
from octavo.planner.slo import Slo
from octavo.planner.verdict import Verdict, judge


@dataclass(frozen=True, slots=True)
class FeasibleAlternatives:
    """Changes that are feasible, each by itself.

    Args:
        num_devices: of the same kind that would do, with each matrix on one or on several of
            them; None where no number does.
        rate: requests per second that these devices answer within the limits, where a rate is
            asked.
        concurrency: requests that fit at once.
        output_len: tokens of answers that end in time; None where no limit is of whole answers,
            or not even one token does.
        limits: seconds at which limits would hold, by their names.
    """

    num_devices: int | None
    rate: float | None
    concurrency: int
    output_len: int | None
    limits: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        return {
            "num_devices": self.num_devices,
            "rate": self.rate,
            "concurrency": self.concurrency,
            "output_len": self.output_len,
            "slo": {f"{name}_ms": seconds * 1e3 for name, seconds in self.limits.items()},
        }


def feasible_alternatives(verdict: Verdict, slo: Slo) -> FeasibleAlternatives:
    """Return the alternatives to a deployment that is not feasible."""
    deployment, traffic = verdict.deployment, verdict.traffic
    enough = fewest_devices(deployment, traffic, slo)
    return FeasibleAlternatives(
        num_devices=None if enough is None else enough.deployment.num_devices,
        rate=None if traffic.rate is None else highest_rate(deployment, traffic, slo),
        concurrency=deployment.max_concurrency(traffic.total_len),
        output_len=_longest_answer(verdict, slo),
        limits={
            each.limit.name: max(each.limit.seconds, each.predicted.value) for each in verdict.kept
        },
    )


def _longest_answer(verdict: Verdict, slo: Slo) -> int | None:
    """Number of tokens of an answer that keeps the limits, where answers of the traffic end too
    late."""
    if not any(each.limit.metric == "e2e" and not each.holds for each in verdict.kept):
        return None

    def keeps(output_len: int) -> bool:
        shorter = replace(verdict.traffic, output_len=output_len)
        return judge(verdict.deployment, shorter, slo).is_feasible

    lengths = range(1, verdict.traffic.output_len)
    return bisect_left(lengths, True, key=lambda length: not keeps(length)) or None
