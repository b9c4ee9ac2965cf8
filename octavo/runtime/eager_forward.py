"""A forward pass of one PyTorch op at a time, on any device that PyTorch supports."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch

from octavo.base.errors import ConfigError
from octavo.core.batch import Batch, TokenLogprobs
from octavo.core.executor import Probe
from octavo.core.request import Request
from octavo.core.state_types import NO_STATE
from octavo.kernels.dispatch import Ops
from octavo.kernels.recurrence import LayerStates, SequenceStates
from octavo.layers.module import Module
from octavo.layers.taps import with_taps
from octavo.models.kv_groups import one_table
from octavo.models.registry import CausalLM
from octavo.runtime.capacity import RankLimits
from octavo.runtime.eager_attention import EagerAttention, PagedAttention
from octavo.runtime.eager_lora import EagerLora, EagerLoras
from octavo.runtime.forward import ForwardOutput, ObservedRunner, SampledRows
from octavo.runtime.input_batch import (
    InputBatch,
    StepInputs,
    blocks_of_row,
    state_steps,
    token_types,
)
from octavo.runtime.kv_cache import KVCache
from octavo.runtime.sampler import compute_logprobs, probabilities, sample
from octavo.runtime.sampling_row import sampling_row
from octavo.runtime.state_memory import StateMemory
from octavo.runtime.torch_probe import TorchProbe


class RopeTables:
    """Rope tables (cosines and sines) on a device, kept until a longer one is needed."""

    def __init__(self) -> None:
        self._kept: dict[Callable[[int], np.ndarray], tuple[np.ndarray, torch.Tensor]] = {}

    def get(
        self, table: Callable[[int], np.ndarray], num_positions: int, device: torch.device
    ) -> torch.Tensor:
        values = table(num_positions)
        kept = self._kept.get(table)
        if kept is None or kept[0] is not values:
            kept = self._kept[table] = values, torch.from_numpy(values).to(device)
        return kept[1]


class EagerStates:
    """The states of all slots on a device; on the CPU, they share the memory of ``StateMemory``."""

    def __init__(self, memory: StateMemory, device: torch.device):
        self._layers = [
            [torch.from_numpy(array).to(device) for array in memory.layer(index)]
            for index in range(memory.num_layers)
        ]

    def of_step(self, inputs: StepInputs, batch: Batch) -> list[LayerStates]:
        """Return the states of each layer with the slots of a step's sequences."""
        bounds = inputs.query_start.tolist()
        sequences = [
            SequenceStates(
                begin, end, None if step.source == NO_STATE else step.source, step.target
            )
            for begin, end, step in zip(bounds, bounds[1:], state_steps(batch), strict=False)
        ]
        return [LayerStates(memories, sequences) for memories in self._layers]


@dataclass(slots=True)
class EagerContext:
    """The ``ForwardContext`` of a step on ops of PyTorch."""

    positions: torch.Tensor
    attention: PagedAttention
    ops: Ops
    rope_tables: RopeTables = field(default_factory=RopeTables)
    layer_states: Sequence[LayerStates] = ()
    types: torch.Tensor | None = None  # None: all are 0

    @property
    def token_types(self) -> torch.Tensor:
        return torch.zeros_like(self.positions) if self.types is None else self.types

    def states(self, layer: int) -> LayerStates:
        return self.layer_states[layer]

    def rope_table(self, table: Callable[[int], np.ndarray], rotary_dim: int) -> torch.Tensor:
        return self.rope_tables.get(table, self.attention.num_positions, self.positions.device)


