"""Products by Triton kernels and cuBLAS, as ``gemm_dispatch.py`` chooses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from octavo.kernels.cuda.activations import activation_mul
from octavo.kernels.cuda.code_products import row_codes, scale_products
from octavo.kernels.cuda.dequantize import dequantize, room_for
from octavo.kernels.cuda.gemm_dispatch import (
    FEW_CODED_ROWS,
    FEW_DENSE_ROWS,
    GemmConditions,
    GemmKind,
    gemm_kind,
)
from octavo.kernels.cuda.gemv import multiply_row, multiply_row_by_nibbles, nibbles_tiling
from octavo.kernels.cuda.linear import linear, tiling_of
from octavo.kernels.cuda.norms import rmsnorm
from octavo.kernels.cuda.products import GemmFusion
from octavo.kernels.cuda.splits import Tiling, Workspace
from octavo.kernels.cuda.weights import DenseWeight, DeviceWeight, JoinedWeight, W4Weight, W8Weight
from octavo.kernels.op_arguments import RowNorm

# Products of more rows are split: memory between a norm, a product and an activation is no
# larger than for these.
PIECE_ROWS = 4096
_INTEGER_ROWS = 1024  # likewise for int32 products
_EXPANDED_VALUES = 1 << 26  # values of a weight dequantized at a time
_INVARIANT_ROWS, _INVARIANT_TILES = 32, 16
_SO_MANY_OUTPUTS = 1 << 30  # that their tiles are enough for any GPU
# Products of FP8 are summed in float32 throughout. With fast sums, Hopper's tensor cores keep about
# 14 bits, an error of up to 2 % of a sum of 4,096 (DeepSeek-V3, arXiv 2412.19437, 3.3.2), on top of
# that of the codes. How much faster they are has not been measured here.
FAST_SUMS = False


@dataclass(frozen=True, slots=True)
class WeightUse:
    """The largest product with a weight: its rows, and whether it has an activation.

    ``of_outputs``: where it is some rows of a matrix, and shall have the bits of the whole, the
    outputs of that; else None.
    """

    weight: DeviceWeight
    max_rows: int
    gated: bool = False
    of_outputs: int | None = None


class TritonProducts:
    """Products of one stream, with memory for those that are declared in advance.

    Args:
        uses: of each weight that is multiplied with, but not of those that are only looked up.
        conditions: for ``gemm_kind``.
    """

    def __init__(
        self,
        uses: Iterable[WeightUse],
        conditions: GemmConditions,
        device: torch.device | str,
    ):
        self._conditions, dtype = conditions, conditions.dtype
        self._tilings: dict[tuple[int, int, bool], Tiling] = {}
        needs = _Needs()
        for use in uses:
            self._prepare(use, needs)
        self._workspace = Workspace.for_all(self._tilings.values(), device)
        self._normed = torch.empty(needs.normed, dtype=dtype, device=device)
        self._wide = torch.empty(needs.wide, dtype=dtype, device=device)
        self._scratch = torch.empty(needs.scratch, dtype=dtype, device=device)
        self._codes = torch.empty(needs.codes, dtype=torch.int8, device=device)
        self._scales = torch.empty(needs.scales, dtype=torch.float32, device=device)
        self._integers = torch.empty(needs.integers, dtype=torch.int32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        buffers = (
            *(self._workspace.parts, self._workspace.counters, self._normed, self._wide),
            *(self._scratch, self._codes, self._scales, self._integers),
        )
        return sum(buffer.nbytes for buffer in buffers)

    def reset(self) -> None:
        """See ``Products.reset``."""
        self._workspace.counters.zero_()

    def linear(self, x: Tensor, weight: DeviceWeight, out: Tensor, fusion: GemmFusion) -> None:
        """See ``Products.linear``. It cannot both accumulate and apply an activation."""
        assert fusion.activation is None or not fusion.accumulate
        for rows in _evenly(len(x), PIECE_ROWS):
            self._piece(x[rows], weight, out[rows], fusion)

    def rows(self, weight: DeviceWeight, ids: Tensor, out: Tensor) -> None:
        """See ``Products.rows``. ``out`` is of the type of the weight, if that is of floats."""
        if isinstance(weight, DenseWeight):
            torch.index_select(weight.values, 0, ids, out=out)
        else:
            assert isinstance(weight, W4Weight | W8Weight), weight.format
            dequantize(weight, out, ids)

    def _prepare(self, use: WeightUse, needs: _Needs) -> None:
        """Plan the tilings of a use, and note the memory that it takes."""
        weight, (n, k), most = use.weight, use.weight.shape, min(use.max_rows, PIECE_ROWS)
        num_processors = self._conditions.gpu.num_processors
        for rows in _rows_to_look_at(most):
            kind = gemm_kind(weight, rows, self._conditions)
            if kind is GemmKind.VECTOR:
                if isinstance(weight, W4Weight):
                    needs.normed = max(needs.normed, k)
                    tiling = nibbles_tiling(weight, num_processors, gated=use.gated)
                    self._tilings[self._key(kind, weight, rows, use.gated)] = tiling
            elif kind in (GemmKind.FUSED, GemmKind.TILES):
                assert isinstance(weight, DenseWeight | W4Weight | W8Weight)
                key, tiles = self._key(kind, weight, rows, use.gated), _num_row_tiles(kind, most)
                self._tilings[key] = tiling_of(
                    weight,
                    key[1],
                    num_processors,
                    gated=use.gated,
                    row_tiles=tiles,
                    of_outputs=use.of_outputs,
                )
                needs.normed = max(needs.normed, rows * k)
            else:
                needs.of_several(kind, rows, n, k, use.gated)
        if isinstance(weight, JoinedWeight):
            for part in weight.parts:
                # How many outputs a part has of the whole is not known: then nothing is split.
                whole = None if use.of_outputs is None else _SO_MANY_OUTPUTS
                self._prepare(WeightUse(part, use.max_rows, of_outputs=whole), needs)

    def _key(
        self, kind: GemmKind, weight: DeviceWeight, rows: int, gated: bool
    ) -> tuple[int, int, bool]:
        """Key of a tiling: the weight, the rows of a program, and whether there is an
        activation."""
        if kind is GemmKind.VECTOR:
            of_program = 1
        elif kind is GemmKind.TILES:
            of_program = _INVARIANT_ROWS
        else:
            of_program = max(FEW_DENSE_ROWS, triton.next_power_of_2(rows))
        return id(weight), of_program, gated

    def _piece(self, x: Tensor, weight: DeviceWeight, out: Tensor, fusion: GemmFusion) -> None:
        kind = gemm_kind(weight, len(x), self._conditions)
        if kind is GemmKind.VECTOR:
            self._row(x, weight, out, fusion)
        elif kind in (GemmKind.FUSED, GemmKind.TILES):
            self._in_one_launch(kind, x, weight, out, fusion)
        elif fusion.activation is None:
            self._product(kind, x, weight, out, fusion)
        else:
            wide = _room(self._wide, len(x), weight.shape[0])
            self._product(kind, x, weight, wide, replace(fusion, activation=None))
            activation_mul(wide, out, fusion.activation)

    def _row(self, x: Tensor, weight: DeviceWeight, out: Tensor, fusion: GemmFusion) -> None:
        if not isinstance(weight, W4Weight):
            assert isinstance(weight, DenseWeight | W8Weight)
            return multiply_row(x, weight, out, fusion)
        x, fusion = self._norm(x, fusion.norm), replace(fusion, norm=None)
        key = self._key(GemmKind.VECTOR, weight, 1, fusion.activation is not None)
        multiply_row_by_nibbles(x, weight, out, self._tilings[key], self._workspace, fusion)

    def _in_one_launch(
        self, kind: GemmKind, x: Tensor, weight: DeviceWeight, out: Tensor, fusion: GemmFusion
    ) -> None:
        x, fusion = self._norm(x, fusion.norm), replace(fusion, norm=None)
        assert isinstance(weight, DenseWeight | W4Weight | W8Weight)
        tiling = self._tilings[self._key(kind, weight, len(x), fusion.activation is not None)]
        for rows in _slices(len(x), tiling.max_rows):
            linear(x[rows], weight, out[rows], tiling, self._workspace, fusion)

    def _product(
        self, kind: GemmKind, x: Tensor, weight: DeviceWeight, out: Tensor, fusion: GemmFusion
    ) -> None:
        """Multiply in several launches, without an activation."""
        if isinstance(weight, W8Weight) and kind is GemmKind.FP8:
            return self._in_fp8(x, weight, out, fusion)
        if isinstance(weight, W8Weight) and kind is GemmKind.INT8:
            return self._in_int8(x, weight, out, fusion)
        x = self._norm(x, fusion.norm)
        if isinstance(weight, DenseWeight):
            _gemm(x, weight.values.t(), out, fusion.bias, fusion.accumulate)
        elif isinstance(weight, JoinedWeight):
            for outputs, part in _parts(weight):
                bias = None if fusion.bias is None else fusion.bias[outputs]
                self._piece(x, part, out[:, outputs], replace(fusion, norm=None, bias=bias))
        else:
            assert isinstance(weight, W4Weight | W8Weight)
            self._expand(x, weight, out, fusion)

    def _expand(
        self, x: Tensor, weight: W4Weight | W8Weight, out: Tensor, fusion: GemmFusion
    ) -> None:
        n, k = weight.shape
        for outputs in _slices(n, _outputs_at_a_time(k)):
            part = weight.narrow(outputs.start, outputs.stop)
            numbers = room_for(part, self._scratch)
            dequantize(part, numbers)
            bias = None if fusion.bias is None else fusion.bias[outputs]
            _gemm(x, numbers.t(), out[:, outputs], bias, fusion.accumulate)

    def _in_fp8(self, x: Tensor, weight: W8Weight, out: Tensor, fusion: GemmFusion) -> None:
        codes, scales = self._coded(x, fusion.norm, torch.float8_e4m3fn)
        if out.dtype == torch.float32:
            return self._fp8_logits(codes, scales, weight, out, fusion)
        is_final = out.is_contiguous() and not fusion.accumulate
        made = out if is_final else _room(self._scratch, len(x), weight.shape[0])
        torch._scaled_mm(
            codes,
            weight.codes.t(),
            scale_a=scales[:, None],
            scale_b=weight.scales,
            out_dtype=made.dtype,
            use_fast_accum=FAST_SUMS,
            out=made,
        )
        if not is_final:
            out.add_(made) if fusion.accumulate else out.copy_(made)
        if fusion.bias is not None:
            out.add_(fusion.bias)

    def _fp8_logits(
        self, codes: Tensor, scales: Tensor, weight: W8Weight, out: Tensor, fusion: GemmFusion
    ) -> None:
        """Multiply FP8 codes in float32, which torch does only with one scale for all: scales of
        rows and outputs are applied afterwards."""
        assert out.is_contiguous() and not fusion.accumulate
        torch._scaled_mm(
            codes,
            weight.codes.t(),
            scale_a=self._one,
            scale_b=self._one,
            out_dtype=torch.float32,
            use_fast_accum=FAST_SUMS,
            out=out,
        )
        scale_products(out, scales, weight.scales[0], out, bias=fusion.bias)

    def _in_int8(self, x: Tensor, weight: W8Weight, out: Tensor, fusion: GemmFusion) -> None:
        codes, scales = self._coded(x, fusion.norm, torch.int8)
        for rows in _evenly(len(x), _INTEGER_ROWS):
            integers = _room(self._integers, len(codes[rows]), weight.shape[0])
            torch._int_mm(codes[rows], weight.codes.t(), out=integers)
            scale_products(
                integers,
                scales[rows],
                weight.scales[0],
                out[rows],
                bias=fusion.bias,
                accumulate=fusion.accumulate,
            )

    def _coded(self, x: Tensor, norm: RowNorm | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Norm x and convert it to codes [T, K] with a scale for each row."""
        codes = _room(self._codes, *x.shape).view(dtype)
        scales = self._scales[: len(x)]
        if norm is None:
            row_codes(x, codes, scales)
        else:
            rmsnorm(x, norm, codes, scales=scales)
        return codes, scales

    def _norm(self, x: Tensor, norm: RowNorm | None) -> Tensor:
        if norm is None:
            return x
        normed = _room(self._normed, *x.shape)
        rmsnorm(x, norm, normed)
        return normed


