"""The phases of a step, on CPUs and GPUs, and what is asked of a list of them.

A phase is what the threads of a CPU do between two barriers, and a few launches on a GPU: fewer and
longer ones are faster. ``fuser.py`` makes them of a recorded forward pass; :func:`place` finds
memory for what they pass on; :func:`exit_after` has those of a model that ends earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from octavo.kernels.recorder import RopeTable, Value
from octavo.kernels.recurrence_specs import RecurrentSpec
from octavo.kernels.routing import ExpertWeights, Routing

MAX_SEGMENTS = 4  # as OCT_MAX_SEGMENTS


class CannotFuse(Exception):
    """The recorded ops are none that fused kernels can run together; says which."""


class WeightRef(Protocol):
    """A weight. Phases say which one, and how large it is; what is in it is the business of those
    who pack it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(slots=True)
class FusedNorm:
    """An rmsnorm: its weight, and the epsilon under its root."""

    weight: np.ndarray
    eps: float


@dataclass(slots=True)
class FusedSegment:
    weight: WeightRef
    bias: np.ndarray | None
    out: Value


@dataclass(slots=True)
class FusedEmbedding:
    ids: Value
    weight: WeightRef
    scale: float
    out: Value
    positions: WeightRef | None = None  # of which the row of a token's position is added
    position_offset: int = 0


@dataclass(slots=True)
class FusedLinear:
    """x = source (+ added, normed by ``added_norm``) -> ``sum_out``; normed; times the weights."""

    source: Value
    segments: list[FusedSegment]
    norm: FusedNorm | None = None
    added: Value | None = None
    added_norm: FusedNorm | None = None
    sum_out: Value | None = None
    residual: Value | None = None  # the product is added to it
    activation: str | None = None  # "silu", "gelu_tanh", "gelu_erf": of segment 0, times segment 1
    remainder_above: float = math.inf  # see activations.py
    scale: float | None = None  # of the product, before it is added to a residual


@dataclass(slots=True)
class FusedAttention:
    layer: int
    q: Value
    k: Value
    v: Value
    out: Value
    scale: float
    window: int | None
    softcap: float | None
    sinks: np.ndarray | None
    q_norm: FusedNorm | None = None
    k_norm: FusedNorm | None = None
    rope: RopeTable | None = None
    interleaved: bool = False


@dataclass(slots=True)
class FusedRows:
    """An element-wise op or a norm alone.

    Kinds: "norm" and "layernorm", which has a ``bias`` or not; of a and b "add", "silu",
    "gelu_tanh", "gelu_erf" (an activation of a, times b), "sigmoid" (of b, which has a number for
    each of a's, or one for all of a token, times a); of a alone "scale", by ``factor``, and
    those of ``ALONE``.
    """

    kind: str
    a: Value
    out: Value
    b: Value | None = None
    norm: FusedNorm | None = None
    bias: np.ndarray | None = None
    factor: float = 1.0


# Activations that multiply nothing: from what an op calls them to a kind of Rows.
ALONE = {
    "silu": "silu_alone",
    "gelu_tanh": "gelu_tanh_alone",
    "gelu": "gelu_erf_alone",
    "relu": "relu_alone",
}


@dataclass(slots=True)
class FusedCheck:
    """Finds the tokens whose activations are no longer numbers."""

    source: Value


@dataclass(slots=True)
class FusedHead:
    """Logits of some rows: x = source, normed, times the weight, scaled, softcapped."""

    source: Value
    weight: WeightRef
    norm: FusedNorm | None = None
    softcap: float | None = None
    remainder_above: float = math.inf
    scale: float | None = None


@dataclass(slots=True)
class FusedLatentAttention:
    """The ops ``store_latents`` and ``latent_attention`` of a layer."""

    layer: int
    q: Value
    ckv: Value
    out: Value
    kv_b: WeightRef
    norm: FusedNorm
    scale: float
    rope: RopeTable
    interleaved: bool


