"""The fused ops of one stage of a pipeline: those of its layers, and what crosses its ends.

    stage 0    embedding, layers 0 ... 11     ── values ──▶
    stage 1    layers 12 ... 23, last norm, head

A value crosses where ops before the cut write it and ops behind it read it: usually the residual
stream; the last product of a layer too, where the next one adds it; or hidden states that a drafter
reads at the end. Each is a whole number of float32 rows, so that the bits are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from octavo.kernels.fused_ops import (
    MIXERS,
    CannotFuse,
    FusedAttention,
    FusedLatentAttention,
    FusedOp,
    FusedRecurrence,
    WeightRef,
    matrices_of,
    reads,
    writes,
)
from octavo.kernels.parts import Stage
from octavo.kernels.recorder import Value

_Numbered = FusedAttention | FusedLatentAttention | FusedRecurrence
_LAYERS: tuple[tuple[type[_Numbered], ...], ...] = (
    MIXERS,
    (FusedRecurrence,),
)  # with KV; with states


@dataclass(frozen=True, slots=True)
class StageOps:
    """The ops of one stage.

    Args:
        ops: in their order; layers with KV or with states are counted from the stage's first one.
        inputs, outputs: the values that come from the stage before, and go to the next: the outputs
            of a stage are the inputs of the next one, in the same order.
        kv_layers, state_layers: the numbers that these layers have in the whole model.
    """

    ops: Sequence[FusedOp]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    kv_layers: range
    state_layers: range


def stage_of(
    ops: Sequence[FusedOp],
    stage: Stage,
    num_layers: int,
    layer_of: Callable[[WeightRef], int | None],
    kept: Collection[Value] = (),
) -> StageOps:
    """Return the ops of a stage.

    Args:
        num_layers: of the model.
        layer_of: returns the layer that a matrix is of; None for the embedding and the head.
        kept: values that the last stage keeps, beside those that its ops read.

    Raises:
        CannotFuse: the ops of the layers are not one after the other.
    """
    first, end = 0, len(ops)
    if stage.is_whole:
        return StageOps(ops, (), (), *(range(len(_layers(ops, kinds))) for kinds in _LAYERS))
    layers = stage.layers(num_layers)
    layer_of_op = [_layer_of(op, layer_of) for op in ops]
    if not stage.is_first:
        first = _cut(ops, layer_of_op, layers.start, kept)
    if not stage.is_last:
        end = _cut(ops, layer_of_op, layers.stop, kept)
    own = ops[first:end]
    kv_layers, state_layers = (_numbers(ops, first, end, kinds) for kinds in _LAYERS)
    return StageOps(
        [_renumbered(op, kv_layers.start, state_layers.start) for op in own],
        tuple(_crossing(ops, first, kept)),
        tuple(_crossing(ops, end, kept)) if not stage.is_last else (),
        kv_layers,
        state_layers,
    )


def _layer_of(op: FusedOp, layer_of: Callable[[WeightRef], int | None]) -> int | None:
    return next((n for matrix in matrices_of(op) if (n := layer_of(matrix)) is not None), None)


def _cut(
    ops: Sequence[FusedOp],
    layers: Sequence[int | None],
    layer: int,
    kept: Collection[Value],
) -> int:
    """Return the index of the first op behind the layers before ``layer``. Ops without matrices,
    such as norms and sums, may be on either side: the cut is where the fewest numbers cross."""
    last_before = max(i for i, number in enumerate(layers) if number is not None and number < layer)
    first = min(i for i, number in enumerate(layers) if number is not None and number >= layer)
    if first < last_before:
        raise CannotFuse(f"ops of layers before layer {layer} are mixed with later ones")
    return min(
        range(first, last_before, -1),
        key=lambda index: sum(value.width for value in _crossing(ops, index, kept)),
    )


def _crossing(ops: Sequence[FusedOp], cut: int, kept: Collection[Value]) -> list[Value]:
    """Return the values that are written before a cut and read behind it, in order of writing."""
    read = {value for op in ops[cut:] for value in reads(op)}
    read.update(value.source for value in kept)
    written = dict.fromkeys(value for op in ops[:cut] for value in writes(op))
    return [value for value in written if value in read]


def _numbers(
    ops: Sequence[FusedOp], first: int, end: int, kinds: tuple[type[_Numbered], ...]
) -> range:
    """Return the layers of ops of some kinds from ``first`` to ``end``, which follow each other."""
    before, own = _layers(ops[:first], kinds), _layers(ops[first:end], kinds)
    start = max(before, default=-1) + 1
    if own != set(range(start, start + len(own))):
        raise CannotFuse(f"layers {sorted(own)} of a stage do not follow each other")
    return range(start, start + len(own))


def _layers(ops: Sequence[FusedOp], kinds: tuple[type[_Numbered], ...]) -> set[int]:
    return {op.layer for op in ops if isinstance(op, kinds) and op.layer is not None}


def _renumbered(op: FusedOp, first_kv: int, first_state: int) -> FusedOp:
    if isinstance(op, MIXERS) and first_kv:
        return replace(op, layer=op.layer - first_kv)
    if isinstance(op, FusedRecurrence) and op.layer is not None and first_state:
        return replace(op, layer=op.layer - first_state)
    return op
