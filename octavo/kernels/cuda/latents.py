"""Latent attention (DeepSeek-V2, arXiv 2405.04434) in Triton, absorbed: keys are not expanded.

    ckv [T, C + R] --(norm of C, rotation of R)--> slots of the caches
    q [T, H, P + R] --(rotation of R)--> rope_q [T, H, R]
                    --(times U of each head, P to C)--> attention over latents, which are keys and
                    values of all heads --(times V of each head, C to V)--> out [T, H, V]

kv_b [H (P + V), C] has for each head U [P, C] and V [V, C]. Prompts are computed in the same way:
they read no more than decoding does, and multiply more than with expanded keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.attention import GpuAttention
from octavo.kernels.cuda.kv_codes import kind_of, pointers
from octavo.kernels.cuda.kv_write import normed_and_rotated, store_vectors
from octavo.kernels.cuda.ops import LatentLayer, StepTensors
from octavo.kernels.cuda.splits import add_product
from octavo.kernels.cuda.weights import DenseWeight

_FEW_ROWS, _MANY_ROWS, _INVARIANT_ROWS = 16, 64, 32
_BLOCK_N, _BLOCK_K = 64, 64


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of a layer."""

    num_heads: int
    rank: int  # C
    rope_dim: int  # R


class GpuLatents:
    """The layers of latent attention of one model, with memory between their launches.

    Args:
        dtype: of activations.
        is_invariant: as in ``GpuAttention``.
    """

    def __init__(
        self,
        sizes: Iterable[LatentSizes],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        is_invariant: bool = False,
    ):
        self._is_invariant = is_invariant
        absorbed = rope_q = 0
        for each in sizes:
            absorbed = max(absorbed, max_tokens * each.num_heads * each.rank)
            rope_q = max(rope_q, max_tokens * each.num_heads * each.rope_dim)
        self._absorbed, self._rope_q = (
            torch.empty(count, dtype=dtype, device=device) for count in (absorbed, rope_q)
        )

    def attend(
        self,
        q: Tensor,
        ckv: Tensor,
        step: StepTensors,
        layer: LatentLayer,
        attention: GpuAttention,
        out: Tensor,
    ) -> None:
        """Compute :meth:`octavo.kernels.cuda.ops.LatentOps.attend_latents`."""
        (num_tokens, num_heads, query_dim), weight = q.shape, layer.kv_b
        assert isinstance(weight, DenseWeight)
        rank, rope_dim = weight.shape[1], layer.rope.cos_sin.shape[1]
        nope_dim = query_dim - rope_dim
        rope_q = self._rope_q[: num_tokens * num_heads * rope_dim]
        rope_q = rope_q.view(num_tokens, num_heads, rope_dim)
        absorbed = self._absorbed[: num_tokens * num_heads * rank]
        absorbed = absorbed.view(num_tokens, num_heads, rank)
        write_latents(ckv, q, step.positions, step.slots[layer.group], layer, rope_q)
        of_heads = weight.values.view(num_heads, -1, rank)
        up, values = of_heads[:, :nope_dim].transpose(1, 2), of_heads[:, nope_dim:]
        self._multiply(q[..., :nope_dim], up, absorbed)
        plan = attention.plan(step.num_seqs, step.max_query)
        attention.attend_latents(
            absorbed, rope_q, layer, step.tables[layer.group], out=absorbed, plan=plan
        )
        self._multiply(absorbed, values, out)

    def _multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        few = _FEW_ROWS if len(x) <= _FEW_ROWS else _MANY_ROWS
        multiply_heads(x, weight, out, _INVARIANT_ROWS if self._is_invariant else few)


