"""The plan of a model's step, recorded from one forward pass, and its native program."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.kernels import fused_ops
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.activation_precision import round_activations
from octavo.kernels.cpu.joined_activations import join_activations
from octavo.kernels.cpu.latent_weights import planned_bytes
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.packed_weights import PackedWeights
from octavo.kernels.cpu.program import KVLayout, Program
from octavo.kernels.dispatch import Ops, create_ops
from octavo.kernels.division import Division
from octavo.kernels.expert_places import ExpertPlaces
from octavo.kernels.fused_ops import WeightRef, matrices_of
from octavo.kernels.fuser import fuse, fuse_to
from octavo.kernels.op_arguments import RopeArguments, RowNorm
from octavo.kernels.parts import WHOLE, WHOLE_MODEL, Part, Stage
from octavo.kernels.recorder import KVRef, RopeTable, StateRef, Tape, Value
from octavo.kernels.stages import StageOps, stage_of
from octavo.layers.module import Module, named_parameters

if TYPE_CHECKING:
    from octavo.kernels.cpu.group import ShmGroup
    from octavo.models.registry import CausalLM, HiddenStates
    from octavo.quantization.base import Weight

_LAYER = re.compile(r"model\.layers\.(\d+)\.")  # of the name of a parameter: see ``DecoderModel``


class RecordedAttention:
    """A ``StepAttention`` that records its ops. Kernels read slots, block tables and lengths at
    each step."""

    def __init__(self, ops: Ops):
        self._ops = ops

    def attend(
        self,
        layer: int,
        q: Value,
        k: Value,
        v: Value,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: np.ndarray | None = None,
        rotated: Callable[[Any], Value] | None = None,
        bidirectional: bool = False,
    ) -> Value:
        kept = KVRef(layer)
        self._ops.store_kv(k, v, kept, kept, None)
        attended: Value = self._ops.paged_attention(
            q, kept, kept, None, scale, window, softcap, sinks, bidirectional
        )
        return attended

    def attend_latents(
        self,
        layer: int,
        q: Value,
        ckv: Value,
        norm: RowNorm,
        rotation: RopeArguments,
        kv_b: Weight,
        *,
        scale: float,
    ) -> Value:
        kept = KVRef(layer)
        self._ops.store_latents(ckv, norm, rotation, kept, kept, None)
        attended: Value = self._ops.latent_attention(q, kv_b, rotation, kept, kept, None, scale)
        return attended


class RecordingContext:
    """The ``ForwardContext`` of a recording, whose values hold for every step."""

    def __init__(self, token_ids: Value):
        self.ops = create_ops(name="recorder")
        self.positions = self.token_types = token_ids
        self.attention = RecordedAttention(self.ops)

    def states(self, layer: int) -> StateRef:
        return StateRef(layer)

    def rope_table(self, table: Callable[[int], np.ndarray], rotary_dim: int) -> RopeTable:
        return RopeTable(rotary_dim, table)


def record(model: CausalLM) -> Tape:
    """Record the ops of ``model``, from token ids to logits."""
    tape = Tape()
    token_ids = Value(tape, None, ())
    context = RecordingContext(token_ids)
    model.compute_logits(model(token_ids, context), context)
    return tape


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A model's step: its fused ops in their order, and the names of their weights.

    Args:
        name_of: returns the name of a matrix; tied matrices have the same name.
        output: what the steps of a model without a head end with.
    """

    ops: Sequence[fused_ops.FusedOp]
    name_of: Callable[[WeightRef], str]
    output: Value | None = None

    def streams(self, depths: Iterable[int]) -> dict[int, Value]:
        """Return the hidden states of ``depths`` as values. CannotFuse if one does not exist."""
        return {depth: fused_ops.residual_stream(self.ops, depth)[0] for depth in depths}

    @property
    def num_layers(self) -> int:
        layers = map(self._layer_of, self.matrices())
        return 1 + max((layer for layer in layers if layer is not None), default=-1)

    def stage(self, stage: Stage, kept: Collection[Value] = ()) -> StageOps:
        """Return the ops of one stage of a pipeline, whose last one ``kept`` values reach too.
        CannotFuse if layers cannot be told apart."""
        return stage_of(self.ops, stage, self.num_layers, self._layer_of, kept)

    def _layer_of(self, matrix: WeightRef) -> int | None:
        found = _LAYER.match(self.name_of(matrix))
        return None if found is None else int(found[1])

    def matrices(self) -> Iterator[WeightRef]:
        """Yield the matrices of all fused ops in their order, with repetitions."""
        for op in self.ops:
            yield from matrices_of(op)

    def part_of(self, part: Part, ops: Sequence[fused_ops.FusedOp]) -> Part:
        """Return a part of the whole model as one of some of its ops, a stage's: with the places of
        their experts."""
        if part.experts is None:
            return part
        own = {id(op) for op in ops}
        mixtures = (op for op in self.ops if isinstance(op, fused_ops.FusedExperts))
        layers = [
            layer for op, layer in zip(mixtures, part.experts.layers, strict=False) if id(op) in own
        ]
        return replace(part, experts=ExpertPlaces(tuple(layers)))

    def rows_of(
        self, part: Part, stage: Stage = WHOLE_MODEL, *, with_embedding: bool = False
    ) -> dict[str, range]:
        """Return the rows of each matrix that a rank reads: none of those of other stages, but for
        an embedding that drafts are made with."""
        rows = {self.name_of(matrix): range(0) for matrix in self.matrices()}
        ops = list(self.ops if stage.is_whole else self.stage(stage).ops)
        if with_embedding:
            ops += [op for op in self.ops if isinstance(op, fused_ops.FusedEmbedding)]
        for matrix, read in Division(ops, self.part_of(part, ops)).matrices(ops):
            known = rows[self.name_of(matrix)] or read
            rows[self.name_of(matrix)] = range(
                min(known.start, read.start), max(known.stop, read.stop)
            )
        return rows

    def gathered(self) -> set[str]:
        """Return the names of matrices of which a step reads only some rows: untied embeddings."""
        tables: set[str] = set()
        multiplied: set[str] = set()
        for op in self.ops:
            names = tables if isinstance(op, fused_ops.FusedEmbedding) else multiplied
            names.update(map(self.name_of, matrices_of(op)))
        return tables - multiplied


