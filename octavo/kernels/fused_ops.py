"""Fused ops: the steps of a forward pass on CPUs and GPUs, and queries about a list of them.

A CPU's threads run one fused op between two barriers, and a GPU runs it in a few launches: fewer
and longer ones are faster. ``fuser.py`` makes them from a recorded forward pass; :func:`place`
allocates memory for the values between them; :func:`exit_after` returns those of a model that ends
early.
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
    """Raised where fused kernels cannot run the recorded ops; the message says which ones."""


class WeightRef(Protocol):
    """A reference to a weight. Fused ops know its identity and shape; its contents are read when
    weights are packed."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(slots=True)
class FusedNorm:
    """An rmsnorm: its weight, and the epsilon under its root."""

    weight: np.ndarray
    eps: float


@dataclass(slots=True)
class FusedSegment:
    """One of the matrices of a linear, with its bias and its output."""

    weight: WeightRef
    bias: np.ndarray | None
    out: Value


@dataclass(slots=True)
class FusedEmbedding:
    """Embeddings of tokens, scaled, and of positions if the model has these."""

    ids: Value
    weight: WeightRef
    scale: float
    out: Value
    positions: WeightRef | None = None  # learned positions, added to the embeddings
    position_offset: int = 0
    types: np.ndarray | None = None  # vectors of token types, added too: float32 [types, width]
    # Of the scheme `sum`: ``weight`` has the rows of these tokens, and zeros of all others are
    # added up over the ranks. None: it has all rows.
    token_ids: range | None = None


@dataclass(slots=True)
class FusedLinear:
    """Matrix product with the work before and behind it.

    x = source (+ ``added``, which is normed by ``added_norm``), written to ``sum_out``; then
    normed; then multiplied with the weights of all segments.
    """

    source: Value
    segments: list[FusedSegment]
    norm: FusedNorm | None = None
    added: Value | None = None
    added_norm: FusedNorm | None = None
    sum_out: Value | None = None
    residual: Value | None = None  # the product is added to it
    # "silu", "gelu_tanh", "gelu_erf" of segment 0, times segment 1; or a kind of ``ALONE`` of the
    # only segment (`cpu/joined_activations.py`).
    activation: str | None = None
    remainder_above: float = math.inf  # see cpu/activation_precision.py
    scale: float | None = None  # of the product, before it is added to a residual
    first_input: int = 0  # of ``source``, which may have more than the weights multiply


@dataclass(slots=True)
class FusedSum:
    """The sum of the parts of a product, whose inputs the scheme `sum` cuts; see
    ``sum_division.py``.

    Terms are added in pairs, and these again, as a binary tree. ``is_divided``: over all ranks.
    ``is_canonical``: in float32, and between ranks in the same tree. Else their parts are of the
    activations' type, and added in any order.
    """

    terms: Sequence[Value]
    out: Value
    is_divided: bool
    is_canonical: bool
    residual: Value | None = None  # the sum is added to it
    scale: float | None = None  # of the sum, before it is added to a residual


@dataclass(slots=True)
class FusedAttention:
    """Attention of a layer, with norms of heads, rotation, and the writing of KV."""

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
    bidirectional: bool = False  # queries see the positions after their own too


@dataclass(slots=True)
class FusedRows:
    """An element-wise op, or a norm alone.

    Kinds: "norm" and "layernorm" (with a ``bias`` or without); of a and b "add", "silu",
    "gelu_tanh" and "gelu_erf" (activation of a, times b), and "sigmoid" (a times the sigmoid of b,
    which has a number for each of a's, or one per token); of a alone "scale", by ``factor``, and
    those of ``ALONE``.
    """

    kind: str
    a: Value
    out: Value
    b: Value | None = None
    norm: FusedNorm | None = None
    bias: np.ndarray | None = None
    factor: float = 1.0


