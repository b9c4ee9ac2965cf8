"""Steps over a paged KV cache, made up for kernels: ragged, shuffled, NaN wherever nothing is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.kv_stores import CODECS, HadamardCodec, KVStore, hadamard_rotate
from octavo.kernels.reference import paged_attention, plan_attention


@dataclass(frozen=True)
class Shape:
    group: int = 3  # query heads of a key head
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    kv: str = "float32"
    dtype: torch.dtype = torch.float32


@dataclass
class PagedStep:
    """The last ``new`` tokens of sequences, with all of their keys and values stored."""

    q: Tensor
    caches: tuple[KVStore, KVStore]
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor

    def expected(self, scale: float, **options) -> Tensor:
        new = self.query_start.diff()
        plan = plan_attention(
            self.block_tables,
            self.query_start,
            self.seq_lens,
            int(new.max()),
            int(self.seq_lens.max()),
            self.caches[0].parts[0].shape[1],
        )
        return paged_attention(self.q, *self.caches, plan, scale, **options)

    @property
    def turned_q(self) -> Tensor:
        """Queries where the keys are: rotated, if these are."""
        if not isinstance(self.caches[0].codec, HadamardCodec):
            return self.q
        dim = self.q.shape[-1]
        return (hadamard_rotate(self.q.float()) / (dim & -dim)).to(self.q.dtype)


def numbers_of(sequence: int, length: int, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a sequence, the same whatever step it is in."""
    generator = torch.Generator().manual_seed(sequence)
    heads = (shape.group * shape.kv_heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(1 << 10, h, shape.head_dim, generator=generator) for h in heads)
    return tuple(x[:length].to(shape.dtype) for x in (q * 3, k, v))


def paged_step(
    sequences: Sequence[tuple[int, int]],
    shape: Shape,
    device: str = "cpu",
    names: Sequence[int] | None = None,
    table_width: int | None = None,
) -> PagedStep:
    """Of sequences (length, new tokens); ``names`` say which ones they are, 0, 1, ... if not."""
    size = shape.block_size
    counts = [-(-length // size) for length, _ in sequences]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(len(counts)))
    caches = tuple(_empty_store(codec, len(order), shape) for codec in CODECS[shape.kv])
    tables = torch.full((len(counts), table_width or max(counts)), int(order[-1]))
    queries = []
    for s, (length, new) in enumerate(sequences):
        blocks = order[sum(counts[:s]) : sum(counts[: s + 1])]
        tables[s, : len(blocks)] = blocks
        place = torch.arange(length)
        q, *stored = numbers_of(s if names is None else names[s], length, shape)
        for cache, x in zip(caches, stored, strict=True):
            cache.write(blocks[place // size] * size + place % size, x)
        queries.append(q[length - new :])
    new = torch.tensor([0, *(new for _, new in sequences)])
    return PagedStep(
        torch.cat(queries).to(device),
        tuple(KVStore(c.codec, [part.to(device) for part in c.parts]) for c in caches),
        tables.int().to(device),
        new.cumsum(0).int().to(device),
        torch.tensor([length for length, _ in sequences], dtype=torch.int32, device=device),
    )


def _empty_store(codec, num_blocks: int, shape: Shape) -> KVStore:
    parts = []
    for part in codec.parts(shape.head_dim):
        size = (num_blocks, shape.block_size, shape.kv_heads, part.width)
        empty = math.nan if part.dtype.is_floating_point else 255
        parts.append(torch.full(size, empty, dtype=part.dtype))
    return KVStore(codec, parts)