def share_of(op: fused_ops.FusedOp) -> tuple[int, int] | None:
    """Return the experts that a token uses and their number in all, None for other ops."""
    if not isinstance(op, fused_ops.FusedExperts):
        return None
    return op.routing.top_k, op.routing.num_experts


def plan_step(model: CausalLM, activations: str = "auto") -> tuple[StepPlan, dict[str, Weight]]:
    """Return the plan of a loaded model, and the weights that it uses by name.

    ``activations``: as in ``EngineArgs``, for native kernels; ``kernels/cuda/gemm_dispatch.py``
    decides on a GPU. CannotFuse if the model's ops cannot be fused.
    """
    return _plan_of(fuse(record(model)), model, activations)


def plan_pooling(
    model: HiddenStates, activations: str = "auto"
) -> tuple[StepPlan, dict[str, Weight]]:
    """The same of a model that is used without its head, for native kernels: its steps end with
    hidden states."""
    token_ids = Value(Tape(), None, ())
    output: Any = model(token_ids, RecordingContext(token_ids))
    ops = join_activations(fuse_to(output))
    return _plan_of(ops, model, activations, output.source)


def _plan_of(
    ops: Sequence[fused_ops.FusedOp],
    model: HiddenStates,
    activations: str,
    output: Value | None = None,
) -> tuple[StepPlan, dict[str, Weight]]:
    assert isinstance(model, Module)
    round_activations(ops, activations)
    names: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        names.setdefault(id(parameter.value), name)
    plan = StepPlan(ops, lambda matrix: names[id(matrix)], output)
    weights = {name: parameter.value for name, parameter in named_parameters(model)}
    return plan, {name: weights[name] for name in map(plan.name_of, plan.matrices())}


@dataclass(frozen=True, slots=True)
class NativeModel:
    """A model packed for the native kernels.

    Args:
        weights_bytes: the size of the weights in the model's files.
    """

    plan: StepPlan
    packed: PackedWeights
    weights_bytes: int

    @property
    def latent_bytes(self) -> int:
        """Size of the weights that a program makes for latent attention, beside packed ones."""
        layers = (
            each for each in self.plan.ops if isinstance(each, fused_ops.FusedLatentAttention)
        )
        return sum(
            planned_bytes(layer, self.packed.struct(self.plan.name_of(layer.kv_b)).format)
            for layer in layers
        )

    def copied(self, rows: Mapping[str, range], bind: Callable[[int, int], object]) -> NativeModel:
        """Return the model with a copy of the packed ``rows`` of each weight, in memory that was
        passed to ``bind`` (address, bytes) before."""
        return replace(self, packed=self.packed.copied(rows, bind))

    def create_program(
        self,
        library: Library,
        pool: Pool,
        kv: KVLayout,
        max_tokens: int,
        kept: Collection[Value] = (),
        group: ShmGroup | None = None,
        part: Part = WHOLE,
        ops: Sequence[fused_ops.FusedOp] | None = None,
    ) -> Program:
        """Create the program of a step on this model's weights; the values ``kept`` stay
        readable after a step. Of a ``group``, it computes ``part``. ``ops``: of a stage; None: of
        the whole model."""

        def struct(matrix: WeightRef) -> abi.Weight:
            return self.packed.struct(self.plan.name_of(matrix))

        ops = self.plan.ops if ops is None else ops
        part = self.plan.part_of(part, ops)
        return Program(
            *(ops, library, pool, kv, struct, max_tokens, kept),
            group=group,
            part=part,
            name_of=self.plan.name_of,
        )
