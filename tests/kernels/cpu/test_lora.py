"""The kernel of adapters beside its slow twin: each row by itself, with sums in the order that
csrc/lora.h says, in float64 where that makes no bit differ."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from octavo.base.errors import EngineError
from octavo.core.batch import Batch, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cpu import abi, packing
from octavo.kernels.cpu.program import LoraSite
from octavo.lora.targets import LowRank
from octavo.quantization.base import stored_floats
from octavo.runtime.lora_pool import PooledLora
from octavo.runtime.native_lora import NativeLoras

SIZES = ((40, 33), (16, 33))  # of the two matrices of a linear: (outputs, inputs)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float32":
        return values
    bits = values.view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


def fma(a, b, c):
    """a b + c, rounded once: the product of two float32 is exact in float64, and the sum is rounded
    to odd there, so that rounding it again changes nothing."""
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + c
    error = (c - (total - product)) + (product - (total - (total - product)))
    bits = total.view(np.int64)
    is_even = (bits & 1) == 0
    towards = np.where((error > 0) == (total > 0), 1, -1)
    fixed = np.where((error != 0) & is_even, bits + towards, bits)
    return fixed.view(np.float64).astype(np.float32)


def slow_change(x: np.ndarray, change: LowRank, dtype: str) -> np.ndarray:
    """B (scale * (A x)) of one row, as the kernel adds it up."""
    a, b = rounded(change.a, dtype), rounded(change.b, dtype)
    sums = np.zeros(len(a), np.float32)
    for i in range(len(x)):
        sums = fma(a[:, i], np.repeat(x[i], len(a)), sums)
    sums *= np.float32(change.scale)
    even = odd = np.zeros(len(b), np.float32)
    for j in range(0, len(a) - 1, 2):
        even = fma(b[:, j], np.repeat(sums[j], len(b)), even)
        odd = fma(b[:, j + 1], np.repeat(sums[j + 1], len(b)), odd)
    if len(a) % 2:
        even = fma(b[:, -1], np.repeat(sums[-1], len(b)), even)
    return even + odd


def made_change(rng, shape, rank) -> LowRank:
    rows, columns = shape
    a = rng.standard_normal((rank, columns)).astype(np.float32)
    b = rng.standard_normal((rows, rank)).astype(np.float32)
    return LowRank(a, b, float(rng.uniform(0.5, 2)))


class Step:
    """A program of one linear of two matrices, run on rows with adapters."""

    def __init__(self, native, dtype, adapters, num_rows, seed=0):
        rng = np.random.default_rng(seed)
        self.native, (k,) = native, {columns for _, columns in SIZES}
        weights = [rng.standard_normal(size).astype(np.float32) for size in SIZES]
        self.packed = [
            packing.pack(stored_floats(each), native.library, native.pool) for each in weights
        ]
        self.x = rng.standard_normal((num_rows, k)).astype(np.float32)
        self.out = [np.zeros((num_rows, rows), np.float32) for rows, _ in SIZES]
        names = ("first", "second")
        site = LoraSite(abi.OCT_OP_LINEAR, names, SIZES, tuple(range(rows) for rows, _ in SIZES))
        self.loras = NativeLoras([site], num_rows, dtype)
        self.changes = [
            {
                name: made_change(rng, size, rank)
                for name, size, rank in zip(names, SIZES, ranks, strict=True)
                if rank
            }
            for ranks in adapters
        ]
        self.pooled = []
        for index, changes in enumerate(self.changes):
            adapter = PooledLora("", f"{index}")
            adapter.weights = self.loras.pack(changes)
            self.pooled.append(adapter)

    def run(self, chosen, counts=None) -> list[np.ndarray]:
        """The outputs where sequences of these lengths have these adapters, -1 for none."""
        counts = counts or [1] * len(chosen)
        total = sum(counts)
        linear = abi.LinearArgs(k=self.x.shape[1], ldin=self.x.shape[1], num_segments=2)
        linear.remainder_above = float("inf")
        setattr(linear, "in", self.x.ctypes.data)
        for segment, weight, out in zip(linear.segments, self.packed, self.out, strict=False):
            segment.weight, segment.y = weight.as_struct(), out.ctypes.data
            segment.ldy = out.shape[1]
        node = abi.Node(abi.OCT_OP_LINEAR, 1, 0, 0, ctypes.addressof(linear))
        program = abi.Program((abi.Node * 1)(node), 1, 0, 0, len(self.x))
        starts = np.cumsum([0, *counts]).astype(np.int32)
        batch = abi.Batch(num_multi_steps=1)
        batch.seqs.num_seqs, batch.seqs.num_tokens = len(chosen), total
        batch.seqs.q_start = starts.ctypes.data
        items = []
        for place, number in enumerate(chosen):
            request = Request(f"{place}", [1], SamplingParams(), 0.0)
            request.adapter = None if number < 0 else self.pooled[number]
            items.append(ScheduledRequest(request, 0, counts[place], 1))
        self.loras.write(Batch(0, tuple(items)), batch)
        step = self.native.lib.oct_step
        self.native.check(step(self.native.pool, ctypes.byref(program), ctypes.byref(batch)))
        return [out[:total].copy() for out in self.out]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [(1, 2), (16, 16), (17, 5), (0, 40), (64, 70)])
def test_rows_are_those_of_the_slow_twin(dtype, ranks, native):
    step = Step(native, dtype, [ranks, (3, 0)], 9)
    chosen = [0, -1, 1, 0, 0, 1, -1, 0, 0]
    plain, changed = step.run([-1] * 9), step.run(chosen)
    for row, number in enumerate(chosen):
        for index, name in enumerate(("first", "second")):
            expected = plain[index][row]
            if number >= 0 and name in step.changes[number]:
                change = slow_change(step.x[row], step.changes[number][name], dtype)
                expected = expected + change
            np.testing.assert_array_equal(changed[index][row], expected)


def test_a_row_does_not_depend_on_the_others(native):
    step = Step(native, "bfloat16", [(16, 8), (4, 4), (33, 16)], 40)
    rng = np.random.default_rng(3)
    counts = [1, 7, 1, 12, 1, 1, 9, 8]
    chosen = [0, 1, -1, 2, 0, 2, 0, 1]
    together = step.run(chosen, counts)
    rows = step.x.copy()
    begin = 0
    for number, count in zip(chosen, counts, strict=True):
        for row in range(begin, begin + count):
            step.x[0] = rows[row]
            alone = step.run([number])
            for index in (0, 1):
                np.testing.assert_array_equal(alone[index][0], together[index][row])
        begin += count
    step.x[:] = rng.permuted(rows, axis=0)


def test_arguments_that_would_read_out_of_bounds_are_refused(native):
    step = Step(native, "float32", [(4, 4)], 4)
    lora = step.pooled[0].weights
    segment = lora._sites[0].segments[0]
    for name, value in (("rank", 257), ("rank", 0), ("first", 13), ("first", -1)):
        before = getattr(segment, name)
        setattr(segment, name, value)
        with pytest.raises(EngineError, match="of an adapter has the rank"):
            step.run([0])
        setattr(segment, name, before)
    lora.struct.num_sites = 0
    with pytest.raises(EngineError, match="0 sites"):
        step.run([0])
    lora.struct.num_sites = 1
    lora.struct.format = abi.OCT_F16
    with pytest.raises(EngineError, match="format"):
        step.run([0])
    lora.struct.format = abi.OCT_F32
    assert step.run([0])
