"""Devices as far as memory and time depend on them: ``Device``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.base.errors import ConfigError
from octavo.cost.networks import Network
from octavo.cost.rank_model import Arithmetic
from octavo.runtime.layout import RankBounds, check_ranks

SHARED_MEMORY = "shared memory"  # the link between processors of one machine
_READ_BY_A_CORE = 20e9  # of what another one has written; see octavo.cost.communication

# Where a device has no peak for a type, it computes in the first of these that it has one for.
_COMPUTED_IN: dict[Arithmetic, tuple[Arithmetic, ...]] = {
    "fp4": ("fp4", "fp8", "fp16", "fp32"),
    "fp8": ("fp8", "fp16", "fp32"),
    "int8": ("int8", "fp16", "fp32"),
    "fp16": ("fp16", "fp32"),
    "fp32": ("fp32", "fp16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Ceilings of one device.

    Args:
        name: as in the table, such as ``H100 SXM``.
        kind: ``gpu``, ``cpu``, or ``unified`` (a processor and a GPU that share their memory).
        memory_bytes: that an allocator sees, not what the sheet says.
        memory_bandwidth: bytes a second, of the sheet.
        peaks: dense operations a second, by what they are computed in; what is missing is computed
            in the next larger type (see ``computed_in``).
        link_bandwidth: bytes a second and direction to another device of the same machine; of a
            processor, at which one rank reads what another one has written.
        tdp_watts, usd_per_hour: None where they are not known; prices are from ... to.
        is_measured: the ceilings are what was reached there, not those of a sheet.
        num_cores: threads of a processor that get a core each; None where it is not known.
        num_ranks: that share this machine; its ceilings are those of one of them.
        network: between machines that have one of these each, or some; None: the usual one.
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
    is_measured: bool = False
    num_cores: int | None = None
    num_ranks: int = 1
    network: Network | None = None

    def shared_by(self, num_ranks: int) -> Device:
        """Return the part that each of several ranks has of this machine.

        ConfigError if there is no core for each.
        """
        check_ranks(num_ranks, RankBounds(model=self.name, num_cores=self.num_cores))
        return replace(
            self,
            name=f"1/{num_ranks} of {self.name}",
            memory_bytes=self.memory_bytes / num_ranks,
            memory_bandwidth=self.memory_bandwidth / num_ranks,
            peaks={name: peak / num_ranks for name, peak in self.peaks.items()},
            link_bandwidth=self.link_bandwidth and self.link_bandwidth / num_ranks,
            num_cores=self.num_cores and self.num_cores // num_ranks,
            num_ranks=num_ranks,
        )

    def as_json(self) -> dict[str, Any]:
        """The device as JSON: the fields of a hardware file, and ``ridge_flops_per_byte``."""
        return {
            "name": self.name,
            "kind": self.kind,
            "memory_bytes": self.memory_bytes,
            "bandwidth_gb_s": self.memory_bandwidth / 1e9,
            "dense_tflops": {name: peak / 1e12 for name, peak in self.peaks.items()},
            "ridge_flops_per_byte": self.ridge(),
            "link_gb_s": self.link_bandwidth and self.link_bandwidth / 1e9,
            "link_kind": self.link_kind or None,
            "tdp_watts": self.tdp_watts,
            "usd_per_hour": self.usd_per_hour and list(self.usd_per_hour),
            "trust": self.trust,
            "measured": self.is_measured,
            "note": self.note,
            "source": self.source,
            "aliases": list(self.aliases),
            **({} if self.network is None else {"network": self.network.as_json()}),
        }

    def computed_in(self, arithmetic: Arithmetic) -> Arithmetic:
        """The type that products of a type are computed in here: where there is no FP8, its weights
        become 16 bits. ConfigError if there is none."""
        for type in _COMPUTED_IN[arithmetic]:
            if type in self.peaks:
                return type
        raise ConfigError(
            f"{self.name}: no peak is known for {arithmetic}, or for what could take its place; "
            f"add dense_tflops of one of {', '.join(_COMPUTED_IN[arithmetic])}"
        )

    def peak(self, arithmetic: Arithmetic) -> float:
        """Dense operations a second, in ``computed_in(arithmetic)``."""
        return self.peaks[self.computed_in(arithmetic)]

    def ridge(self, arithmetic: Arithmetic = "fp16") -> float:
        """Operations for each byte from which on computing takes longer than memory."""
        return self.peak(arithmetic) / self.memory_bandwidth


def shared_memory_bandwidth(
    memory_bandwidth: float, num_cores: int | None, *, is_between_sockets: bool
) -> float:
    """Return the bytes a second at which all cores of a processor read what other ranks have
    written: each as fast as it was measured for one, and from other sockets no more than a quarter
    of what their own memory gives, which is not measured."""
    by_cores = float("inf") if num_cores is None else num_cores * _READ_BY_A_CORE
    return min(by_cores, memory_bandwidth / 4) if is_between_sockets else by_cores
