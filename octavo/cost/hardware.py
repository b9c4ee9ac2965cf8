"""What a device can do, as far as memory and time depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.cost.rank_model import Arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Ceilings of one device.

    Args:
        name: as in the table, such as ``H100 SXM``.
        kind: ``gpu``, ``cpu``, or ``unified`` (a processor and a GPU that share their memory).
        memory_bytes: that an allocator sees, not what the sheet says.
        memory_bandwidth: bytes a second, of the sheet.
        peaks: dense operations a second, by what they are computed in; what is missing is computed
            in the next larger type (see ``peak``).
        link_bandwidth: bytes a second and direction to another device of the same machine.
        tdp_watts, usd_per_hour: None where they are not known; prices are from ... to.
        trust: ``sure``, ``mostly``, ``uncertain``.
        source: where the figures are from.
    """

    name: str
    kind: str
    memory_bytes: float
    memory_bandwidth: float
    peaks: Mapping[Arithmetic, float]
    link_bandwidth: float | None = None
    link_kind: str = ""
    tdp_watts: float | None = None
    usd_per_hour: tuple[float, float] | None = None
    trust: str = "sure"
    note: str = ""
    source: str = ""
    aliases: tuple[str, ...] = field(default=())
