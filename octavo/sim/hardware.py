"""What a device can do, as far as the time of a step depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """Ceilings of one device.

    Args:
        name: for reports.
        memory_bytes: that weights and KV have to fit into.
        memory_bandwidth: bytes per second that reads reach.
        flops: dense floating-point operations per second, in the type that is computed with.
        step_overhead: seconds of a step that no byte or operation explains: launches, Python.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    flops: float
    step_overhead: float = 0.0

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The longer of the time that memory takes, and of that of arithmetic."""
        return max(num_bytes / self.memory_bandwidth, flops / self.flops)