@dataclass(slots=True)
class FusedExperts:
    """x = source, normed, by the experts that ``logits`` choose, and the residual added."""

    source: Value
    logits: Value
    experts: Sequence[ExpertWeights]
    routing: Routing
    activation: str  # as of a Linear, or ``CLAMPED_SWIGLU``
    correction: np.ndarray | None
    out: Value
    norm: FusedNorm | None = None
    residual: Value | None = None
    remainder_above: float = math.inf
    inner_remainder_above: float = math.inf  # of what goes into ``down``


@dataclass(slots=True)
class FusedRecurrence:
    """An op of a recurrent layer, of which ``spec`` says which; ``kernels/recurrence.py`` has what
    its inputs and its constants are, in their order.

    ``layer`` counts the layers that have states; None where the op has none.
    """

    spec: RecurrentSpec
    layer: int | None
    inputs: tuple[Value, ...]
    constants: tuple[np.ndarray | None, ...]
    out: Value


FusedOp = (
    FusedEmbedding
    | FusedLinear
    | FusedAttention
    | FusedLatentAttention
    | FusedRecurrence
    | FusedRows
    | FusedCheck
    | FusedHead
    | FusedExperts
)

# Where a layer looks at other positions.
MIXERS = (FusedAttention, FusedLatentAttention)

Place = TypeVar("Place")  # of a value in memory, for whoever allocates it


def reads(op: FusedOp) -> Iterator[Value]:
    """What a phase reads, each as the value that others are views of."""
    match op:
        case FusedLinear():
            values = [op.source, op.added, op.residual]
        case FusedAttention():
            values = [op.q, op.k, op.v]
        case FusedLatentAttention():
            values = [op.q, op.ckv]
        case FusedRows():
            values = [op.a, op.b]
        case FusedCheck() | FusedHead():
            values = [op.source]
        case FusedExperts():
            values = [op.source, op.logits, op.residual]
        case FusedRecurrence():
            values = [*op.inputs]
        case FusedEmbedding():
            values = []
    return (value.source for value in values if value is not None)


def writes(op: FusedOp) -> Iterator[Value]:
    """What a phase writes."""
    match op:
        case FusedLinear():
            outs = op.segments[:1] if op.activation else op.segments
            values = [op.sum_out, *(segment.out for segment in outs)]
        case (
            FusedEmbedding()
            | FusedAttention()
            | FusedRows()
            | FusedExperts()
            | FusedLatentAttention()
            | FusedRecurrence()
        ):
            values = [op.out]
        case FusedCheck() | FusedHead():
            values = []
    return (value.source for value in values if value is not None)


def residual_stream(ops: Sequence[FusedOp], num_layers: int) -> tuple[Value, FusedNorm]:
    """The activations that ``num_layers`` layers have made, and the norm that reads them next: that
    of the layer which follows, or after all layers that of the head.

    CannotFuse if no norm stands there.
    """
    _refuse_recurrences(ops)
    reader = next(
        (p for p in ops if isinstance(p, MIXERS) and p.layer == num_layers),
        ops[-1],
    )
    if isinstance(reader, MIXERS):
        # Of latent attention, queries may be two products away.
        made = (reader.ckv if isinstance(reader, FusedLatentAttention) else reader.q).source
        reader = next(
            p for p in ops if isinstance(p, FusedLinear | FusedRows) and made in writes(p)
        )
    if not isinstance(reader, FusedLinear | FusedHead) or reader.norm is None:
        raise CannotFuse(f"no norm reads what {num_layers} layers make")
    if isinstance(reader, FusedLinear) and reader.sum_out is not None:
        return reader.sum_out.source, reader.norm
    return reader.source.source, reader.norm


