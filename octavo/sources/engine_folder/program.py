"""Fused ops of a step (``kernels/fused_ops.py``) as JSON, and back.

    values      width of each value that ops pass on, in numbers per token
    ropes       tables of cosines and sines: a rope of the model's config, and maybe divisors
    phases      in their order; a value is [number, *shape], a weight a name, a constant a number

What is read back may have been written by anybody, and the kernels check no sizes: they have only
addresses. So every op is checked against the shapes of its weights, of its constants and of the
values that earlier ops have written, and the whole against the model's config.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
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
    FusedNorm,
    FusedOp,
    FusedRecurrence,
    FusedRows,
    FusedSegment,
    WeightRef,
    writes,
)
from octavo.kernels.recorder import RopeTable, Tape, Value
from octavo.kernels.routing import CLAMPED_SWIGLU, ExpertWeights, Routing
from octavo.layers.module import Module
from octavo.layers.rope import RotaryEmbedding
from octavo.models.config import ModelConfig
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime.op_program import StepPlan
from octavo.sources.engine_folder.plain_data import read_dataclass
from octavo.sources.engine_folder.recurrence import RecurrenceReader, recurrence_json

GATES = ("silu", "gelu_tanh", "gelu_erf")
# Rows by what they take.
_NORMS, _OF_ONE, _OF_TWO = (
    ("norm", "layernorm"),
    ("scale", *ALONE.values()),
    ("add", "sigmoid", *GATES),
)
_MakeTable = Callable[[int], np.ndarray]
_MAX_WIDTH = 1 << 24
_MAX_WINDOW = (1 << 31) - 1
_MATRICES, _BIASES = ("gate", "up", "down"), ("gate_bias", "up_bias", "down_bias")
_ROPES = ("rope", "local_rope")  # of a ModelConfig
_DIVISORS = ("freq_factors", "short_factors", "long_factors")  # of a RotaryEmbedding


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
    """The plan of a model's step; ``constants`` gets the arrays that it refers to."""
    return _Writer(plan, model, config, constants).document()


