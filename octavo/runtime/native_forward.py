"""A forward pass on the native kernels: one call a step, sampling included.

The arguments of the step program are written into arrays that persist from step to step, and its
results are read from such arrays.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from operator import add
from types import MappingProxyType

import numpy as np

from octavo.base.errors import ConfigError
from octavo.core.batch import Batch, TokenLogprobs
from octavo.core.lookahead import MAX_MULTI_STEPS, multi_steps_in_time
from octavo.core.request import Request
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.program import Program
from octavo.kernels.fused_ops import CannotFuse
from octavo.kernels.recorder import Value
from octavo.runtime.capacity import RankLimits
from octavo.runtime.forward import ForwardOutput, KVBlocks, ObservedRunner, SampledRows
from octavo.runtime.input_batch import (
    BlockTables,
    StepSinkWindow,
    blocks_of_row,
    flatten,
    state_steps,
)
from octavo.runtime.mask_thread import LateMask, MaskThread
from octavo.runtime.native_kv_cache import NativeCache
from octavo.runtime.native_sampling import LogprobArray, SampleArray, status_error
from octavo.runtime.probe import NativeProbe
from octavo.runtime.prompt_logits import LOGITS_ROWS
from octavo.system import machine


class NativeForward:
    """Runs batches of one model by its step program, which samples their tokens too."""

    depth = 1
    feeds_tokens = False

    def __init__(
        self,
        program: Program,
        kv_cache: NativeCache,
        limits: RankLimits,
        share_prefixes: bool = True,
        streams: Mapping[int, Value] = MappingProxyType({}),
    ):
        self.kv_cache: KVBlocks = kv_cache
        self.cache = kv_cache
        self.program = program
        self.limits = limits
        self._share_prefixes = share_prefixes
        self._streams = streams  # the values that the program keeps, by their depth
        max_num_seqs, max_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        max_blocks = blocks_of_row(limits.max_model_len, max_tokens, kv_cache.block_size)
        num_groups = 1 if limits.kv_groups is None else limits.kv_groups.num_groups
        self._tables = self._make_tables(max_num_seqs, max_blocks, kv_cache.block_size, num_groups)
        self._step_tables = self._tables.array  # those of the running step, kept alive for it
        self._table_rows: Sequence[int] = ()  # of the step's sequences
        self._num_table_blocks = 0  # of the longest of these
        self._table_address = self._tables.array.ctypes.data
        self._table_stride = max_blocks
        self._group_stride = max_num_seqs * max_blocks
        rows = max(max_tokens, LOGITS_ROWS, MAX_MULTI_STEPS)
        # A step reads and writes a few numbers. Arrays of Python's, because numpy's code is slower
        # for so few once the weights have evicted it from the caches. Their lengths never change.
        self._token_ids = _int32s(max_tokens)
        self._query_start = _int32s(max_num_seqs + 1)
        self._kv_len = _int32s(max_num_seqs)
        self._parents = _int32s(max_tokens)
        self._sink_windows = (abi.SinkWindow * max_num_seqs)()
        self._state_source = _int32s(max_num_seqs)
        self._state_target = _int32s(max_num_seqs)
        self._out_rows = _int32s(rows)
        self._logits_at = array("Q", bytes(8 * rows))
        self._tokens = _int32s(rows)
        self._status = _int32s(rows)
        self._row_finite = bytearray(max(max_tokens, rows))
        self._samples = SampleArray(rows)
        self._late_masks: list[LateMask] = []  # of the step that is written
        has_core = machine.cpu().usable_cores > program.pool.size
        self._mask_thread = MaskThread(program.library, program.vocab_size, has_core=has_core)
        self._logprobs = LogprobArray(rows, program.vocab_size)
        self._logits = np.empty((0, program.vocab_size), dtype=np.float32)
        self._probabilities = np.empty((0, program.vocab_size), dtype=np.float32)
        self._probabilities_at = array("Q", bytes(8 * rows))
        self._decode_seconds = math.inf  # of a decode step, lately; so the first call has one step
        self._arguments = self._make_arguments()

    def _make_tables(self, *sizes: int) -> BlockTables:
        return BlockTables(*sizes)

    def _make_arguments(self) -> abi.Batch:
        """Create the struct that all steps share: the addresses in it stay the same."""
        sequences = abi.Sequences(
            q_start=_address(self._query_start),
            kv_len=_address(self._kv_len),
            block_size=self.cache.block_size,
            share_prefixes=self._share_prefixes,
            state_source=_address(self._state_source),
            state_target=_address(self._state_target),
        )
        return abi.Batch(
            seqs=sequences,
            token_ids=_address(self._token_ids),
            out_rows=_address(self._out_rows),
            logits=_address(self._logits_at),
            samples=ctypes.cast(self._samples.address, ctypes.POINTER(abi.Sample)),
            tokens=_address(self._tokens),
            status=_address(self._status),
            row_finite=ctypes.addressof(ctypes.c_char.from_buffer(self._row_finite)),
            masks_made=self._mask_thread.counter,
        )

    @property
    def kernel_seconds(self) -> float:
        return self.program.seconds

    def exit_after(self, num_layers: int) -> NativeForward:
        """See :meth:`octavo.runtime.forward.Forward.exit_after`."""
        program = self._exit_program(num_layers)
        return NativeForward(program, self.cache, self.limits, self._share_prefixes)

    def _exit_program(self, num_layers: int) -> Program:
        try:
            return self.program.exit_after(num_layers)
        except CannotFuse as error:
            raise ConfigError(f"no exit after layer {num_layers}: {error}") from error

    def probe(self, runner: ObservedRunner) -> NativeProbe:
        return NativeProbe(runner, self.program, self.cache)

    def feeds(self, request: Request) -> bool:
        return False

    def submit(self, batch: Batch, weighed: Collection[str] = ()) -> ForwardOutput:
        num_tokens, longest = self._write_sequences(batch)
        if num_tokens == batch.num_seqs:  # one token each, so there are no drafts
            most = min(item.num_sampled for item in batch.items)
            if most > 1:
                return self._run_multi_step(batch, most, longest)
        sampling = SampledRows(batch, self._query_start, weighed)
        self._write_step(sampling)
        self._step(longest)
        return self._output(sampling, num_tokens)

    def _write_step(self, sampling: SampledRows) -> None:
        """Write what is sampled in a single step."""
        self._write_sampling(sampling)
        self._arguments.num_multi_steps = 1
        asked = [request.params.logprobs for request in sampling.requests]
        self._arguments.logprobs = self._logprobs.ask(asked)

    def _output(self, sampling: SampledRows, num_tokens: int) -> ForwardOutput:
        """Return the output of the step of ``num_tokens`` rows that was run."""
        count = len(sampling.at)
        status, tokens = self._status[:count].tolist(), self._tokens[:count].tolist()
        rows = ForwardOutput(self._query_start, self._damaged(num_tokens))
        problems = self._mask_thread.problems
        sampling.give(
            rows,
            tokens,
            _reasons(status) | problems if problems or any(status) else {},
            lambda row: self._logprobs.entry(row, tokens[row]),
        )
        if sampling.weighed:
            sampling.give_probabilities(rows, self._probabilities)
        return rows

    def _run_multi_step(self, batch: Batch, most: int, longest: int) -> ForwardOutput:
        """Run several decode steps in one call: each sequence goes on from its own token."""
        requests = [item.request for item in batch.items]
        count = len(requests)
        steps = multi_steps_in_time(min(most, len(self._tokens) // count), self._decode_seconds)
        if any(request.params.has_penalties or request.is_masked for request in requests):
            steps = 1  # the next step depends on this one's token
        self._write_sampling(SampledRows(batch, self._query_start))
        self._arguments.num_multi_steps = steps
        asked = [request.params.logprobs for request in requests]
        self._arguments.logprobs = self._logprobs.ask(asked * steps)
        before = self.kernel_seconds
        self._step(longest + steps - 1)
        # A coarse clock may have stood still.
        self._decode_seconds = max((self.kernel_seconds - before) / steps, 1e-6)
        rows = ForwardOutput(self._query_start, self._damaged(count))
        for place, num_top in enumerate(asked):
            taken = self._tokens_of_steps(place, count, steps, rows)
            if num_top is not None:
                rows.logprobs[place] = [
                    self._logprobs.entry(index * count + place, token_id)
                    for index, token_id in enumerate(taken)
                ]
        return rows

    def _tokens_of_steps(
        self, place: int, count: int, steps: int, rows: ForwardOutput
    ) -> list[int]:
        """Store and return the tokens of the request at ``place`` of ``count``. Tokens from a
        failure on are dropped: the next call meets it in its first step."""
        of_all = slice(place, count * steps, count)
        status, token_ids = self._status[of_all].tolist(), self._tokens[of_all].tolist()
        if status[0]:
            rows.reasons[place] = _reasons(status[:1])
        for index, (code, is_finite) in enumerate(
            zip(status, self._row_finite[of_all], strict=True)
        ):
            if code or not is_finite:
                del token_ids[index:]
                break
        rows.tokens.append(token_ids)
        return token_ids

    def _damaged(self, num_rows: int) -> list[int]:
        if self._row_finite.find(0, 0, num_rows) < 0:
            return []
        return [row for row in range(num_rows) if not self._row_finite[row]]

    def _write_sequences(self, batch: Batch) -> tuple[int, int]:
        """Write tokens, lengths and block tables of a batch; return T, and the number of positions
        that rope tables must have."""
        token_ids, starts, counts, rows, num_blocks, parents, sink_windows = flatten(
            batch, self._tables
        )
        kv_len = list(map(add, starts, counts))
        num_seqs, num_tokens = len(rows), len(token_ids)
        self._table_rows, self._num_table_blocks = rows, num_blocks
        self._token_ids[:num_tokens] = array("i", token_ids)
        self._query_start[1 : num_seqs + 1] = array("i", accumulate(counts))
        self._kv_len[:num_seqs] = array("i", kv_len)
        if self.cache.states is not None:
            steps = state_steps(batch)
            self._state_source[:num_seqs] = array("i", [step.source for step in steps])
            self._state_target[:num_seqs] = array("i", [step.target for step in steps])
        sequences = self._arguments.seqs
        sequences.num_seqs, sequences.num_tokens = num_seqs, num_tokens
        sequences.parents = None
        if parents:
            self._parents[:num_tokens] = array("i", parents)
            sequences.parents = _address(self._parents)
        sequences.sink_windows = None
        num_angles = max(kv_len)
        if sink_windows:
            num_angles = max(map(self._write_sink_window, range(num_seqs), sink_windows, kv_len))
            sequences.sink_windows = ctypes.addressof(self._sink_windows)
        self._point_at_tables(rows, num_blocks)
        return num_tokens, num_angles

    def _point_at_tables(self, rows: Sequence[int], num_blocks: int) -> None:
        """Have the step read these rows of the block tables, up to ``num_blocks`` entries."""
        if len(rows) > 1:
            self._point_at_copies(rows, num_blocks)
            return
        sequences = self._arguments.seqs
        sequences.table_stride = self._table_stride
        sequences.group_stride = self._group_stride
        sequences.block_table = self._table_address + rows[0] * self._table_stride * 4

    def _point_at_copies(self, rows: Sequence[int], num_blocks: int) -> None:
        """Have the step read copies of these rows, side by side."""
        sequences = self._arguments.seqs
        self._step_tables = np.ascontiguousarray(self._tables.array[:, rows, :num_blocks])
        sequences.table_stride = num_blocks
        sequences.group_stride = len(rows) * num_blocks
        sequences.block_table = self._step_tables.ctypes.data

    def _write_sink_window(self, index: int, of: StepSinkWindow | None, num_slots: int) -> int:
        """Write the sink window of a sequence; return the positions that rope tables must have."""
        target = self._sink_windows[index]
        if of is None:
            target.window = 0
            return num_slots
        sink_window = of.sink_window
        target.sinks, target.window, target.stride = (
            sink_window.sinks,
            sink_window.window,
            sink_window.stride,
        )
        target.turn, target.left_out = sink_window.turn, of.left_out
        return sink_window.num_angles(num_slots + of.left_out)

    def _step(self, num_positions: int) -> None:
        """Run the step that is written; rope tables must have ``num_positions``."""
        self._run(num_positions)

    def _run(self, num_positions: int) -> None:
        """Run this rank's part of the step that is written, while its masks are made."""
        masks, self._late_masks = self._late_masks, []
        if not masks:  # as nearly always
            self._mask_thread.problems = {}
            self.program.step(self._arguments, num_positions)
            return
        with self._mask_thread.making(masks):
            self.program.step(self._arguments, num_positions)

    def _write_sampling(self, sampling: SampledRows) -> None:
        """Write which rows are sampled, and their parameters."""
        count = len(sampling.at)
        self._arguments.num_out = count
        self._arguments.head_only = 0
        self._out_rows[:count] = array("i", sampling.at)
        self._logits_at[:count] = array("Q", bytes(8 * count))
        self._late_masks = []
        self._samples.write(sampling.requests, self._late_masks)
        self._arguments.probabilities = None
        if sampling.weighed:
            self._ask_probabilities(sampling.weighed, count)

    def _ask_probabilities(self, weighed: Sequence[int], count: int) -> None:
        """Have the probabilities of the weighed rows written to consecutive rows of an array."""
        if self._probabilities.shape[0] < len(weighed):
            self._probabilities = np.empty((len(weighed), self.program.vocab_size), np.float32)
        first, stride = self._probabilities.ctypes.data, self._probabilities.strides[0]
        self._probabilities_at[:count] = array("Q", bytes(8 * count))
        for place, row in enumerate(weighed):
            self._probabilities_at[row] = first + place * stride
        self._arguments.probabilities = self._probabilities_at.buffer_info()[0]

    def logits(self, rows: range) -> np.ndarray:
        """Compute the logits of rows of the last step by a call of the head alone."""
        count = len(rows)
        if self._logits.shape[0] < count:
            self._logits = np.empty((count, self.program.vocab_size), dtype=np.float32)
        first, stride = self._logits.ctypes.data, self._logits.strides[0]
        self._out_rows[:count] = array("i", rows)
        self._logits_at[:count] = array("Q", range(first, first + count * stride, stride))
        self._arguments.num_out, self._arguments.head_only = count, 1
        self._arguments.num_multi_steps = 1
        self._step(0)
        return self._logits[:count]

    def hidden_states(self, depth: int) -> np.ndarray:
        return self.program.buffer(self._streams[depth])[: self._arguments.seqs.num_tokens]

    def logprobs(self, rows: range, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        count = len(self.logits(rows))
        self.program.logprob_rows(
            count,
            _address(self._logits_at),
            _address(targets := array("i", token_ids)),
            self._logprobs.ask([num_top] * count),
        )
        return [self._logprobs.entry(row, token_id) for row, token_id in enumerate(targets)]


def _int32s(count: int) -> array[int]:
    return array("i", bytes(4 * count))


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]


def _reasons(status: Sequence[int]) -> dict[int, str]:
    """Return why tokens could not be sampled, by their index."""
    return {place: status_error(code) for place, code in enumerate(status) if code}
