"""Structs of recurrent layers' ops for the native kernels; ``program.py`` has the other ops."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from octavo.kernels.cpu import abi
from octavo.kernels.fused_ops import FusedRecurrence
from octavo.kernels.recorder import Value
from octavo.kernels.recurrence_specs import ConvSpec, DeltaSpec, GatedNormSpec, ScanSpec

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Addresses of states for the native kernels; see ``oct_states``."""

    layers: list[list[int]]  # the address of each of a layer's states in the first slot
    slot_floats: int
    num_slots: int

    def struct(self, layer: int, index: int) -> abi.States:
        return abi.States(self.layers[layer][index], self.slot_floats, self.num_slots)


def recurrence_structs(
    op: FusedRecurrence,
    columns: Sequence[range],
    at: Callable[[Value], int],
    constant: Callable[[np.ndarray | None], int | None],
    states: StateLayout | None,
) -> Iterator[tuple[int, ctypes.Structure]]:
    """Yield the op code (OCT_OP_*) of an op, and its arguments, for each range of columns of its
    output that are computed.

    Args:
        at, constant: return the address of a value, and of a small array.
    """
    spec = op.spec
    if isinstance(spec, GatedNormSpec):
        for each in columns:
            yield abi.OCT_OP_GATED_NORM, _gated_norm(op, spec, each, at, constant)
        return
    assert states is not None and op.layer is not None, "no memory for states"
    match spec:
        case ConvSpec():
            kept = states.struct(op.layer, 0)
            for each in columns:
                yield abi.OCT_OP_CONV, _conv(op, spec, each, at, constant, kept)
                # The states of the ranges lie one after the other.
                before = _FLOAT_BYTES * (spec.kernel - 1) * len(each)
                kept = abi.States(kept.data + before, kept.slot_floats, kept.num_slots)
        case ScanSpec():
            kept = states.struct(op.layer, 1)
            for each in columns:
                yield abi.OCT_OP_SCAN, _scan(op, spec, each, at, constant, kept)
        case DeltaSpec():
            kept = states.struct(op.layer, 1)
            for each in columns:
                yield abi.OCT_OP_DELTA, _delta(op, spec, each, at, constant, kept)


_At = Callable[[Value], int]
_Constant = Callable[[np.ndarray | None], int | None]


def _conv(
    op: FusedRecurrence,
    spec: ConvSpec,
    columns: range,
    at: _At,
    constant: _Constant,
    kept: abi.States,
) -> abi.ConvArgs:
    weight, bias = op.constants
    (x,) = op.inputs
    assert weight is not None
    return abi.ConvArgs(
        channels=spec.channels,
        first=columns.start,
        count=len(columns),
        kernel=spec.kernel,
        gated=spec.gated,
        x=at(x) + _FLOAT_BYTES * spec.first,
        ldx=x.width,
        weight=constant(weight.reshape(spec.channels, spec.kernel).T),
        bias=constant(bias),
        out=at(op.out),
        states=kept,
    )


def _scan(
    op: FusedRecurrence,
    spec: ScanSpec,
    columns: range,
    at: _At,
    constant: _Constant,
    kept: abi.States,
) -> abi.ScanArgs:
    a_log, skip, step_bias = op.constants
    x, steps = op.inputs
    return abi.ScanArgs(
        heads=spec.heads,
        first=columns.start // spec.head_dim,
        count=len(columns) // spec.head_dim,
        head_dim=spec.head_dim,
        groups=spec.groups,
        state_dim=spec.state_dim,
        step_min=spec.step_min,
        step_max=math.inf if spec.step_max is None else spec.step_max,
        step_scale=spec.step_scale,
        x=at(x),
        steps=at(steps) + _FLOAT_BYTES * spec.first,
        ldx=x.width,
        ldsteps=steps.width,
        decay=constant(_decay(a_log)),
        skip=constant(skip),
        step_bias=constant(step_bias),
        out=at(op.out),
        states=kept,
    )


def _delta(
    op: FusedRecurrence,
    spec: DeltaSpec,
    columns: range,
    at: _At,
    constant: _Constant,
    kept: abi.States,
) -> abi.DeltaArgs:
    a_log, step_bias = op.constants
    x, gates = op.inputs
    return abi.DeltaArgs(
        key_heads=spec.key_heads,
        key_dim=spec.key_dim,
        value_heads=spec.value_heads,
        first=columns.start // spec.value_dim,
        count=len(columns) // spec.value_dim,
        value_dim=spec.value_dim,
        x=at(x),
        gates=at(gates),
        ldx=x.width,
        ldgates=gates.width,
        decay=constant(_decay(a_log)),
        step_bias=constant(step_bias),
        out=at(op.out),
        states=kept,
    )


def _gated_norm(
    op: FusedRecurrence, spec: GatedNormSpec, columns: range, at: _At, constant: _Constant
) -> abi.GatedNormArgs:
    weight = op.constants[0] if spec.normed else None
    x, gate = op.inputs
    return abi.GatedNormArgs(
        width=spec.width,
        first=columns.start,
        count=len(columns),
        # A gate alone has no groups: these are only what a thread does at once.
        group=spec.group if spec.normed else math.gcd(spec.group, columns.start, len(columns)),
        gate_first=spec.gate_first,
        eps=spec.eps,
        gate_scale=spec.gate_scale,
        x=at(x),
        gate=at(gate) + _FLOAT_BYTES * spec.first,
        ldgate=gate.width,
        weight=constant(weight),
        out=at(op.out),
    )


def _decay(a_log: np.ndarray | None) -> np.ndarray:
    assert a_log is not None
    return cast(np.ndarray, -np.exp(a_log))
