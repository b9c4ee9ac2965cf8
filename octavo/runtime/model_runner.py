"""A batch in, tokens out: inputs, forward pass, logits, sampling."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch

from octavo import faults
from octavo.core.batch import DAMAGED, Batch, StepOutput
from octavo.core.request import Request
from octavo.kernels.dispatch import Ops
from octavo.layers.context import ForwardContext
from octavo.models.registry import CausalLM
from octavo.runtime.input_batch import InputBatch, StepInputs
from octavo.runtime.kv_cache import KVCache
from octavo.runtime.prompt_logits import LogitsObserver, judge_prompt
from octavo.runtime.sampler import SamplingRow, sample


class ModelRunner:
    """Runs batches of one model on one device."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        ops: Ops,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
    ):
        self.model = model
        self.kv_cache = kv_cache
        self._ops = ops
        self._device = device
        self.kernel_seconds = 0.0
        self.logits_observer: LogitsObserver | None = None
        max_blocks = -(-max_model_len // kv_cache.block_size)
        self._input_batch = InputBatch(max_num_seqs, max_blocks, kv_cache.block_size)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Compute a batch. A request whose numbers went wrong is reported in ``errors`` alone."""
        self.kv_cache.copy_blocks(batch.block_copies)
        inputs = self._input_batch.build(batch)
        ctx = self._context(inputs)
        begin = time.perf_counter()
        hidden = self.model(self._tensor(inputs.token_ids), ctx)
        self.kernel_seconds += time.perf_counter() - begin
        if faults.hit("runner.nan"):
            hidden[0] = torch.nan

        output = StepOutput(token_ids={})
        self._find_damage(batch, inputs, hidden, output)
        healthy = [
            (item, int(inputs.query_start[index]))
            for index, item in enumerate(batch.items)
            if item.request.request_id not in output.errors
        ]
        for item, offset in healthy:
            rows = hidden[offset : offset + item.num_tokens]
            logits_at = partial(self._prompt_logits, item.start, rows, ctx)
            judge_prompt(item, logits_at, self.logits_observer, output)
        sampling = [(item, offset) for item, offset in healthy if item.samples]
        if sampling:
            last = [offset + item.num_tokens - 1 for item, offset in sampling]
            begin = time.perf_counter()
            logits = self.model.compute_logits(hidden[last], ctx)
            self.kernel_seconds += time.perf_counter() - begin
            self._sample(logits, [item.request for item, _ in sampling], output)
        return output

    def _context(self, inputs: StepInputs) -> ForwardContext:
        plan = self._ops.plan_attention(
            self._tensor(inputs.block_tables),
            self._tensor(inputs.query_start),
            self._tensor(inputs.seq_lens),
            int((inputs.query_start[1:] - inputs.query_start[:-1]).max()),
            int(inputs.seq_lens.max()),
            self.kv_cache.block_size,
        )
        return ForwardContext(
            positions=self._tensor(inputs.positions),
            slot_mapping=self._tensor(inputs.slot_mapping),
            plan=plan,
            kv_cache=self.kv_cache,
            ops=self._ops,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _find_damage(
        self, batch: Batch, inputs: StepInputs, hidden: torch.Tensor, output: StepOutput
    ) -> None:
        """Report requests with a NaN or an infinity anywhere in what this step computed.

        Looking at all rows, not only at those that sample, keeps damaged KV out of the prefix
        cache even when it comes from the middle of a prompt.
        """
        # The sum of a row is finite if and only if all of it is, short of overflow in float32.
        sound = torch.isfinite(hidden.float().abs().sum(dim=-1))
        if bool(sound.all()):
            return
        rows = sound.cpu().numpy()
        for index, item in enumerate(batch.items):
            start, end = inputs.query_start[index], inputs.query_start[index + 1]
            if not rows[start:end].all():
                output.errors[item.request.request_id] = DAMAGED

    def _prompt_logits(
        self, start: int, hidden: torch.Tensor, ctx: ForwardContext, positions: range
    ) -> torch.Tensor:
        """Logits at positions of an item that begins at ``start``."""
        rows = hidden[positions.start - start : positions.stop - start]
        return self.model.compute_logits(rows, ctx)

    def _sample(self, logits: torch.Tensor, requests: list[Request], output: StepOutput) -> None:
        sampled = sample(logits, [sampling_row(request) for request in requests])
        for index, request in enumerate(requests):
            request_id = request.request_id
            if index in sampled.errors:
                output.errors[request_id] = sampled.errors[index]
                continue
            output.token_ids[request_id] = [sampled.token_ids[index]]
            logprobs = sampled.logprobs[index]
            if logprobs is not None:
                output.logprobs[request_id] = [logprobs]


def sampling_row(request: Request) -> SamplingRow:
    """What the sampler needs to know of a request."""
    return SamplingRow(
        params=request.params,
        seed=request.seed,
        sample_index=request.sample_index,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        stop_token_ids=(*request.eos_token_ids, *request.params.stop_token_ids),
        bad_words_token_ids=request.bad_words_token_ids,
    )
