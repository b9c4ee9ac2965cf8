"""Native latent attention as tests call it, and its oracle: float64, keys and values expanded.

As ``native_attention.py`` has it: a ``Cache`` is one layer's rows with a block table per sequence,
blocks in a shuffled order, and NaN wherever nothing was written. ``attend`` runs a step of chunks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from native_attention import deal_blocks

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.latent_weights import as_read

FORMATS = {
    "f32": abi.OCT_KV_F32,
    "bf16": abi.OCT_KV_BF16,
    "int8": abi.OCT_KV_INT8,
    "fp8": abi.OCT_KV_FP8,
}
WEIGHTS = {"f32": abi.OCT_F32, "f16": abi.OCT_F16, "bf16": abi.OCT_BF16}
# Weights that a format has.
ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "f32": lambda x: x,
    "f16": lambda x: x.astype(np.float16).astype(np.float32),
    "bf16": lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32),
}
MAX_POSITIONS = 1216
OTHER_LAYERS = 192  # bytes of a block that are none of this layer's


@dataclass(frozen=True)
class Layer:
    """What latent attention needs to know of a layer."""

    heads: int = 5
    rank: int = 32
    rope: int = 8
    nope: int = 12
    value: int = 20
    kv: str = "f32"
    interleaved: bool = True
    weights_in: str = "f32"
    block_size: int = 32

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5

    def weights(self) -> dict[str, np.ndarray]:
        """``up`` is kv_b: [H, nope + value, rank]."""
        rng = np.random.default_rng(5)
        angles = np.outer(np.arange(MAX_POSITIONS), 100.0 ** -rng.random(self.rope // 2))
        up = rng.normal(size=(self.heads, self.nope + self.value, self.rank)) * self.rank**-0.5
        return {
            "cos_sin": np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32),
            "norm": (1 + rng.random(self.rank)).astype(np.float32),
            "up": ROUNDED[self.weights_in](up.astype(np.float32)),
        }

    def as_read(self) -> tuple[np.ndarray, np.ndarray]:
        """key_up and value_up of ``oct_latent_args``."""
        up, format = self.weights()["up"], WEIGHTS[self.weights_in]
        keys, values = up[:, : self.nope], up[:, self.nope :].transpose(0, 2, 1)
        return as_read(keys, format), as_read(values, format)


@dataclass
class Sequence:
    """Queries [positions, H, nope + rope] and rows [positions, rank + rope] before norm and rope,
    and a block table."""

    q: np.ndarray
    ckv: np.ndarray
    blocks: np.ndarray

    def __len__(self) -> int:
        return len(self.q)


def make_sequence(layer: Layer, length: int, seed: int) -> Sequence:
    rng = np.random.default_rng([seed, length])
    q = rng.normal(size=(length, layer.heads, layer.nope + layer.rope)) * 2
    ckv = rng.normal(size=(length, layer.rank + layer.rope))
    return Sequence(q.astype(np.float32), ckv.astype(np.float32), np.empty(0, np.int32))


@dataclass
class Cache:
    """Memory for the rows of some sequences; gives them their blocks."""

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
        row = self.native.check(
            self.native.lib.oct_latent_row_bytes(FORMATS[layer.kv], layer.rank, layer.rope)
        )
        self.block_bytes = OTHER_LAYERS + size * row
        self.memory = np.full(self.num_blocks * self.block_bytes, 0xFF, np.uint8)  # NaN

    def read(self, index: int, length: int) -> np.ndarray:
        step = Step(self, [(index, 0, length)])
        # Rows are decoded 16 numbers at a time.
        rows = np.empty(length * (self.layer.rank + self.layer.rope), np.float32)
        self.native.check(
            self.native.lib.oct_latent_read(step.args, step.seqs, 0, rows.ctypes.data)
        )
        return rows.reshape(length, -1)


class Step:
    """Arguments of a call in which sequence i goes from ``position`` on by ``count`` tokens."""

    def __init__(
        self,
        cache: Cache,
        chunks: list[tuple[int, int, int]],
        parents: list[int] | None = None,
    ):
        layer, sequences = cache.layer, cache.sequences
        parts = [(sequences[i], slice(start, start + count)) for i, start, count in chunks]
        self.q = np.concatenate([sequence.q[at] for sequence, at in parts])
        self.ckv = np.concatenate([sequence.ckv[at] for sequence, at in parts])
        counts = [count for _, _, count in chunks]
        self.q_start = np.cumsum([0, *counts]).astype(np.int32)
        self.kv_len = np.array([start + count for _, start, count in chunks], np.int32)
        self.table = np.full((len(chunks), 1 + max(len(s.blocks) for s in sequences)), -1, np.int32)
        for row, (i, _, _) in zip(self.table, chunks, strict=True):
            row[: len(sequences[i].blocks)] = sequences[i].blocks
        self.out = np.full((len(self.q), layer.heads, layer.value), 7e7, np.float32)
        self.weights, (self.keys, self.values) = layer.weights(), layer.as_read()
        self.args = abi.LatentArgs(
            num_heads=layer.heads,
            rank=layer.rank,
            rope_dim=layer.rope,
            nope_dim=layer.nope,
            value_dim=layer.value,
            kv_format=FORMATS[layer.kv],
            rope_interleaved=layer.interleaved,
            weight_format=WEIGHTS[layer.weights_in],
            scale=layer.scale,
            eps=1e-6,
            norm=self.weights["norm"].ctypes.data,
            cos_sin=self.weights["cos_sin"].ctypes.data,
            key_up=self.keys.ctypes.data,
            value_up=self.values.ctypes.data,
            q=self.q.ctypes.data,
            ckv=self.ckv.ctypes.data,
            ldq=self.q[0].size,
            ldckv=self.ckv.shape[1],
            kv=cache.memory.ctypes.data,
            kv_block_bytes=cache.block_bytes,
            out=self.out.ctypes.data,
            ldo=self.out[0].size,
            num_blocks=cache.num_blocks,
        )
        self.seqs = abi.Sequences(
            num_seqs=len(chunks),
            num_tokens=len(self.q),
            q_start=self.q_start.ctypes.data,
            kv_len=self.kv_len.ctypes.data,
            block_table=self.table.ctypes.data,
            table_stride=self.table.shape[1],
            block_size=layer.block_size,
        )
        if parents is not None:
            self.parents = np.array(parents, np.int32)
            self.seqs.parents = self.parents.ctypes.data


def attend(
    cache: Cache,
    chunks: list[tuple[int, int, int]],
    pool=None,
    parents: list[int] | None = None,
) -> list[np.ndarray]:
    """Run a step; the output of each chunk."""
    step = Step(cache, chunks, parents)
    native = cache.native
    pool = native.pool if pool is None else pool
    native.check(native.lib.oct_latent(pool, ctypes.byref(step.args), ctypes.byref(step.seqs)))
    return np.split(step.out, step.q_start[1:-1])


def attend_all(native, layer: Layer, sequence: Sequence, pool=None) -> np.ndarray:
    """A whole prompt at once, alone."""
    cache = Cache(native, layer, [sequence])
    return attend(cache, [(0, 0, len(sequence))], pool)[0]


# ---- The oracle


def rotated(layer: Layer, x: np.ndarray) -> np.ndarray:
    """x [positions, heads, rope] at the positions 0, 1, ..."""
    cos_sin = layer.weights()["cos_sin"][: len(x), None, :].astype(np.float64)
    cos, sin = np.split(cos_sin, 2, axis=-1)
    half, turned = layer.rope // 2, x.astype(np.float64)
    pairs = (slice(0, None, 2), slice(1, None, 2))
    first, second = pairs if layer.interleaved else (slice(0, half), slice(half, None))
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


def expected_rows(layer: Layer, sequence: Sequence) -> np.ndarray:
    """What is to be kept, in float64: [positions, rank + rope]."""
    c = sequence.ckv[:, : layer.rank].astype(np.float64)
    c = c / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-6) * layer.weights()["norm"]
    return np.concatenate([c, rotated(layer, sequence.ckv[:, None, layer.rank :])[:, 0]], axis=1)


def expected(
    layer: Layer, sequence: Sequence, rows: np.ndarray, last: int | None = None
) -> np.ndarray:
    """Outputs at all positions or the ``last`` ones, in float64, over stored rows: by each head's
    keys and values."""
    up = layer.weights()["up"].astype(np.float64)
    c, k = np.split(rows.astype(np.float64), [layer.rank], axis=1)
    keys = np.einsum("hnr,tr->thn", up[:, : layer.nope], c)
    keys = np.concatenate([keys, np.repeat(k[:, None], layer.heads, axis=1)], axis=-1)
    values = np.einsum("hvr,tr->thv", up[:, layer.nope :], c)
    n, r = np.split(sequence.q.astype(np.float64), [layer.nope], axis=-1)
    first = 0 if last is None else len(n) - last
    queries = np.concatenate([n, rotated(layer, r)], axis=-1)[first:]
    scores = np.einsum("qhd,khd->hqk", queries, keys) * layer.scale
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1 + first)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khv->qhv", weights, values)
