"""From a recorded forward pass to the phases of a step, on CPUs and GPUs.

A phase is what the threads of a CPU do between two barriers, and a few launches on a GPU: fewer and
longer ones are faster. A linear takes in what is done to its input and its output row by
row; attention takes in everything between the projections::

    rmsnorm > q, k, v                       one Linear of three segments, with a norm before it
    norms > rope > store_kv > attention     one Attention
    store_latents > latent_attention        one LatentAttention
    o > add                                 one Linear, added to the residual stream in place
    rmsnorm > gate, up > silu_mul           one Linear of two segments, multiplied as they are made
    down > add                              one Linear
    down > rmsnorm > add > rmsnorm > q ...  (Gemma) the norm and the add go before the next Linear
    down > rmsnorm > add > q ...            (OLMo 2) the same
    o > scale > add                         (Granite) one Linear, scaled
    embed, positions > add                  (GPT-2) one Embed

    rmsnorm > router, experts > add         one Linear and one Experts, with the norm in both

So five phases a layer, as with experts. What fits no pattern becomes a phase of its own
(:class:`Rows`): layernorms, activations that multiply nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from octavo.kernels.recorder import Call, RopeTable, Tape, Value
from octavo.kernels.recurrence_specs import RecurrentSpec
from octavo.kernels.routing import Expert, Routing

MAX_SEGMENTS = 4  # as OCT_MAX_SEGMENTS


class CannotFuse(Exception):
    """The recorded ops are none that fused kernels can run together; says which."""


class Matrix(Protocol):
    """A weight. Phases say which one, and how large it is; what is in it is the business of those
    who pack it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(slots=True)
class Norm:
    """An rmsnorm: its weight, and the epsilon under its root."""

    weight: np.ndarray
    eps: float


@dataclass(slots=True)
class Segment:
    weight: Matrix
    bias: np.ndarray | None
    out: Value


@dataclass(slots=True)
class Embed:
    ids: Value
    weight: Matrix
    scale: float
    out: Value
    positions: Matrix | None = None  # of which the row of a token's position is added
    position_offset: int = 0


@dataclass(slots=True)
class Linear:
    """x = source (+ added, normed by ``added_norm``) -> ``sum_out``; normed; times the weights."""

    source: Value
    segments: list[Segment]
    norm: Norm | None = None
    added: Value | None = None
    added_norm: Norm | None = None
    sum_out: Value | None = None
    residual: Value | None = None  # the product is added to it
    activation: str | None = None  # "silu", "gelu_tanh", "gelu_erf": of segment 0, times segment 1
    remainder_above: float = math.inf  # see activations.py
    scale: float | None = None  # of the product, before it is added to a residual


@dataclass(slots=True)
class Attention:
    layer: int
    q: Value
    k: Value
    v: Value
    out: Value
    scale: float
    window: int | None
    softcap: float | None
    sinks: np.ndarray | None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    rope: RopeTable | None = None
    interleaved: bool = False


@dataclass(slots=True)
class Rows:
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
    norm: Norm | None = None
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
class Check:
    """Finds the tokens whose activations are no longer numbers."""

    source: Value


@dataclass(slots=True)
class Head:
    """Logits of some rows: x = source, normed, times the weight, scaled, softcapped."""

    source: Value
    weight: Matrix
    norm: Norm | None = None
    softcap: float | None = None
    remainder_above: float = math.inf
    scale: float | None = None


# Ops that wait for who reads what they make.
_WAITING = (
    *("rmsnorm", "layernorm", "add", "scale", "embed_positions", "rope"),
    *("store_kv", "store_latents"),
)


@dataclass(slots=True)
class LatentAttention:
    """The ops ``store_latents`` and ``latent_attention`` of a layer."""

    layer: int
    q: Value
    ckv: Value
    out: Value
    kv_b: Matrix
    norm: Norm
    scale: float
    rope: RopeTable
    interleaved: bool


@dataclass(slots=True)
class Experts:
    """x = source, normed, by the experts that ``logits`` choose, and the residual added."""

    source: Value
    logits: Value
    experts: Sequence[Expert]
    routing: Routing
    activation: str  # as of a Linear, or ``CLAMPED_SWIGLU``
    correction: np.ndarray | None
    out: Value
    norm: Norm | None = None
    residual: Value | None = None
    remainder_above: float = math.inf
    inner_remainder_above: float = math.inf  # of what goes into ``down``


