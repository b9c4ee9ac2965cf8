"""Structs of recurrent layers' ops for the native kernels; ``program.py`` has the other ops."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
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


def recurrence_struct(
    op: FusedRecurrence,
    at: Callable[[Value], int],
    constant: Callable[[np.ndarray | None], int | None],
    states: StateLayout | None,
) -> tuple[int, ctypes.Structure]:
    """The op code (OCT_OP_*) of an op, and its arguments.

    Args:
        at, constant: return the address of a value, and of a small array.
    """
    spec = op.spec
    if isinstance(spec, GatedNormSpec):
        return abi.OCT_OP_GATED_NORM, _gated_norm(op, spec, at, constant)
    assert states is not None and op.layer is not None, "no memory for states"
    match spec:
        case ConvSpec():
            kept = states.struct(op.layer, 0)
            return abi.OCT_OP_CONV, _conv(op, spec, at, constant, kept)
        case ScanSpec():
            kept = states.struct(op.layer, 1)
            return abi.OCT_OP_SCAN, _scan(op, spec, at, constant, kept)
        case DeltaSpec():
            kept = states.struct(op.layer, 1)
            return abi.OCT_OP_DELTA, _delta(op, spec, at, constant, kept)


_At = Callable[[Value], int]
_Constant = Callable[[np.ndarray | None], int | None]


def _conv(
    op: FusedRecurrence, spec: ConvSpec, at: _At, constant: _Constant, kept: abi.States
) -> abi.ConvArgs:
    weight, bias = op.constants
    (x,) = op.inputs
    assert weight is not None
    return abi.ConvArgs(
        channels=spec.channels,
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
    op: FusedRecurrence, spec: ScanSpec, at: _At, constant: _Constant, kept: abi.States
) -> abi.ScanArgs:
    a_log, skip, step_bias = op.constants
    x, steps = op.inputs
    return abi.ScanArgs(
        heads=spec.heads,
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
    op: FusedRecurrence, spec: DeltaSpec, at: _At, constant: _Constant, kept: abi.States
) -> abi.DeltaArgs:
    a_log, step_bias = op.constants
    x, gates = op.inputs
    return abi.DeltaArgs(
        key_heads=spec.key_heads,
        key_dim=spec.key_dim,
        value_heads=spec.value_heads,
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
    op: FusedRecurrence, spec: GatedNormSpec, at: _At, constant: _Constant
) -> abi.GatedNormArgs:
    weight = op.constants[0] if spec.normed else None
    x, gate = op.inputs
    return abi.GatedNormArgs(
        width=spec.width,
        group=spec.group,
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
