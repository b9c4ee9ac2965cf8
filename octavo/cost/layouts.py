"""Ways to lay a model out over devices, by tensor, pipeline, expert and data parallelism.

Tensor parallelism (tp) splits matrices among devices with fast links to each other. Pipelines (pp)
split the layers. Experts (ep) are split among the devices that share the other weights, among
copies of those weights (dp), or among both. Processors that share the layers of a model with latent
attention can have requests of their own (dp attention). `octavo.planner.sizing` chooses among the
layouts that these rules leave, which are all others: what a layout is worth follows from the
traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from octavo.base.errors import ConfigError
from octavo.cost.hardware import Device
from octavo.cost.mixers import LatentAttention
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel

_FAST_LINK_DEVICES = 8  # of one machine
_LARGER_GROUPS = {"NVL72": 72}
_SLOW_LINK = 100e9  # bytes a second; PCIe is below, and NVLink above


def layouts(spec: ModelSpec, device: Device, num_devices: int) -> Iterator[Parallel]:
    """Yields the layouts of one replica over ``num_devices`` devices or fewer."""
    has_experts = any(layer.mlp is not None and layer.mlp.num_experts for layer in spec.layers)
    mixers = {mixer for layer in spec.layers for mixer in layer.mixers}
    has_latents = all(isinstance(mixer, LatentAttention) for mixer in mixers)
    linked = fast_link_devices(device)
    for tp in _divisors(num_devices):
        if tp > linked:
            continue
        for pp in _divisors(num_devices // tp):
            if pp > spec.num_layers:
                continue
            yield Parallel(tp=tp, pp=pp)
            attends_apart = has_latents and device.kind == "cpu" and tp > 1 == pp
            if attends_apart:
                yield Parallel(tp=tp, dp_attention=True)
            if not has_experts:
                continue  # copies have nothing in common: they are replicas
            if attends_apart:
                yield Parallel(tp=tp, ep=tp, dp_attention=True)
            for dp in _divisors(num_devices // (tp * pp)):
                if tp * dp > 1:
                    yield Parallel(tp=tp, pp=pp, ep=tp * dp, dp=dp)


def fast_link_devices(device: Device) -> int:
    """Number of devices that have fast links to each other: those of a machine, or of a rack."""
    for words, size in _LARGER_GROUPS.items():
        if words in device.link_kind:
            return size
    return _FAST_LINK_DEVICES


def has_slow_link(device: Device) -> bool:
    """True if tensor parallelism would spend most of a step in communication."""
    if device.kind == "cpu":
        return False  # as much slower than a GPU as the link is
    return device.link_bandwidth is None or device.link_bandwidth < _SLOW_LINK


def spread_over_devices(
    count: int,
    *,
    tp: int | None = None,
    pp: int = 1,
    ep: int = 1,
    dp: int = 1,
    replicas: int | None = None,
    dp_attention: bool = False,
) -> tuple[Parallel, int]:
    """Return the layout of one replica and the number of replicas that ``count`` devices make.

    Args:
        count: devices in all; 1 says nothing of their number: there are then as many as it takes.
        tp, replicas: None takes as many as the other degrees leave devices for.

    Raises:
        ConfigError: the devices are too few, or their number is no multiple of the given degrees.
    """
    given = {"replicas": replicas, "tp": tp, "pp": pp, "dp": dp}
    if count == 1:
        tp, replicas = tp or 1, replicas or 1
    else:
        tp = tp or _share(count, pp * dp * (replicas or 1), given)
        replicas = replicas or _share(count, pp * dp * tp, given)
        if count < (needed := tp * pp * dp * replicas):
            raise ConfigError(f"{needed} devices are needed, and --hardware has {count}")
    return Parallel(tp, pp, ep, dp, dp_attention=dp_attention), replicas


def _share(count: int, others: int, given: Mapping[str, int | None]) -> int:
    if count % others:
        what = ", ".join(f"{name} = {number}" for name, number in given.items() if number)
        raise ConfigError(
            f"{count} devices cannot be shared out by {what}: give others, or a multiple of "
            f"{others} devices"
        )
    return count // others


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
