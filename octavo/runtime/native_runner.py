"""A batch in, tokens out, on the native kernels: one call a step.

What ``model_runner.py`` does op by op, the step program does at once, up to and with the sampling
of most requests. Here its arguments are written into arrays that persist from step to step, and
its results are read. Requests that want more of their logits than a token get them as a tensor, and
go through the same sampler as on any device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import add

import numpy as np
import torch

from octavo import faults
from octavo.core.batch import DAMAGED, Batch, ScheduledRequest, StepOutput, TokenLogprobs
from octavo.core.request import Request
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.program import Program
from octavo.runtime.input_batch import BlockTables, flatten
from octavo.runtime.kv_cache import NativeKVCache
from octavo.runtime.model_runner import sampling_row
from octavo.runtime.native_sampling import SampleArray, is_native, status_error
from octavo.runtime.prompt_logits import LOGITS_ROWS, LogitsObserver, judge_prompt
from octavo.runtime.sampler import sample

# A lone stream gets several tokens of one call, as long as all take no longer than this: readers
# see no difference, and what arrives meanwhile does not wait long.
_ROUNDS_SECONDS = 0.02
MAX_ROUNDS = 8


class NativeModelRunner:
    """Runs batches of one model through its step program."""

    def __init__(
        self,
        program: Program,
        kv_cache: NativeKVCache,
        max_num_seqs: int,
        max_model_len: int,
        max_tokens: int,
    ):
        self.kv_cache = kv_cache
        self.program = program
        self.logits_observer: LogitsObserver | None = None
        self._tables = BlockTables(max_num_seqs, -(-max_model_len // kv_cache.block_size))
        self._step_tables = self._tables.array  # those of the running step, kept alive for it
        self._table_address = self._tables.array.ctypes.data
        self._table_stride = self._tables.array.shape[1]
        self._token_ids = np.zeros(max_tokens, dtype=np.int32)
        self._query_start = np.zeros(max_num_seqs + 1, dtype=np.int32)
        self._kv_len = np.zeros(max_num_seqs, dtype=np.int32)
        rows = max(max_num_seqs, LOGITS_ROWS, MAX_ROUNDS)
        self._row_finite = np.zeros(max(max_tokens, rows), dtype=np.uint8)
        self._out_rows = np.zeros(rows, dtype=np.int32)
        self._logits_at = np.zeros(rows, dtype=np.uintp)
        self._tokens = np.zeros(rows, dtype=np.int32)
        self._status = np.zeros(rows, dtype=np.int32)
        self._samples = SampleArray(rows)
        self._logits = torch.empty(0, program.vocab_size)
        self._round_seconds = _ROUNDS_SECONDS  # of the last decode of a lone stream
        self._arguments = self._make_arguments()

    def _make_arguments(self) -> abi.Batch:
        """The struct of all steps: of its fields, those that are addresses stay."""
        sequences = abi.Sequences(
            q_start=self._query_start.ctypes.data,
            kv_len=self._kv_len.ctypes.data,
            block_size=self.kv_cache.block_size,
        )
        return abi.Batch(
            seqs=sequences,
            token_ids=self._token_ids.ctypes.data,
            out_rows=self._out_rows.ctypes.data,
            logits=self._logits_at.ctypes.data,
            samples=ctypes.cast(self._samples.address, ctypes.POINTER(abi.Sample)),
            tokens=self._tokens.ctypes.data,
            status=self._status.ctypes.data,
            row_finite=self._row_finite.ctypes.data,
        )

    @property
    def kernel_seconds(self) -> float:
        return self.program.seconds

    def run(self, batch: Batch) -> StepOutput:
        """Compute a batch. A request whose numbers went wrong is reported in ``errors`` alone."""
        self.kv_cache.copy_blocks(batch.block_copies)
        num_tokens, longest = self._write_sequences(batch)
        sampling = [(i, item) for i, item in enumerate(batch.items) if item.samples]
        in_python = self._write_sampling(sampling)
        if batch.max_rounds > 1 and not in_python:
            return self._decode_alone(sampling[0][1].request, batch.max_rounds, longest)
        self._arguments.num_rounds = 1
        self.program.step(self._arguments, longest)
        if faults.hit("runner.nan"):
            self._row_finite[0] = 0

        output = StepOutput(token_ids={})
        if not self._row_finite[:num_tokens].all():
            self._find_damage(batch, output)
        self._take_tokens(sampling, in_python, output)
        for index, item in enumerate(batch.items):
            if item.request.params.prompt_logprobs is None and self.logits_observer is None:
                continue
            if item.request.request_id not in output.errors:
                logits_at = partial(self._prompt_logits, index, item.start)
                judge_prompt(item, logits_at, self.logits_observer, output)
        return output

    def _decode_alone(self, request: Request, max_rounds: int, longest: int) -> StepOutput:
        """Several rounds of the only request, in one call."""
        rounds = max(1, min(max_rounds, int(_ROUNDS_SECONDS / self._round_seconds)))
        if request.params.has_penalties:  # they count every token, here
            rounds = 1
        self._arguments.num_rounds = rounds
        before = self.kernel_seconds
        self.program.step(self._arguments, longest + rounds - 1)
        # A coarse clock may have stood still.
        self._round_seconds = max((self.kernel_seconds - before) / rounds, 1e-6)
        if faults.hit("runner.nan"):
            self._row_finite[0] = 0
        tokens: list[int] = []
        for index in range(rounds):
            if not self._row_finite[index]:
                reason = DAMAGED
            elif status := int(self._status[index]):
                reason = status_error(status)
            else:
                tokens.append(int(self._tokens[index]))
                continue
            if not tokens:
                return StepOutput({}, errors={request.request_id: reason})
            break  # the next step will meet it in its first round
        return StepOutput({request.request_id: tokens})

    def _write_sequences(self, batch: Batch) -> tuple[int, int]:
        """Tokens, lengths and block tables of a batch; returns T and the longest length."""
        token_ids, starts, counts, rows, num_blocks = flatten(batch, self._tables)
        kv_len = list(map(add, starts, counts))
        num_seqs, num_tokens = len(rows), len(token_ids)
        self._token_ids[:num_tokens] = token_ids
        self._query_start[1 : num_seqs + 1] = list(accumulate(counts))
        self._kv_len[:num_seqs] = kv_len
        sequences = self._arguments.seqs
        sequences.num_seqs, sequences.num_tokens = num_seqs, num_tokens
        if num_seqs == 1:
            sequences.table_stride = self._table_stride
            sequences.block_table = self._table_address + rows[0] * self._table_stride * 4
        else:
            self._step_tables = self._tables.array[rows, :num_blocks]
            sequences.table_stride = num_blocks
            sequences.block_table = self._step_tables.ctypes.data
        return num_tokens, max(kv_len)

    def _write_sampling(self, sampling: Sequence[tuple[int, ScheduledRequest]]) -> list[int]:
        """What becomes of the last token of the sequences (index, item) that sample.

        Returns which of them (places in ``sampling``) are sampled here, from their logits.
        """
        count = len(sampling)
        self._arguments.num_out = count
        self._arguments.head_only = 0
        requests = [item.request for _, item in sampling]
        if count == self._arguments.seqs.num_seqs:
            np.subtract(self._query_start[1 : count + 1], 1, out=self._out_rows[:count])
        else:
            self._out_rows[:count] = [self._query_start[index + 1] - 1 for index, _ in sampling]
        in_python = [place for place, request in enumerate(requests) if not is_native(request)]
        self._logits_at[:count] = 0
        if in_python:
            self._logits_at[in_python] = self._logits_rows(len(in_python))
        self._samples.write(requests)
        return in_python

    def _logits_rows(self, count: int) -> list[int]:
        """Addresses of the first ``count`` rows of ``self._logits``."""
        if self._logits.shape[0] < count:
            self._logits = torch.empty(count, self.program.vocab_size)
        stride = self._logits.stride(0) * self._logits.itemsize
        return [self._logits.data_ptr() + i * stride for i in range(count)]

    def _find_damage(self, batch: Batch, output: StepOutput) -> None:
        for index, item in enumerate(batch.items):
            start, end = self._query_start[index], self._query_start[index + 1]
            if not self._row_finite[start:end].all():
                output.errors[item.request.request_id] = DAMAGED

    def _take_tokens(
        self,
        sampling: Sequence[tuple[int, ScheduledRequest]],
        in_python: Sequence[int],
        output: StepOutput,
    ) -> None:
        count = len(sampling)
        tokens, status = self._tokens[:count].tolist(), self._status[:count].tolist()
        reasons = {place: status_error(code) for place, code in enumerate(status) if code}
        logprobs: dict[int, TokenLogprobs | None] = {}
        if in_python:
            rows = [sampling_row(sampling[place][1].request) for place in in_python]
            sampled = sample(self._logits[: len(in_python)], rows)
            for i, place in enumerate(in_python):
                tokens[place], logprobs[place] = sampled.token_ids[i], sampled.logprobs[i]
                reasons.pop(place, None)
                if i in sampled.errors:
                    reasons[place] = sampled.errors[i]
        for place, (_, item) in enumerate(sampling):
            request_id = item.request.request_id
            if request_id in output.errors:
                continue
            if place in reasons:
                output.errors[request_id] = reasons[place]
                continue
            output.token_ids[request_id] = [tokens[place]]
            entry = logprobs.get(place)
            if entry is not None:
                output.logprobs[request_id] = [entry]

    def _prompt_logits(self, index: int, start: int, positions: range) -> torch.Tensor:
        """Logits at positions of the item ``index``, which begins at ``start``: a further call, of
        the head alone."""
        count = len(positions)
        first = int(self._query_start[index]) + positions.start - start
        self._out_rows[:count] = np.arange(first, first + count)
        self._logits_at[:count] = self._logits_rows(count)
        self._arguments.num_out, self._arguments.head_only = count, 1
        self._arguments.num_rounds = 1
        self.program.step(self._arguments, 0)
        return self._logits[:count]
