"""Native paged attention as tests call it, and its oracle: float64 over the stored keys and values.

A ``Cache`` is one layer's KV with a block table per sequence, blocks in a shuffled order, and NaN
wherever nothing was written. ``attend`` runs a step of chunks on it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np

from octavo.core.sink_window import SinkWindow
from octavo.kernels.cpu import abi, layout
from octavo.kernels.cpu.library import Library, Pool

FORMATS = {
    "f32": abi.OCT_KV_F32,
    "bf16": abi.OCT_KV_BF16,
    "int8": abi.OCT_KV_INT8,
    "fp8": abi.OCT_KV_FP8,
    "int4": abi.OCT_KV_INT4,
    "k8v4": abi.OCT_KV_K8V4,
}
# Dimensions of a rotated query that share a scale where it has one byte.
QUERY_GROUP = {"int8": 512, "int4": 32, "k8v4": 512}
MAX_POSITIONS = 1216
OTHER_LAYERS = 192  # bytes of a block that are none of this layer's


@dataclass(frozen=True)
class Layer:
    """What attention needs to know of a layer."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    kv: str = "bf16"
    window: int = 0
    rotary: int = 32
    interleaved: bool = False
    softcap: float = 0.0
    qk_norm: bool = False
    sinks: bool = False
    block_size: int = 32

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def padded(self) -> int:
        """Values of a head in the KV memory."""
        return layout.padded_head(self.dim)

    def weights(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(5)
        angles = np.outer(np.arange(MAX_POSITIONS), 100.0 ** -rng.random(self.rotary // 2))
        return {
            "cos_sin": np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32),
            "q_norm": (1 + rng.random(self.dim)).astype(np.float32),
            "k_norm": (1 + rng.random(self.dim)).astype(np.float32),
            "sinks": rng.normal(size=self.heads).astype(np.float32),
        }


@dataclass
class Sequence:
    """Queries, keys and values before norm and rope, [positions, heads, D], and a block table."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    blocks: np.ndarray

    def __len__(self) -> int:
        return len(self.q)


@dataclass(frozen=True)
class Native:
    """What the fixture ``native`` is, for a test that wants several."""

    library: Library
    pool: Pool

    @property
    def lib(self):
        return self.library.lib

    def check(self, code: int) -> int:
        return self.library.check(code)


def make_sequence(layer: Layer, length: int, seed: int) -> Sequence:
    rng = np.random.default_rng([seed, length])
    shapes = [(length, heads, layer.dim) for heads in (layer.heads, layer.kv_heads, layer.kv_heads)]
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return Sequence(q * 2, k, v, np.empty(0, np.int32))


def deal_blocks(sequences, block_size: int, seed: int) -> int:
    """Gives each sequence the blocks that it needs, in no order; how many there are, some spare."""
    needed = [-(-len(s) // block_size) for s in sequences]
    num_blocks = sum(needed) + 3
    order = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    for sequence, count in zip(sequences, needed, strict=True):
        sequence.blocks, order = order[:count], order[count:]
    return num_blocks


@dataclass
class Cache:
    """Memory for the keys and values of some sequences; gives them their blocks."""

    native: object
    layer: Layer
    sequences: list[Sequence]
    seed: int = 0
    num_blocks: int = field(init=False)
    block_bytes: int = field(init=False)
    memory: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        layer, size = self.layer, self.layer.block_size
        self.num_blocks = deal_blocks(self.sequences, size, self.seed)
        chunk_bytes = self.native.lib.oct_kv_chunk_bytes
        chunk = self.native.check(chunk_bytes(FORMATS[layer.kv], layer.padded))
        layer_bytes = layer.kv_heads * (size // 16) * chunk
        self.block_bytes = OTHER_LAYERS + layer_bytes
        total = self.num_blocks * self.block_bytes
        self.memory = np.full(total, 0xFF, np.uint8)  # NaN in all formats that have it

    def read(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        dim = self.layer.dim
        keys, values = self.read_padded(index, length)
        return keys[..., :dim], values[..., :dim]

    def read_padded(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        step = Step(self, [(index, 0, length)])
        shape = (length, self.layer.kv_heads, self.layer.padded)
        keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.native.check(
            self.native.lib.oct_kv_read(
                step.args, step.seqs, 0, keys.ctypes.data, values.ctypes.data
            )
        )
        return keys, values


class Step:
    """Arguments of a call in which sequence i goes from ``position`` on by ``count`` tokens.

    ``q``, ``k`` and ``v`` lie side by side, as the output of one linear. ``parents`` are of all
    rows, as ``oct_sequences`` has them. ``sink_windows`` are what its sequences see.
    """

    def __init__(
        self,
        cache: Cache,
        chunks: list[tuple[int, int, int]],
        parents: list[int] | None = None,
        share_prefixes: bool = False,
        sink_windows: list[SinkWindow | None] | None = None,
    ):
        layer, sequences = cache.layer, cache.sequences
        heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.dim
        rows = [
            np.concatenate(
                [getattr(sequences[i], name)[start : start + count].reshape(count, -1)
                 for name in "qkv"], axis=1,
            )
            for i, start, count in chunks
        ]  # fmt: skip
        self.qkv = np.ascontiguousarray(np.concatenate(rows))
        counts = [count for _, _, count in chunks]
        self.q_start = np.cumsum([0, *counts]).astype(np.int32)
        self.kv_len = np.array([start + count for _, start, count in chunks], np.int32)
        self.table = np.full((len(chunks), 1 + max(len(s.blocks) for s in sequences)), -1, np.int32)
        for row, (i, _, _) in zip(self.table, chunks, strict=True):
            row[: len(sequences[i].blocks)] = sequences[i].blocks
        self.out = np.full((len(self.qkv), heads, dim), 7e7, np.float32)
        self.weights = layer.weights()

        def pointer(name: str, wanted: object) -> int | None:
            return self.weights[name].ctypes.data if wanted else None

        q = self.qkv.ctypes.data
        self.args = abi.AttentionArgs(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=layer.padded,
            head_size=dim,
            kv_format=FORMATS[layer.kv],
            window=layer.window,
            rotary_dim=layer.rotary,
            rope_interleaved=layer.interleaved,
            scale=layer.scale,
            softcap=layer.softcap,
            qk_norm_eps=1e-6,
            q_norm=pointer("q_norm", layer.qk_norm),
            k_norm=pointer("k_norm", layer.qk_norm),
            sinks=pointer("sinks", layer.sinks),
            cos_sin=pointer("cos_sin", layer.rotary),
            q=q,
            k=q + 4 * heads * dim,
            v=q + 4 * (heads + kv_heads) * dim,
            ldq=self.qkv.shape[1],
            ldk=self.qkv.shape[1],
            ldv=self.qkv.shape[1],
            kv=cache.memory.ctypes.data,
            kv_block_bytes=cache.block_bytes,
            out=self.out.ctypes.data,
            ldo=heads * dim,
            num_blocks=cache.num_blocks,
        )
        self.seqs = abi.Sequences(
            num_seqs=len(chunks),
            num_tokens=len(self.qkv),
            q_start=self.q_start.ctypes.data,
            kv_len=self.kv_len.ctypes.data,
            block_table=self.table.ctypes.data,
            table_stride=self.table.shape[1],
            block_size=layer.block_size,
            share_prefixes=share_prefixes,
        )
        if parents is not None:
            self.parents = np.array(parents, np.int32)
            self.seqs.parents = self.parents.ctypes.data
        if sink_windows is not None:
            fields = [
                (s.sinks, s.window, s.stride, s.turn, 0) if s else (0,) * 5 for s in sink_windows
            ]
            self.sink_windows = (abi.SinkWindow * len(fields))(*fields)
            self.seqs.sink_windows = ctypes.addressof(self.sink_windows)


def attend(
    cache: Cache,
    chunks: list[tuple[int, int, int]],
    pool=None,
    parents: list[int] | None = None,
    share_prefixes: bool = False,
    sink_windows: list[SinkWindow | None] | None = None,
) -> list[np.ndarray]:
    """Run a step; the output of each chunk."""
    step = Step(cache, chunks, parents, share_prefixes, sink_windows)
    native = cache.native
    pool = native.pool if pool is None else pool
    native.check(native.lib.oct_attention(pool, ctypes.byref(step.args), ctypes.byref(step.seqs)))
    return np.split(step.out, step.q_start[1:-1])


def attend_all(native, layer: Layer, sequence: Sequence, pool=None) -> np.ndarray:
    """A whole prompt at once, alone."""
    cache = Cache(native, layer, [sequence])
    return attend(cache, [(0, 0, len(sequence))], pool)[0]


# ---- The oracle


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def rotated(layer: Layer, x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """x [positions, heads, D] at the positions 0, 1, ..."""
    cos, sin = np.split(cos_sin[: len(x), None, :].astype(np.float64), 2, axis=-1)
    half, turned = layer.rotary // 2, x.copy()
    if layer.interleaved:
        first, second = slice(0, layer.rotary, 2), slice(1, layer.rotary, 2)
    else:
        first, second = slice(0, half), slice(half, layer.rotary)
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


def expected_heads(layer: Layer, x: np.ndarray, norm: str) -> np.ndarray:
    weights, x = layer.weights(), x.astype(np.float64)
    if layer.qk_norm:
        x = normed(x, weights[norm])
    return rotated(layer, x, weights["cos_sin"])


def hadamard(dim: int) -> np.ndarray:
    """An orthogonal matrix of signs, in blocks of the largest power of two that divides what
    ``dim`` is padded to."""
    dim = layout.padded_head(dim)
    size = dim & -dim
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.kron([[1, 1], [1, -1]], block)
    return np.kron(np.eye(dim // size), block / size**0.5)


def in_one_byte(queries: np.ndarray, group: int) -> np.ndarray:
    """Rotated, rounded to 127ths of the largest number of ``group``, and rotated back."""
    dim = queries.shape[-1]
    rotation = hadamard(dim)
    rotated = queries @ rotation[:dim]
    for first in range(0, len(rotation), group):
        part = rotated[..., first : first + group]
        scale = np.abs(part).max(-1, keepdims=True) / 127
        part[...] = np.rint(part / scale) * scale
    return (rotated @ rotation)[..., :dim]


def expected(
    layer: Layer,
    sequence: Sequence,
    keys: np.ndarray,
    values: np.ndarray,
    last: int | None = None,
) -> np.ndarray:
    """Outputs at all positions or the ``last`` ones, in float64, over stored keys and values
    [positions, Hk, D]."""
    position = np.arange(len(sequence))
    asked = position if last is None else position[-last:]
    queries = expected_heads(layer, sequence.q, "q_norm")[asked]
    if layer.kv in QUERY_GROUP:
        queries = in_one_byte(queries, QUERY_GROUP[layer.kv])
    group = layer.heads // layer.kv_heads
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries, keys) * layer.scale
    if layer.softcap:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    distance = asked[:, None] - position[None, :]
    hidden = distance < 0
    if layer.window:
        hidden |= distance >= layer.window
    scores[:, hidden] = -np.inf
    if layer.sinks:
        sinks = np.broadcast_to(layer.weights()["sinks"][:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, sinks.astype(np.float64)], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights[..., : len(position)], values)
