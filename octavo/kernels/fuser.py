"""Fuses the ops of a recorded forward pass.

A linear takes in the row-wise work on its input and its output; attention takes in everything
between the projections::

    rmsnorm > q, k, v                       one Linear of three segments, with a norm before it
    norms > rope > store_kv > attention     one Attention
    store_latents > latent_attention        one LatentAttention
    o > add                                 one Linear, added to the residual stream in place
    rmsnorm > gate, up > silu_mul           one Linear of two segments, multiplied as they are made
    down > add                              one Linear
    down > rmsnorm > add > rmsnorm > q ...  (Gemma) the norm and the add go before the next Linear
    down > rmsnorm > add > q ...            (OLMo 2) the same
    o > scale > add                         (Granite) one Linear, scaled
    embed, positions > add                  (GPT-2) one Embedding
    embed, types > add, positions > add     (BERT) one Embedding

    rmsnorm > router, experts > add         one Linear and one Experts, with the norm in both

So a layer is five fused ops, with experts too. A call that fits no pattern becomes an op of its own
(:class:`FusedRows`): layernorms, activations without a product.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from octavo.kernels.fused_ops import (
    ALONE,
    MAX_SEGMENTS,
    CannotFuse,
    FusedAttention,
    FusedCheck,
    FusedEmbedding,
    FusedExperts,
    FusedHead,
    FusedLatentAttention,
    FusedLinear,
    FusedNorm,
    FusedOp,
    FusedRecurrence,
    FusedRows,
    FusedSegment,
)
from octavo.kernels.recorder import Call, Tape, Value

# Ops that wait for the readers of their outputs.
_WAITING = (
    *("rmsnorm", "layernorm", "add", "scale", "embed_positions", "embed_types", "rope"),
    *("store_kv", "store_latents"),
)


def fuse(tape: Tape) -> list[FusedOp]:
    """Fuse a recorded forward pass into a list of ops, the head last.

    Raises:
        CannotFuse: a call cannot be fused.
    """
    ops = _Fusion(tape).run()
    if not ops or not isinstance(ops[-1], FusedHead):
        raise CannotFuse("the forward pass does not end with lm_head")
    return ops


def fuse_to(output: Value) -> list[FusedOp]:
    """Fuse a recorded forward pass that ends with ``output``, and has no head.

    Raises:
        CannotFuse: a call cannot be fused.
    """
    return _Fusion(output.tape).run(output)


@dataclass(slots=True)
class _Fusion:
    """State of a fusion. Calls are taken in order; norms and sums wait until an op reads them.

    A reader that can take in such a call does so; for any other reader, :meth:`_need` makes it an
    op.
    """

    tape: Tape
    ops: list[FusedOp] = field(default_factory=list)
    readers: dict[Value, list[Call]] = field(default_factory=lambda: defaultdict(list))
    made: set[Value] = field(default_factory=set)  # values that an op so far writes
    taken: set[int] = field(default_factory=set)  # ids of calls that need no op of their own

    def run(self, output: Value | None = None) -> list[FusedOp]:
        self.made.update(self.tape.inputs)
        for call in self.tape.calls:
            for value in call.inputs:
                self.readers[value.source].append(call)
        for call in self.tape.calls:
            if id(call) not in self.taken:
                self._take(call)
        if output is not None:
            self.ops.append(FusedCheck(self._need(output)))
        return self.ops

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
                self._rows(FusedRows(_activation(call), gate, call.outputs[0], up))
            case "activate":
                kind = ALONE[call.arguments["activation"]]
                self._rows(FusedRows(kind, self._need(call.inputs[0]), call.outputs[0]))
            case "sigmoid_mul":
                gate, x = (self._need(value) for value in call.inputs)
                self._rows(FusedRows("sigmoid", x, call.outputs[0], gate))
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
        op = FusedEmbedding(
            call.inputs[0], weight, 1.0 if scale is None else scale, call.outputs[0]
        )
        while (sum_call := self._only_reader(op.out, "add")) is not None:
            added = _other(sum_call, op.out).source.producer
            if added is not None and added.name == "embed_positions" and op.positions is None:
                op.positions = added.arguments["weight"]
                op.position_offset = added.arguments["offset"]
            elif added is not None and added.name == "embed_types" and op.types is None:
                op.types = added.arguments["weight"].floats()
            else:
                break
            self.taken.update((id(sum_call), id(added)))
            op.out = sum_call.outputs[0]
        self.ops.append(op)
        self.made.add(op.out)

    def _linear(self, call: Call) -> None:
        source = call.inputs[0].source
        group = self._group(call)
        activation = self._common_reader(group)
        if activation is None and any(self._sum_reader(c) for c in group):
            group = [call]
        for member in group:
            self.taken.add(id(member))
        op = FusedLinear(
            source,
            [FusedSegment(c.arguments["weight"], c.arguments["bias"], c.outputs[0]) for c in group],
        )
        self._absorb_input(op)
        if activation is not None:
            self.taken.add(id(activation))
            op.activation = _activation(activation)
            op.segments[0].out = activation.outputs[0]
        elif (sum_call := self._sum_reader(call)) is not None:
            self._absorb_sum(op, sum_call)
        self.ops.append(op)
        self.made.update(segment.out for segment in op.segments)

    def _router(self, call: Call) -> None:
        segment = FusedSegment(call.arguments["weight"], call.arguments["bias"], call.outputs[0])
        op = FusedLinear(call.inputs[0].source, [segment])
        self._absorb_input(op)
        self.ops.append(op)
        self.made.add(segment.out)

    def _experts(self, call: Call) -> None:
        x, logits = call.inputs
        source, norm = self._normed(x)
        activation = call.arguments["activation"]
        op = FusedExperts(
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
            op.residual, scale = self._sum_of(op.out, sum_call)
            if op.residual is not None:
                op.routing = replace(op.routing, scale=op.routing.scale * (scale or 1.0))
                op.out = sum_call.outputs[0]
        self.ops.append(op)
        self.made.add(op.out)

    def _group(self, call: Call) -> list[Call]:
        """The linears that read the same value as ``call`` and become one op with it: the two of a
        gate, or those without a gate."""
        gate = self._gate_of(call)
        return [
            other
            for other in self.readers[call.inputs[0].source]
            if other.name == "linear"
            and id(other) not in self.taken
            and self._gate_of(other) is gate
        ][:MAX_SEGMENTS]

    def _gate_of(self, call: Call) -> Call | None:
        """The op that multiplies a linear's output, or its activation, with another linear's
        output."""
        reader = self._only_reader(call.outputs[0])
        return reader if reader is not None and reader.name in ("silu_mul", "gelu_mul") else None

    def _absorb_sum(self, op: FusedLinear, sum_call: Call) -> None:
        """Take in the sum of a linear's output, scaled or not, and the residual stream."""
        op.residual, op.scale = self._sum_of(op.segments[0].out, sum_call)
        if op.residual is not None:
            op.segments[0].out = sum_call.outputs[0]

    def _sum_of(self, product: Value, sum_call: Call) -> tuple[Value | None, float | None]:
        """The residual that a product is added to, if it exists already, and the scale of the
        product before the sum. Both calls are then taken."""
        scale = self._only_reader(product, "scale")
        other = _other(sum_call, product if scale is None else scale.outputs[0])
        if other.source not in self.made:
            return None, None
        self.taken.add(id(sum_call))
        if scale is None:
            return other.source, None
        self.taken.add(id(scale))
        return other.source, scale.arguments["factor"]

    def _absorb_input(self, op: FusedLinear) -> None:
        """Take in the norm that makes a linear's input, and the sum that it or the linear reads."""
        norm_call = op.source.producer
        if norm_call is not None and op.source not in self.made and _is_row_norm(norm_call):
            op.norm = FusedNorm(norm_call.arguments["weight"], norm_call.arguments["eps"])
            op.source = norm_call.inputs[0].source
        sum_call = op.source.producer
        if sum_call is None or op.source in self.made or sum_call.name != "add":
            op.source = self._need(op.source)
            return
        # x + y: one of them exists, and the other exists too or is the norm of an existing value.
        for x, y in (sum_call.inputs, sum_call.inputs[::-1]):
            x, y, y_norm = x.source, y.source, None
            maker = y.producer
            if y not in self.made and maker is not None and _is_row_norm(maker):
                y_norm = FusedNorm(maker.arguments["weight"], maker.arguments["eps"])
                y = maker.inputs[0].source
            if x in self.made and y in self.made and x is not y:
                op.sum_out = sum_call.outputs[0]
                op.source, op.added, op.added_norm = x, y, y_norm
                self.made.add(op.sum_out)
                return
        op.source = self._need(op.source)

    def _store_of(self, layer: int, name: str) -> Call:
        """Take the call that stores the step's tokens for the attention of a layer."""
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
        op = FusedLatentAttention(
            arguments["layer"],
            self._need(q).view(-1, *q.shape),
            self._need(ckv),
            call.outputs[0],
            arguments["weight"],
            FusedNorm(weight, eps),
            arguments["scale"],
            arguments["table"],
            arguments["interleaved"],
        )
        self.ops.append(op)
        self.made.add(op.out)

    def _attention(self, call: Call) -> None:
        layer = call.arguments["layer"]
        store = self._store_of(layer, "store_kv")
        q, k, v = call.inputs[0], store.inputs[0], store.inputs[1]
        if self.readers[k.source] != [store]:
            raise CannotFuse(f"the keys of layer {layer} are read by more than the KV cache")
        op = FusedAttention(
            layer,
            q,
            k,
            self._need(v).view(-1, *v.shape),
            call.outputs[0],
            call.arguments["scale"],
            call.arguments["window"],
            call.arguments["softcap"],
            call.arguments["sinks"],
            bidirectional=call.arguments["bidirectional"],
        )
        rope = q.source.producer
        if rope is not None and rope.name == "rope":
            if k.source.producer is not rope:
                raise CannotFuse(f"queries and keys of layer {layer} are rotated apart")
            self.taken.add(id(rope))
            op.rope, op.interleaved = rope.arguments["table"], rope.arguments["interleaved"]
            op.q, op.k = rope.inputs
        op.q, op.q_norm = self._head_norm(op.q)
        op.k, op.k_norm = self._head_norm(op.k)
        self.ops.append(op)
        self.made.add(op.out)

    def _recurrence(self, call: Call) -> None:
        spec, layer = call.arguments["spec"], call.arguments["layer"]
        inputs = tuple(self._need(value) for value in call.inputs)
        out = call.outputs[0]
        self.ops.append(FusedRecurrence(spec, layer, inputs, call.arguments["constants"], out))
        self.made.add(out)

    def _head_norm(self, value: Value) -> tuple[Value, FusedNorm | None]:
        """The input of the norm of every head that makes ``value``, and that norm; without one,
        ``value`` itself and None."""
        call = value.source.producer
        is_of_heads = call is not None and call.name == "rmsnorm" and not _is_row_norm(call)
        if call is None or value.source in self.made or not is_of_heads:
            return self._need(value).view(-1, *value.shape), None
        norm = FusedNorm(call.arguments["weight"], call.arguments["eps"])
        return self._need(call.inputs[0]).view(-1, *call.inputs[0].shape), norm

    def _head(self, call: Call) -> None:
        source, norm = self._normed(call.inputs[0])
        op = FusedHead(source, call.arguments["weight"], norm)
        self._absorb_logits(op, call.outputs[0])
        self.ops += [FusedCheck(source), op]

    def _absorb_logits(self, op: FusedHead, logits: Value) -> None:
        """Take in the ops on logits: a scale, and then a soft cap."""
        for reader in self.readers[logits]:
            if reader.name == "scale" and op.softcap is None and op.scale is None:
                op.scale = reader.arguments["factor"]
            elif reader.name == "softcap" and op.softcap is None:
                op.softcap = reader.arguments["cap"]
            else:
                raise CannotFuse(f"{reader.name} of logits has no native kernel")
            self.taken.add(id(reader))
            self._absorb_logits(op, reader.outputs[0])

    def _normed(self, value: Value) -> tuple[Value, FusedNorm | None]:
        """The input of the row norm that makes ``value``, and that norm; without one, ``value``
        itself and None."""
        source, norm = value.source, None
        norm_call = source.producer
        if norm_call is not None and source not in self.made and _is_row_norm(norm_call):
            norm = FusedNorm(norm_call.arguments["weight"], norm_call.arguments["eps"])
            source = norm_call.inputs[0].source
        return self._need(source), norm

    def _need(self, value: Value) -> Value:
        """Make sure that an op writes ``value``, and return the source that it is a view of."""
        source = value.source
        call = source.producer
        if source in self.made:
            return source
        if call is None or call.name not in ("rmsnorm", "layernorm", "add", "scale"):
            raise CannotFuse(f"{call.name if call else 'token ids'} are read in an unknown way")
        x, *more = (self._need(each).view(-1, *each.shape) for each in call.inputs)
        self._rows(_row_op(call, x, source, *more))
        return source

    def _rows(self, op: FusedRows) -> None:
        self.ops.append(op)
        self.made.add(op.out)

    def _only_reader(self, value: Value, name: str | None = None) -> Call | None:
        """The only reader of a value, if it has this name."""
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
        """The add that alone reads a product, or the scaled product."""
        scale = self._only_reader(call.outputs[0], "scale")
        return self._only_reader((scale or call).outputs[0], "add")


def _is_row_norm(call: Call) -> bool:
    return call.name == "rmsnorm" and len(call.inputs[0].shape) == 1


def _row_op(call: Call, a: Value, out: Value, b: Value | None = None) -> FusedRows:
    """Make an op of its own from a call that waited for its reader."""
    arguments = call.arguments
    match call.name:
        case "rmsnorm":
            return FusedRows("norm", a, out, norm=FusedNorm(arguments["weight"], arguments["eps"]))
        case "layernorm":
            norm = FusedNorm(arguments["weight"], arguments["eps"])
            return FusedRows("layernorm", a, out, norm=norm, bias=arguments["bias"])
        case "scale":
            return FusedRows("scale", a, out, factor=arguments["factor"])
    return FusedRows("add", a, out, b)


def _activation(call: Call) -> str:
    if call.name == "silu_mul":
        return "silu"
    return "gelu_tanh" if call.arguments["approximate"] else "gelu_erf"


def _other(call: Call, value: Value) -> Value:
    x, y = call.inputs
    return y if x.source is value else x
