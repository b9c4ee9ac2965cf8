"""A model's forward pass, recorded once and made into the native program of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.kernels.cpu import fusion
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.pack_cache import PackedWeights, Progress, open_or_pack
from octavo.kernels.cpu.program import KVLayout, Program
from octavo.kernels.dispatch import Ops
from octavo.kernels.recorder import LayerKV, RopeTable, Tape, Value
from octavo.layers.module import Module, named_parameters
from octavo.models.registry import CausalLM
from octavo.quantization.base import Weight


class _RecordedCaches:
    def layer(self, index: int) -> tuple[LayerKV, LayerKV]:
        return LayerKV(index), LayerKV(index)


class _RecordingContext:
    """A ``ForwardContext`` of no step in particular."""

    def __init__(self, ops: Ops, token_ids: Value):
        self.ops = ops
        self.positions = self.slot_mapping = token_ids
        self.plan = None
        self.kv_cache = _RecordedCaches()

    def rope_table(self, table: Callable[[int], np.ndarray], rotary_dim: int) -> RopeTable:
        return RopeTable(rotary_dim, table)


def record(model: CausalLM, ops: Ops) -> Tape:
    """Call ``model``, from token ids to logits, with the ops of ``kernels/recorder.py``."""
    tape = Tape()
    token_ids = Value(tape, None, ())
    context = _RecordingContext(ops, token_ids)
    model.compute_logits(model(token_ids, context), context)
    return tape


def pack_weights(
    model: CausalLM,
    phases: Sequence[fusion.Phase],
    library: Library,
    pool: Pool,
    *,
    files: Sequence[Path] = (),
    home: Path | None = None,
    progress: Progress | None = None,
) -> tuple[PackedWeights, dict[int, str]]:
    """Every matrix that the phases use, packed, and its name by the id of the weight."""
    assert isinstance(model, Module)
    names: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        names.setdefault(id(parameter.value), name)
    used = {names[id(weight)]: weight for weight in _weights(phases)}
    packed = open_or_pack(used, files, library, pool, home=home, progress=progress)
    return packed, names


def create_program(
    phases: Sequence[fusion.Phase],
    library: Library,
    pool: Pool,
    kv: KVLayout,
    packed: PackedWeights,
    names: dict[int, str],
    max_tokens: int,
) -> Program:
    """The program of phases whose weights have been packed."""

    def struct(weight: Weight) -> Any:
        return packed.struct(names[id(weight)])

    return Program(list(phases), library, pool, kv, struct, max_tokens)


def _weights(phases: Sequence[fusion.Phase]) -> list[Weight]:
    weights: list[Weight] = []
    for phase in phases:
        if isinstance(phase, fusion.Linear):
            weights += [segment.weight for segment in phase.segments]
        elif isinstance(phase, fusion.Embed | fusion.Head):
            weights.append(phase.weight)
    return weights