@dataclass(slots=True)
class _Needs:
    """Numbers that each kind of memory has to hold."""

    normed: int = 0
    wide: int = 0  # gates and ups
    scratch: int = 0  # dequantized weights; products that cannot be written in place
    codes: int = 0
    scales: int = 0
    integers: int = 0

    def of_several(self, kind: GemmKind, rows: int, n: int, k: int, gated: bool) -> None:
        if gated:
            self.wide = max(self.wide, rows * n)
        if kind in (GemmKind.FP8, GemmKind.INT8):
            self.codes, self.scales = max(self.codes, rows * k), max(self.scales, rows)
        else:
            self.normed = max(self.normed, rows * k)
        if kind is GemmKind.INT8:
            self.integers = max(self.integers, min(rows, _INTEGER_ROWS) * n)
        if kind is GemmKind.FP8:
            self.scratch = max(self.scratch, rows * n)
        if kind is GemmKind.EXPANDED:
            self.scratch = max(self.scratch, min(n, _outputs_at_a_time(k)) * k)


def _rows_to_look_at(most: int) -> list[int]:
    """Numbers of rows that cover all kinds of products, and the most rows of each."""
    steps = [1 << power for power in range(most.bit_length()) if 1 << power <= FEW_CODED_ROWS]
    return [*steps, *(step - 1 for step in steps if step > 1), most]