class EagerForward:
    """Runs a model on the ops of a device, and samples from its logits there."""

    depth = 1
    feeds_tokens = False

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        ops: Ops,
        device: torch.device,
        limits: RankLimits,
        depths: Collection[int] = (),
        states: StateMemory | None = None,
    ):
        self._streams: dict[int, torch.Tensor] = {}  # hidden states of the last run, by depth
        self.model = with_taps(model, depths, self._streams.__setitem__) if depths else model
        self.kv_cache = kv_cache
        self._states = states if states is None else EagerStates(states, device)
        self._ops = ops
        self._device = device
        self._limits = limits
        self.kernel_seconds = 0.0
        groups = limits.kv_groups or one_table(kv_cache.num_layers)
        block_size = kv_cache.block_size
        max_blocks = blocks_of_row(limits.max_model_len, limits.max_num_batched_tokens, block_size)
        self._input_batch = InputBatch(
            limits.max_num_seqs, max_blocks, block_size, groups.num_groups
        )
        self._attention = EagerAttention(ops, kv_cache, block_size, groups, self._tensor)
        self._hidden: torch.Tensor
        self._context: EagerContext
        self._rope_tables = RopeTables()
        self._loras: EagerLoras | None = None
        self._lora_rows: Sequence[EagerLora | None] = ()  # of the last batch

    def open_loras(self, dtype: str) -> EagerLoras:
        if dtype == "bfloat16":
            raise ConfigError("lora_dtype bfloat16: reference ops keep adapters in float32")
        assert isinstance(self.model, Module)
        self._loras = EagerLoras(self.model, self._ops, self._device)
        return self._loras

    def exit_after(self, num_layers: int) -> EagerForward:
        """See :meth:`octavo.runtime.forward.Forward.exit_after`."""
        model = self.model.exit_after(num_layers)
        return EagerForward(model, self.kv_cache, self._ops, self._device, self._limits)

    def feeds(self, request: Request) -> bool:
        return False

    @torch.inference_mode()
    def submit(self, batch: Batch, weighed: Collection[str] = ()) -> ForwardOutput:
        inputs = self._input_batch.build(batch)
        self._lora_rows = () if self._loras is None else self._loras.rows_of(batch)
        self._context = self._make_context(inputs, batch)
        begin = time.perf_counter()
        hidden = self.model(self._tensor(inputs.token_ids), self._context)
        self._hidden = cast(torch.Tensor, hidden)
        self.kernel_seconds += time.perf_counter() - begin
        # The sum of a row is finite if and only if all of it is, short of overflow in float32.
        is_sound = torch.isfinite(self._hidden.float().abs().sum(dim=-1))
        sampling = SampledRows(batch, inputs.query_start, weighed)
        rows = ForwardOutput(inputs.query_start, (~is_sound).nonzero()[:, 0].tolist())
        if sampling.at:
            logits = self._compute_logits(sampling.at)
            own = [sampling_row(request) for request in sampling.requests]
            chosen = sample(logits, own)
            sampling.give(rows, chosen.token_ids, chosen.errors, chosen.logprobs.__getitem__)
            if at := sampling.weighed:
                found = probabilities(logits[at], [own[row] for row in at])
                sampling.give_probabilities(rows, found.cpu().numpy())
        return rows

    @torch.inference_mode()
    def logits(self, rows: range) -> torch.Tensor:
        return self._compute_logits(rows)

    def hidden_states(self, depth: int) -> np.ndarray:
        return self._streams[depth].float().cpu().numpy()

    def last_hidden_states(self) -> np.ndarray:
        """See :class:`octavo.runtime.pooling_runner.PooledForward`."""
        return self._hidden.float().cpu().numpy()

    @torch.inference_mode()
    def logprobs(self, rows: range, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        return compute_logprobs(self.logits(rows), token_ids, num_top)

    def probe(self, runner: ObservedRunner) -> Probe:
        return TorchProbe(
            runner, self.model, self.kv_cache, self._device, getattr(torch, self._ops.dtype)
        )

    def _compute_logits(self, rows: Sequence[int]) -> torch.Tensor:
        begin = time.perf_counter()
        context = self._context
        if self._lora_rows:
            context = replace(context, ops=self._ops_of([self._lora_rows[row] for row in rows]))
        logits = self.model.compute_logits(self._hidden[[*rows]], context)
        self.kernel_seconds += time.perf_counter() - begin
        return cast(torch.Tensor, logits)

    def _make_context(self, inputs: StepInputs, batch: Batch) -> EagerContext:
        return EagerContext(
            positions=self._tensor(inputs.positions),
            attention=self._attention.plan(inputs),
            ops=self._ops_of(self._lora_rows),
            rope_tables=self._rope_tables,
            layer_states=() if self._states is None else self._states.of_step(inputs, batch),
            types=self._tensor(np.array(types)) if (types := token_types(batch)) else None,
        )

    def _ops_of(self, loras: Sequence[EagerLora | None]) -> Ops:
        """Return the ops for rows with these adapters."""
        return self._ops if self._loras is None else self._loras.ops(loras)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