def write_latents(
    ckv: Tensor,
    q: Tensor,
    positions: Tensor,
    slots: Tensor,
    layer: LatentLayer,
    rope_q: Tensor,
) -> None:
    """Write latent vectors and rotated keys to ``slots`` (int32 [T], -1 for none) of the caches,
    and the last R values of q [T, H, P + R], rotated, to rope_q [T, H, R]."""
    num_tokens, num_heads, rope_dim = rope_q.shape
    norm, rope, rank = layer.norm, layer.rope, layer.norm.weight.shape[0]
    assert ckv.shape == (num_tokens, rank + rope_dim) and q.stride(2) == ckv.stride(1) == 1
    values, scales = pointers(layer.latents)
    rope_values, rope_scales = pointers(layer.rope_keys)
    _write[(num_tokens, 1 + num_heads)](
        ckv,
        ckv.stride(0),
        q,
        q.stride(0),
        q.stride(1),
        q.shape[2] - rope_dim,
        positions,
        slots,
        values,
        scales,
        rope_values,
        rope_scales,
        norm.weight,
        norm.eps,
        rope.cos_sin,
        rope_q,
        NUM_HEADS=num_heads,
        RANK=rank,
        ROPE_DIM=rope_dim,
        INTERLEAVED=rope.interleaved,
        KIND=kind_of(layer.latents),
        WIDTH=triton.next_power_of_2(rank),
        ROPE_WIDTH=triton.next_power_of_2(rope_dim),
        num_warps=1,
        enable_fp_fusion=False,
    )


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor, rows: int) -> None:
    """Multiply x [T, H, K] with weight [H, N, K] transposed, head by head, to out [T, H, N]:
    float32 sums.

    A program has ``rows`` rows. The weight is contiguous in N or in K.
    """
    (num_rows, num_heads, k), n = x.shape, out.shape[2]
    assert weight.shape == (num_heads, n, k) and x.stride(2) == out.stride(2) == 1
    is_k_last = weight.stride(2) == 1
    assert is_k_last or weight.stride(1) == 1
    _multiply_heads[(triton.cdiv(num_rows, rows), num_heads, triton.cdiv(n, _BLOCK_N))](
        x,
        x.stride(0),
        x.stride(1),
        weight,
        weight.stride(0),
        weight.stride(1) if is_k_last else weight.stride(2),
        out,
        out.stride(0),
        out.stride(1),
        num_rows,
        n,
        k,
        IS_K_LAST=is_k_last,
        ROWS=rows,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
    )


@triton.jit
def _write(
    ckv,
    ckv_stride,
    q,
    q_stride,
    q_head_stride,
    nope_dim,
    positions,
    slots,
    latents,
    scales,
    keys,
    key_scales,
    weight,
    eps,
    cos_sin,
    rope_q,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
):
    """One program handles the cached vectors of a token, and one each of its query heads."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    one = tl.arange(0, 1)
    position = tl.load(positions + token)
    if part > 0:
        head = q + token * q_stride + (part - 1) * q_head_stride + nope_dim
        x = normed_and_rotated(
            head, one, 1, position, None, 0.0, cos_sin, ROPE_DIM, ROPE_WIDTH, ROPE_DIM, INTERLEAVED
        )
        place = token * NUM_HEADS + part - 1
        store_vectors(rope_q, None, place, one, 1, x, False, "float", ROPE_DIM, ROPE_WIDTH)
        return
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    row = ckv + token * ckv_stride
    x = normed_and_rotated(row, one, 1, position, weight, eps, None, RANK, WIDTH, 0, False)
    store_vectors(latents, scales, slot, one, 1, x, False, KIND, RANK, WIDTH)
    x = normed_and_rotated(
        row + RANK, one, 1, position, None, 0.0, cos_sin,
        ROPE_DIM, ROPE_WIDTH, ROPE_DIM, INTERLEAVED,
    )  # fmt: skip
    store_vectors(keys, key_scales, slot, one, 1, x, False, KIND, ROPE_DIM, ROPE_WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_heads(
    x,
    x_stride,
    x_head_stride,
    weight,
    head_stride,
    weight_stride,
    out,
    out_stride,
    out_head_stride,
    num_rows,
    n,
    k,
    IS_K_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_exists, column_exists = row < num_rows, column < n
    of_rows = x + head * x_head_stride + row.to(tl.int64)[:, None] * x_stride
    of_head = weight + head * head_stride
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=3):
        inputs = start + tl.arange(0, BLOCK_K)
        exists = inputs < k
        values = tl.load(
            of_rows + inputs[None, :], mask=row_exists[:, None] & exists[None, :], other=0.0
        )
        if IS_K_LAST:
            place = of_head + column[:, None] * weight_stride + inputs[None, :]
            numbers = tl.load(place, mask=column_exists[:, None] & exists[None, :], other=0.0)
            sums = add_product(sums, values, tl.trans(numbers))
        else:
            place = of_head + inputs[:, None] * weight_stride + column[None, :]
            numbers = tl.load(place, mask=exists[:, None] & column_exists[None, :], other=0.0)
            sums = add_product(sums, values, numbers)
    places = out + head * out_head_stride + row.to(tl.int64)[:, None] * out_stride
    mask = row_exists[:, None] & column_exists[None, :]
    tl.store(places + column[None, :], sums.to(out.dtype.element_ty), mask=mask)
