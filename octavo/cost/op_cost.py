"""Time of each operation of a pass: the roofline, and the overheads of an engine.

    seconds = (memory^p + compute^p)^(1/p) + launch

where memory and compute are the times at the shares of the ceilings that are reached (Williams et
al., CACM 2009, with the corner smoothed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from octavo.cost.efficiency import Efficiency
from octavo.cost.hardware import Device
from octavo.cost.prediction import Prediction
from octavo.cost.rank_model import Arithmetic, MatrixOp, RankModel
from octavo.cost.work import (
    ResourceUse,
    RowCounts,
    decode_attention_work,
    matrix_work,
    prompt_attention_work,
)

Bound = Literal["compute", "memory", "latency", "communication"]

SMALL_OPS = "small ops"  # what all of them together are called

# Small operations of a layer: two norms, the rotation and writing of keys, the activation function.
_SMALL_OPS = 4
# Rows of the hidden size that they move: each norm reads two and writes two of them, its own and
# the residual stream.
_SMALL_OP_ROWS = 8
_BITS: dict[Arithmetic, int] = {"fp32": 32, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4}


@dataclass(frozen=True, slots=True)
class OpCost:
    """One operation in all of its layers on one rank: ``seconds``, ``bytes`` and ``flops`` are sums
    over ``count``. ``ridge``: the intensity from which on the device computes longer than it
    reads."""

    name: str
    count: int
    seconds: float
    bytes: float
    flops: float
    ridge: float
    bound: Bound

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "count": self.count,
            "ms": self.seconds * 1e3,
            "bytes": self.bytes,
            "flops": self.flops,
            "intensity": self.intensity,
            "ridge": self.ridge,
            "bound": self.bound,
        }


@dataclass(frozen=True, slots=True)
class PricedOp:
    """An operation of a model, and what it costs on a device.

    Args:
        stages: of a pipeline that run it, one after the other.
        work: of a pass, in all ``count`` layers of a rank.
        bandwidth, peak: the ceilings. bytes_per_s, flops_per_s: what is reached of them.
        launch_s: of all ``count``.
    """

    name: str
    count: int
    stages: int
    work: Callable[[RowCounts], ResourceUse]
    bandwidth: float
    peak: float
    bytes_per_s: float
    flops_per_s: float
    launch_s: float
    efficiency: Efficiency

    def seconds(self, work: ResourceUse) -> float:
        """Times of the operations on one rank."""
        if not (work.bytes or work.flops):
            return 0.0
        memory, compute = work.bytes / self.bytes_per_s, work.flops / self.flops_per_s
        return _together(memory, compute, self.efficiency.sharpness) + self.launch_s

    def prediction(self, work: ResourceUse) -> Prediction:
        """Time of the operations on all stages; never below the ceilings themselves."""
        return Prediction(*self.ends(work), self.efficiency.source)

    def ends(self, work: ResourceUse) -> tuple[float, float, float]:
        """The value, the low and the high end of that prediction."""
        value, spread = self.seconds(work), 1.0 + self.efficiency.spread
        least = max(work.bytes / self.bandwidth, work.flops / self.peak)
        low = min(value, max(least, value / spread))
        return value * self.stages, low * self.stages, value * spread * self.stages

    def cost(self, work: ResourceUse) -> OpCost:
        times: dict[Bound, float] = {
            "memory": work.bytes / self.bytes_per_s,
            "compute": work.flops / self.flops_per_s,
            "latency": self.launch_s,
        }
        return OpCost(
            self.name,
            self.count,
            self.seconds(work),
            work.bytes,
            work.flops,
            self.peak / self.bandwidth,
            max(times, key=times.__getitem__),
        )


def priced_ops(model: RankModel, device: Device, efficiency: Efficiency) -> Iterator[PricedOp]:
    """All operations of a model's pass. ConfigError if the device has no peak for one."""
    price = partial(_priced, device=device, efficiency=efficiency, stages=model.parallel.pp)
    for matrix in model.matrices:
        found = price(
            matrix.name,
            matrix.count,
            partial(matrix_work, matrix, model=model),
            matrix.arithmetic,
            _compute_share(matrix, device, efficiency),
        )
        # Only the last stage has the head.
        yield replace(found, stages=1) if matrix.sampled_only else found
    for op in model.attention:
        share = efficiency.attention_compute
        decode = partial(decode_attention_work, op)
        prompt = partial(prompt_attention_work, op)
        yield price(f"{op.name}.decode", op.count, decode, "fp16", share)
        yield price(f"{op.name}.prompt", op.count, prompt, "fp16", share)
    small = partial(_small_ops_work, model)
    yield price(SMALL_OPS, _SMALL_OPS * model.num_layers, small, "fp16", efficiency.compute)


def merge_ops(ops: Iterable[OpCost]) -> tuple[OpCost, ...]:
    """Sum the operations of several passes by name, bound as the longest of them is."""
    merged: dict[str, OpCost] = {}
    for op in ops:
        if op.name in merged:
            one, other = sorted((merged[op.name], op), key=lambda each: each.seconds)
            op = replace(
                other,
                count=one.count + other.count,
                seconds=one.seconds + other.seconds,
                bytes=one.bytes + other.bytes,
                flops=one.flops + other.flops,
            )
        merged[op.name] = op
    return tuple(merged.values())


def _priced(
    name: str,
    count: int,
    work: Callable[[RowCounts], ResourceUse],
    arithmetic: Arithmetic,
    compute_share: float,
    *,
    device: Device,
    efficiency: Efficiency,
    stages: int,
) -> PricedOp:
    peak = device.peak(arithmetic)
    return PricedOp(
        name,
        count,
        stages,
        work,
        device.memory_bandwidth,
        peak,
        device.memory_bandwidth * efficiency.memory,
        peak * compute_share,
        count * efficiency.launch_s,
        efficiency,
    )


def _together(memory: float, compute: float, sharpness: float) -> float:
    """(a^p + b^p)^(1/p): the longer of two times, and a little more where they are alike."""
    longer, shorter = (memory, compute) if memory > compute else (compute, memory)
    if not shorter:
        return longer
    return float(longer * (1.0 + (shorter / longer) ** sharpness) ** (1.0 / sharpness))


def _compute_share(matrix: MatrixOp, device: Device, efficiency: Efficiency) -> float:
    """Less where weights are unpacked into more bits before they are multiplied; that 16 bits
    become 32 costs nothing."""
    bits = 8.0 * matrix.num_bytes / matrix.num_params if matrix.num_params else 0.0
    if bits < 0.9 * min(16, _BITS[device.computed_in(matrix.arithmetic)]):  # scales add some
        return efficiency.compute * efficiency.dequantized
    return efficiency.compute


def _small_ops_work(model: RankModel, rows: RowCounts) -> ResourceUse:
    row = model.hidden_size * model.activation_bytes
    return ResourceUse(model.num_layers * _SMALL_OP_ROWS * rows.num_tokens * row)
