"""The work between projections and attention, in one Triton kernel: norms of heads, rotary
embeddings, and the writing of keys and values.

Numbers are rounded where the reference ops round them, and nothing is fused that would round less
often: without norms, whose sums may be in another order, the written bits are the same, in all
formats. If keys are rotated by a Hadamard matrix before they become codes, so are queries; that
leaves their products unchanged.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.kv_codes import encoded, hadamard_rotated, kind_of, pointers
from octavo.kernels.cuda.ops import AttentionLayer
from octavo.kernels.kv_stores import HadamardCodec


def write_kv(
    qkv: Tensor, positions: Tensor, slots: Tensor, layer: AttentionLayer, q_out: Tensor
) -> None:
    """Write the queries of qkv [T, (H + 2 Hk) D] to q_out [T, H, D], its keys and values to slots.

    ``positions`` and ``slots`` are integers [T], of any width; in slot -1 nothing is written.
    """
    k_cache, v_cache, norms, rope = layer.k_cache, layer.v_cache, layer.norms, layer.rope
    num_tokens, num_heads, head_dim = q_out.shape
    num_kv_heads = k_cache.num_heads
    width = triton.next_power_of_2(head_dim)
    # Few tokens are spread over many processors, many are done in few programs.
    heads = 1 if num_tokens < 64 else max(1, 512 // width)
    num_tiles = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    keys, key_scales = pointers(k_cache)
    values, value_scales = pointers(v_cache)
    _write[(num_tokens, num_tiles)](
        qkv,
        positions,
        slots,
        keys,
        key_scales,
        values,
        value_scales,
        q_out,
        *((None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)),
        None if rope is None else rope.cos_sin,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        ROTARY=0 if rope is None else rope.cos_sin.shape[1],
        INTERLEAVED=rope is not None and rope.interleaved,
        ROTATED_KEYS=isinstance(k_cache.codec, HadamardCodec),
        ROTATED_VALUES=isinstance(v_cache.codec, HadamardCodec),
        KEY_KIND=kind_of(k_cache),
        VALUE_KIND=kind_of(v_cache),
        HEADS=heads,
        num_warps=max(1, heads * width // 256),
        enable_fp_fusion=False,
    )


@triton.jit
def _write(
    qkv,
    positions,
    slots,
    keys,
    key_scales,
    values,
    value_scales,
    q_out,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTATED_KEYS: tl.constexpr,
    ROTATED_VALUES: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program handles a token and a tile of heads: of queries first, then keys, then values."""
    Q_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    slot = tl.load(slots + token).to(tl.int64)
    if tile < Q_TILES:
        head = tile * HEADS + tl.arange(0, HEADS)
        x = normed_and_rotated(
            source, head, NUM_HEADS, tl.load(positions + token), q_weight, eps, cos_sin,
            HEAD_DIM, WIDTH, ROTARY, INTERLEAVED,
        )  # fmt: skip
        if ROTATED_KEYS:
            x = (hadamard_rotated(x.to(tl.float32), HEAD_DIM) / (HEAD_DIM & -HEAD_DIM)).to(x.dtype)
        store_vectors(q_out, None, token, head, NUM_HEADS, x, False, "float", HEAD_DIM, WIDTH)
        return
    if slot < 0:
        return
    if tile < Q_TILES + KV_TILES:
        head = (tile - Q_TILES) * HEADS + tl.arange(0, HEADS)
        x = normed_and_rotated(
            source + NUM_HEADS * HEAD_DIM, head, NUM_KV_HEADS, tl.load(positions + token),
            k_weight, eps, cos_sin, HEAD_DIM, WIDTH, ROTARY, INTERLEAVED,
        )  # fmt: skip
        store_vectors(
            keys, key_scales, slot, head, NUM_KV_HEADS, x, ROTATED_KEYS, KEY_KIND, HEAD_DIM, WIDTH
        )
        return
    head = (tile - Q_TILES - KV_TILES) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, WIDTH)
    x = _vectors(source + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM, head, dim, NUM_KV_HEADS, HEAD_DIM)
    store_vectors(
        values, value_scales, slot, head, NUM_KV_HEADS, x, ROTATED_VALUES, VALUE_KIND,
        HEAD_DIM, WIDTH,
    )  # fmt: skip


@triton.jit
def normed_and_rotated(
    source,
    head,
    num_heads,
    position,
    weight,
    eps,
    cos_sin,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Vectors of heads [HEADS, WIDTH], normed and rotated to a position, in the type of the
    source."""
    HALF: tl.constexpr = ROTARY // 2
    dim = tl.arange(0, WIDTH)
    x = _vectors(source, head, dim, num_heads, HEAD_DIM)
    if weight is not None:
        wide = x.to(tl.float32)
        factor = 1 / tl.sqrt_rn(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)
        x = _normed(x, factor, weight, dim, HEAD_DIM)
    if ROTARY:
        # Dimensions are rotated in pairs: the partner of each, and whether it is the first.
        if INTERLEAVED:
            other, angle, is_first = dim ^ 1, dim // 2, dim % 2 == 0
        else:
            is_first = dim < HALF
            other, angle = tl.where(is_first, dim + HALF, dim - HALF), dim % HALF
        is_rotated = dim < ROTARY
        other = tl.where(is_rotated, other, dim)
        y = _vectors(source, head, other, num_heads, HEAD_DIM)
        if weight is not None:
            y = _normed(y, factor, weight, other, HEAD_DIM)
        row = cos_sin + position * ROTARY
        cos = tl.load(row + angle, mask=is_rotated, other=0.0)[None, :]
        sin = tl.load(row + HALF + angle, mask=is_rotated, other=0.0)[None, :]
        sin = tl.where(is_first[None, :], -sin, sin)
        made = x.to(tl.float32) * cos + y.to(tl.float32) * sin
        x = tl.where(is_rotated[None, :], made.to(x.dtype), x)
    return x


@triton.jit
def _vectors(source, head, dim, num_heads, HEAD_DIM: tl.constexpr):
    is_there = (head < num_heads)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(source + head[:, None] * HEAD_DIM + dim[None, :], mask=is_there, other=0.0)


@triton.jit
def _normed(x, factor, weight, dim, HEAD_DIM: tl.constexpr):
    weights = tl.load(weight + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * factor[:, None] * weights[None, :]).to(x.dtype)


@triton.jit
def store_vectors(
    memory,
    scales,
    row,
    head,
    num_heads,
    x,
    ROTATED: tl.constexpr,
    KIND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Encode and store vectors of heads in a row of all heads."""
    vector = row * num_heads + head
    dim = tl.arange(0, WIDTH)
    if ROTATED:
        x = hadamard_rotated(x.to(tl.float32), HEAD_DIM)
    if KIND != "float":
        x, scale = encoded(x.to(tl.float32), KIND)
        tl.store(scales + vector, scale, mask=head < num_heads)
    is_there = (head < num_heads)[:, None] & (dim < HEAD_DIM)[None, :]
    at = vector[:, None] * HEAD_DIM + dim[None, :]
    tl.store(memory + at, x.to(memory.dtype.element_ty), mask=is_there)