class _Writer:
    def __init__(self, plan: StepPlan, model: Module, config: ModelConfig, constants: Constants):
        self._plan, self._config, self._constants = plan, config, constants
        self._rotary: dict[_MakeTable, RotaryEmbedding] = {}
        for _, module in model.named_modules():
            if isinstance(module, RotaryEmbedding):
                self._rotary[module.table] = module
        self._ropes: dict[_MakeTable, int] = {}
        self._numbers: dict[Value, int] = {}

    def document(self) -> dict[str, Any]:
        for op in self._plan.ops:
            for value in writes(op):
                self._numbers[value] = len(self._numbers)
        ops = [self._op(op) for op in self._plan.ops]
        ropes = [self._rope_json(self._rotary[make]) for make in self._ropes]
        return {
            "values": [value.width for value in self._numbers],
            "ropes": ropes,
            "phases": [{k: v for k, v in op.items() if v is not None} for op in ops],
        }

    def _op(self, op: FusedOp) -> dict[str, Any]:
        name, value, norm = self._plan.name_of, self._value, self._norm
        match op:
            case FusedEmbedding(_, weight, scale, out, positions, offset):
                return {
                    "kind": "embed",
                    "weight": name(weight),
                    "scale": scale,
                    "out": value(out),
                    "positions": None if positions is None else name(positions),
                    "position_offset": offset or None,
                }
            case FusedLinear():
                return {
                    "kind": "linear",
                    "source": value(op.source),
                    "norm": norm(op.norm),
                    "added": value(op.added),
                    "added_norm": norm(op.added_norm),
                    "sum_out": value(op.sum_out),
                    "residual": value(op.residual),
                    "activation": op.activation,
                    "scale": op.scale,
                    "remainder_above": _finite(op.remainder_above),
                    "segments": [
                        {
                            "weight": name(segment.weight),
                            "bias": self._constant(segment.bias),
                            "out": value(segment.out),
                        }
                        for segment in op.segments
                    ],
                }
            case FusedAttention():
                return {
                    "kind": "attention",
                    "layer": op.layer,
                    **{each: value(getattr(op, each)) for each in ("q", "k", "v", "out")},
                    "scale": op.scale,
                    "window": op.window,
                    "softcap": op.softcap,
                    "sinks": self._constant(op.sinks),
                    "q_norm": norm(op.q_norm),
                    "k_norm": norm(op.k_norm),
                    "rope": None if op.rope is None else self._rope(op.rope),
                    "interleaved": op.interleaved,
                }
            case FusedLatentAttention():
                return {
                    "kind": "latent_attention",
                    "layer": op.layer,
                    **{each: value(getattr(op, each)) for each in ("q", "ckv", "out")},
                    "weight": name(op.kv_b),
                    "norm": norm(op.norm),
                    "scale": op.scale,
                    "rope": self._rope(op.rope),
                    "interleaved": op.interleaved,
                }
            case FusedRows(kind, a, out, b, its_norm, bias, factor):
                return {
                    "kind": "rows",
                    "op": kind,
                    "a": value(a),
                    "b": value(b),
                    "norm": norm(its_norm),
                    "bias": self._constant(bias),
                    "factor": factor if kind == "scale" else None,
                    "out": value(out),
                }
            case FusedCheck(source):
                return {"kind": "check", "source": value(source)}
            case FusedHead():
                return {
                    "kind": "head",
                    "source": value(op.source),
                    "weight": name(op.weight),
                    "norm": norm(op.norm),
                    "softcap": op.softcap,
                    "scale": op.scale,
                    "remainder_above": _finite(op.remainder_above),
                }
            case FusedRecurrence():
                return recurrence_json(op, value, self._constant)
            case FusedExperts():
                return {
                    "kind": "experts",
                    **{each: value(getattr(op, each)) for each in ("source", "logits", "out")},
                    "norm": norm(op.norm),
                    "residual": value(op.residual),
                    "routing": dataclasses.asdict(op.routing),
                    "correction": self._constant(op.correction),
                    "activation": op.activation,
                    "remainder_above": _finite(op.remainder_above),
                    "inner_remainder_above": _finite(op.inner_remainder_above),
                    "experts": [self._expert(expert) for expert in op.experts],
                }

    def _expert(self, expert: ExpertWeights) -> dict[str, Any]:
        values = expert._asdict()
        weights = {each: self._plan.name_of(values[each]) for each in _MATRICES}
        biases = {each: self._constant(values[each]) for each in _BIASES}
        return {
            **weights,
            **{name: number for name, number in biases.items() if number is not None},
        }

    def _value(self, value: Value | None) -> list[int] | None:
        # What a gate takes in is never written anywhere, and has no number.
        if value is None or value.source not in self._numbers:
            return None
        return [self._numbers[value.source], *value.shape]

    def _norm(self, norm: FusedNorm | None) -> dict[str, Any] | None:
        return None if norm is None else {"weight": self._constant(norm.weight), "eps": norm.eps}

    def _constant(self, array: np.ndarray | None) -> int | None:
        return None if array is None else self._constants.number(array)

    def _rope(self, rope: RopeTable) -> int:
        return self._ropes.setdefault(rope.make, len(self._ropes))

    def _rope_json(self, rotary: RotaryEmbedding) -> dict[str, Any]:
        config = next(name for name in _ROPES if getattr(self._config, name) == rotary.config)
        divisors = {name: getattr(rotary, name) for name in _DIVISORS}
        return {
            "config": config,
            **{name: p and self._constant(p.value) for name, p in divisors.items()},
        }


def _finite(bound: float) -> float | None:
    """JSON knows no infinity: what is never exceeded is left out."""
    return bound if math.isfinite(bound) else None


# -- and back -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A weight of the folder."""

    name: str
    shape: tuple[int, int]


