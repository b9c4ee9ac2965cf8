"""The tables of ops, and why native kernels do not run."""

from __future__ import annotations

import dataclasses
from types import FunctionType

import pytest
import torch

from octavo.kernels import recorder, reference
from octavo.kernels.cpu import library
from octavo.kernels.dispatch import OP_NAMES, create_ops, why_not_native


def test_ops_that_compute_are_those_of_the_reference():
    ops = create_ops()
    assert (ops.name, ops.dtype) == ("reference", "float32")
    assert ops.linear is reference.linear and ops.paged_attention is reference.paged_attention


def test_ops_of_a_recording_are_those_of_the_recorder():
    ops = create_ops(name="recorder")
    assert ops.name == "recorder" and ops.linear is recorder.linear


def test_why_native_kernels_do_not_run(monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", "none")
    assert why_not_native("cpu") == "OCTAVO_ISA=none asks for the reference kernels"
    assert why_not_native("cpu", "bfloat16") == "activations between native ops are float32"
    assert why_not_native("meta") == "these kernels are for the CPU"


@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
def test_native_kernels_run_where_they_can(monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", library.runnable()[-1])
    assert why_not_native("cpu") is None


def test_every_op_of_the_reference_is_in_the_table():
    own = {
        name
        for name, value in vars(reference).items()
        if isinstance(value, FunctionType)
        and value.__module__ == reference.__name__
        and not name.startswith("_")
    }
    elsewhere = {"plan_attention", "paged_attention"}
    elsewhere |= {"short_conv", "selective_scan", "delta_rule", "gated_norm"}
    assert own | elsewhere == set(OP_NAMES)


def test_the_table_cannot_be_changed_but_replaced():
    ops = create_ops()
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.linear = None
    calls = []
    recording = dataclasses.replace(ops, add=lambda x, y: calls.append((x, y)))
    recording.add(1, 2)
    assert calls == [(1, 2)] and ops.add is reference.add


def test_embed_gives_the_dtype_of_activations():
    ops = create_ops("bfloat16")
    assert ops.embed(torch.tensor([0]), torch.ones(1, 2)).dtype == torch.bfloat16
