"""The fused ops of a step (``kernels/fused_ops.py``) as JSON, and back.

    values      how many numbers a token has of each value that ops hand to each other
    ropes       tables of cosines and sines: a rope of the model's config, and maybe divisors
    phases      the ops in their order; a value is [number, *shape], a weight a name, a constant a
                number

The folder may come from anybody, and the kernels check no sizes: they have only addresses. So every
op is held against the shapes of its weights, of its constants and of the values that ops before it
have written, and the whole against the model's config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from octavo.base.fields import Fields
from octavo.kernels.fused_ops import (
    ALONE,
    MAX_SEGMENTS,
    FusedAttention,
    FusedCheck,
    FusedEmbedding,
    FusedExperts,
    FusedHead,
    FusedLatentAttention,
    FusedLinear,
    FusedOp,
    FusedRecurrence,
    FusedRows,
    FusedSegment,
    writes,
)
from octavo.kernels.recorder import RopeTable, Value
from octavo.kernels.recurrence_specs import ConvSpec, GatedNormSpec, RecurrentSpec
from octavo.kernels.routing import CLAMPED_SWIGLU, ExpertWeights, Routing
from octavo.layers.module import Module
from octavo.layers.rope import RotaryEmbedding
from octavo.models.config import ModelConfig
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime.op_program import StepPlan
from octavo.sources.engine_folder.op_fields import MAX_WIDTH, OpFields, StoredRefs, as_it_is
from octavo.sources.engine_folder.plain_data import read_dataclass

GATES = ("silu", "gelu_tanh", "gelu_erf")
# The kinds of FusedRows, by what they take.
_NORMS = ("norm", "layernorm")
_OF_ONE = ("scale", *ALONE.values())
_OF_TWO = ("add", "sigmoid", *GATES)
_MakeTable = Callable[[int], np.ndarray]
_MAX_WINDOW = (1 << 31) - 1
_ROPES = ("rope", "local_rope")  # of a ModelConfig
_DIVISORS = ("freq_factors", "short_factors", "long_factors")  # of a RotaryEmbedding
_RECURRENT = ("conv", "scan", "norm")  # of a RecurrenceConfig


# -- the ops --------------------------------------------------------------------------------------


def _embedding(op: OpFields) -> None:
    # Token ids are there before the first op, and have no number.
    op.field("ids", lambda ids: None, lambda f, key: Value(op.refs.tape, None, ()))
    width = op.vocabulary("weight").shape[1]
    op.number("scale")
    op.output("out", width)
    positions = op.matrix("positions", optional=True)
    offset = op.field(
        "position_offset", lambda n: n or None, lambda f, key: f.integer(key, 0, minimum=0)
    )
    if positions is not None:
        op.expect_shape("positions", positions.shape, (op.model.max_position + offset, width))


def _linear(op: OpFields) -> None:
    k = op.flat("source").width
    op.norm("norm", k)
    added = op.flat("added", k, optional=True)
    added_norm = op.norm("added_norm", k)
    sum_out = op.output("sum_out", k, optional=True)
    op.expect(
        (added is None) == (sum_out is None) and (added is not None or added_norm is None),
        "added",
        "is missing, or the place for the sum is, or there is a norm of nothing",
    )
    residual = op.flat("residual", optional=True)
    is_gate = op.choice("activation", GATES, optional=True) is not None
    if op.number("scale", None) is not None:
        op.expect(residual is not None, "scale", "is of products that are added to a residual")
    op.bound("remainder_above")
    segments = op.each("segments", FusedSegment, _segment(k, is_gate), keeps_nulls=True)
    count, sizes = len(segments), {segment.weight.shape[0] for segment in segments}
    op.expect(
        1 <= count <= MAX_SEGMENTS, "segments", f"are {count}: 1 to {MAX_SEGMENTS} are possible"
    )
    places = [op.refs.stores(segment.out) for segment in segments]
    op.expect(
        not is_gate or places == [True, False] and len(sizes) == 1 and residual is None,
        "segments",
        "a gate takes two of the same size, writes the first, and adds nothing",
    )
    op.expect(
        residual is None or count == 1 and sizes == {residual.width},
        "residual",
        "is not of the size of the one segment added to it",
    )


def _segment(k: int, is_gate: bool) -> Callable[[OpFields], None]:
    def describe(op: OpFields) -> None:
        n, columns = op.matrix("weight").shape
        op.expect(columns == k, "weight", f"has {columns} columns for {k} inputs")
        op.constant("bias", n)
        # What an activation multiplies is never written to memory, and has no number.
        if op.output("out", n, optional=is_gate) is None:
            op.values["out"] = Value(op.refs.tape, None, (n,))

    return describe


def _attention(op: OpFields) -> None:
    model = op.model
    op.expect(model.latent is None, "kind", "this model keeps latent vectors, and no keys")
    op.layer("attention", model.num_layers)
    q = op.value("q", (model.num_heads, model.head_dim))
    for name in "kv":
        op.value(name, (model.num_kv_heads, model.head_dim))
    op.output("out", q.width)
    op.number("scale")
    op.field("window", as_it_is, lambda f, key: f.integer(key, None, maximum=_MAX_WINDOW))
    op.number("softcap", None)
    op.constant("sinks", model.num_heads)
    op.norm("q_norm", model.head_dim)
    op.norm("k_norm", model.head_dim)
    op.rope("rope", optional=True)
    op.field("interleaved", as_it_is, Fields.boolean)


def _latent_attention(op: OpFields) -> None:
    latent, heads = op.model.latent, op.model.num_heads
    op.expect(latent is not None, "kind", "this model keeps no latent vectors")
    assert latent is not None
    op.layer("attention", op.model.num_layers)
    op.value("q", (heads, latent.query_dim))
    op.flat("ckv", latent.kv_rank + latent.rope_dim)
    op.output("out", heads * latent.value_dim)
    rows = heads * (latent.nope_dim + latent.value_dim)
    op.matrix("kv_b", (rows, latent.kv_rank), key="weight")
    op.norm("norm", latent.kv_rank, optional=False)
    op.number("scale")
    turned = op.rope("rope").rotary_dim
    op.expect(turned == latent.rope_dim, "rope", f"turns {turned} of {latent.rope_dim} values")
    op.field("interleaved", as_it_is, Fields.boolean)


def _rows(op: OpFields) -> None:
    kind = op.choice("kind", (*_NORMS, *_OF_ONE, *_OF_TWO), key="op")
    a = op.value("a")
    b = op.value("b", optional=True)
    norm = op.norm("norm", a.shape[-1])
    op.expect(
        (norm is not None) == (kind in _NORMS) and (b is not None) == (kind in _OF_TWO),
        "op",
        f"{kind} has a norm, or a second operand, where it takes none",
    )
    widths = (1, a.width) if kind == "sigmoid" else (a.width,)
    op.expect(b is None or b.width in widths, "b", f"has {b and b.width} numbers, and a {a.width}")
    bias = op.constant("bias", a.shape[-1])
    op.expect(bias is None or kind == "layernorm", "bias", f"{kind} has none")
    op.field(
        "factor",
        lambda factor: factor if kind == "scale" else None,
        lambda f, key: f.number(key, 1.0),
    )
    op.output("out", a.width)


def _check(op: OpFields) -> None:
    op.flat("source")


def _head(op: OpFields) -> None:
    source = op.value("source")
    op.expect_shape("source", source.shape, (op.vocabulary("weight").shape[1],))
    op.norm("norm", source.width)
    op.number("softcap", None)
    op.number("scale", None)
    op.bound("remainder_above")


def _experts(op: OpFields) -> None:
    hidden = op.flat("source").width
    logits = op.flat("logits")
    op.output("out", hidden)
    op.norm("norm", hidden)
    op.flat("residual", hidden, optional=True)
    count = op.field("routing", dataclasses.asdict, _read_routing).num_experts
    op.expect_shape("logits", logits.shape, (count,))
    op.constant("correction", count)
    op.choice("activation", (*GATES, CLAMPED_SWIGLU))
    op.bound("remainder_above")
    op.bound("inner_remainder_above")
    experts = op.each("experts", ExpertWeights, _expert, count)
    op.expect(
        {expert.gate.shape for expert in experts} == {(experts[0].gate.shape[0], hidden)},
        "experts",
        f"are not all from {hidden} values to as many others",
    )


def _expert(op: OpFields) -> None:
    inner, hidden = op.matrix("gate").shape
    op.matrix("up", (inner, hidden))
    op.matrix("down", (hidden, inner))
    for name, size in (("gate_bias", inner), ("up_bias", inner), ("down_bias", hidden)):
        op.constant(name, size)


def _read_routing(fields: Fields, key: str) -> Routing:
    routing = read_dataclass(fields.section(key), Routing)
    if (reason := routing.why_not()) is not None:
        raise fields.error(key, reason)
    return routing


def _recurrence(op: OpFields) -> None:
    """Describe the op of a recurrence; the sizes of its spec are in the model's config."""
    recurrence = op.model.recurrence

    def read_spec(fields: Fields, key: str) -> RecurrentSpec:
        name = fields.text(key)
        spec: RecurrentSpec | None = getattr(recurrence, name) if name in _RECURRENT else None
        if spec is None:
            raise fields.error(key, f"the model has no {name!r:.60}")
        return spec

    def read_input(fields: Fields, key: str, width: int) -> Value:
        value = op.read_input(fields, key)
        if value.width < width:
            raise fields.error(key, f"has {value.width} numbers, and {width} are read")
        return value.view(-1, value.width)

    def read_constant(fields: Fields, key: str, size: int) -> np.ndarray | None:
        # The second constant of a convolution is a bias, which not every model has.
        may_miss = isinstance(spec, ConvSpec) and key == "constant_1"
        return None if may_miss and key not in fields else op.refs.constant(fields, key, size)

    spec = op.field("spec", _op_of, read_spec, key="op")
    if isinstance(spec, GatedNormSpec):  # it has no state, and counts no layers
        op.values["layer"] = None
    else:
        assert recurrence is not None
        op.layer(_op_of(spec), len(recurrence.layers))
    op.numbered("inputs", spec.reads, op.refs.value, read_input)
    flat_constant = lambda array: op.refs.constant(array.reshape(-1))  # noqa: E731
    op.numbered("constants", spec.constants, flat_constant, read_constant)
    op.output("out", spec.width)


