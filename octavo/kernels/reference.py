"""Every op in plain torch, for any device: the oracle of all faster ones, and the fallback.

On the CPU in float32 the ops are *batch invariant, bit by bit*: the result for a token depends only
on the token's own inputs, not on the other tokens of the step, on their number, on how a prompt was
cut into chunks, or on where its KV blocks lie. The rounding of a reduction depends on how it is
split, so every split here has a fixed size:

- Matrix products go through tiles of exactly ``ROW_TILE`` rows, the last one padded with zeros. A
  BLAS picks its kernel by the shape, and for one shape treats all rows alike.
- Attention cuts keys into tiles at multiples of ``KEY_TILE`` positions (see ``attention.py``).
- Norms reduce one row at a time.
- Element-wise functions are made of ``exp``, ``tanh`` and ``erf`` and exactly rounded arithmetic.
  torch's own ``silu`` and ``gelu`` are not used: they round differently in the last few elements
  of a vectorized loop than in the rest, and which those are depends on the size of the batch.

Elsewhere (CUDA, or activations in 16 bits) results may depend on the batch in the last bit.

Shapes: T tokens, H query heads, Hk key and value heads, D head size, N output and K input features,
R rows of logits, V vocabulary, B slots of a KV block. Inputs and outputs have the same dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.attention import ReferenceAttentionPlan
from octavo.kernels.attention import paged_attention as paged_attention
from octavo.kernels.attention import plan_attention as plan_attention
from octavo.kernels.experts import add_up, clamped_swiglu, route
from octavo.kernels.kv_stores import JoinedStore, KVStore
from octavo.kernels.op_arguments import RopeArguments, RowNorm
from octavo.kernels.recurrence import delta_rule as delta_rule
from octavo.kernels.recurrence import gated_norm as gated_norm
from octavo.kernels.recurrence import selective_scan as selective_scan
from octavo.kernels.recurrence import short_conv as short_conv
from octavo.kernels.routing import CLAMPED_SWIGLU, ExpertWeights, RouterWeights, Routing
from octavo.quantization.tensors import WeightTensor

ROW_TILE = 16

# Weights that are not in the dtype of the product are converted this many values at a time: on a
# CPU, so that the piece stays in the cache; on a GPU, so that it stays small beside the weights.
_CHUNK_VALUES_CPU = 1 << 20
_CHUNK_VALUES = 1 << 26


def embed(
    ids: Tensor, weight: WeightTensor, scale: float | None = None, *, dtype: str = "float32"
) -> Tensor:
    """Rows ``ids`` (int64 [T]) of ``weight`` [V, K], times ``scale``: [T, K] in ``dtype``."""
    rows = weight.index_select(0, ids) if isinstance(weight, Tensor) else weight.select(ids)
    rows = rows.to(getattr(torch, dtype))
    # The factor is rounded to the activations' dtype first, as models with one were trained.
    return rows if scale is None else rows * torch.tensor(scale, dtype=rows.dtype)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, x / sqrt(mean(x^2) + eps) * weight, computed in float32."""
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def embed_positions(
    positions: Tensor, weight: WeightTensor, offset: int = 0, *, dtype: str = "float32"
) -> Tensor:
    """Rows ``positions`` (int64 [T]) + ``offset`` of ``weight`` [P, K]: [T, K] in ``dtype``."""
    return embed(positions + offset, weight, dtype=dtype)


def embed_types(types: Tensor, weight: Tensor, *, dtype: str = "float32") -> Tensor:
    """Rows ``types`` (int64 [T]) of ``weight``, float32 [types, K]: [T, K] in ``dtype``."""
    return weight.index_select(0, types).to(getattr(torch, dtype))