@dataclass(slots=True)
class Recurrence:
    """An op of a recurrent layer, of which ``spec`` says which; ``kernels/recurrence.py`` has what
    its inputs and its constants are, in their order.

    ``layer`` counts the layers that have states; None where the op has none.
    """

    spec: RecurrentSpec
    layer: int | None
    inputs: tuple[Value, ...]
    constants: tuple[np.ndarray | None, ...]
    out: Value


Phase = Embed | Linear | Attention | LatentAttention | Recurrence | Rows | Check | Head | Experts

# Where a layer looks at other positions.
MIXERS = (Attention, LatentAttention)

Place = TypeVar("Place")  # of a value in memory, for whoever allocates it


def fuse(tape: Tape) -> list[Phase]:
    """The phases of a recorded forward pass, the head last. CannotFuse if one cannot be made."""
    return _Fusion(tape).run()


@dataclass(slots=True)
class _Fusion:
    """Calls are taken in their order; norms and sums wait until someone reads them.

    A reader that can take such a call in does; for any other, :meth:`_need` makes it a phase.
    """

    tape: Tape
    phases: list[Phase] = field(default_factory=list)
    readers: dict[Value, list[Call]] = field(default_factory=lambda: defaultdict(list))
    made: set[Value] = field(default_factory=set)  # values that a phase so far writes
    taken: set[int] = field(default_factory=set)  # ids of calls that need no phase of their own

    def run(self) -> list[Phase]:
        self.made.update(self.tape.inputs)
        for call in self.tape.calls:
            for value in call.inputs:
                self.readers[value.source].append(call)
        for call in self.tape.calls:
            if id(call) not in self.taken:
                self._take(call)
        if not self.phases or not isinstance(self.phases[-1], Head):
            raise CannotFuse("the forward pass does not end with lm_head")
        return self.phases

    def _take(self, call: Call) -> None:
        match call.name:
            case "embed":
                self._embed(call)
            case "linear":
                self._linear(call)
            case "paged_attention":
                self._attention(call)
            case "latent_attention":
                self._latent_attention(call)
            case "lm_head":
                self._head(call)
            case "silu_mul" | "gelu_mul":
                gate, up = (self._need(value) for value in call.inputs)
                self._rows(Rows(_activation(call), gate, call.outputs[0], up))
            case "activate":
                kind = ALONE[call.arguments["activation"]]
                self._rows(Rows(kind, self._need(call.inputs[0]), call.outputs[0]))
            case "sigmoid_mul":
                gate, x = (self._need(value) for value in call.inputs)
                self._rows(Rows("sigmoid", x, call.outputs[0], gate))
            case "router":
                self._router(call)
            case "experts":
                self._experts(call)
            case "short_conv" | "selective_scan" | "delta_rule" | "gated_norm":
                self._recurrence(call)
            case _ if call.name in _WAITING:
                pass
            case _:
                raise CannotFuse(f"{call.name} has no native kernel where the model calls it")

    def _embed(self, call: Call) -> None:
        weight, scale = call.arguments["weight"], call.arguments["scale"]
        phase = Embed(call.inputs[0], weight, 1.0 if scale is None else scale, call.outputs[0])
        sum_call = self._only_reader(phase.out, "add")
        positions = sum_call and _other(sum_call, phase.out).source.producer
        if sum_call and positions and positions.name == "embed_positions":
            self.taken.update((id(sum_call), id(positions)))
            phase.positions = positions.arguments["weight"]
            phase.position_offset = positions.arguments["offset"]
            phase.out = sum_call.outputs[0]
        self.phases.append(phase)
        self.made.add(phase.out)

    def _linear(self, call: Call) -> None:
        source = call.inputs[0].source
        group = self._group(call)
        activation = self._common_reader(group)
        if activation is None and any(self._sum_reader(c) for c in group):
            group = [call]
        for member in group:
            self.taken.add(id(member))
        phase = Linear(
            source,
            [Segment(c.arguments["weight"], c.arguments["bias"], c.outputs[0]) for c in group],
        )
        self._absorb_input(phase)
        if activation is not None:
            self.taken.add(id(activation))
            phase.activation = _activation(activation)
            phase.segments[0].out = activation.outputs[0]
        elif (sum_call := self._sum_reader(call)) is not None:
            self._absorb_sum(phase, sum_call)
        self.phases.append(phase)
        self.made.update(segment.out for segment in phase.segments)

    def _router(self, call: Call) -> None:
        segment = Segment(call.arguments["weight"], call.arguments["bias"], call.outputs[0])
        phase = Linear(call.inputs[0].source, [segment])
        self._absorb_input(phase)
        self.phases.append(phase)
        self.made.add(segment.out)

    def _experts(self, call: Call) -> None:
        x, logits = call.inputs
        source, norm = self._normed(x)
        activation = call.arguments["activation"]
        phase = Experts(
            source,
            self._need(logits),
            call.arguments["experts"],
            call.arguments["routing"],
            "gelu_erf" if activation == "gelu" else activation,
            call.arguments["correction"],
            call.outputs[0],
            norm,
        )
        if (sum_call := self._sum_reader(call)) is not None:
            phase.residual, scale = self._sum_of(phase.out, sum_call)
            if phase.residual is not None:
                phase.routing = replace(phase.routing, scale=phase.routing.scale * (scale or 1.0))
                phase.out = sum_call.outputs[0]
        self.phases.append(phase)
        self.made.add(phase.out)

    def _group(self, call: Call) -> list[Call]:
        """The linears that read what ``call`` reads, and become one phase with it: the two of a
        gate, or those that are of none."""
        gate = self._gate_of(call)
        return [
            other
            for other in self.readers[call.inputs[0].source]
            if other.name == "linear"
            and id(other) not in self.taken
            and self._gate_of(other) is gate
        ][:MAX_SEGMENTS]

    def _gate_of(self, call: Call) -> Call | None:
        """The op that multiplies a linear's output, or what an activation makes of it, with another
        one's."""
        reader = self._only_reader(call.outputs[0])
        return reader if reader is not None and reader.name in ("silu_mul", "gelu_mul") else None

    def _absorb_sum(self, phase: Linear, sum_call: Call) -> None:
        """Take in the sum of a linear's output, scaled or not, and the residual stream."""
        phase.residual, phase.scale = self._sum_of(phase.segments[0].out, sum_call)
        if phase.residual is not None:
            phase.segments[0].out = sum_call.outputs[0]

    def _sum_of(self, product: Value, sum_call: Call) -> tuple[Value | None, float | None]:
        """What a product is added to, if that is there, and what it is scaled by before. The calls
        are taken then."""
        scale = self._only_reader(product, "scale")
        other = _other(sum_call, product if scale is None else scale.outputs[0])
        if other.source not in self.made:
            return None, None
        self.taken.add(id(sum_call))
        if scale is None:
            return other.source, None
        self.taken.add(id(scale))
        return other.source, scale.arguments["factor"]

    def _absorb_input(self, phase: Linear) -> None:
        """Take in the norm that makes a linear's input, and the sum that it or the linear reads."""
        norm_call = phase.source.producer
        if norm_call is not None and phase.source not in self.made and _is_row_norm(norm_call):
            phase.norm = Norm(norm_call.arguments["weight"], norm_call.arguments["eps"])
            phase.source = norm_call.inputs[0].source
        sum_call = phase.source.producer
        if sum_call is None or phase.source in self.made or sum_call.name != "add":
            phase.source = self._need(phase.source)
            return
        # x + y, of which one is there, and the other is there or is the norm of one that is.
        for x, y in (sum_call.inputs, sum_call.inputs[::-1]):
            x, y, y_norm = x.source, y.source, None
            maker = y.producer
            if y not in self.made and maker is not None and _is_row_norm(maker):
                y_norm = Norm(maker.arguments["weight"], maker.arguments["eps"])
                y = maker.inputs[0].source
            if x in self.made and y in self.made and x is not y:
                phase.sum_out = sum_call.outputs[0]
                phase.source, phase.added, phase.added_norm = x, y, y_norm
                self.made.add(phase.sum_out)
                return
        phase.source = self._need(phase.source)

    def _store_of(self, layer: int, name: str) -> Call:
        """What keeps the step's tokens for the attention of a layer."""
        stores = [
            c
            for c in self.tape.calls
            if c.name == name and c.arguments["layer"] == layer and id(c) not in self.taken
        ]
        if len(stores) != 1:
            raise CannotFuse(f"attention of layer {layer} has {len(stores)} {name} before it")
        self.taken.add(id(stores[0]))
        return stores[0]

    def _latent_attention(self, call: Call) -> None:
        arguments = call.arguments
        store = self._store_of(arguments["layer"], "store_latents")
        q, ckv = call.inputs[0], store.inputs[0]
        weight, eps = store.arguments["norm"]
        phase = LatentAttention(
            arguments["layer"],
            self._need(q).view(-1, *q.shape),
            self._need(ckv),
            call.outputs[0],
            arguments["weight"],
            Norm(weight, eps),
            arguments["scale"],
            arguments["table"],
            arguments["interleaved"],
        )
        self.phases.append(phase)
        self.made.add(phase.out)

    def _attention(self, call: Call) -> None:
        layer = call.arguments["layer"]
        store = self._store_of(layer, "store_kv")
        q, k, v = call.inputs[0], store.inputs[0], store.inputs[1]
        if self.readers[k.source] != [store]:
            raise CannotFuse(f"the keys of layer {layer} are read by more than the KV cache")
        phase = Attention(
            layer,
            q,
            k,
            self._need(v).view(-1, *v.shape),
            call.outputs[0],
            call.arguments["scale"],
            call.arguments["window"],
            call.arguments["softcap"],
            call.arguments["sinks"],
        )
        rope = q.source.producer
        if rope is not None and rope.name == "rope":
            if k.source.producer is not rope:
                raise CannotFuse(f"queries and keys of layer {layer} are rotated apart")
            self.taken.add(id(rope))
            phase.rope, phase.interleaved = rope.arguments["table"], rope.arguments["interleaved"]
            phase.q, phase.k = rope.inputs
        phase.q, phase.q_norm = self._head_norm(phase.q)
        phase.k, phase.k_norm = self._head_norm(phase.k)
        self.phases.append(phase)
        self.made.add(phase.out)

    def _recurrence(self, call: Call) -> None:
        spec, layer = call.arguments["spec"], call.arguments["layer"]
        inputs = tuple(self._need(value) for value in call.inputs)
        out = call.outputs[0]
        self.phases.append(Recurrence(spec, layer, inputs, call.arguments["constants"], out))
        self.made.add(out)

    def _head_norm(self, value: Value) -> tuple[Value, Norm | None]:
        """The value that a norm of every head reads, if ``value`` is made by one."""
        call = value.source.producer
        is_of_heads = call is not None and call.name == "rmsnorm" and not _is_row_norm(call)
        if call is None or value.source in self.made or not is_of_heads:
            return self._need(value).view(-1, *value.shape), None
        norm = Norm(call.arguments["weight"], call.arguments["eps"])
        return self._need(call.inputs[0]).view(-1, *call.inputs[0].shape), norm

    def _head(self, call: Call) -> None:
        source, norm = self._normed(call.inputs[0])
        phase = Head(source, call.arguments["weight"], norm)
        self._absorb_logits(phase, call.outputs[0])
        self.phases += [Check(source), phase]

    def _absorb_logits(self, phase: Head, logits: Value) -> None:
        """Take in what is done to logits: a scale, and then a soft cap."""
        for reader in self.readers[logits]:
            if reader.name == "scale" and phase.softcap is None and phase.scale is None:
                phase.scale = reader.arguments["factor"]
            elif reader.name == "softcap" and phase.softcap is None:
                phase.softcap = reader.arguments["cap"]
            else:
                raise CannotFuse(f"{reader.name} of logits has no native kernel")
            self.taken.add(id(reader))
            self._absorb_logits(phase, reader.outputs[0])

    def _normed(self, value: Value) -> tuple[Value, Norm | None]:
        """What a norm of rows reads, if ``value`` is made by one, and the norm."""
        source, norm = value.source, None
        norm_call = source.producer
        if norm_call is not None and source not in self.made and _is_row_norm(norm_call):
            norm = Norm(norm_call.arguments["weight"], norm_call.arguments["eps"])
            source = norm_call.inputs[0].source
        return self._need(source), norm

    def _need(self, value: Value) -> Value:
        """Make sure that a phase writes ``value``; gives what it is a view of."""
        source = value.source
        call = source.producer
        if source in self.made:
            return source
        if call is None or call.name not in ("rmsnorm", "layernorm", "add", "scale"):
            raise CannotFuse(f"{call.name if call else 'token ids'} are read in an unknown way")
        x, *more = (self._need(each).view(-1, *each.shape) for each in call.inputs)
        self._rows(_row_op(call, x, source, *more))
        return source

    def _rows(self, phase: Rows) -> None:
        self.phases.append(phase)
        self.made.add(phase.out)

    def _only_reader(self, value: Value, name: str | None = None) -> Call | None:
        """What alone reads a value, if it has this name."""
        readers = self.readers[value]
        is_it = len(readers) == 1 and name in (None, readers[0].name)
        return readers[0] if is_it else None

    def _common_reader(self, group: list[Call]) -> Call | None:
        """The activation that alone reads a group of two, gate first."""
        if len(group) != 2:
            return None
        readers = [self.readers[c.outputs[0]] for c in group]
        if readers[0] != readers[1] or len(readers[0]) != 1:
            return None
        (call,) = readers[0]
        if call.name not in ("silu_mul", "gelu_mul"):
            return None
        if [value.source for value in call.inputs] != [c.outputs[0] for c in group]:
            return None
        return call

    def _sum_reader(self, call: Call) -> Call | None:
        """The add that alone reads what a product makes, or what a scale makes of it."""
        scale = self._only_reader(call.outputs[0], "scale")
        return self._only_reader((scale or call).outputs[0], "add")