# Activations without a product: from the name in an op to the kind of FusedRows.
ALONE = {
    "silu": "silu_alone",
    "gelu_tanh": "gelu_tanh_alone",
    "gelu": "gelu_erf_alone",
    "relu": "relu_alone",
}


@dataclass(slots=True)
class FusedCheck:
    """Finds the tokens whose activations are NaN or infinite."""

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
    # Of the scheme `sum`: the tokens of each rank, of which ``weight`` has this one's. Empty: all.
    tokens_of_ranks: Sequence[range] = ()

    @property
    def vocab_size(self) -> int:
        return self.tokens_of_ranks[-1].stop if self.tokens_of_ranks else self.weight.shape[0]


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
    """Mixture of experts: source, normed, through the experts that ``logits`` choose, plus the
    residual."""

    source: Value
    logits: Value
    experts: Sequence[ExpertWeights]
    routing: Routing
    activation: str  # as in FusedLinear, or ``CLAMPED_SWIGLU``
    correction: np.ndarray | None
    out: Value
    norm: FusedNorm | None = None
    residual: Value | None = None
    remainder_above: float = math.inf
    inner_remainder_above: float = math.inf  # of the input of ``down``


@dataclass(slots=True)
class FusedRecurrence:
    """An op of a recurrent layer, given by ``spec``; ``kernels/recurrence.py`` documents its inputs
    and constants, in the same order.

    ``layer`` counts the layers that have states; it is None if the op has no state.
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
    | FusedSum
)

# The ops that read other positions.
MIXERS = (FusedAttention, FusedLatentAttention)

Place = TypeVar("Place")  # place of a value in memory, as the allocator has it


def reads(op: FusedOp) -> Iterator[Value]:
    """Yields the values that an op reads; views are resolved to their source."""
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
        case FusedSum():
            values = [*op.terms, op.residual]
        case FusedRecurrence():
            values = [*op.inputs]
        case FusedEmbedding():
            values = []
    return (value.source for value in values if value is not None)


def writes(op: FusedOp) -> Iterator[Value]:
    """Yields the values that an op writes."""
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
            | FusedSum()
        ):
            values = [op.out]
        case FusedCheck() | FusedHead():
            values = []
    return (value.source for value in values if value is not None)


def matrices_of(op: FusedOp) -> Iterator[WeightRef]:
    """Yield the matrices that a fused op multiplies with or reads rows of."""
    for together in products_of(op):
        yield from together


def products_of(op: FusedOp) -> Iterator[Sequence[WeightRef]]:
    """Yield the matrices of a fused op, those together that multiply the same rows."""
    if isinstance(op, FusedLinear):
        yield [segment.weight for segment in op.segments]
    elif isinstance(op, FusedExperts):
        yield [matrix for expert in op.experts for matrix in (expert.gate, expert.up)]
        yield [expert.down for expert in op.experts]
    elif isinstance(op, FusedEmbedding):
        yield [matrix for matrix in (op.weight, op.positions) if matrix is not None]
    elif isinstance(op, FusedHead):
        yield (op.weight,)
    elif isinstance(op, FusedLatentAttention):
        yield (op.kv_b,)


def residual_stream(ops: Sequence[FusedOp], num_layers: int) -> tuple[Value, FusedNorm]:
    """The output of the first ``num_layers`` layers, and the norm that reads it next: that of the
    following layer, or of the head after the last layer.

    Raises:
        CannotFuse: no norm reads it.
    """
    _refuse_recurrences(ops)
    reader = next(
        (p for p in ops if isinstance(p, MIXERS) and p.layer == num_layers),
        ops[-1],
    )
    if isinstance(reader, MIXERS):
        # In latent attention, queries may be two products away.
        made = (reader.ckv if isinstance(reader, FusedLatentAttention) else reader.q).source
        reader = next(
            p for p in ops if isinstance(p, FusedLinear | FusedRows) and made in writes(p)
        )
    if not isinstance(reader, FusedLinear | FusedHead) or reader.norm is None:
        raise CannotFuse(f"no norm reads what {num_layers} layers make")
    if isinstance(reader, FusedLinear) and reader.sum_out is not None:
        return reader.sum_out.source, reader.norm
    return reader.source.source, reader.norm


class Sharing(Protocol):
    """Memory and meetings of ranks that compute a step together; see ``division.py``."""

    def is_shared(self, value: Value) -> bool:
        """Whether a value lies in memory that all ranks read and write."""
        ...

    def meets(self, op: FusedOp) -> bool:
        """Whether no rank begins the next op before all have ended this one."""
        ...


class OneRank:
    """The sharing of a rank that computes alone: its threads meet behind every op."""

    def is_shared(self, value: Value) -> bool:
        return False

    def meets(self, op: FusedOp) -> bool:
        return True


def place(
    ops: Sequence[FusedOp],
    allocate: Callable[[Value], Place],
    free: Callable[[Place], None],
    kept: Collection[Value] = (),
    sharing: Sharing = OneRank(),  # noqa: B008 - it has no state
) -> dict[Value, Place]:
    """Assign a place in memory to every value, reused once its last reader is done in all ranks.

    Outputs of an op never lie where the same op reads, since threads do not finish rows together.
    The exception is a residual, of which a thread reads only what it is about to overwrite. Values
    in ``kept`` survive until the last op has ended, and so do inputs, which no op writes, and which
    ops read or which are kept.
    """
    last_read = {value: i for i, op in enumerate(ops) for value in reads(op)}
    inputs = dict.fromkeys([*last_read, *kept])
    for op in ops:
        for value in writes(op):
            inputs.pop(value, None)
    places = {value: allocate(value) for value in inputs}
    stays = {*kept, *inputs}
    # Since all have met: what was read, and what is not read any more.
    read: set[Value] = set()
    done: list[Value] = []
    for i, op in enumerate(ops):
        ending = [
            value
            for value in dict.fromkeys(reads(op))
            if last_read[value] == i and value not in stays
        ]
        overwritten = _overwritten(op, ending)
        product = _product(op)
        if overwritten in read or (
            overwritten and product and sharing.is_shared(overwritten) != sharing.is_shared(product)
        ):
            overwritten = None
        for value in writes(op):
            if overwritten is not None and value is product:
                places[value] = places[overwritten]
                ending.remove(overwritten)
            else:
                places[value] = allocate(value)
        # The head may run again over its input, which is therefore kept.
        if not isinstance(op, FusedHead):
            done += ending
        read.update(reads(op))
        if sharing.meets(op):
            for value in done:
                free(places[value])
            read.clear()
            done.clear()
    return places


def _overwritten(op: FusedOp, ending: list[Value]) -> Value | None:
    """The residual that a product may overwrite in place."""
    if (
        isinstance(op, FusedLinear | FusedExperts | FusedSum)
        and op.residual in ending
        and (isinstance(op, FusedSum) or op.residual is not op.source)
    ):
        return op.residual
    return None


def _product(op: FusedOp) -> Value | None:
    """The output of an op that may overwrite its residual."""
    if isinstance(op, FusedExperts | FusedSum):
        return op.out.source
    return op.segments[0].out.source if isinstance(op, FusedLinear) else None


def exit_after(ops: Sequence[FusedOp], num_layers: int) -> list[FusedOp]:
    """The ops of a model that ends after its first ``num_layers`` layers: the input of the next
    layer goes through the last norm to the head.

    Raises:
        CannotFuse: that input is not found.
    """
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
    """Index of the linear that reads the output of the layers before ``layer``."""
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
        if isinstance(op, FusedLinear):  # from here on, follow the residual stream
            wanted.difference_update(writes(op))
        else:
            wanted.update(reads(op))
    return first


def _like(value: Value) -> Value:
    """A new value of the same shape."""
    return Value(value.tape, None, value.shape)