def read_program(
    fields: Fields,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, int]],
    constants: Sequence[np.ndarray],
) -> StepPlan:
    """The plan in the fields of a manifest's ``program``.

    Args:
        shapes: rows and columns of every weight of the folder.
        constants: float32, of one dimension each.

    Raises:
        ModelFileError: it is no program, or not of this model.
    """
    ops = _Reader(fields, config, shapes, constants).ops()
    return StepPlan(ops, lambda matrix: matrix.name)  # type: ignore[attr-defined]


class _Reader:
    """Reads ops in order; each may read values that earlier ops have written."""

    def __init__(
        self,
        fields: Fields,
        config: ModelConfig,
        shapes: Mapping[str, tuple[int, int]],
        constants: Sequence[np.ndarray],
    ):
        self._fields, self._config = fields, config
        self._shapes, self._constants = shapes, constants
        self._tape = Tape()
        widths = fields.each("values", lambda f, name: f.integer(name, maximum=_MAX_WIDTH))
        self._values = [Value(self._tape, None, (width,)) for width in widths]
        self._written: set[int] = set()
        self._ropes = fields.each("ropes", lambda f, name: self._rope(f.section(name)))
        self._layers: set[int] = set()
        self._recurrences = RecurrenceReader(
            config.recurrence, self._read, self._constant, self._out
        )

    def ops(self) -> list[FusedOp]:
        ops: list[FusedOp] = self._fields.each("phases", lambda f, name: self._op(f, name))
        kinds = [type(op) for op in ops]
        if kinds[:1] != [FusedEmbedding] or kinds[-2:] != [FusedCheck, FusedHead]:
            raise self._fields.error("phases", "do not begin with embed, or end with check, head")
        for kind in (FusedEmbedding, FusedCheck, FusedHead):
            if kinds.count(kind) != 1:
                raise self._fields.error(
                    "phases", f"have more than one {kind.__name__.removeprefix('Fused').lower()}"
                )
        num_layers = len(self._config.kv_layers)
        if len(self._layers) != num_layers:
            raise self._fields.error(
                "phases", f"attend in {len(self._layers)} of {num_layers} layers"
            )
        return ops

    def _op(self, parent: Fields, name: str) -> FusedOp:
        fields = parent.section(name)
        kind = fields.text("kind")
        readers: dict[str, Callable[[Fields], FusedOp]] = {
            "embed": self._embed,
            "linear": self._linear,
            "attention": self._attention,
            "latent_attention": self._latent_attention,
            "rows": self._rows,
            "check": lambda f: FusedCheck(self._flat(f, "source")),
            "head": self._head,
            "experts": self._experts,
            "recurrence": self._recurrences.op,
        }
        if kind not in readers:
            raise fields.error("kind", f"{kind!r:.60} is none of {', '.join(readers)}")
        return readers[kind](fields)

    def _embed(self, fields: Fields) -> FusedEmbedding:
        weight = self._vocabulary(fields)
        width = weight.shape[1]
        positions = self._matrix(fields, "positions") if "positions" in fields else None
        offset = fields.integer("position_offset", 0, minimum=0)
        if positions is not None:
            wanted = self._config.max_position + offset, width
            if positions.shape != wanted:
                raise fields.error("positions", f"has the shape {positions.shape}, not {wanted}")
        ids, out = Value(self._tape, None, ()), self._out(fields, "out", width)
        return FusedEmbedding(ids, weight, fields.number("scale"), out, positions, offset)

    def _linear(self, fields: Fields) -> FusedLinear:
        source = self._flat(fields, "source")
        k = source.width
        op = FusedLinear(
            source, [], self._norm(fields, "norm", k), remainder_above=self._bound(fields)
        )
        op.added = self._flat(fields, "added", k) if "added" in fields else None
        if op.added is not None:
            op.added_norm = self._norm(fields, "added_norm", k)
        elif "added_norm" in fields or "sum_out" in fields:
            raise fields.error("added", "is missing, where there is a norm or a place for the sum")
        if "residual" in fields:
            op.residual = self._flat(fields, "residual")
        op.activation = fields.text("activation", None)
        if op.activation not in (None, *GATES):
            raise fields.error("activation", f"is none of {', '.join(GATES)}")
        op.scale = fields.number("scale", None)
        if op.scale is not None and op.residual is None:
            raise fields.error("scale", "is of products that are added to a residual")
        # Written once all that is read has been: an op does not read what it writes.
        if op.added is not None:
            op.sum_out = self._out(fields, "sum_out", k)
        op.segments = fields.each("segments", lambda f, name: self._segment(f.section(name), k, op))
        self._check_segments(fields, op)
        return op

    def _segment(self, fields: Fields, k: int, op: FusedLinear) -> FusedSegment:
        weight = self._matrix(fields, "weight")
        n = weight.shape[0]
        if weight.shape[1] != k:
            raise fields.error("weight", f"has {weight.shape[1]} columns for {k} inputs")
        bias = self._constant(fields, "bias", n) if "bias" in fields else None
        if op.activation is not None and "out" not in fields:
            return FusedSegment(weight, bias, Value(self._tape, None, (n,)))
        return FusedSegment(weight, bias, self._out(fields, "out", n))

    def _check_segments(self, fields: Fields, op: FusedLinear) -> None:
        count = len(op.segments)
        sizes = {segment.weight.shape[0] for segment in op.segments}
        places = [segment.out in self._values for segment in op.segments]
        if not 1 <= count <= MAX_SEGMENTS:
            raise fields.error("segments", f"are {count}: 1 to {MAX_SEGMENTS} are possible")
        if op.activation is not None and (
            count != 2 or len(sizes) != 1 or places != [True, False] or op.residual is not None
        ):
            raise fields.error(
                "segments", "a gate takes two of the same size, writes the first, and adds nothing"
            )
        if op.residual is not None and (count != 1 or sizes != {op.residual.width}):
            raise fields.error("residual", "is not of the size of the one segment added to it")

    def _attention(self, fields: Fields) -> FusedAttention:
        config = self._config
        dim, kv_heads = config.head_dim, config.num_kv_heads
        if config.latent is not None:
            raise fields.error("kind", "this model keeps latent vectors, and no keys")
        layer = self._layer(fields)
        q = self._shaped(fields, "q", (config.num_heads, dim))
        k, v = (self._shaped(fields, name, (kv_heads, dim)) for name in "kv")
        rope = self._rope_table(fields) if "rope" in fields else None
        q_norm, k_norm = (self._norm(fields, name, dim) for name in ("q_norm", "k_norm"))
        return FusedAttention(
            layer,
            q,
            k,
            v,
            self._out(fields, "out", q.width),
            scale=fields.number("scale"),
            window=fields.integer("window", None, maximum=_MAX_WINDOW),
            softcap=fields.number("softcap", None),
            sinks=self._constant(fields, "sinks", q.shape[0]) if "sinks" in fields else None,
            q_norm=q_norm,
            k_norm=k_norm,
            rope=rope,
            interleaved=fields.boolean("interleaved"),
        )

    def _latent_attention(self, fields: Fields) -> FusedLatentAttention:
        config, latent = self._config, self._config.latent
        if latent is None:
            raise fields.error("kind", "this model keeps no latent vectors")
        layer, weight = self._layer(fields), self._matrix(fields, "weight")
        rows = config.num_heads * (latent.nope_dim + latent.value_dim)
        if weight.shape != (rows, latent.kv_rank):
            raise fields.error("weight", f"has the shape {weight.shape}")
        rope, norm = self._rope_table(fields), self._norm(fields, "norm", latent.kv_rank)
        if rope.rotary_dim != latent.rope_dim:
            raise fields.error("rope", f"turns {rope.rotary_dim} of {latent.rope_dim} values")
        if norm is None:
            raise fields.error("norm", "is missing")
        return FusedLatentAttention(
            layer,
            self._shaped(fields, "q", (config.num_heads, latent.query_dim)),
            self._flat(fields, "ckv", latent.kv_rank + latent.rope_dim),
            self._out(fields, "out", config.num_heads * latent.value_dim),
            weight,
            norm,
            scale=fields.number("scale"),
            rope=rope,
            interleaved=fields.boolean("interleaved"),
        )

    def _rows(self, fields: Fields) -> FusedRows:
        kind = fields.text("op")
        if kind not in (*_NORMS, *_OF_ONE, *_OF_TWO):
            raise fields.error("op", f"is none of {', '.join((*_NORMS, *_OF_ONE, *_OF_TWO))}")
        a = self._read(fields, "a")
        if (kind in _NORMS) != ("norm" in fields) or (kind in _OF_TWO) != ("b" in fields):
            raise fields.error("op", f"{kind} has a norm, or a second operand, where it takes none")
        if "bias" in fields and kind != "layernorm":
            raise fields.error("bias", f"{kind} has none")
        size = a.shape[-1]
        norm = self._norm(fields, "norm", size)
        bias = self._constant(fields, "bias", size) if "bias" in fields else None
        b = self._read(fields, "b") if kind in _OF_TWO else None
        if b is not None and b.width not in ((1, a.width) if kind == "sigmoid" else (a.width,)):
            raise fields.error("b", f"has {b.width} numbers, and a {a.width}")
        out = self._out(fields, "out", a.width)
        return FusedRows(kind, a, out, b, norm, bias, fields.number("factor", 1.0))

    def _head(self, fields: Fields) -> FusedHead:
        weight = self._vocabulary(fields)
        source = self._flat(fields, "source", weight.shape[1])
        norm = self._norm(fields, "norm", source.width)
        softcap, scale = fields.number("softcap", None), fields.number("scale", None)
        return FusedHead(source, weight, norm, softcap, self._bound(fields), scale)

    def _experts(self, fields: Fields) -> FusedExperts:
        routing = read_dataclass(fields.section("routing"), Routing)
        if (reason := routing.why_not()) is not None:
            raise fields.error("routing", reason)
        source = self._flat(fields, "source")
        hidden, count = source.width, routing.num_experts
        experts = fields.each("experts", lambda f, name: self._expert(f.section(name)), count)
        if {expert.gate.shape for expert in experts} != {(experts[0].gate.shape[0], hidden)}:
            raise fields.error("experts", f"are not all from {hidden} values to as many others")
        correction = self._constant(fields, "correction", count) if "correction" in fields else None
        activation = fields.text("activation")
        if activation not in (*GATES, CLAMPED_SWIGLU):
            raise fields.error("activation", f"is none of {', '.join((*GATES, CLAMPED_SWIGLU))}")
        return FusedExperts(
            source,
            self._flat(fields, "logits", count),
            experts,
            routing,
            activation,
            correction,
            norm=self._norm(fields, "norm", hidden),
            residual=self._flat(fields, "residual", hidden) if "residual" in fields else None,
            remainder_above=self._bound(fields),
            inner_remainder_above=self._bound(fields, "inner_remainder_above"),
            out=self._out(fields, "out", hidden),
        )

    def _expert(self, fields: Fields) -> ExpertWeights:
        gate, up, down = (self._matrix(fields, name) for name in _MATRICES)
        inner, hidden = gate.shape
        if up.shape != (inner, hidden) or down.shape != (hidden, inner):
            raise fields.error("down", f"{up.shape} and {down.shape} do not fit {gate.shape}")
        biases = (
            self._constant(fields, name, size) if name in fields else None
            for name, size in zip(_BIASES, (inner, inner, hidden), strict=True)
        )
        return ExpertWeights(gate, up, down, *biases)

    # -- parts of ops -----------------------------------------------------------------------------

    def _vocabulary(self, fields: Fields) -> WeightRef:
        weight = self._matrix(fields, "weight")
        if weight.shape[0] != self._config.vocab_size:
            raise fields.error(
                "weight",
                f"has {weight.shape[0]} rows for a vocabulary of {self._config.vocab_size}",
            )
        return weight

    def _layer(self, fields: Fields) -> int:
        """The layer of an op that attends, of which each layer has one."""
        layer: int = fields.integer("layer", minimum=0, maximum=self._config.num_layers - 1)
        if layer in self._layers:
            raise fields.error("layer", f"layer {layer} has its attention already")
        self._layers.add(layer)
        return layer

    def _rope_table(self, fields: Fields) -> RopeTable:
        number = fields.integer("rope", minimum=0)
        if number >= len(self._ropes):
            raise fields.error("rope", f"there are {len(self._ropes)} ropes")
        return self._ropes[number]

    def _matrix(self, fields: Fields, name: str) -> WeightRef:
        weight = fields.text(name)
        if weight not in self._shapes:
            raise fields.error(name, f"there is no weight {weight!r:.100}")
        return StoredMatrix(weight, self._shapes[weight])

    def _constant(self, fields: Fields, name: str, size: int) -> np.ndarray:
        number = fields.integer(name, minimum=0)
        if number >= len(self._constants):
            raise fields.error(name, f"there are {len(self._constants)} constants")
        array = self._constants[number]
        if array.shape != (size,):
            raise fields.error(
                name, f"constant {number} has the shape {array.shape}, not ({size},)"
            )
        return array

    def _norm(self, fields: Fields, name: str, size: int) -> FusedNorm | None:
        if name not in fields:
            return None
        norm = fields.section(name)
        return FusedNorm(self._constant(norm, "weight", size), norm.number("eps"))

    def _rope(self, fields: Fields) -> RopeTable:
        name = fields.text("config")
        config = getattr(self._config, name) if name in _ROPES else None
        if config is None:
            raise fields.error("config", f"the model has no {name!r:.60}")
        rotary = RotaryEmbedding(config)
        for name in _DIVISORS:
            if (parameter := getattr(rotary, name)) is not None:
                divisors = self._constant(fields, name, config.rotary_dim // 2)
                data = divisors.view(np.uint8).reshape(1, -1)
                parameter.load(StoredWeight(GGMLType.F32, data, divisors.shape))
        return RopeTable(config.rotary_dim, rotary.table)

    def _bound(self, fields: Fields, name: str = "remainder_above") -> float:
        bound: float = fields.number(name, math.inf, above=-1e-18)
        return bound

    def _value(self, fields: Fields, name: str) -> tuple[int, Value]:
        """A value and its number, in the shape in which it is named here."""
        number, *shape = fields.each(
            name, lambda f, entry: f.integer(entry, minimum=0, maximum=_MAX_WIDTH)
        ) or [len(self._values)]
        if number >= len(self._values):
            raise fields.error(name, f"there are {len(self._values)} values")
        value = self._values[number]
        if not 1 <= len(shape) <= 2 or prod(shape) != value.width:
            raise fields.error(name, f"{value.width} numbers cannot be seen as {shape}")
        return number, value if len(shape) == 1 else value.view(-1, *shape)

    def _read(self, fields: Fields, name: str) -> Value:
        number, value = self._value(fields, name)
        if number not in self._written:
            raise fields.error(name, f"value {number} is read before an op writes it")
        return value

    def _flat(self, fields: Fields, name: str, width: int | None = None) -> Value:
        value = self._read(fields, name)
        if len(value.shape) != 1 or value.width != (width or value.width):
            raise fields.error(name, f"has the shape {value.shape}, not ({width or value.width},)")
        return value

    def _shaped(self, fields: Fields, name: str, shape: tuple[int, int]) -> Value:
        value = self._read(fields, name)
        if value.shape != shape:
            raise fields.error(name, f"has the shape {value.shape}, not {shape}")
        return value

    def _out(self, fields: Fields, name: str, width: int) -> Value:
        number, value = self._value(fields, name)
        if number in self._written:
            raise fields.error(name, f"value {number} is written twice")
        if value.width != width:
            raise fields.error(name, f"value {number} has {value.width} numbers, not {width}")
        self._written.add(number)
        return value