def _is_row_norm(call: Call) -> bool:
    return call.name == "rmsnorm" and len(call.inputs[0].shape) == 1


def _row_op(call: Call, a: Value, out: Value, b: Value | None = None) -> Rows:
    """An op that waited for its reader, as a phase of its own."""
    arguments = call.arguments
    match call.name:
        case "rmsnorm":
            return Rows("norm", a, out, norm=Norm(arguments["weight"], arguments["eps"]))
        case "layernorm":
            norm = Norm(arguments["weight"], arguments["eps"])
            return Rows("layernorm", a, out, norm=norm, bias=arguments["bias"])
        case "scale":
            return Rows("scale", a, out, factor=arguments["factor"])
    return Rows("add", a, out, b)


def _activation(call: Call) -> str:
    if call.name == "silu_mul":
        return "silu"
    return "gelu_tanh" if call.arguments["approximate"] else "gelu_erf"


def _other(call: Call, value: Value) -> Value:
    x, y = call.inputs
    return y if x.source is value else x


def reads(phase: Phase) -> Iterator[Value]:
    """What a phase reads, each as the value that others are views of."""
    match phase:
        case Linear():
            values = [phase.source, phase.added, phase.residual]
        case Attention():
            values = [phase.q, phase.k, phase.v]
        case LatentAttention():
            values = [phase.q, phase.ckv]
        case Rows():
            values = [phase.a, phase.b]
        case Check() | Head():
            values = [phase.source]
        case Experts():
            values = [phase.source, phase.logits, phase.residual]
        case Recurrence():
            values = [*phase.inputs]
        case Embed():
            values = []
    return (value.source for value in values if value is not None)


