"""The choice of implementations."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.kernels import dispatch, reference
from octavo.kernels.dispatch import OP_NAMES, Candidate, create_ops, explain


def test_the_reference_runs_everything_today():
    ops = create_ops("cpu")
    assert (ops.name, ops.isa, ops.dtype) == ("reference", None, torch.float32)
    assert ops.linear is reference.linear and ops.paged_attention is reference.paged_attention
    assert [choice.op for choice in explain("cpu")] == list(OP_NAMES)
    assert {(choice.chosen, choice.refused) for choice in explain("cpu")} == {("reference", ())}


def test_every_op_of_the_reference_is_in_the_table():
    assert sorted(OP_NAMES) == sorted(reference.__all__)


def test_the_table_cannot_be_changed_but_replaced():
    ops = create_ops("cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.linear = None
    calls = []
    recording = dataclasses.replace(ops, add=lambda x, y: calls.append((x, y)))
    recording.add(1, 2)
    assert calls == [(1, 2)] and ops.add is reference.add


def test_embed_gives_the_dtype_of_activations():
    ops = create_ops("cpu", torch.bfloat16)
    assert ops.embed(torch.tensor([0]), torch.ones(1, 2)).dtype == torch.bfloat16


def fast_linear(x, weight, bias=None):
    raise NotImplementedError


def fast_plan(*arguments):
    raise NotImplementedError


def fast_attention(*arguments):
    raise NotImplementedError


def candidates(refuses):
    fast = Candidate(
        "fast",
        {
            "linear": fast_linear,
            "plan_attention": fast_plan,
            "paged_attention": fast_attention,
        },
        refuses,
        isa="avx512",
    )
    return (fast, *dispatch.CANDIDATES)


def test_the_first_that_does_not_refuse_is_chosen_and_the_reasons_are_told():
    def refuses(op, device, dtype):
        return "no bf16" if dtype == torch.bfloat16 and op == "linear" else None

    ops = create_ops("cpu", torch.float32, candidates(refuses))
    assert ops.linear is fast_linear and ops.rope is reference.rope
    assert (ops.name, ops.isa) == ("reference+fast", "avx512")

    ops = create_ops("cpu", torch.bfloat16, candidates(refuses))
    assert ops.linear is reference.linear and ops.paged_attention is fast_attention
    told = {c.op: c for c in explain("cpu", torch.bfloat16, candidates(refuses))}
    assert told["linear"] == ("linear", "reference", (("fast", "no bf16"),))
    assert told["rope"].refused == (("fast", "does not have this op"),)
    assert told["paged_attention"] == ("paged_attention", "fast", ())


def test_a_plan_is_made_by_the_attention_that_reads_it():
    def refuses(op, device, dtype):
        return "not today" if op == "paged_attention" else None

    ops = create_ops("cpu", torch.float32, candidates(refuses))
    assert ops.plan_attention is reference.plan_attention
    assert ops.paged_attention is reference.paged_attention