def _op_of(spec: RecurrentSpec) -> str:
    if isinstance(spec, ConvSpec):
        return "conv"
    return "norm" if isinstance(spec, GatedNormSpec) else "scan"


_OPS: dict[str, tuple[type[Any], Callable[[OpFields], None]]] = {
    "embed": (FusedEmbedding, _embedding),
    "linear": (FusedLinear, _linear),
    "attention": (FusedAttention, _attention),
    "latent_attention": (FusedLatentAttention, _latent_attention),
    "rows": (FusedRows, _rows),
    "check": (FusedCheck, _check),
    "head": (FusedHead, _head),
    "experts": (FusedExperts, _experts),
    "recurrence": (FusedRecurrence, _recurrence),
}
_KINDS = {make: kind for kind, (make, _) in _OPS.items()}


# -- to JSON --------------------------------------------------------------------------------------


class Constants:
    """Small arrays, each of them once, by numbers."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._numbers: dict[int, int] = {}

    def number(self, array: np.ndarray) -> int:
        if id(array) not in self._numbers:
            self._numbers[id(array)] = len(self.arrays)
            self.arrays.append(array)
        return self._numbers[id(array)]


def program_json(
    plan: StepPlan, model: Module, config: ModelConfig, constants: Constants
) -> dict[str, Any]:
    """Return the plan of a model's step; ``constants`` gets the arrays that it refers to."""
    refs = _Refs(plan, constants)
    ops = []
    for fused in plan.ops:
        kind = _KINDS[type(fused)]
        op = OpFields(config, refs, fused)
        op.json["kind"] = kind
        _OPS[kind][1](op)
        ops.append(op.json)
    rotary: dict[_MakeTable, RotaryEmbedding] = {
        module.table: module
        for _, module in model.named_modules()
        if isinstance(module, RotaryEmbedding)
    }
    ropes = [_rope_json(rotary[make], config, constants) for make in refs.ropes]
    return {"values": [value.width for value in refs.values], "ropes": ropes, "phases": ops}


