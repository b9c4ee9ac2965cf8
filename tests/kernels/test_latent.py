"""Latent attention in the reference ops: against expanded keys and values, and with itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_latents import Layer, Sequence, expected, expected_rows, make_sequence

from octavo.kernels import recorder, reference
from octavo.kernels.fused_ops import CannotFuse, FusedLatentAttention
from octavo.kernels.fuser import fuse
from octavo.kernels.kv_stores import KVStore, codecs_of
from octavo.kernels.op_arguments import RopeArguments, RowNorm
from octavo.kernels.recorder import KVRef, RopeTable, Tape

BLOCK_SIZE = 16


class Attended:
    """A layer, and what it keeps of one sequence, in blocks that lie apart."""

    def __init__(self, layer: Layer, sequence: Sequence, dtype: str = "float32"):
        self.layer, self.sequence = layer, sequence
        num_blocks = -(-len(sequence) // BLOCK_SIZE)
        self.table = torch.arange(2 * num_blocks - 2, -1, -2, dtype=torch.int32)
        self.stores = []
        for codec, width in zip(codecs_of(dtype, True), (layer.rank, layer.rope), strict=True):
            shape = 2 * num_blocks, BLOCK_SIZE, 1
            parts = [torch.zeros(*shape, p.width, dtype=p.dtype) for p in codec.parts(width)]
            self.stores.append(KVStore(codec, parts))
        weights = layer.weights()
        self.kv_b = torch.from_numpy(weights["up"].reshape(-1, layer.rank))
        self.norm = RowNorm(torch.from_numpy(weights["norm"]), 1e-6)
        self.cos_sin = torch.from_numpy(weights["cos_sin"])

    def run(self, start: int, count: int) -> torch.Tensor:
        """Outputs [count, H, value] of the next tokens."""
        positions = torch.arange(start, start + count)
        rotation = RopeArguments(positions, self.cos_sin, self.layer.interleaved)
        slots = self.table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        plan = reference.plan_attention(
            self.table[None],
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([start + count], dtype=torch.int32),
            count,
            start + count,
            BLOCK_SIZE,
        )
        q, ckv = (
            torch.from_numpy(x[start : start + count]) for x in (self.sequence.q, self.sequence.ckv)
        )
        reference.store_latents(ckv, self.norm, rotation, *self.stores, slots)
        return reference.latent_attention(
            q, self.kv_b, rotation, *self.stores, plan, self.layer.scale
        )


LAYERS = {
    "interleaved": Layer(),
    "halves": Layer(interleaved=False),
    "odd sizes": Layer(heads=3, rank=27, rope=6, nope=5, value=9),
    "one head": Layer(heads=1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_absorbed_as_expanded(name):
    layer = LAYERS[name]
    sequence = make_sequence(layer, 150, 1)
    wanted = expected(layer, sequence, expected_rows(layer, sequence))
    out = Attended(layer, sequence).run(0, 150).numpy()
    assert np.abs(out - wanted).max() <= 5e-6 * np.abs(wanted).max()


def test_chunks_do_not_matter():
    layer = Layer()
    sequence = make_sequence(layer, 150, 1)
    whole = Attended(layer, sequence).run(0, 150)
    for size in (1, 7, 64):
        cut = Attended(layer, sequence)
        parts = [cut.run(at, min(size, 150 - at)) for at in range(0, 150, size)]
        assert torch.equal(torch.cat(parts), whole), f"in chunks of {size}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "fp8"])
def test_formats(dtype):
    layer = Layer(rank=64)
    sequence = make_sequence(layer, 90, 1)
    exact = Attended(layer, sequence).run(0, 90)
    rounded = Attended(layer, sequence, dtype).run(0, 90)
    error = ((rounded - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert 1e-5 < error < {"bfloat16": 5e-3, "float16": 1e-3, "int8": 2e-2, "fp8": 5e-2}[dtype]


# ---- Recorded


def record(tape: Tape, layer: Layer, stores: bool = True):
    weights = layer.weights()
    q, ckv = tape.input(layer.heads, layer.nope + layer.rope), tape.input(layer.rank + layer.rope)
    rotation = RopeArguments(None, RopeTable(layer.rope, lambda count: weights["cos_sin"]), True)
    norm = RowNorm(weights["norm"], 1e-6)
    if stores:
        recorder.store_latents(ckv, norm, rotation, KVRef(3), KVRef(3), None)
    kv_b = weights["up"].reshape(-1, layer.rank)
    return recorder.latent_attention(q, kv_b, rotation, KVRef(3), KVRef(3), None, layer.scale)


def test_both_are_one_fused_op():
    layer, tape = Layer(), Tape()
    attended = record(tape, layer)
    assert attended.shape == (layer.heads, layer.value)
    recorder.lm_head(attended.view(-1, layer.heads * layer.value), np.zeros((3, 100)))
    op = fuse(tape)[0]
    assert isinstance(op, FusedLatentAttention)
    assert (op.layer, op.scale, op.interleaved) == (3, layer.scale, True)
    assert [value.source for value in (op.q, op.ckv)] == tape.inputs


def test_rows_must_be_stored_first():
    tape = Tape()
    record(tape, Layer(), stores=False)
    with pytest.raises(CannotFuse, match="layer 3 has 0 store_latents before it"):
        fuse(tape)
