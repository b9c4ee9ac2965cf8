"""Causal attention over the paged KV cache, in plain torch.

A *work item* is ``QUERY_TILE`` consecutive queries of one request. All items of a step and all
their tiles of ``KEY_TILE`` keys go through the same few calls::

    queries   [items, Hk, QUERY_TILE * G, D]         G = H / Hk query heads share a key head
    keys      [items, tiles, Hk, KEY_TILE, D]        gathered from the cache, slot by slot
    scores    [items, tiles, Hk, QUERY_TILE * G, KEY_TILE]
    output    sum over tiles, one after the other, of exp(scores - maximum) @ values

For bitwise batch invariance (see ``reference.py``), every product has these tile sizes whatever the
batch is, tiles of keys begin at absolute positions that are multiples of ``KEY_TILE``, the maximum
is exact in any order, and tiles are added up from the first to the last. A tile without visible
keys, before a window or after the end, adds exact zeros; so the padding of an item to the length of
others does not matter.

Slots that no query of an item sees are never read: their positions are replaced by the nearest
visible one before the lookup, and then masked. So stale or foreign blocks, which may hold NaN,
cannot leak.

Where requests have sink windows (``key_tiles.py``), an item goes through the tiles of the sinks
first, and each tile has queries that are rotated as its keys require.

Draft tokens in a tree are items of their own, which see the slots of their ancestors at the
ancestors' positions: products and sums are those that the path alone would have, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.key_tiles import (
    KEY_TILE,
    BothWays,
    SinkWindowLike,
    StepSinkWindows,
    Visibility,
    Windowed,
)
from octavo.kernels.kv_stores import Vectors

QUERY_TILE = 8

# Tiles of keys that the items of a group have at most (all heads of a tile count as one).
_TILES_AT_ONCE = 128
# Groups are cached for all layers, unless a long prompt makes their indices large.
_KEPT_INDICES = 1 << 21


def plan_attention(
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    block_size: int,
    parents: Tensor | None = None,
    sink_windows: Sequence[tuple[SinkWindowLike, int] | None] | None = None,
) -> ReferenceAttentionPlan:
    """Plan the attention of a step, for :func:`paged_attention` in all layers.

    ``block_tables`` int32 [S, longest table], ``query_start`` int32 [S + 1] and ``seq_lens`` int32
    [S]: request s has the rows query_start[s] to query_start[s + 1] of the step's tokens, which are
    the last ones of its seq_lens[s] slots. The maxima are those of the step, as numbers.

    Slots are those of positions, unless the last rows of a request are a tree of draft tokens.
    ``parents`` int32 [T] then has the row that each draft token follows, an earlier one of the tree
    or the one before it, and its position is the next one; other rows have -1.

    ``sink_windows`` are those of requests, with the tokens behind the sinks that have no slots;
    None for a request that sees everything. Queries are then needed in three rotations, see
    ``ReferenceAttentionPlan.angles``.
    """
    device = block_tables.device
    tables, start, lengths = (
        t.cpu().numpy().astype(np.int64) for t in (block_tables, query_start, seq_lens)
    )
    return ReferenceAttentionPlan(
        tables,
        start,
        lengths,
        max_query_len,
        max_seq_len,
        block_size,
        device,
        None if parents is None else _Trees(parents.cpu().numpy(), start, lengths),
        None if sink_windows is None else StepSinkWindows.of(sink_windows),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Work items with about the same number of key tiles, as indices into flattened tensors."""

    num_items: int
    num_tiles: int
    # [items, 1 or tiles, QUERY_TILE] row of q; short items repeat their last query
    query_rows: Tensor
    tokens: Tensor  # [n] row of the output, for each query that is no repetition
    rows: Tensor  # [n] the same queries as places in items * QUERY_TILE
    cache_rows: Tensor  # [items, tiles, Hk * KEY_TILE] row of a cache seen as [slots * Hk, D]
    hidden: Tensor  # bool [items, tiles, 1, QUERY_TILE, 1, KEY_TILE]

    def tile_ranges(self) -> Iterator[tuple[int, int]]:
        """Consecutive ranges of tiles: one, unless the context is long."""
        step = max(1, _TILES_AT_ONCE // self.num_items)
        for start in range(0, self.num_tiles, step):
            yield start, min(start + step, self.num_tiles)


class _Trees:
    """The draft tokens of a step that are in trees: R rows of the step, in order."""

    def __init__(self, parents: np.ndarray, query_start: np.ndarray, seq_lens: np.ndarray):
        self.rows = np.flatnonzero(parents >= 0)
        self.request = np.searchsorted(query_start, self.rows, side="right") - 1
        slots = self.rows - query_start[self.request + 1] + seq_lens[self.request]
        paths: dict[int, list[int]] = {}
        for row, slot in zip(self.rows.tolist(), slots.tolist(), strict=True):
            paths[row] = [*paths.get(int(parents[row]), []), slot]
        lengths = np.array([len(path) for path in paths.values()], dtype=np.int64)
        drafted = self.num_rows(len(seq_lens))
        self._num_known = (seq_lens - drafted)[self.request]
        self.position = self._num_known + lengths - 1
        # [R, longest path], the slots of each row's path, which ends with its own.
        self._paths = np.zeros((len(paths), lengths.max(initial=0)), dtype=np.int64)
        for row, path in zip(self._paths, paths.values(), strict=True):
            row[: len(path)] = path

    def num_rows(self, num_requests: int) -> np.ndarray:
        """Number of tree rows of each request."""
        return np.bincount(self.request, minlength=num_requests)

    def places(self, which: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slots, within their sequences, of positions [n, ...] that some rows see."""
        num_known = self._num_known[which, None]
        drafted = np.take_along_axis(self._paths[which], np.maximum(positions - num_known, 0), 1)
        return np.where(positions < num_known, positions, drafted)


class ReferenceAttentionPlan:
    """The work items of a step. Immutable except for index tensors, which are cached between
    layers."""

    def __init__(
        self,
        block_tables: np.ndarray,
        query_start: np.ndarray,
        seq_lens: np.ndarray,
        max_query_len: int,
        max_seq_len: int,
        block_size: int,
        device: torch.device,
        trees: _Trees | None = None,
        sink_windows: StepSinkWindows | None = None,
    ):
        self.num_rows = int(query_start[-1])
        self.max_query_len = max_query_len
        self.max_seq_len = max_seq_len
        self._tables = block_tables
        self._block_size = block_size
        self._device = device
        self._sink_windows = sink_windows
        # Number of positions that rotations are needed for; and positions of queries besides their
        # own, int64 [T] each, if keys are compared at different relative positions.
        self.num_angles = max_seq_len
        self.angles: tuple[Tensor, ...] = ()
        if sink_windows is not None:
            self.num_angles = sink_windows.num_angles(seq_lens)
            of_row = np.repeat(np.arange(len(seq_lens)), np.diff(query_start))
            slots = np.arange(self.num_rows) + (seq_lens - query_start[1:])[of_row]
            self.angles = tuple(map(self._tensor, sink_windows.angles(of_row, slots)))
        self._seq_lens = seq_lens
        self._groups: dict[tuple[int | None, int, bool], tuple[_Group, ...]] = {}

        query_lens = np.diff(query_start)
        known_lens = query_lens if trees is None else query_lens - trees.num_rows(len(query_lens))
        items = -(-known_lens // QUERY_TILE)
        request = np.repeat(np.arange(len(items)), items)
        first = (np.arange(len(request)) - np.repeat(np.cumsum(items) - items, items)) * QUERY_TILE
        self._request = request
        self._num_queries = np.minimum(known_lens[request] - first, QUERY_TILE)
        self._token = query_start[request] + first
        self._position = seq_lens[request] - query_lens[request] + first  # of the first query
        self._trees = trees
        self._first_drafted = len(request)  # index of the first item of a tree
        if trees is not None:
            self._request = np.concatenate([request, trees.request])
            self._num_queries = np.concatenate([self._num_queries, np.ones_like(trees.rows)])
            self._token = np.concatenate([self._token, trees.rows])
            self._position = np.concatenate([self._position, trees.position])

    def groups(
        self, window: int | None, num_kv_heads: int, bidirectional: bool = False
    ) -> Iterator[_Group]:
        """Yields the work items in groups, with indices into caches of ``num_kv_heads`` heads."""
        key = (window, num_kv_heads, bidirectional)
        if key in self._groups:
            yield from self._groups[key]
            return
        last = self._position + self._num_queries - 1
        visible = self._visibility(window, bidirectional)
        num_tiles = visible.num_tiles(self._request, self._position, last)
        made = []
        for items in _split(num_tiles):
            group = self._group(items, last[items], visible, num_kv_heads)
            made.append(group)
            yield group
        if num_tiles.sum() * num_kv_heads * KEY_TILE <= _KEPT_INDICES:
            self._groups[key] = tuple(made)

    def _visibility(self, window: int | None, bidirectional: bool) -> Visibility:
        """Visibility rules of a layer."""
        if bidirectional:
            assert self._sink_windows is None and self._trees is None
            return BothWays(window, self._seq_lens)
        if self._sink_windows is None:
            return Windowed(window)
        assert window is None, "a request's own window is for layers that see all"
        return self._sink_windows

    def _group(
        self, items: np.ndarray, last: np.ndarray, visible: Visibility, num_kv_heads: int
    ) -> _Group:
        """Index tensors of some items; ``last`` [items] are the positions of their last queries."""
        request, count = self._request[items], self._num_queries[items]
        place = np.arange(QUERY_TILE)
        step = np.minimum(place, count[:, None] - 1)
        query = (self._position[items, None] + step)[:, None, :]
        is_query = place < count[:, None]

        tiles = visible.tiles(request, self._position[items], last)
        num_tiles = tiles.first_key.shape[1]
        key = tiles.first_key[:, :, None] + np.arange(KEY_TILE)
        seen = np.clip(key, tiles.low[:, :, None], tiles.high[:, :, None])
        place = self._places(items, seen.reshape(len(items), -1))
        slot = self._tables[request[:, None], place // self._block_size] * self._block_size
        slot = (slot + place % self._block_size).reshape(len(items), num_tiles, 1, KEY_TILE)
        cache_rows = slot * num_kv_heads + np.arange(num_kv_heads)[:, None]

        hidden = visible.hidden(request, tiles, query[..., None], key[:, :, None, :])
        token = self._token[items, None] + step
        rotations = visible.rotations(request, tiles, query)
        return _Group(
            num_items=len(items),
            num_tiles=num_tiles,
            query_rows=self._tensor(token[:, None, :] + self.num_rows * rotations),
            tokens=self._tensor(token[is_query]),
            rows=self._tensor(np.flatnonzero(is_query)),
            cache_rows=self._tensor(cache_rows.reshape(len(items), num_tiles, -1)),
            hidden=self._tensor(np.ascontiguousarray(hidden)[:, :, None, :, None, :]),
        )

    def _places(self, items: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slots, within their sequences, of positions [items, n] that items see."""
        is_drafted = items >= self._first_drafted
        if self._trees is None or not is_drafted.any():
            return positions
        places = positions.copy()
        which = items[is_drafted] - self._first_drafted
        places[is_drafted] = self._trees.places(which, positions[is_drafted])
        return places

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _split(num_tiles: np.ndarray) -> Iterator[np.ndarray]:
    """Yields groups of items of similar length, as many in each as ``_TILES_AT_ONCE`` allows."""
    order = np.argsort(num_tiles, kind="stable")
    group: list[int] = []
    for item in order.tolist():
        # Items are sorted, so this one is the longest of its group and sets the padding.
        if group and (len(group) + 1) * num_tiles[item] > _TILES_AT_ONCE:
            yield np.array(group)
            group = []
        group.append(item)
    yield np.array(group)


def paged_attention(
    q: Tensor,
    k_cache: Vectors,
    v_cache: Vectors,
    plan: ReferenceAttentionPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bidirectional: bool = False,
) -> Tensor:
    """Attention of q [T, H, D] over the caches: [T, H, value_dim].

    If the plan has ``angles``, q has the rows of all rotations, one after the other.

    A query sees the positions up to its own; with ``window``, only the last ``window`` of them. If
    ``bidirectional``, it sees those after its own in the same way.
    Scores are scaled, then capped to ``softcap * tanh(score / softcap)``. ``sinks`` [H] are the
    scores of one more key per head that every query sees, with a value of zero.
    """
    num_kv_heads = k_cache.num_heads
    if sinks is not None:
        sinks = sinks.float().view(1, num_kv_heads, 1, -1, 1)
    num_tokens, num_heads = plan.num_rows if plan.angles else len(q), q.shape[1]
    out: Tensor | None = None
    for group in plan.groups(window, num_kv_heads, bidirectional):
        scores = _scores(q, k_cache, group, scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill_(group.hidden, float("-inf"))
        attended = _weighted_values(scores, v_cache, sinks, group, _product_dtype(q))
        attended = attended.transpose(1, 2).reshape(-1, num_heads, attended.shape[-1]).to(q.dtype)
        if out is None:
            out = q.new_empty(num_tokens, *attended.shape[1:])
        if group.num_items * QUERY_TILE != len(group.rows):
            attended = attended.index_select(0, group.rows)
        out.index_copy_(0, group.tokens, attended)
    assert out is not None
    return out


def _scores(q: Tensor, k_cache: Vectors, group: _Group, scale: float) -> Tensor:
    """Scores [items, tiles, Hk, QUERY_TILE, G, KEY_TILE] in float32."""
    num_kv_heads, head_dim = k_cache.num_heads, q.shape[-1]
    heads_per_key = q.shape[1] // num_kv_heads
    queries = q.index_select(0, group.query_rows.view(-1)).to(_product_dtype(q)) * scale
    queries = queries.view(*group.query_rows.shape, num_kv_heads, heads_per_key, head_dim)
    queries = queries.transpose(2, 3).flatten(2, 4)
    parts = []
    for start, stop in group.tile_ranges():
        keys = _gather(k_cache, group, start, stop).to(queries.dtype).transpose(1, 2)
        repeated = queries[:, start:stop] if queries.shape[1] > 1 else queries
        repeated = repeated.expand(-1, stop - start, -1, -1)
        repeated = repeated.reshape(-1, QUERY_TILE * heads_per_key, head_dim)
        part = torch.bmm(repeated, keys).float()
        parts.append(
            part.view(group.num_items, stop - start, num_kv_heads, QUERY_TILE, -1, KEY_TILE)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _weighted_values(
    scores: Tensor, v_cache: Vectors, sinks: Tensor | None, group: _Group, dtype: torch.dtype
) -> Tensor:
    """Values averaged by the softmax of ``scores``: float32 [items, Hk, QUERY_TILE, G, D].

    ``scores`` are overwritten. ``sinks`` are [1, Hk, 1, G, 1]. Products are in ``dtype``.
    """
    top = scores.amax(dim=(1, 5), keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.unsqueeze(1))
    weights = scores.sub_(top).exp_()
    total: Tensor | None = None
    norm: Tensor | None = None
    for start, stop in group.tile_ranges():
        part = weights[:, start:stop]
        values = _gather(v_cache, group, start, stop).to(dtype)
        product = torch.bmm(part.reshape(values.shape[0], -1, KEY_TILE).to(values.dtype), values)
        total = _add_tiles(total, product.float().view(*part.shape[:-1], -1))
        norm = _add_tiles(norm, part.sum(dim=-1, keepdim=True))
    assert total is not None and norm is not None
    if sinks is not None:
        norm = norm + torch.exp(sinks - top.squeeze(1))
    return total / norm


def _gather(cache: Vectors, group: _Group, start: int, stop: int) -> Tensor:
    """Keys or values of tiles ``start`` to ``stop``: [items * tiles * Hk, KEY_TILE, D]."""
    vectors = cache.read(group.cache_rows[:, start:stop].reshape(-1))
    return vectors.view(-1, KEY_TILE, vectors.shape[-1])


def _product_dtype(x: Tensor) -> torch.dtype:
    """Dtype in which queries and weights are multiplied: float32 on the CPU."""
    return torch.float32 if x.device.type == "cpu" else x.dtype


def _add_tiles(total: Tensor | None, parts: Tensor) -> Tensor:
    """Sum over dimension 1 from the first to the last; torch's own sum may group the terms."""
    for part in parts.unbind(1):
        total = part if total is None else total + part
    assert total is not None
    return total
