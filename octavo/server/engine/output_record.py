"""`OutputRecord`, the output of a request so far, from which another engine can go on with it."""

from __future__ import annotations

import dataclasses
from array import array
from dataclasses import dataclass, field

from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.generation import GenerationStats
from octavo.serving.outputs import Delta


@dataclass(slots=True)
class _Sample:
    """The tokens of a sample that has not ended, and the sum of their log-probabilities, which is
    added up as the engine does it."""

    token_ids: array[int] = field(default_factory=lambda: array("q"))
    cumulative_logprob: float = 0.0


class OutputRecord:
    """The output of each sample that has not ended, and the statistics of the engines that ended.

    The tokens are all that an engine needs to go on: random numbers are counted by position, and
    penalties, limits and text follow from the tokens.
    """

    def __init__(self, num_samples: int):
        self._samples = {index: _Sample() for index in range(num_samples)}
        self._num_longest = 0  # tokens of the longest sample, ended or not
        self._before: GenerationStats | None = None  # of the engines that ended

    @staticmethod
    def of(params: SamplingParams) -> OutputRecord | None:
        """Return a record for a request; None if it can only be begun anew: where the best of more
        samples are returned, nothing is streamed, and their log-probabilities are not known
        here."""
        return OutputRecord(params.n) if params.num_samples == params.n else None

    @property
    def is_empty(self) -> bool:
        return not any(sample.token_ids for sample in self._samples.values())

    def add(self, delta: Delta) -> None:
        """Take in what a step brought."""
        sample = self._samples.get(delta.index)
        if sample is None:
            return
        sample.token_ids.extend(delta.token_ids)
        for entry in delta.logprobs:
            sample.cumulative_logprob += entry.logprob
        self._num_longest = max(self._num_longest, len(sample.token_ids))
        if delta.finish_reason is not None:
            del self._samples[delta.index]

    def go_on(self, stats: GenerationStats) -> None:
        """Note that another engine goes on from here."""
        self._before = dataclasses.replace(stats)

    def resumed(self) -> list[list[object]]:
        """Return the field ``resumed`` of the message to the engine that goes on."""
        return [
            [index, sample.token_ids.tolist(), sample.cumulative_logprob]
            for index, sample in self._samples.items()
        ]

    def correct(self, stats: GenerationStats) -> None:
        """Correct the statistics that the last engine reported, which knows nothing of those before
        it: the prompt was looked up, and the first token came, there."""
        before = self._before
        if before is None:
            return
        for name in ("num_cached_tokens", "miss_reason", "queue_time", "ttft", "prefill_time"):
            setattr(stats, name, getattr(before, name))
        for name in ("num_preemptions", "num_draft_tokens", "num_accepted_tokens"):
            setattr(stats, name, getattr(stats, name) + getattr(before, name))
        if stats.e2e is not None and stats.ttft is not None:
            stats.decode_time = stats.e2e - stats.ttft
            num_later = self._num_longest - 1
            stats.tpot = stats.decode_time / num_later if num_later > 0 else None
