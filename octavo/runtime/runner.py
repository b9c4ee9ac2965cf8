"""A batch in, tokens out: a forward pass, and all that is the same whatever made it.

A row with NaN or infinite values ends its own request, and whoever wants logits of a prompt gets
them.
"""

from __future__ import annotations

from bisect import bisect_left

from octavo.core.batch import DAMAGED, Batch, ScheduledRequest, StepOutput
from octavo.core.executor import LogitsObserver, Probe
from octavo.runtime.forward import Forward, Rows
from octavo.runtime.prompt_logits import judge_prompt


class Runner:
    """Runs batches of one model on one device."""

    def __init__(self, forward: Forward):
        self.forward = forward
        self.logits_observer: LogitsObserver | None = None

    @property
    def kernel_seconds(self) -> float:
        return self.forward.kernel_seconds

    def probe(self) -> Probe:
        return self.forward.probe(self)

    def run(self, batch: Batch) -> StepOutput:
        """Compute a batch. A request whose numbers went wrong is reported in ``errors`` alone."""
        if batch.block_copies:
            self.forward.kv_cache.copy_blocks(batch.block_copies)
        rows = self.forward.run(batch)
        output = StepOutput(token_ids={})
        if rows.damaged:
            _report_damage(batch, rows, output)
        _take_tokens(rows, output)
        observer = self.logits_observer
        for index, item in enumerate(batch.items):
            if observer is not None or item.request.params.prompt_logprobs is not None:
                self._judge_prompt(item, int(rows.starts[index]), output)
        return output

    def _judge_prompt(self, item: ScheduledRequest, first_row: int, output: StepOutput) -> None:
        if item.request.request_id in output.errors:
            return
        judge_prompt(item, first_row, self.forward, self.logits_observer, output)


def _report_damage(batch: Batch, rows: Rows, output: StepOutput) -> None:
    """End requests with a NaN or an infinity anywhere in what this step computed.

    All rows count, not only those that sample: that keeps damaged KV out of the prefix cache even
    when it comes from the middle of a prompt.
    """
    for index, item in enumerate(batch.items):
        first = bisect_left(rows.damaged, rows.starts[index])
        if first < len(rows.damaged) and rows.damaged[first] < rows.starts[index + 1]:
            output.errors[item.request.request_id] = DAMAGED


def _take_tokens(rows: Rows, output: StepOutput) -> None:
    errors, reasons, token_ids = output.errors, rows.reasons, output.token_ids
    for place, (item, tokens) in enumerate(zip(rows.sampled, rows.tokens, strict=True)):
        request_id = item.request.request_id
        if request_id in errors:
            continue
        if place in reasons:
            errors[request_id] = reasons[place]
            continue
        token_ids[request_id] = tokens
        if place in rows.logprobs:
            output.logprobs[request_id] = rows.logprobs[place]
