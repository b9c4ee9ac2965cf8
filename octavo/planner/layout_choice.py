"""Chooses the layout of a model over devices, by judging each that is possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from octavo.base.errors import ConfigError
from octavo.cost.layouts import layouts
from octavo.planner.deployment import Deployment
from octavo.planner.slo import Slo
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict, judge


def best_layout(base: Deployment, num_devices: int, traffic: Traffic, slo: Slo) -> Verdict:
    """Return the best layout of a deployment, with as many replicas as fill the devices."""
    verdicts = [
        judge(each.times(num_devices // each.num_devices), traffic, slo)
        for each in candidate_deployments(base, num_devices)
    ]
    return min(verdicts, key=lambda verdict: verdict.order)


def candidate_deployments(base: Deployment, num_devices: int) -> Iterator[Deployment]:
    """Yields one replica in each layout that the model and the device allow.

    Raises:
        ConfigError: not even one device can run it.
    """
    for parallel in layouts(base.spec, base.device, num_devices):
        deployment = replace(base, parallel=parallel, replicas=1)
        try:
            deployment.steps  # noqa: B018  (raises where it cannot be laid out so)
        except ConfigError:
            if parallel.num_devices == 1:
                raise
        else:
            yield deployment