def _num_row_tiles(kind: GemmKind, most: int) -> int:
    return min(_INVARIANT_TILES, -(-most // _INVARIANT_ROWS)) if kind is GemmKind.TILES else 1


def _outputs_at_a_time(k: int) -> int:
    """Outputs of a weight that are dequantized at a time: a multiple of the kernels' tiles."""
    return max(128, _EXPANDED_VALUES // k // 128 * 128)


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, max(size, 1)))


def _evenly(count: int, most: int) -> Iterator[slice]:
    """Yields the fewest slices, of nearly one size, as products in 8 bits need at least 17 rows."""
    return _slices(count, -(-count // max(1, -(-count // most))))


def _parts(weight: JoinedWeight) -> Iterator[tuple[slice, DeviceWeight]]:
    start = 0
    for part in weight.parts:
        stop = start + part.shape[0]
        yield slice(start, stop), part
        start = stop


def _room(memory: Tensor, rows: int, columns: int) -> Tensor:
    return memory[: rows * columns].view(rows, columns)


def _gemm(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, accumulate: bool) -> None:
    """Compute out = x @ weight [K, N] + bias, or add that to ``out``; by cuBLAS."""
    if accumulate:
        torch.addmm(out, x, weight, out=out)
    elif out.dtype != x.dtype:
        torch.mm(x, weight, out_dtype=out.dtype, out=out)
    elif bias is not None and bias.dtype == x.dtype:
        torch.addmm(bias, x, weight, out=out)
        return
    else:
        torch.mm(x, weight, out=out)
    if bias is not None:
        out.add_(bias)
