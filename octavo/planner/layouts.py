"""How a model can be laid out over devices.

Tensor parallelism shares out matrices within an island of fast links, and divides the heads;
pipelines go across islands, or where links are slow; experts are shared out by those that share the
rest, or by copies of it. Whatever these rules leave is judged, and the best is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from octavo.base.errors import ConfigError
from octavo.cost.hardware import Device
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.planner.deployment import Deployment
from octavo.planner.slo import Slo
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict, judge

_ISLAND = 8  # devices of a machine, whose links are fast
_LARGE_ISLANDS = {"NVL72": 72}
_SLOW_LINK = 100e9  # bytes a second; PCIe is below, and NVLink above


def layouts(spec: ModelSpec, device: Device, num_devices: int) -> Iterator[Parallel]:
    """Ways to lay one replica out over at most so many devices."""
    has_experts = any(layer.mlp is not None and layer.mlp.num_experts for layer in spec.layers)
    island = island_of(device)
    for tp in _divisors(num_devices):
        if tp > island:
            continue
        yield Parallel(tp=tp)
        if has_experts and tp > 1:
            yield Parallel(tp=tp, ep=tp)
            yield Parallel(dp=tp, ep=tp)
        if tp == island or has_slow_link(device):
            for pp in _divisors(num_devices // tp)[1:]:
                if pp <= spec.num_layers:
                    yield Parallel(tp=tp, pp=pp)


def island_of(device: Device) -> int:
    """Devices that have fast links to each other."""
    for words, size in _LARGE_ISLANDS.items():
        if words in device.link_kind:
            return size
    return _ISLAND


def has_slow_link(device: Device) -> bool:
    """Whether sharing out matrices would mostly be talk."""
    return device.link_bandwidth is None or device.link_bandwidth < _SLOW_LINK


def best_layout(base: Deployment, num_devices: int, traffic: Traffic, slo: Slo) -> Verdict:
    """The best of the layouts of a deployment over so many devices, with as many replicas as there
    are devices for."""
    verdicts = [
        judge(each.times(num_devices // each.num_devices), traffic, slo)
        for each in laid_out(base, num_devices)
    ]
    return min(verdicts, key=lambda verdict: verdict.order)


def laid_out(base: Deployment, num_devices: int) -> Iterator[Deployment]:
    """One replica in each layout that the model and the device allow.

    ConfigError if not even one device can run it.
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


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
