"""Ops that record their calls and compute nothing: a forward pass becomes a list.

A model that is called with these ops, and with a :class:`Value` for its token ids, runs once, in
Python, and leaves the sequence of its ops on the value's tape. Shapes have no number of tokens: the
list is the same for every step, whatever mix of prompts and single tokens it has. The native
kernels run such a list in one call (``fuser.py`` and ``cpu/program.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from octavo.kernels.op_arguments import RopeArguments, RowNorm
from octavo.kernels.recurrence_specs import (
    ConvSpec,
    DeltaSpec,
    GatedNormSpec,
    RecurrentSpec,
    ScanSpec,
)
from octavo.kernels.routing import ExpertWeights, RouterWeights, Routing
from octavo.quantization.base import Weight


@dataclass(eq=False, slots=True)
class Call:
    """One recorded op: its inputs and outputs, and its other arguments by name."""

    name: str
    inputs: tuple[Value, ...]
    arguments: dict[str, Any]
    outputs: tuple[Value, ...] = ()


@dataclass(eq=False, slots=True)
class Tape:
    """The ops of a forward pass, in the order in which they were called.

    ``inputs`` are activations that exist before the first op; the caller of a program fills them.
    """

    calls: list[Call] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)

    def input(self, *shape: int) -> Value:
        """Create activations of this shape, for each token, that no op makes."""
        value = Value(self, None, shape)
        self.inputs.append(value)
        return value

    def record(
        self, name: str, inputs: tuple[Value, ...], widths: tuple[int, ...], **arguments: Any
    ) -> tuple[Value, ...]:
        """Record a call and return its results: one for each of ``widths``, in values per token."""
        for value in inputs:
            assert value.tape is self, f"{name} mixes values of two recordings"
        call = Call(name, inputs, arguments)
        call.outputs = tuple(Value(self, call, (width,)) for width in widths)
        self.calls.append(call)
        return call.outputs


class Value:
    """Activations that are yet to be computed: [T, *shape], for any number of tokens T."""

    __slots__ = ("producer", "shape", "source", "tape")

    def __init__(
        self, tape: Tape, producer: Call | None, shape: tuple[int, ...], source: Value | None = None
    ):
        self.tape = tape
        self.producer = producer  # None: token ids, or an input
        self.shape = shape
        self.source: Value = source or self  # what it is a view of

    @property
    def width(self) -> int:
        """Number of values per token."""
        return math.prod(self.shape)

    def view(self, tokens: int, *shape: int) -> Value:
        """The same values in another shape, whose first dimension must be -1, that of tokens."""
        if tokens != -1 or math.prod(shape) != self.width:
            raise ValueError(f"{[-1, *self.shape]} cannot be seen as {[tokens, *shape]}")
        return Value(self.tape, self.producer, shape, self.source)


class KVRef(NamedTuple):
    """Stands for the keys or the values of a layer's KV cache."""

    layer: int


class StateRef(NamedTuple):
    """Stands for the states of a recurrent layer."""

    layer: int


class RopeTable(NamedTuple):
    """Stands for a table of cosines and sines, which ``make(num_positions)`` returns at each
    step."""

    rotary_dim: int
    make: Callable[[int], np.ndarray]


def embed(ids: Value, weight: Weight, scale: float | None = None, **_: Any) -> Value:
    return ids.tape.record("embed", (ids,), (weight.shape[1],), weight=weight, scale=scale)[0]


def rmsnorm(x: Value, weight: np.ndarray, eps: float) -> Value:
    (y,) = x.tape.record("rmsnorm", (x,), (x.width,), weight=weight, eps=eps)
    return y.view(-1, *x.shape)


def embed_positions(positions: Value, weight: Weight, offset: int = 0, **_: Any) -> Value:
    width = (weight.shape[1],)
    return positions.tape.record(
        "embed_positions", (positions,), width, weight=weight, offset=offset
    )[0]


def embed_types(types: Value, weight: Weight, **_: Any) -> Value:
    return types.tape.record("embed_types", (types,), (weight.shape[1],), weight=weight)[0]


