"""Hardware as a user names it: a device of the table or this machine, and how many of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from octavo.base.errors import ConfigError
from octavo.cost.hardware import Device
from octavo.cost.hardware_table import named_device
from octavo.cost.networks import measured_network

AUTO = "auto"  # the machine that this runs on


def find_device(text: str, own: str | Path | None = None) -> tuple[Device, int]:
    """A device by name, and how many: ``H100 SXM:8`` is eight; of processors, sockets.

    ``auto:2@node-2`` is two machines like this one, with the network between them that
    `octavo calibrate --link` has measured (`octavo.cost.networks`). Others are the devices of
    several machines, of which eight have links to each other.

    ``auto`` is the machine that this runs on, measured (`octavo.cost.this_machine`); other names
    are those of `octavo.cost.hardware_table`, with the user's devices in the file ``own``.

    ConfigError if the name means no device, or more than one; the message has the nearest.
    """
    text, at, network = text.partition("@")
    if at:
        return _with_network(*find_device(text, own), text, network.strip())
    name, count = _with_count(text)
    if name.lower() == AUTO:
        from octavo.cost.this_machine import this_machine  # it takes a while to import

        return this_machine(), count
    return named_device(name, own), count


def asked_ranks(tp: int | str | None, device: Device, count: int) -> int | None:
    """The number of ranks that ``tp`` asks for, as of ``--tensor-parallel-size``: with ``auto`` one
    for each processor, or for each NUMA node of this machine; None leaves it open."""
    if tp is None or isinstance(tp, int):
        return tp
    if device.kind != "cpu":
        return None
    if not device.is_measured:
        return count
    from octavo.system import numa  # plans of other devices need not import it

    return numa.auto_ranks(numa.nodes())


def ranks_of(device: Device, count: int, num_ranks: int) -> tuple[Device, int]:
    """The devices of ``num_ranks`` ranks, of all stages and copies: as they are, but that of this
    machine's processor each rank has a part, with as many parts of it.

    ConfigError if there is no core for each.
    """
    if device.network is not None:
        return device, count  # machines, which are not divided
    if num_ranks == 1 or not (device.kind == "cpu" and device.is_measured):
        return device, count
    return device.shared_by(num_ranks), count * num_ranks


def _with_network(device: Device, count: int, text: str, network: str) -> tuple[Device, int]:
    if count == 1:
        raise ConfigError(
            f"hardware {text.strip()}@{network}: one of it has no network: say how many, as in "
            f"{text.strip()}:2@{network}"
        )
    return replace(device, network=measured_network(network)), count


def _with_count(text: str) -> tuple[str, int]:
    name, colon, count = text.rpartition(":")
    if not colon:
        return text.strip(), 1
    if not count.strip().isdecimal() or int(count) < 1:
        raise ConfigError(f"hardware {text!r}: {count!r} is no number of devices, as in 'H100:8'")
    return name.strip(), int(count)
