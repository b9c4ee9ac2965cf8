"""The choice of implementations."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.kernels import dispatch, reference
from octavo.kernels.cpu import library
from octavo.kernels.dispatch import CANDIDATES, OP_NAMES, OpBackend, create_ops, explain


def test_ops_that_compute_are_those_of_the_reference():
    ops = create_ops("cpu")
    assert (ops.name, ops.isa, ops.dtype) == ("reference", None, "float32")
    assert ops.linear is reference.linear and ops.paged_attention is reference.paged_attention


def test_native_kernels_run_everything_on_a_cpu_or_nothing(monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", "none")
    assert [choice.op for choice in explain("cpu")] == list(OP_NAMES)
    reason = "OCTAVO_ISA=none asks for the reference kernels"
    told = {(choice.chosen, choice.refused) for choice in explain("cpu")}
    assert told == {("reference", (("native", reason),))}
    for device, dtype, why in (
        ("cpu", "bfloat16", "activations between native ops are float32"),
        ("meta", "float32", "these kernels are for the CPU"),
    ):
        assert {choice.refused for choice in explain(device, dtype)} == {(("native", why),)}


@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
def test_native_kernels_are_chosen_where_they_can_be(monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", library.runnable()[-1])
    assert {(choice.chosen, choice.refused) for choice in explain("cpu")} == {("native", ())}
    ops = create_ops("cpu", candidates=CANDIDATES)
    assert (ops.name, ops.isa) == ("native", library.runnable()[-1])


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
    ops = create_ops("cpu", "bfloat16")
    assert ops.embed(torch.tensor([0]), torch.ones(1, 2)).dtype == torch.bfloat16


def fast_linear(x, weight, bias=None):
    raise NotImplementedError


def fast_plan(*arguments):
    raise NotImplementedError


def fast_attention(*arguments):
    raise NotImplementedError


def candidates(refuses):
    fast = OpBackend(
        "fast",
        {
            "linear": fast_linear,
            "plan_attention": fast_plan,
            "paged_attention": fast_attention,
        },
        refuses,
        isa=lambda: "avx512",
    )
    return (fast, *dispatch.EAGER)


def test_the_first_that_does_not_refuse_is_chosen_and_the_reasons_are_told():
    def refuses(op, device, dtype):
        return "no bf16" if dtype == "bfloat16" and op == "linear" else None

    ops = create_ops("cpu", "float32", candidates(refuses))
    assert ops.linear is fast_linear and ops.rope is reference.rope
    assert (ops.name, ops.isa) == ("reference+fast", "avx512")

    ops = create_ops("cpu", "bfloat16", candidates(refuses))
    assert ops.linear is reference.linear and ops.paged_attention is fast_attention
    told = {c.op: c for c in explain("cpu", "bfloat16", candidates(refuses))}
    assert told["linear"] == ("linear", "reference", (("fast", "no bf16"),))
    assert told["rope"].refused == (("fast", "does not have this op"),)
    assert told["paged_attention"] == ("paged_attention", "fast", ())


def test_a_plan_is_made_by_the_attention_that_reads_it():
    def refuses(op, device, dtype):
        return "not today" if op == "paged_attention" else None

    ops = create_ops("cpu", "float32", candidates(refuses))
    assert ops.plan_attention is reference.plan_attention
    assert ops.paged_attention is reference.paged_attention
