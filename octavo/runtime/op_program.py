"""A model's forward pass, recorded once: the plan of a step, and the native program of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.kernels import fused_ops
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.activation_precision import round_activations
from octavo.kernels.cpu.latent_weights import planned_bytes
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.packed_weights import PackedWeights
from octavo.kernels.cpu.program import KVLayout, Program
from octavo.kernels.dispatch import RECORDER, Ops, create_ops
from octavo.kernels.fused_ops import WeightRef
from octavo.kernels.fuser import fuse
from octavo.kernels.op_arguments import RopeArguments, RowNorm
from octavo.kernels.recorder import KVRef, RopeTable, StateRef, Tape, Value
from octavo.layers.module import Module, named_parameters

if TYPE_CHECKING:
    from octavo.models.registry import CausalLM
    from octavo.quantization.base import Weight


class RecordedAttention:
    """A ``StepAttention`` that says what is to be kept and attended: the kernels read slots, block
    tables and lengths themselves."""

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
    ) -> Value:
        kept = KVRef(layer)
        self._ops.store_kv(k, v, kept, kept, None)
        attended: Value = self._ops.paged_attention(
            q, kept, kept, None, scale, window, softcap, sinks
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
    """A ``ForwardContext`` of no step in particular."""

    def __init__(self, ops: Ops, token_ids: Value):
        self.ops = ops
        self.positions = token_ids
        self.attention = RecordedAttention(ops)

    def states(self, layer: int) -> StateRef:
        return StateRef(layer)

    def rope_table(self, table: Callable[[int], np.ndarray], rotary_dim: int) -> RopeTable:
        return RopeTable(rotary_dim, table)


def record(model: CausalLM) -> Tape:
    """Call ``model``, from token ids to logits, with the ops of ``kernels/recorder.py``."""
    ops = create_ops("", candidates=(RECORDER,))
    tape = Tape()
    token_ids = Value(tape, None, ())
    context = RecordingContext(ops, token_ids)
    model.compute_logits(model(token_ids, context), context)
    return tape


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A model's step: its phases, and what their weights are called.

    Args:
        name_of: the name of a matrix of the phases; matrices that are the same have the same.
    """

    ops: Sequence[fused_ops.FusedOp]
    name_of: Callable[[WeightRef], str]

    def streams(self, depths: Iterable[int]) -> dict[int, Value]:
        """The values that are the hidden states of these depths. CannotFuse if there is none."""
        return {depth: fused_ops.residual_stream(self.ops, depth)[0] for depth in depths}

    def matrices(self) -> Iterator[WeightRef]:
        """Those of all phases, in their order; one that several phases use, as often."""
        for op in self.ops:
            yield from matrices_of(op)

    def gathered(self) -> set[str]:
        """The names of those of which a step reads some rows only: an embedding that is no head."""
        tables: set[str] = set()
        multiplied: set[str] = set()
        for op in self.ops:
            names = tables if isinstance(op, fused_ops.FusedEmbedding) else multiplied
            names.update(map(self.name_of, matrices_of(op)))
        return tables - multiplied


def matrices_of(op: fused_ops.FusedOp) -> Iterator[WeightRef]:
    """What a phase multiplies with, or reads rows of."""
    for together in products_of(op):
        yield from together


def products_of(op: fused_ops.FusedOp) -> Iterator[Sequence[WeightRef]]:
    """The same, those together that are multiplied with the same rows."""
    if isinstance(op, fused_ops.FusedLinear):
        yield [segment.weight for segment in op.segments]
    elif isinstance(op, fused_ops.FusedExperts):
        yield [matrix for expert in op.experts for matrix in (expert.gate, expert.up)]
        yield [expert.down for expert in op.experts]
    elif isinstance(op, fused_ops.FusedEmbedding):
        yield [matrix for matrix in (op.weight, op.positions) if matrix is not None]
    elif isinstance(op, fused_ops.FusedHead):
        yield (op.weight,)
    elif isinstance(op, fused_ops.FusedLatentAttention):
        yield (op.kv_b,)


def share_of(op: fused_ops.FusedOp) -> tuple[int, int] | None:
    """How many of how many experts a token uses."""
    if not isinstance(op, fused_ops.FusedExperts):
        return None
    return op.routing.top_k, op.routing.num_experts


def plan_step(model: CausalLM, activations: str = "auto") -> tuple[StepPlan, dict[str, Weight]]:
    """The plan of a model that is loaded, and the weights that it uses by name.

    ``activations`` as in ``EngineArgs``: for native kernels; on a GPU, ``ways.py`` has its say.
    CannotFuse if the model's ops do not make phases.
    """
    assert isinstance(model, Module)
    ops = fuse(record(model))
    round_activations(ops, activations)
    names: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        names.setdefault(id(parameter.value), name)
    plan = StepPlan(ops, lambda matrix: names[id(matrix)])
    weights = {name: parameter.value for name, parameter in named_parameters(model)}
    return plan, {name: weights[name] for name in map(plan.name_of, plan.matrices())}


@dataclass(frozen=True, slots=True)
class NativeModel:
    """All that the native kernels need of a model.

    Args:
        weights_bytes: of the weights as the model's files have them.
    """

    plan: StepPlan
    packed: PackedWeights
    weights_bytes: int

    @property
    def latent_bytes(self) -> int:
        """That a program takes for the weights of latent attention, beside the packed ones."""
        layers = (
            each for each in self.plan.ops if isinstance(each, fused_ops.FusedLatentAttention)
        )
        return sum(
            planned_bytes(layer, self.packed.struct(self.plan.name_of(layer.kv_b)).format)
            for layer in layers
        )

    def create_program(
        self,
        library: Library,
        pool: Pool,
        kv: KVLayout,
        max_tokens: int,
        kept: Collection[Value] = (),
    ) -> Program:
        """The program of a step, which reads this model's memory, and keeps some values."""

        def struct(matrix: WeightRef) -> abi.Weight:
            return self.packed.struct(self.plan.name_of(matrix))

        return Program(self.plan.ops, library, pool, kv, struct, max_tokens, kept)