def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension, (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight +
    bias, computed in float32."""
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    normed = centred * torch.rsqrt((centred * centred).mean(dim=-1, keepdim=True) + eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor."""
    return x * factor


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply an activation function: "silu", "gelu", "gelu_tanh" or "relu", as in
    ``ModelConfig``."""
    if activation == "relu":
        return torch.relu(x)
    one = torch.ones((), dtype=x.dtype, device=x.device)
    return silu_mul(x, one) if activation == "silu" else gelu_mul(x, one, activation != "gelu")


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of equal shapes: the residual connection."""
    return x + y


def linear(x: Tensor, weight: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [T, K] with weight [N, K] transposed, and add bias [N]: [T, N]."""
    y = _linear_in_tiles(x, weight) if _is_bitwise(x) else _linear_at_once(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


def lm_head(hidden: Tensor, weight: WeightTensor) -> Tensor:
    """Logits, float32 [R, V], of hidden [R, K] and weight [V, K]; computed in float32."""
    return linear(hidden.float(), weight)


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, D] and k [T, Hk, D] to ``positions`` (int64 [T]).

    ``cos_sin`` is float32 [P, rotary], the cosines of all angles of a position before their sines;
    rotary may be less than D, then the rest of a head is left unchanged. Angle i rotates the pair
    of values (i, rotary / 2 + i), or (2 i, 2 i + 1) if ``interleaved``. The results may share
    memory.
    """
    rotary = cos_sin.shape[1]
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    heads = torch.cat([q, k], dim=1)
    pairs = heads[..., :rotary].float()
    if interleaved:
        first, second = pairs[..., 0::2], pairs[..., 1::2]
    else:
        first, second = pairs.chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        rotated = [torch.stack(rotated, dim=-1).flatten(-2)]
    heads = torch.cat([*(part.to(q.dtype) for part in rotated), heads[..., rotary:]], dim=-1)
    return heads[:, : q.shape[1]], heads[:, q.shape[1] :]


def store_kv(
    k: Tensor, v: Tensor, k_cache: KVStore, v_cache: KVStore, slot_mapping: Tensor
) -> None:
    """Write k and v [T, Hk, D] to slots (int64 [T]) of the caches."""
    k_cache.write(slot_mapping, k)
    v_cache.write(slot_mapping, v)


def store_latents(
    ckv: Tensor,
    norm: RowNorm,
    rotation: RopeArguments,
    latents: KVStore,
    rotated: KVStore,
    slot_mapping: Tensor,
) -> None:
    """Write the rows of ckv [T, C + R] to slots (int64 [T]) of the caches.

    The first C values, normed, are the latent vector of a token; the other R, rotated by
    ``rotation``, are the key that all heads share beside it.
    """
    rank = norm.weight.shape[0]
    key = _rotated(ckv[:, None, rank:], rotation)
    latents.write(slot_mapping, rmsnorm(ckv[:, :rank], *norm).unsqueeze(1))
    rotated.write(slot_mapping, key)


def latent_attention(
    q: Tensor,
    kv_b: WeightTensor,
    rotation: RopeArguments,
    latents: KVStore,
    rotated: KVStore,
    plan: ReferenceAttentionPlan,
    scale: float,
) -> Tensor:
    """Attention of q [T, H, P + R] over latent vectors c [C] and rotated keys k [R]: [T, H, V].

    kv_b [H * (P + V), C] has for each head U [P, C], which gives its key as U c followed by k, and
    then V [V, C], which gives its value as V c. They are not computed for every token that is seen:
    a query (n, r) has with its key the product (U^T n, r) (c, k), and V is applied to the weighted
    sum of all c.
    """
    num_heads, nope_dim = q.shape[1], q.shape[2] - rotation.cos_sin.shape[1]
    up = torch.cat([piece.clone() for _, piece in _pieces(kv_b, q.dtype)])
    up = up.view(num_heads, -1, kv_b.shape[1])
    absorbed = _multiply_heads(q[..., :nope_dim], up[:, :nope_dim].transpose(1, 2))
    queries = torch.cat([absorbed, _rotated(q[..., nope_dim:], rotation)], dim=-1)
    keys = JoinedStore((latents, rotated))
    attended = paged_attention(queries, keys, latents, plan, scale)
    return _multiply_heads(attended, up[:, nope_dim:])


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, of equal shapes."""
    if not _is_bitwise(gate):
        return F.silu(gate) * up
    return gate / (1 + torch.exp(-gate)) * up


def gelu_mul(gate: Tensor, up: Tensor, approximate: bool = True) -> Tensor:
    """``gelu(gate) * up``, of equal shapes; by default with tanh in place of the error function."""
    if not _is_bitwise(gate):
        return F.gelu(gate, approximate="tanh" if approximate else "none") * up
    if approximate:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * (gate * gate * gate))
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    return 0.5 * gate * (1 + torch.erf(gate * math.sqrt(0.5))) * up


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """``sigmoid(gate) * x`` for gates of the shape of x [T, K], or one number per token, [T, 1]."""
    return x / (1 + torch.exp(-gate))


def moe(
    x: Tensor,
    router: RouterWeights,
    experts: Sequence[ExpertWeights],
    routing: Routing,
    activation: str,
) -> Tensor:
    """Send each token of x [T, K] to ``routing.top_k`` experts, and sum their outputs by weight:
    [T, K].

    ``activation``: "silu", "gelu" or "gelu_tanh", as in configs, or ``CLAMPED_SWIGLU``. The router
    and the sum are computed in float32.
    """
    logits = linear(x.float(), router.weight, router.bias)
    ids, weights = route(logits, routing, router.correction)

    def run(index: int, taken: Tensor) -> Tensor:
        expert = experts[index]
        gate = linear(taken, expert.gate, expert.gate_bias)
        inner = _GATES[activation](gate, linear(taken, expert.up, expert.up_bias))
        return linear(inner, expert.down, expert.down_bias)

    return add_up(x, ids, weights, run)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def _rotated(heads: Tensor, rotation: RopeArguments) -> Tensor:
    """heads [T, H, R], rotated in all of their values."""
    rotated, _ = rope(heads, heads[:, :0], *rotation)
    return rotated


def _multiply_heads(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x [T, H, K] with weights [H, N, K] transposed, head by head, in tiles of rows as in
    ``linear``: [T, H, N]."""
    num_rows, num_heads, _ = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, -num_rows % ROW_TILE))
    weights = weights.contiguous()
    tiles = [torch.bmm(weights, tile.permute(1, 2, 0).contiguous()) for tile in x.split(ROW_TILE)]
    out = torch.stack(tiles).permute(0, 3, 1, 2).reshape(-1, num_heads, weights.shape[1])
    return out[:num_rows]