def writes(phase: Phase) -> Iterator[Value]:
    """What a phase writes."""
    match phase:
        case Linear():
            outs = phase.segments[:1] if phase.activation else phase.segments
            values = [phase.sum_out, *(segment.out for segment in outs)]
        case Embed() | Attention() | Rows() | Experts() | LatentAttention() | Recurrence():
            values = [phase.out]
        case Check() | Head():
            values = []
    return (value.source for value in values if value is not None)


def residual_stream(phases: Sequence[Phase], num_layers: int) -> tuple[Value, Norm]:
    """The activations that ``num_layers`` layers have made, and the norm that reads them next: that
    of the layer which follows, or after all layers that of the head.

    CannotFuse if no norm stands there.
    """
    _refuse_recurrences(phases)
    reader = next(
        (p for p in phases if isinstance(p, MIXERS) and p.layer == num_layers),
        phases[-1],
    )
    if isinstance(reader, MIXERS):
        # Of latent attention, queries may be two products away.
        made = (reader.ckv if isinstance(reader, LatentAttention) else reader.q).source
        reader = next(p for p in phases if isinstance(p, Linear | Rows) and made in writes(p))
    if not isinstance(reader, Linear | Head) or reader.norm is None:
        raise CannotFuse(f"no norm reads what {num_layers} layers make")
    if isinstance(reader, Linear) and reader.sum_out is not None:
        return reader.sum_out.source, reader.norm
    return reader.source.source, reader.norm


