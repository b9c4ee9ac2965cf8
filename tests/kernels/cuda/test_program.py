"""The fused program by plain ops, against the same model op by op: ragged steps, with padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fused_models import (
    BLOCK_SIZE,
    CONFIGS,
    DEEPSEEK_V2,
    GEMMA,
    LLAMA,
    MAX_LEN,
    MAX_ROWS,
    MIXTRAL,
    eager_logits,
    eager_twin,
    fused_program,
    random_model,
    step_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import stored

from octavo.kernels import recorder, reference
from octavo.kernels.fused_ops import CannotFuse, FusedAttention, FusedExperts, FusedRows
from octavo.kernels.fuser import fuse
from octavo.kernels.recorder import KVRef, Value
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime import op_program

# (sequence, tokens that it has, tokens to compute)
STEPS = [
    step_of((0, 0, 23), (1, 0, 1), (2, 0, 40)),  # prompts
    step_of((0, 23, 1), (1, 1, 1), (2, 40, 1)),  # decode
    step_of((2, 41, 5), (3, 0, 33), (0, 24, 1), (1, 2, 20)),  # all at once
    step_of((3, 33, 17), (4, 0, 16)),  # chunks, and the end of a block
    step_of((4, 16, 1)),
]


def logits_of(program, count):
    """Of the first rows, as many at a time as the program gives."""
    parts = []
    for rows in torch.arange(count, dtype=torch.int32).split(MAX_ROWS):
        parts.append(torch.full((len(rows), program.vocab_size), torch.nan))
        program.logits(rows, parts[-1])
    return torch.cat(parts)


def assert_close(ours, theirs):
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def assert_same_answers(program, twin, steps):
    for step in steps:
        count = len(step.token_ids)
        expected = eager_logits(twin, step)
        program.run(step.padded(64, 6) if count % 2 else step.padded(count, len(step.seq_lens)))
        assert_close(logits_of(program, count), expected)
        assert not program.damaged[:count].any()


@pytest.mark.parametrize("name", CONFIGS)
def test_it_says_what_the_model_says_op_by_op(name):
    config, model = CONFIGS[name], random_model(CONFIGS[name])
    program = fused_program(config, model)
    assert_same_answers(program, eager_twin(config, model), STEPS)


@pytest.mark.parametrize("type_", [GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.BF16], ids=str)
def test_weights_as_their_files_have_them(type_):
    config = replace(LLAMA, intermediate_size=64)
    model = random_model(config, type_)
    assert_same_answers(fused_program(config, model), eager_twin(config, model), STEPS[:3])


@pytest.mark.parametrize(
    ("dtype", "type_"), [("bfloat16", GGMLType.BF16), ("float16", GGMLType.F16)]
)
@pytest.mark.parametrize("config", [LLAMA, GEMMA, DEEPSEEK_V2], ids=["llama", "gemma", "deepseek"])
def test_activations_in_16_bits(config, dtype, type_):
    """What rounding does is about what it does op by op."""
    model = random_model(config, type_)
    exact, twin = eager_twin(config, model), eager_twin(config, model, dtype, dtype)
    program = fused_program(config, model, dtype=getattr(torch, dtype), kv=dtype)
    for step in STEPS[:3]:
        expected = eager_logits(exact, step)
        program.run(step.padded(64, 6))
        fused = (logits_of(program, len(step.token_ids)) - expected).abs().mean()
        assert 0 < fused < 1.5 * (eager_logits(twin, step) - expected).abs().mean()


def test_logits_of_routers_are_not_rounded():
    model = random_model(MIXTRAL)
    program = fused_program(MIXTRAL, model, dtype=torch.bfloat16, kv="bfloat16")
    experts = [op for op in program.ops if isinstance(op, FusedExperts)]
    assert experts
    for op in experts:
        assert program.buffer(op.logits).dtype == torch.float32
        assert program.buffer(op.source).dtype == torch.bfloat16


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_any_ragged_steps(data):
    config = data.draw(st.sampled_from([LLAMA, GEMMA]))
    model, lengths = random_model(config), [0] * 5
    twin, program = eager_twin(config, model), fused_program(config, model)
    for _ in range(data.draw(st.integers(1, 4))):
        items, room = [], 64
        for number in data.draw(st.permutations(range(5))):
            most = min(room, MAX_LEN - lengths[number])
            count = data.draw(st.sampled_from([0, 1, 2, BLOCK_SIZE, 31]))
            if 0 < count <= most:
                items.append((number, lengths[number], count))
                lengths[number], room = lengths[number] + count, room - count
        if items:
            assert_same_answers(program, twin, [step_of(*items)])


@pytest.mark.parametrize("kv", ["int8", "fp8", "bfloat16"])
def test_keys_and_values_in_fewer_bits(kv):
    model = random_model(LLAMA)
    program = fused_program(LLAMA, model, kv=kv)
    twin = eager_twin(LLAMA, model, kv=kv)
    for step in STEPS[:3]:
        count = len(step.token_ids)
        program.run(step.padded(64, 6))
        # Sums that differ in the last bit may become another code.
        expected = eager_logits(twin, step)
        assert (logits_of(program, count) - expected).abs().max() < 1e-2 * expected.abs().max()


def test_sinks():
    sinks = np.linspace(-2, 2, LLAMA.num_heads, dtype=np.float32)
    model = random_model(LLAMA)

    def with_sinks(ops):
        return [replace(p, sinks=sinks) if isinstance(p, FusedAttention) else p for p in ops]

    def attend(*arguments):
        *others, _, bidirectional = arguments
        return reference.paged_attention(*others, torch.from_numpy(sinks), bidirectional)

    twin = eager_twin(LLAMA, model, paged_attention=attend)
    program = fused_program(LLAMA, model, change=with_sinks)
    assert_same_answers(program, twin, STEPS[:2])


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_values_that_are_kept_are_hidden_states(config):
    model, depths = random_model(config), range(config.num_layers + 1)
    twin, plan = eager_twin(config, model), op_program.plan_step(model)[0]
    program = fused_program(config, model, depths=depths)
    values = op_program.StepPlan(program.ops, plan.name_of).streams(depths)
    for step in STEPS[:2]:
        assert_same_answers(program, twin, [step])
        for depth in depths:
            kept = program.buffer(values[depth])[: len(step.token_ids)]
            expected = torch.from_numpy(twin.hidden_states(depth))
            assert torch.allclose(kept, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_an_early_exit_reads_the_same_cache(config):
    model = random_model(config)
    twin, program = eager_twin(config, model), fused_program(config, model)
    assert_same_answers(program, twin, STEPS[:1])
    assert_same_answers(program.exit_after(1), twin.exit_after(1), STEPS[1:2])
    with pytest.raises(CannotFuse, match="nothing ends after 7"):
        program.exit_after(7)


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_an_early_exit_takes_no_memory_but_leaves_what_is_kept(config):
    model = random_model(config)
    plan = op_program.plan_step(model)[0]
    program = fused_program(config, model, depths=[1])
    twin = eager_twin(config, model)
    kept = program.buffer(op_program.StepPlan(program.ops, plan.name_of).streams([1])[1])
    exit = program.exit_after(1)
    again = exit.exit_after(1)
    assert exit._buffers.num_bytes == again._buffers.num_bytes == 0
    for step in STEPS:  # in turns, in the same memory
        assert_same_answers(program, twin, [step])
        expected = kept.clone()
        assert_same_answers(exit, twin.exit_after(1), [step])
        # Rows that no step has written may be NaN.
        torch.testing.assert_close(kept, expected, rtol=0, atol=0, equal_nan=True)
        assert_same_answers(program, twin, [step])


def test_padding_is_harmless():
    """Whatever block 0 holds, which padded rows of block tables name."""
    model = random_model(LLAMA)
    exact, padded = (fused_program(LLAMA, model) for _ in range(2))
    stores = [padded._kv_cache.layer(layer) for layer in range(LLAMA.num_layers)]
    for store in (store for pair in stores for store in pair):
        store.parts[0][0] = torch.nan
    for step in STEPS:
        count = len(step.token_ids)
        exact.run(step.padded(count, len(step.seq_lens)))
        padded.run(step.padded(64, 9))
        assert torch.equal(logits_of(exact, count), logits_of(padded, count))
        assert not padded.damaged[:count].any()
    assert all(store.parts[0][0].isnan().all() for pair in stores for store in pair)


def test_damage_is_of_the_sequence_that_has_it():
    model, step = random_model(LLAMA), STEPS[0]
    program = fused_program(LLAMA, model)
    lone = int(step.token_ids[23])  # of the second sequence
    program._weight_of([program.ops[0].weight]).values[lone] = torch.inf
    program.run(step.padded(64, 3))
    hit = step.token_ids == lone
    sequence = np.searchsorted(step.query_start, np.arange(64), side="right") - 1
    is_theirs = np.isin(sequence, sequence[hit])
    damaged = program.damaged.numpy() == 1
    assert damaged[hit].all() and not damaged[~is_theirs].any()
    assert 0 < is_theirs.sum() < 64


def test_memory_is_that_of_what_is_there_at_once():
    config = replace(LLAMA, num_layers=6, layer_windows=(None,) * 6)
    deep = fused_program(config, random_model(config))
    flat = fused_program(LLAMA, random_model(LLAMA))
    assert deep.num_bytes == flat.num_bytes
    # The residual stream, q | k | v, queries, attended heads, gated ones; hidden rows and damage.
    heads = 16 * LLAMA.num_heads, 16 * (LLAMA.num_heads + 2 * LLAMA.num_kv_heads)
    of_token = 32 + heads[1] + 2 * heads[0] + 48
    assert deep.num_bytes == 4 * (64 * of_token + MAX_ROWS * 32 + 64)


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_is_counted_where_there_is_none(name):
    """A program of no memory says how much another one takes."""
    config, model = CONFIGS[name], random_model(CONFIGS[name])
    there, nowhere = (fused_program(config, model, device=device) for device in ("cpu", "meta"))
    assert nowhere.damaged.is_meta and nowhere.num_bytes == there.num_bytes


def test_rows_of_their_own():
    """An activation of segments that stand among others, and a head without a norm."""
    generator = torch.Generator().manual_seed(3)
    table, gate, up, beside = (torch.randn(32, 32, generator=generator) for _ in range(4))
    tape = recorder.Tape()
    x = recorder.embed(Value(tape, None, ()), stored(table))
    y = recorder.rmsnorm(x, np.ones(32, np.float32), 1e-5)
    parts = [recorder.linear(y, stored(weight)) for weight in (gate, beside, up)]
    gated = recorder.silu_mul(parts[0], parts[2])
    for part in parts:  # all have more than one reader, so that nothing is taken in
        gated = recorder.add(gated, recorder.add(part, part))
    recorder.lm_head(gated, stored(table))
    ops = fuse(tape)
    assert [p.kind for p in ops if isinstance(p, FusedRows)] == ["silu", *["add"] * 6]
    program = fused_program(LLAMA, random_model(LLAMA), change=lambda _: ops)
    step = step_of((0, 0, 9))
    program.run(replace(step.padded(9, 1), token_ids=torch.arange(9, dtype=torch.int32)))
    y = reference.rmsnorm(table[:9], torch.ones(32), 1e-5)
    gated = reference.silu_mul(y @ gate.t(), y @ up.t())
    assert_close(logits_of(program, 9), (gated + 2 * y @ (gate + beside + up).t()) @ table.t())


def matrix(n, k):
    return stored(torch.ones(n, k))


def attention(q, k, v, qk_norm=(None, None)):
    """Of head vectors, as model files write it."""
    heads = [x.view(-1, x.width // 16, 16) for x in (q, k, v)]
    for i, eps in enumerate(qk_norm):
        if eps is not None:
            heads[i] = recorder.rmsnorm(heads[i], np.ones(16, np.float32), eps)
    recorder.store_kv(heads[1], heads[2], KVRef(0), KVRef(0), None)
    attended = recorder.paged_attention(heads[0], KVRef(0), KVRef(0), None, 0.25)
    return attended.view(-1, q.width)


def fused_ops_of(*projections, qk_norm=(None, None), head_norm_alone=False):
    """Of one layer of attention, whose queries, keys and values are segments of these products."""
    tape = recorder.Tape()
    x = recorder.embed(Value(tape, None, ()), matrix(11, 32))
    inputs = [recorder.rmsnorm(x, np.ones(32, np.float32), 1e-5) for _ in range(3)]
    q, k, v = (recorder.linear(inputs[at], matrix(32, 32)) for at in projections)
    out = recorder.linear(attention(q, k, v, qk_norm), matrix(32, 32))
    if head_norm_alone:
        heads = recorder.rmsnorm(out.view(-1, 2, 16), np.ones(16, np.float32), 1e-5)
        out = recorder.linear(heads.view(-1, 32), matrix(32, 32))
    recorder.lm_head(recorder.add(x, out), matrix(11, 32))
    return fuse(tape)


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        (fused_ops_of(0, 0, 0, qk_norm=(1e-5, None)), "of layer 0 are not normed alike"),
        (fused_ops_of(0, 0, 0, qk_norm=(1e-5, 1e-6)), "of layer 0 are not normed alike"),
        (fused_ops_of(0, 0, 0, head_norm_alone=True), "norms of heads"),
    ],
)
def test_what_no_op_does_is_refused_with_the_reason(ops, reason):
    with pytest.raises(CannotFuse, match=reason):
        fused_program(LLAMA, random_model(LLAMA), change=lambda _: ops)
