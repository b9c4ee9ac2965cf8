"""Measures how near each step of a live engine comes to the device's ceilings, and what limits it.

    memory    bytes that the step had to move / the device's bandwidth
    compute   the sum of its operations / the device's peak of each arithmetic
    floor     the longer of the two: nothing can be faster, but for what caches still hold
    share     floor / the time that the step took

A step is bound by memory or by compute, whichever takes longer at the share of its ceiling that the
engine is known to reach (`octavo.cost.efficiency`), or by overhead, if what is left of its time is
more than either. `octavo bench roofline` has the same floor of whole runs; see docs/metrics.md.

A meter is asked between two steps, while nothing runs, so it has to be quick: what depends on the
numbers of rows alone is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from octavo.cost.step_cost import StepBatch, StepModel
from octavo.cost.work import (
    RowCounts,
    decode_attention_work,
    matrix_work,
    passes,
    prompt_attention_work,
)

_MAX_KINDS = 4096  # numbers of rows, and of those that are sampled, that are remembered


class RooflineMeter:
    """An `octavo.core.step_meter.StepMeter`.

    Args:
        steps: the model on its device, with what was measured of it there, if anything was.
    """

    def __init__(self, steps: StepModel):
        self._steps = steps
        self._model = steps.model
        self._bandwidth = steps.device.memory_bandwidth
        self._attention_peak = steps.device.peak("fp16")
        self._products = lru_cache(_MAX_KINDS)(self._price_products)
        self._share: float | None = None
        self._memory_seconds = self._compute_seconds = 0.0  # of the last step
        self._floor_seconds = self._predicted_seconds = self._measured_seconds = 0.0
        self._bound = {"memory": 0, "compute": 0, "overhead": 0}

    def measure(self, batch: StepBatch, num_multi_steps: int, seconds: float) -> None:
        memory = compute = predicted = 0.0
        for rows, count in _few_of(passes(batch.items, num_multi_steps)):
            more_memory, more_compute = self._least_seconds(rows)
            memory, compute = memory + count * more_memory, compute + count * more_compute
            predicted += count * self._steps.pass_seconds(rows)
        floor = max(memory, compute)
        self._share = floor / seconds
        self._memory_seconds, self._compute_seconds = memory, compute
        self._floor_seconds += floor
        self._predicted_seconds += predicted + self._steps.overhead(len(batch.items))
        self._measured_seconds += seconds
        self._bound[self._limit(memory, compute, seconds)] += 1

    @property
    def figures(self) -> Mapping[str, Any]:
        bound = self._bound
        return {
            "roofline_share": self._share,
            "memory_seconds": self._memory_seconds,
            "compute_seconds": self._compute_seconds,
            "floor_seconds": self._floor_seconds,
            "predicted_seconds": self._predicted_seconds,
            "measured_seconds": self._measured_seconds,
            "num_memory_bound": bound["memory"],
            "num_compute_bound": bound["compute"],
            "num_overhead_bound": bound["overhead"],
        }

    def _limit(self, memory: float, compute: float, seconds: float) -> str:
        efficiency = self._steps.efficiency
        memory, compute = memory / efficiency.memory, compute / efficiency.compute
        longer = max(memory, compute)
        if seconds - longer > longer:
            return "overhead"
        return "memory" if memory >= compute else "compute"

    def _least_seconds(self, rows: RowCounts) -> tuple[float, float]:
        """Seconds of a pass by memory, and by arithmetic."""
        memory, compute = self._products(rows.num_tokens, rows.num_sampled)
        for op in self._model.attention:
            work = decode_attention_work(op, rows)
            if rows.prompts:
                work += prompt_attention_work(op, rows)
            memory += work.bytes / self._bandwidth
            compute += work.flops / self._attention_peak
        return memory, compute

    def _price_products(self, num_tokens: int, num_sampled: int) -> tuple[float, float]:
        """The same of all matrix products, which know rows by their number alone."""
        rows, device = RowCounts(num_tokens, num_sampled, []), self._steps.device
        memory = compute = 0.0
        for matrix in self._model.matrices:
            work = matrix_work(matrix, rows, self._model)
            memory += work.bytes / self._bandwidth
            compute += work.flops / device.peak(matrix.arithmetic)
        return memory, compute


def _few_of(passes: Iterable[RowCounts]) -> Iterator[tuple[RowCounts, float]]:
    """The passes of a step, and how often each counts. Of many decode steps, which differ by one
    key each, the first and the last stand for all."""
    first, *later = passes
    yield first, 1.0
    ends = later if len(later) < 3 else (later[0], later[-1])
    for rows in ends:
        yield rows, len(later) / len(ends)