def place(
    phases: Sequence[Phase],
    allocate: Callable[[Value], Place],
    free: Callable[[Place], None],
    kept: Collection[Value] = (),
) -> dict[Value, Place]:
    """A place for every value, reused once its last reader is done.

    What a phase writes never lies where the same phase reads, since threads do not finish rows
    together; but for a residual, of which a thread only reads what it is about to write. Values in
    ``kept`` are there when the last phase has ended, and so are inputs, which no phase writes.
    """
    last_read = {value: i for i, phase in enumerate(phases) for value in reads(phase)}
    inputs = dict.fromkeys(last_read)
    for phase in phases:
        for value in writes(phase):
            inputs.pop(value, None)
    places = {value: allocate(value) for value in inputs}
    stays = {*kept, *inputs}
    for i, phase in enumerate(phases):
        ending = [
            value
            for value in dict.fromkeys(reads(phase))
            if last_read[value] == i and value not in stays
        ]
        overwritten = _overwritten(phase, ending)
        for value in writes(phase):
            if overwritten is not None and value is _product(phase):
                places[value] = places[overwritten]
                ending.remove(overwritten)
            else:
                places[value] = allocate(value)
        # The head may run again over what it reads: that stays.
        if not isinstance(phase, Head):
            for value in ending:
                free(places[value])
    return places