class _Refs:
    """References of ops to values, weights and constants, as JSON."""

    def __init__(self, plan: StepPlan, constants: Constants):
        self.weight, self.constant = plan.name_of, constants.number
        written = dict.fromkeys(value for op in plan.ops for value in writes(op))
        self.values: dict[Value, int] = {value: number for number, value in enumerate(written)}
        self.ropes: dict[_MakeTable, int] = {}

    def value(self, value: Value) -> list[int] | None:
        return [self.values[value.source], *value.shape] if self.stores(value) else None

    def stores(self, value: Value) -> bool:
        return value.source in self.values

    def rope(self, rope: RopeTable) -> int:
        return self.ropes.setdefault(rope.make, len(self.ropes))


def _rope_json(rotary: RotaryEmbedding, model: ModelConfig, constants: Constants) -> dict[str, Any]:
    divisors = {name: getattr(rotary, name) for name in _DIVISORS}
    return {
        "config": next(name for name in _ROPES if getattr(model, name) == rotary.config),
        **{name: p and constants.number(p.value) for name, p in divisors.items()},
    }


# -- and back -------------------------------------------------------------------------------------


def read_program(
    fields: Fields,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, int]],
    constants: Sequence[np.ndarray],
) -> StepPlan:
    """Return the plan in the fields of a manifest's ``program``.

    Args:
        shapes: rows and columns of every weight of the folder.
        constants: float32, of one dimension each.

    Raises:
        ModelFileError: it is no program, or not of this model.
    """
    widths = fields.each("values", lambda f, name: f.integer(name, maximum=MAX_WIDTH))
    refs = StoredRefs(shapes, constants, widths)
    refs.ropes = fields.each("ropes", lambda f, name: _read_rope(f.section(name), config, refs))
    ops = fields.each("phases", lambda f, name: _read_op(f.section(name), config, refs))
    _check_order(fields, ops)
    num_layers = len(config.kv_layers)
    attending = sum(op == "attention" for _, op in refs.layers)
    if attending != num_layers:
        raise fields.error("phases", f"attend in {attending} of {num_layers} layers")
    return StepPlan(ops, lambda matrix: matrix.name)  # type: ignore[attr-defined]


