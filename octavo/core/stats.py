"""What the engine knows about its own work; returned, never printed.

``docs/metrics.md`` defines every metric from the timestamps kept here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(slots=True)
class RequestStats:
    """Timestamps (seconds of the engine's clock) and counts of one request."""

    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Arrival to the first step that computes something of the request."""
        return _gap(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Arrival to the first token."""
        return _gap(self.arrival_time, self.first_token_time)

    @property
    def e2e(self) -> float | None:
        """Arrival to the last token."""
        return _gap(self.arrival_time, self.last_token_time)

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first; None for fewer than two tokens."""
        decode_time = _gap(self.first_token_time, self.last_token_time)
        if decode_time is None or self.num_output_tokens < 2:
            return None
        return decode_time / (self.num_output_tokens - 1)

    @property
    def prefill_tps(self) -> float | None:
        """Prompt tokens computed (cached ones apart) per second, first scheduled to first token."""
        prefill_time = _gap(self.first_scheduled_time, self.first_token_time)
        if not prefill_time:
            return None
        return (self.num_prompt_tokens - self.num_cached_tokens) / prefill_time

    @property
    def decode_tps(self) -> float | None:
        """Output tokens per second after the first: 1 / TPOT."""
        return 1.0 / self.tpot if self.tpot else None


@dataclass(frozen=True, slots=True)
class StepStats:
    """The engine at the end of one step. Blocks obey free + cached + used == total.

    All that watch the engine read this record, whole as it is: a server sends it on without
    knowing what is in it. A figure more is a field here, and a line where it is shown.
    """

    step_id: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # that are known of those who wait
    num_seqs: int
    num_tokens: int  # that were computed and count; none of a step that raised
    num_preempted: int
    num_finished: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    # Slots that running requests hold and that carry no token, of all the slots they hold.
    kv_waste: float
    # Totals since the engine began; the hit rate is hit / queried.
    num_preemptions: int
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    draft_tokens: int  # that were verified
    draft_tokens_accepted: int
    num_invariant_violations: int  # of the block pool, which is to have none

    @classmethod
    def idle(cls, num_blocks: int = 0) -> StepStats:
        """Of an engine with that many blocks that has done nothing yet."""
        nothing = cls(*(0 for _ in fields(cls)))
        return replace(nothing, num_free_blocks=num_blocks)

    @property
    def kv_utilisation(self) -> float:
        """Share of the block pool that requests hold."""
        total = self.num_free_blocks + self.num_cached_blocks + self.num_used_blocks
        return self.num_used_blocks / total if total else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of admitted prompt tokens that the prefix cache already held."""
        return self.prefix_tokens_hit / max(1, self.prefix_tokens_queried)


def _gap(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
