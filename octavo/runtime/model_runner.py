"""The model runner: a batch in, tokens out, on top of any forward pass.

It verifies drafts, ends requests whose numbers are NaN or infinite, computes log-probabilities of
prompts, and shows logits and hidden states of steps to observers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.batch import DAMAGED, Batch, Draft, ScheduledRequest, StepOutput, TokenLogprobs
from octavo.core.executor import FinishedStep, LogitsObserver, StepHandle
from octavo.runtime.forward import Forward, ForwardOutput
from octavo.runtime.hidden_states import StepFollower, computed_tokens
from octavo.runtime.prompt_logits import add_prompt_logprobs
from octavo.runtime.verification import Acceptance, ExactAcceptance, SampledDraft, VerifiedDraft


class ModelRunner:
    """Runs batches of one model on one device.

    Args:
        acceptance: the rule that accepts drafted tokens; by default exact.
    """

    def __init__(self, forward: Forward, acceptance: Acceptance | None = None):
        self.forward = forward
        self.acceptance: Acceptance = acceptance or ExactAcceptance()
        self.logits_observer: LogitsObserver | None = None
        self.follower: StepFollower | None = None

    @property
    def kernel_seconds(self) -> float:
        return self.forward.kernel_seconds

    def run(self, batch: Batch) -> StepOutput:
        """Compute a batch. Requests with NaN or infinite numbers are in ``errors`` alone."""
        return self.submit(batch).result()

    def submit(self, batch: Batch) -> StepHandle:
        """Start to compute a batch; up to the forward's ``depth`` may be in flight. A batch of
        which more than tokens is needed is finished when this returns."""
        if batch.block_copies:
            self.forward.kv_cache.copy_blocks(batch.block_copies)
        if not batch.items:
            self.forward.kv_cache.wait()
            return FinishedStep(StepOutput({}))
        rows = self.forward.submit(batch, self.acceptance.weighs(batch))
        if self._is_inspected(batch):
            return FinishedStep(self._end(batch, rows.result(), is_inspected=True))
        return _Step(lambda: self._end(batch, rows.result(), is_inspected=False))

    def _is_inspected(self, batch: Batch) -> bool:
        """Return whether more than the tokens of a pass is needed, so that its memory must not be
        overwritten yet. The KV of a draft must be moved before the next step, too."""
        if self.follower is not None or self.logits_observer is not None:
            return True
        return any(item.draft is not None or _wants_prompt_logprobs(item) for item in batch.items)

    def _end(self, batch: Batch, rows: ForwardOutput, *, is_inspected: bool) -> StepOutput:
        """Return the output of a batch. If it is not inspected, the forward may have gone on."""
        output = StepOutput(token_ids={})
        if rows.damaged:
            _report_damage(batch, rows, output)
        paths = self._take_tokens(batch, rows, output)
        if not is_inspected:
            return output
        if self.follower is not None:
            computed = computed_tokens(batch, rows, output, paths)
            self.follower.follow(batch, computed, self.forward.hidden_states)
        for index, item in enumerate(batch.items):
            if self.logits_observer is not None or _wants_prompt_logprobs(item):
                self._add_prompt_logprobs(item, int(rows.starts[index]), output)
        return output

    def _take_tokens(
        self, batch: Batch, rows: ForwardOutput, output: StepOutput
    ) -> dict[int, Sequence[int]]:
        """Add sampled tokens to ``output``; return the accepted paths of drafts, by item index."""
        paths: dict[int, Sequence[int]] = {}
        sampling = ((index, item) for index, item in enumerate(batch.items) if item.samples)
        for place, (index, item) in enumerate(sampling):
            request_id = item.request.request_id
            reasons = rows.reasons.get(place, {})
            if request_id in output.errors:
                continue
            if 0 in reasons:
                output.errors[request_id] = reasons[0]
                continue
            token_ids, logprobs = rows.tokens[place], rows.logprobs.get(place)
            if item.draft is not None:
                first = _first_drafted_row(item, rows, index)
                verified = self._verify(item, item.draft, rows, place, first)
                paths[index] = verified.path
                token_ids = verified.token_ids
                if logprobs is not None:
                    logprobs = self._logprobs_of(verified, logprobs, first - 1)
            output.token_ids[request_id] = token_ids
            if logprobs is not None:
                output.logprobs[request_id] = [entry for entry in logprobs if entry is not None]
        return paths

    def _verify(
        self, item: ScheduledRequest, draft: Draft, rows: ForwardOutput, place: int, first: int
    ) -> VerifiedDraft:
        """Verify a draft, whose rows begin at ``first``, and move the KV of its accepted path to
        the slots of its positions."""
        unsound = {row - first + 1 for row in rows.damaged if first <= row < first + len(draft)}
        verified = self.acceptance.verify(
            SampledDraft(
                item.request,
                draft,
                rows.tokens[place],
                unsound.union(rows.reasons.get(place, ())),
                rows.probabilities.get(place),
            )
        )
        path = verified.path
        if path and path[-1] != len(path) - 1:  # indices ascend
            slots = [item.end + index for index in path]
            for table in item.request.block_tables:
                self.forward.kv_cache.move(table, slots, item.end)
        return verified

    def _logprobs_of(
        self, verified: VerifiedDraft, sampled: Sequence[TokenLogprobs | None], first_row: int
    ) -> list[TokenLogprobs | None]:
        """Return the log-probabilities of the verified tokens. ``sampled`` has those of the tokens
        that were sampled; for a token that was accepted instead they are computed anew."""
        entries: list[TokenLogprobs | None] = []
        for row, token_id in zip(verified.rows, verified.token_ids, strict=True):
            entry = sampled[row]
            if entry is not None and entry.token_id != token_id:
                at = range(first_row + row, first_row + row + 1)
                (entry,) = self.forward.logprobs(at, [token_id], len(entry.top))
            entries.append(entry)
        return entries

    def _add_prompt_logprobs(
        self, item: ScheduledRequest, first_row: int, output: StepOutput
    ) -> None:
        if item.request.request_id in output.errors:
            return
        add_prompt_logprobs(item, first_row, self.forward, self.logits_observer, output)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight."""

    end: Callable[[], StepOutput]
    ready_at: float | None = None

    def result(self) -> StepOutput:
        return self.end()


def _wants_prompt_logprobs(item: ScheduledRequest) -> bool:
    """Return whether an item computes prompt positions whose log-probabilities are requested."""
    request = item.request
    asked = request.params.prompt_logprobs is not None
    return asked and item.start < request.num_prompt_tokens - 1


def _report_damage(batch: Batch, rows: ForwardOutput, output: StepOutput) -> None:
    """End requests with a NaN or an infinity in any row of their known tokens.

    Rows that are not sampled count too, which keeps damaged KV from the middle of a prompt out of
    the prefix cache. Rows of drafted tokens do not count.
    """
    for index, item in enumerate(batch.items):
        first = bisect_left(rows.damaged, rows.starts[index])
        if first < len(rows.damaged) and rows.damaged[first] < _first_drafted_row(
            item, rows, index
        ):
            output.errors[item.request.request_id] = DAMAGED


def _first_drafted_row(item: ScheduledRequest, rows: ForwardOutput, index: int) -> int:
    """Return the row after the last known token of item ``index`` of a batch."""
    return int(rows.starts[index]) + item.end - item.start