def _read_op(fields: Fields, config: ModelConfig, refs: StoredRefs) -> FusedOp:
    kind = fields.text("kind")
    if kind not in _OPS:
        raise fields.error("kind", f"{kind!r:.60} is none of {', '.join(_OPS)}")
    make, describe = _OPS[kind]
    op = OpFields(config, refs, fields=fields)
    describe(op)
    refs.written |= op.outputs
    fused: FusedOp = make(**op.values)
    return fused


def _check_order(fields: Fields, ops: Sequence[FusedOp]) -> None:
    kinds = [type(op) for op in ops]
    if kinds[:1] != [FusedEmbedding] or kinds[-2:] != [FusedCheck, FusedHead]:
        raise fields.error("phases", "do not begin with embed, or end with check, head")
    for kind in (FusedEmbedding, FusedCheck, FusedHead):
        if kinds.count(kind) != 1:
            raise fields.error("phases", f"have more than one {_KINDS[kind]}")


def _read_rope(fields: Fields, model: ModelConfig, refs: StoredRefs) -> RopeTable:
    name = fields.text("config")
    config = getattr(model, name) if name in _ROPES else None
    if config is None:
        raise fields.error("config", f"the model has no {name!r:.60}")
    rotary = RotaryEmbedding(config)
    for name in _DIVISORS:
        if (parameter := getattr(rotary, name)) is not None:
            divisors = refs.constant(fields, name, config.rotary_dim // 2)
            data = divisors.view(np.uint8).reshape(1, -1)
            parameter.load(StoredWeight(GGMLType.F32, data, divisors.shape))
    return RopeTable(config.rotary_dim, rotary.table)
