"""Recorded forward passes, and the fused ops that they become."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from octavo.kernels import fused_ops, recorder
from octavo.kernels.fuser import fuse
from octavo.kernels.recorder import KVRef, RopeTable, Tape, Value
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.ggml_types import GGMLType

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 8, 4, 2, 2, 6, 11


def matrix(n: int, k: int) -> Weight:
    return StoredWeight(GGMLType.F32, np.ones((n, k), dtype=np.float32).view(np.uint8), (n, k))


def attention(x: Value, layer: int = 0, qk_norm: bool = False, rope: bool = True) -> Value:
    q = recorder.linear(x, matrix(HIDDEN, HIDDEN)).view(-1, HEADS, HEAD_DIM)
    k = recorder.linear(x, matrix(KV_HEADS * HEAD_DIM, HIDDEN)).view(-1, KV_HEADS, HEAD_DIM)
    v = recorder.linear(x, matrix(KV_HEADS * HEAD_DIM, HIDDEN)).view(-1, KV_HEADS, HEAD_DIM)
    if qk_norm:
        q = recorder.rmsnorm(q, np.ones(HEAD_DIM), 1e-6)
        k = recorder.rmsnorm(k, np.ones(HEAD_DIM), 1e-6)
    if rope:
        table = RopeTable(HEAD_DIM, lambda n: np.zeros((n, HEAD_DIM)))
        q, k = recorder.rope(q, k, None, table)
    recorder.store_kv(k, v, KVRef(layer), KVRef(layer), None)
    attended = recorder.paged_attention(q, KVRef(layer), KVRef(layer), None, 0.5)
    return attended.view(-1, HIDDEN)


def norm(x: Value) -> Value:
    return recorder.rmsnorm(x, np.ones(HIDDEN), 1e-5)


def mlp(x: Value) -> Value:
    gate = recorder.linear(x, matrix(INNER, HIDDEN))
    up = recorder.linear(x, matrix(INNER, HIDDEN))
    return recorder.linear(recorder.silu_mul(gate, up), matrix(HIDDEN, INNER))


def start() -> tuple[Tape, Value]:
    tape = Tape()
    return tape, recorder.embed(Value(tape, None, ()), matrix(VOCAB, HIDDEN))


def finish(x: Value) -> None:
    recorder.lm_head(norm(x), matrix(VOCAB, HIDDEN))


def kinds(ops: list[Any]) -> list[str]:
    return [
        f"Rows {op.kind}" if isinstance(op, fused_ops.FusedRows) else type(op).__name__
        for op in ops
    ]


def test_a_llama_layer_is_five_fused_ops():
    tape, x = start()
    for layer in range(2):
        x = recorder.add(x, recorder.linear(attention(norm(x), layer), matrix(HIDDEN, HIDDEN)))
        x = recorder.add(x, mlp(norm(x)))
    finish(x)
    ops = fuse(tape)
    layer_ops = ["FusedLinear", "FusedAttention", "FusedLinear", "FusedLinear", "FusedLinear"]
    assert kinds(ops) == ["FusedEmbedding", *layer_ops, *layer_ops, "FusedCheck", "FusedHead"]
    qkv, _, out, gate_up, down = ops[1:6]
    assert len(qkv.segments) == 3 and qkv.norm and qkv.residual is None
    assert out.residual is ops[0].out and out.norm is None
    assert gate_up.activation == "silu" and gate_up.norm and gate_up.source is out.segments[0].out
    assert down.residual is out.segments[0].out
    assert ops[-1].norm and ops[-1].source is ops[-3].segments[0].out


def test_a_gemma_layer_is_five_fused_ops_too():
    tape, x = start()
    for layer in range(3):
        attended = attention(norm(x), layer, qk_norm=True)
        x = recorder.add(x, norm(recorder.linear(attended, matrix(HIDDEN, HIDDEN))))
        x = recorder.add(x, norm(mlp(norm(x))))
    finish(x)
    ops = fuse(tape)
    layer_ops = ["FusedLinear", "FusedAttention", "FusedLinear", "FusedLinear", "FusedLinear"]
    # The last norm and sum have no linear after them that runs over all rows.
    end = ["Rows norm", "Rows add", "FusedCheck", "FusedHead"]
    assert kinds(ops) == ["FusedEmbedding", *layer_ops * 3, *end]
    second_qkv = ops[6]
    assert second_qkv.added is ops[5].segments[0].out and second_qkv.added_norm
    assert second_qkv.sum_out is not None and second_qkv.norm
    assert ops[2].q_norm and ops[2].k_norm and ops[2].rope


def test_halves_side_by_side_read_the_same_norm():
    tape, x = start()
    both = norm(x)
    attended = recorder.linear(attention(both), matrix(HIDDEN, HIDDEN))
    fed = mlp(both)  # beside attention, not after it
    x = recorder.add(recorder.add(x, attended), fed)
    finish(x)
    ops = fuse(tape)
    layer = ["FusedLinear", "FusedAttention", "FusedLinear", "FusedLinear", "FusedLinear"]
    assert kinds(ops) == ["FusedEmbedding", *layer, "FusedCheck", "FusedHead"]
    assert len(ops[1].segments) == 3 and ops[1].norm is not None
    assert ops[4].activation == "silu" and ops[4].norm is not None


def test_sums_that_no_norm_reads():
    """As in OLMo 2: behind each half a norm, and before none."""
    tape, x = start()
    for layer in range(2):
        attended = recorder.linear(attention(x, layer), matrix(HIDDEN, HIDDEN))
        x = recorder.add(x, norm(attended))
        x = recorder.add(x, norm(mlp(x)))
    finish(x)
    ops = fuse(tape)
    layers = ["FusedLinear", "FusedAttention", "FusedLinear", "FusedLinear", "FusedLinear"] * 2
    assert kinds(ops) == [
        "FusedEmbedding",
        *layers,
        "Rows norm",
        "Rows add",
        "FusedCheck",
        "FusedHead",
    ]
    gate_up, second_qkv = ops[4], ops[6]
    for op in (gate_up, second_qkv):
        assert op.norm is None and op.added_norm is not None and op.sum_out is not None


def test_scales_go_into_the_linears_before_them():
    tape, x = start()
    attended = recorder.linear(attention(norm(x)), matrix(HIDDEN, HIDDEN))
    x = recorder.add(x, recorder.scale(attended, 0.5))
    logits = recorder.lm_head(norm(x), matrix(VOCAB, HIDDEN))
    recorder.softcap(recorder.scale(logits, 0.25), 30.0)
    ops = fuse(tape)
    assert kinds(ops) == [
        "FusedEmbedding",
        "FusedLinear",
        "FusedAttention",
        "FusedLinear",
        "FusedCheck",
        "FusedHead",
    ]
    assert ops[3].scale == 0.5 and ops[3].residual is ops[0].out
    assert (ops[-1].scale, ops[-1].softcap) == (0.25, 30.0)


def test_a_scale_of_something_else_stands_alone():
    tape, x = start()
    finish(recorder.scale(x, 3.0))
    assert kinds(fuse(tape)) == ["FusedEmbedding", "Rows scale", "FusedCheck", "FusedHead"]


def test_positions_go_into_the_embedding():
    tape = Tape()
    ids = Value(tape, None, ())
    positions = recorder.embed_positions(ids, matrix(30, HIDDEN), 2)
    finish(recorder.add(recorder.embed(ids, matrix(VOCAB, HIDDEN)), positions))
    (embed, *_) = fuse(tape)
    assert embed.positions.shape == (30, HIDDEN) and embed.position_offset == 2


def test_layernorms_and_plain_activations_stand_alone():
    tape, x = start()
    bias = np.ones(HIDDEN)
    normed = recorder.layernorm(x, np.ones(HIDDEN), bias, 1e-5)
    inner = recorder.activate(recorder.linear(normed, matrix(INNER, HIDDEN)), "relu")
    finish(recorder.add(x, recorder.linear(inner, matrix(HIDDEN, INNER))))
    ops = fuse(tape)
    alone = ["Rows layernorm", "FusedLinear", "Rows relu_alone", "FusedLinear"]
    assert kinds(ops) == ["FusedEmbedding", *alone, "FusedCheck", "FusedHead"]
    assert ops[1].bias is bias and ops[4].residual is ops[0].out


def test_attention_without_rope():
    tape, x = start()
    finish(recorder.add(x, recorder.linear(attention(norm(x), rope=False), matrix(HIDDEN, HIDDEN))))
    (op,) = (p for p in fuse(tape) if isinstance(p, fused_ops.FusedAttention))
    assert op.rope is None and op.q_norm is None


def test_logits_may_be_capped():
    tape, x = start()
    recorder.softcap(recorder.lm_head(x, matrix(VOCAB, HIDDEN)), 30.0)
    head = fuse(tape)[-1]
    assert head.softcap == 30.0 and head.norm is None


def no_head(x: Value) -> None:
    norm(x)


def keys_read_twice(x: Value) -> None:
    table = RopeTable(HEAD_DIM, lambda n: np.zeros((n, HEAD_DIM)))
    q, k = (recorder.linear(x, matrix(HIDDEN, HIDDEN)).view(-1, HEADS, HEAD_DIM) for _ in "qk")
    q, k = recorder.rope(q, k, None, table)
    recorder.store_kv(k, k, KVRef(0), KVRef(0), None)
    attended = recorder.paged_attention(q, KVRef(0), KVRef(0), None, 1.0)
    finish(recorder.add(attended.view(-1, HIDDEN), k.view(-1, HIDDEN)))


def capped_in_the_middle(x: Value) -> None:
    finish(recorder.softcap(x, 2.0))


def nothing_stored(x: Value) -> None:
    q = recorder.linear(x, matrix(HIDDEN, HIDDEN)).view(-1, HEADS, HEAD_DIM)
    finish(recorder.paged_attention(q, KVRef(0), KVRef(0), None, 1.0).view(-1, HIDDEN))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (no_head, "does not end with lm_head"),
        (keys_read_twice, "keys of layer 0"),
        (capped_in_the_middle, "softcap has no native kernel"),
        (nothing_stored, "0 store_kv"),
    ],
)
def test_what_cannot_be_fused_is_said(build, message):
    tape, x = start()
    build(x)
    with pytest.raises(fused_ops.CannotFuse, match=message):
        fuse(tape)


def test_views_must_keep_the_numbers():
    tape, x = start()
    assert x.view(-1, 4, 2).view(-1, HIDDEN).source is x
    for shape in ((-1, 3, 2), (4, HIDDEN)):
        with pytest.raises(ValueError, match="cannot be seen"):
            x.view(*shape)


def test_memory_is_reused_and_never_where_it_is_read():
    tape, x = start()
    for layer in range(6):
        x = recorder.add(x, recorder.linear(attention(norm(x), layer), matrix(HIDDEN, HIDDEN)))
        x = recorder.add(x, norm(mlp(norm(x))))
    finish(x)
    ops = fuse(tape)
    made: list[int] = []
    free: list[int] = []

    def allocate(value: Value) -> int:
        if free:
            return free.pop()
        made.append(value.width)
        return len(made) - 1

    places = fused_ops.place(ops, allocate, free.append)
    assert len(made) < 12  # of more than 60 values
    holds: dict[int, Value] = {}
    for op in ops:
        for value in fused_ops.reads(op):
            assert holds[places[value]] is value, "read after its place was given away"
        residual = getattr(op, "residual", None)
        for value in fused_ops.writes(op):
            read = [places[v] for v in fused_ops.reads(op) if v is not residual]
            assert places[value] not in read
            holds[places[value]] = value


def test_recordings_do_not_mix():
    _, x = start()
    _, y = start()
    with pytest.raises(AssertionError, match="two recordings"):
        recorder.add(x, y)


def test_the_recorder_has_every_op():
    from octavo.kernels.dispatch import OP_NAMES

    assert all(isinstance(getattr(recorder, op), types.FunctionType) for op in OP_NAMES)


def test_an_input_is_there_before_the_first_op_and_stays():
    tape = Tape()
    x, gate = tape.input(HIDDEN), tape.input(HIDDEN)
    y = recorder.add(x, recorder.linear(norm(x), matrix(HIDDEN, HIDDEN)))
    finish(recorder.silu_mul(y, gate))
    ops = fuse(tape)
    made: list[Value] = []
    free: list[int] = []

    def allocate(value: Value) -> int:
        made.append(value)
        return len(made) - 1

    places = fused_ops.place(ops, allocate, free.append)
    assert set(made[:2]) == {x, gate}
    written = [places[value] for op in ops for value in fused_ops.writes(op)]
    assert not {places[x], places[gate]} & {*written, *free}