_GATES = {
    "silu": silu_mul,
    "gelu": lambda gate, up: gelu_mul(gate, up, approximate=False),
    "gelu_tanh": gelu_mul,
    CLAMPED_SWIGLU: clamped_swiglu,
}


def _is_bitwise(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def _linear_in_tiles(x: Tensor, weight: WeightTensor) -> Tensor:
    """x [T, K] @ weight.T in float32, ``ROW_TILE`` rows of x at a time."""
    num_rows, num_tiles = x.shape[0], -(-x.shape[0] // ROW_TILE)
    if num_rows % ROW_TILE:
        x = F.pad(x, (0, 0, 0, num_tiles * ROW_TILE - num_rows))
    tiles = [tile.t() for tile in x.contiguous().split(ROW_TILE)]
    out = x.new_empty(num_tiles, weight.shape[0], ROW_TILE)
    for start, piece in _pieces(weight, x.dtype):
        for tile, columns in zip(tiles, out, strict=True):
            torch.mm(piece, tile, out=columns[start : start + piece.shape[0]])
    # Contiguous: for a single tile it would be a view, over which later sums have another order.
    return out.transpose(1, 2).contiguous().view(-1, weight.shape[0])[:num_rows]


def _linear_at_once(x: Tensor, weight: WeightTensor) -> Tensor:
    """x [T, K] @ weight.T in the dtype of x."""
    parts = [F.linear(x, piece) for _, piece in _pieces(weight, x.dtype)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _pieces(weight: WeightTensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yields consecutive pieces of a weight: (first row, rows in ``dtype``).

    A piece is valid until the next one is requested. This keeps a model's memory at the size of its
    file when weights stay in a smaller format.
    """
    if isinstance(weight, Tensor) and weight.dtype == dtype:
        yield 0, weight
        return
    num_rows, width = weight.shape
    values = _CHUNK_VALUES_CPU if weight.device.type == "cpu" else _CHUNK_VALUES
    step = max(ROW_TILE, values // width)
    scratch = torch.empty((min(step, num_rows), width), device=weight.device)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        rows = scratch[: stop - start]
        if isinstance(weight, Tensor):
            rows.copy_(weight[start:stop])
        else:
            weight.dequantize(start, stop, out=rows)
        yield start, rows.to(dtype)