def _overwritten(phase: Phase, ending: list[Value]) -> Value | None:
    """The residual that a product may replace where it lies."""
    if (
        isinstance(phase, Linear | Experts)
        and phase.residual in ending
        and phase.residual is not phase.source
    ):
        return phase.residual
    return None


def _product(phase: Phase) -> Value | None:
    if isinstance(phase, Experts):
        return phase.out.source
    return phase.segments[0].out.source if isinstance(phase, Linear) else None


def exit_after(phases: Sequence[Phase], num_layers: int) -> list[Phase]:
    """The phases of a model that ends after its first ``num_layers`` layers: what the next one
    would begin with goes through the last norm to the head. CannotFuse if that is not known."""
    _refuse_recurrences(phases)
    head = phases[-1]
    assert isinstance(head, Head)
    if num_layers == sum(isinstance(phase, MIXERS) for phase in phases):
        return list(phases)
    index = _first_of_layer(phases, num_layers)
    entry = phases[index]
    if not isinstance(entry, Linear) or entry.norm is None:
        raise CannotFuse(f"layer {num_layers} does not begin with a norm")
    kept = list(phases[:index])
    stream = entry.source
    if entry.added is not None:
        added = entry.added
        if entry.added_norm is not None:
            normed = _like(added)
            kept.append(Rows("norm", added, normed, norm=entry.added_norm))
            added = normed
        stream = _like(entry.source)
        kept.append(Rows("add", entry.source, stream, b=added))
    return [*kept, Check(stream), replace(head, source=stream)]


def _refuse_recurrences(phases: Sequence[Phase]) -> None:
    if any(isinstance(phase, Recurrence) for phase in phases):
        raise CannotFuse("layers are counted by their attention, and recurrent ones have none")


def _first_of_layer(phases: Sequence[Phase], layer: int) -> int:
    """The place of the linear that reads what the layers before ``layer`` leave."""
    attentions = {p.layer: i for i, p in enumerate(phases) if isinstance(p, MIXERS)}
    if layer not in attentions or layer - 1 not in attentions:
        raise CannotFuse(f"nothing ends after {layer} of {len(attentions)} layers")
    wanted = set(reads(phases[attentions[layer]]))
    first = attentions[layer]
    for index in range(attentions[layer] - 1, attentions[layer - 1], -1):
        phase = phases[index]
        if wanted.isdisjoint(writes(phase)):
            continue
        first = index
        if isinstance(phase, Linear):  # the way from here on leads through the residual stream
            wanted.difference_update(writes(phase))
        else:
            wanted.update(reads(phase))
    return first


def _like(value: Value) -> Value:
    """Another value of the same shape."""
    return Value(value.tape, None, value.shape)