def place(
    ops: Sequence[FusedOp],
    allocate: Callable[[Value], Place],
    free: Callable[[Place], None],
    kept: Collection[Value] = (),
) -> dict[Value, Place]:
    """A place for every value, reused once its last reader is done.

    What a phase writes never lies where the same phase reads, since threads do not finish rows
    together; but for a residual, of which a thread only reads what it is about to write. Values in
    ``kept`` are there when the last phase has ended, and so are inputs, which no phase writes.
    """
    last_read = {value: i for i, op in enumerate(ops) for value in reads(op)}
    inputs = dict.fromkeys(last_read)
    for op in ops:
        for value in writes(op):
            inputs.pop(value, None)
    places = {value: allocate(value) for value in inputs}
    stays = {*kept, *inputs}
    for i, op in enumerate(ops):
        ending = [
            value
            for value in dict.fromkeys(reads(op))
            if last_read[value] == i and value not in stays
        ]
        overwritten = _overwritten(op, ending)
        for value in writes(op):
            if overwritten is not None and value is _product(op):
                places[value] = places[overwritten]
                ending.remove(overwritten)
            else:
                places[value] = allocate(value)
        # The head may run again over what it reads: that stays.
        if not isinstance(op, FusedHead):
            for value in ending:
                free(places[value])
    return places


def _overwritten(op: FusedOp, ending: list[Value]) -> Value | None:
    """The residual that a product may replace where it lies."""
    if (
        isinstance(op, FusedLinear | FusedExperts)
        and op.residual in ending
        and op.residual is not op.source
    ):
        return op.residual
    return None


def _product(op: FusedOp) -> Value | None:
    if isinstance(op, FusedExperts):
        return op.out.source
    return op.segments[0].out.source if isinstance(op, FusedLinear) else None


def exit_after(ops: Sequence[FusedOp], num_layers: int) -> list[FusedOp]:
    """The phases of a model that ends after its first ``num_layers`` layers: what the next one
    would begin with goes through the last norm to the head. CannotFuse if that is not known."""
    _refuse_recurrences(ops)
    head = ops[-1]
    assert isinstance(head, FusedHead)
    if num_layers == sum(isinstance(op, MIXERS) for op in ops):
        return list(ops)
    index = _first_of_layer(ops, num_layers)
    entry = ops[index]
    if not isinstance(entry, FusedLinear) or entry.norm is None:
        raise CannotFuse(f"layer {num_layers} does not begin with a norm")
    kept = list(ops[:index])
    stream = entry.source
    if entry.added is not None:
        added = entry.added
        if entry.added_norm is not None:
            normed = _like(added)
            kept.append(FusedRows("norm", added, normed, norm=entry.added_norm))
            added = normed
        stream = _like(entry.source)
        kept.append(FusedRows("add", entry.source, stream, b=added))
    return [*kept, FusedCheck(stream), replace(head, source=stream)]


def _refuse_recurrences(ops: Sequence[FusedOp]) -> None:
    if any(isinstance(op, FusedRecurrence) for op in ops):
        raise CannotFuse("layers are counted by their attention, and recurrent ones have none")


def _first_of_layer(ops: Sequence[FusedOp], layer: int) -> int:
    """The place of the linear that reads what the layers before ``layer`` leave."""
    attentions = {p.layer: i for i, p in enumerate(ops) if isinstance(p, MIXERS)}
    if layer not in attentions or layer - 1 not in attentions:
        raise CannotFuse(f"nothing ends after {layer} of {len(attentions)} layers")
    wanted = set(reads(ops[attentions[layer]]))
    first = attentions[layer]
    for index in range(attentions[layer] - 1, attentions[layer - 1], -1):
        op = ops[index]
        if wanted.isdisjoint(writes(op)):
            continue
        first = index
        if isinstance(op, FusedLinear):  # the way from here on leads through the residual stream
            wanted.difference_update(writes(op))
        else:
            wanted.update(reads(op))
    return first


def _like(value: Value) -> Value:
    """Another value of the same shape."""
    return Value(value.tape, None, value.shape)