def layernorm(x: Value, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> Value:
    return x.tape.record("layernorm", (x,), (x.width,), weight=weight, bias=bias, eps=eps)[0]


def scale(x: Value, factor: float) -> Value:
    return x.tape.record("scale", (x,), (x.width,), factor=factor)[0]


def activate(x: Value, activation: str) -> Value:
    return x.tape.record("activate", (x,), (x.width,), activation=activation)[0]


def add(x: Value, y: Value) -> Value:
    return x.tape.record("add", (x, y), (x.width,))[0]


def linear(x: Value, weight: Weight, bias: np.ndarray | None = None) -> Value:
    return x.tape.record("linear", (x,), (weight.shape[0],), weight=weight, bias=bias)[0]


def lm_head(hidden: Value, weight: Weight) -> Value:
    return hidden.tape.record("lm_head", (hidden,), (weight.shape[0],), weight=weight)[0]


def rope(
    q: Value, k: Value, positions: Any, cos_sin: RopeTable, interleaved: bool = False
) -> tuple[Value, Value]:
    rotated = q.tape.record(
        "rope", (q, k), (q.width, k.width), table=cos_sin, interleaved=interleaved
    )
    return rotated[0].view(-1, *q.shape), rotated[1].view(-1, *k.shape)


def store_kv(k: Value, v: Value, k_cache: KVRef, v_cache: KVRef, slot_mapping: Any) -> None:
    k.tape.record("store_kv", (k, v), (), layer=k_cache.layer)


def plan_attention(*arguments: Any) -> None:
    """Plans nothing: the kernel reads block tables and lengths itself."""


def paged_attention(
    q: Value,
    k_cache: KVRef,
    v_cache: KVRef,
    plan: Any,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    bidirectional: bool = False,
) -> Value:
    (attended,) = q.tape.record(
        "paged_attention",
        (q,),
        (q.width,),
        layer=k_cache.layer,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        bidirectional=bidirectional,
    )
    return attended.view(-1, *q.shape)


def store_latents(
    ckv: Value,
    norm: RowNorm,
    rotation: RopeArguments,
    latents: KVRef,
    rotated: KVRef,
    slot_mapping: Any,
) -> None:
    ckv.tape.record("store_latents", (ckv,), (), layer=latents.layer, norm=norm)


def latent_attention(
    q: Value,
    kv_b: Weight,
    rotation: RopeArguments,
    latents: KVRef,
    rotated: KVRef,
    plan: Any,
    scale: float,
) -> Value:
    num_heads, query_dim = q.shape
    nope_dim = query_dim - rotation.cos_sin.rotary_dim
    value_dim = kv_b.shape[0] // num_heads - nope_dim
    (attended,) = q.tape.record(
        "latent_attention",
        (q,),
        (num_heads * value_dim,),
        layer=latents.layer,
        weight=kv_b,
        table=rotation.cos_sin,
        interleaved=rotation.interleaved,
        scale=scale,
    )
    return attended.view(-1, num_heads, value_dim)


def silu_mul(gate: Value, up: Value) -> Value:
    return gate.tape.record("silu_mul", (gate, up), (gate.width,))[0]


def gelu_mul(gate: Value, up: Value, approximate: bool = True) -> Value:
    return gate.tape.record("gelu_mul", (gate, up), (gate.width,), approximate=approximate)[0]


def softcap(x: Value, cap: float) -> Value:
    return x.tape.record("softcap", (x,), (x.width,), cap=cap)[0]


def sigmoid_mul(gate: Value, x: Value) -> Value:
    return x.tape.record("sigmoid_mul", (gate, x), (x.width,))[0]


def moe(
    x: Value,
    router: RouterWeights,
    experts: Sequence[ExpertWeights],
    routing: Routing,
    activation: str,
) -> Value:
    """Record two calls: the router is a product like any other, except that its logits are
    float32."""
    num_experts = (router.weight.shape[0],)
    (logits,) = x.tape.record("router", (x,), num_experts, weight=router.weight, bias=router.bias)
    return x.tape.record(
        "experts",
        (x, logits),
        (x.width,),
        experts=tuple(experts),
        routing=routing,
        correction=router.correction,
        activation=activation,
    )[0]


def short_conv(
    x: Value, weight: np.ndarray, bias: np.ndarray | None, state: StateRef, spec: ConvSpec
) -> Value:
    return _recurrent("short_conv", (x,), (weight, bias), spec, state)


def selective_scan(
    x: Value,
    steps: Value,
    a_log: np.ndarray,
    skip: np.ndarray,
    step_bias: np.ndarray,
    state: StateRef,
    spec: ScanSpec,
) -> Value:
    return _recurrent("selective_scan", (x, steps), (a_log, skip, step_bias), spec, state)


def delta_rule(
    x: Value,
    gates: Value,
    a_log: np.ndarray,
    step_bias: np.ndarray,
    state: StateRef,
    spec: DeltaSpec,
) -> Value:
    return _recurrent("delta_rule", (x, gates), (a_log, step_bias), spec, state)


def gated_norm(x: Value, gate: Value, weight: np.ndarray | None, spec: GatedNormSpec) -> Value:
    return _recurrent("gated_norm", (x, gate), () if weight is None else (weight,), spec)


def _recurrent(
    name: str,
    inputs: tuple[Value, ...],
    constants: tuple[np.ndarray | None, ...],
    spec: RecurrentSpec,
    state: StateRef | None = None,
) -> Value:
    return inputs[0].tape.record(
        name,
        inputs,
        (spec.width,),
        constants=constants,
        spec=spec,
        layer=None if state is None else state.layer,
    )[0]
