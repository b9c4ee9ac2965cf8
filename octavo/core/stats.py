"""The figures of requests and steps, which the engine returns and never prints.

``docs/metrics.md`` defines every metric from the timestamps kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import zip_longest
from operator import attrgetter
from typing import Any


@dataclass(slots=True)
class DraftStats:
    """Counts of verified drafts and of their accepted tokens.

    Three figures are easily mixed up: ``acceptance_rate`` is the share of drafted tokens, whatever
    came before them; ``accepted_by_position`` counts drafts; ``mean_accepted_length`` includes the
    token that a step brings in any case.
    """

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)  # drafts accepted up to there

    def count(self, num_tokens: int, num_accepted: int) -> None:
        """Count a verified draft of ``num_tokens`` tokens, ``num_accepted`` of them accepted along
        one path."""
        self.num_drafts += 1
        self.num_tokens += num_tokens
        self.num_accepted += num_accepted
        by_position = self.accepted_by_position
        by_position.extend([0] * (num_accepted - len(by_position)))
        for position in range(num_accepted):
            by_position[position] += 1

    def add(self, other: DraftStats) -> None:
        """Add the counts of other drafts."""
        self.num_drafts += other.num_drafts
        self.num_tokens += other.num_tokens
        self.num_accepted += other.num_accepted
        mine, theirs = self.accepted_by_position, other.accepted_by_position
        mine.extend([0] * (len(theirs) - len(mine)))
        for position, count in enumerate(theirs):
            mine[position] += count

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that were accepted; None without any."""
        return self.num_accepted / self.num_tokens if self.num_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Mean number of tokens from a step that verifies a draft, the one that follows it
        included."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else None


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
    drafts: DraftStats = field(default_factory=DraftStats)
    # Why no more tokens were cached, a ``MissReason``; empty before it is admitted.
    miss_reason: str = ""

    @property
    def queue_time(self) -> float | None:
        """Time from arrival to the first step that computes something of the request."""
        return _gap(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Time from arrival to the first token."""
        return _gap(self.arrival_time, self.first_token_time)

    @property
    def e2e(self) -> float | None:
        """Time from arrival to the last token."""
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


@dataclass(slots=True)
class ConstraintStats:
    """Totals of the constraints on answers: grammars that were compiled or refused, and masks of
    tokens that were computed of them, with the seconds that each took."""

    num_compiled: int = 0
    compile_seconds: float = 0.0
    num_masks: int = 0
    mask_seconds: float = 0.0

    @property
    def figures(self) -> dict[str, Any]:
        """The fields of `StepStats` that have them; none while no constraint was asked for."""
        if not self.num_compiled:
            return {}
        return {
            "constraints_compiled": self.num_compiled,
            "constraint_compile_seconds": self.compile_seconds,
            "constraint_masks": self.num_masks,
            "constraint_mask_seconds": self.mask_seconds,
        }


@dataclass(frozen=True, slots=True)
class StepStats:
    """The engine at the end of one step. Blocks obey free + cached + used == total.

    Every observer of the engine reads this record: a server sends it on without knowing its fields.
    To add a figure, add a field here, and a line where it is shown.
    """

    step_id: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # known tokens of waiting requests
    num_due_tokens: int  # of prompts under way, still to be computed
    num_seqs: int
    num_tokens: int  # computed; 0 for a step that raised
    num_prompt_tokens: int  # of prompts, and of tokens computed again
    num_preempted: int
    num_finished: int
    seconds: float  # from when it could run to its results; 0 if it raised
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    # Slots that running requests hold and that carry no token, of all the slots they hold.
    kv_waste: float
    # What prefill pacing has learned (core/prefill_pacing.py), 0 before it has: seconds of a step
    # that only decodes, and what a token of a prompt adds to one.
    decode_seconds: float
    prompt_token_seconds: float
    # Totals since the engine began; the hit rate is hit / queried.
    step_seconds: float
    num_preemptions: int
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    num_drafts: int  # verified
    draft_tokens: int  # in them
    draft_tokens_accepted: int
    draft_seconds: float  # spent in drafting
    num_invariant_violations: int  # of the block pool; 0 unless there is a bug
    # Drafts that were accepted up to the first token, the second, and so on.
    draft_accepted_by_position: tuple[int, ...] = ()
    # Totals of a store (core/block_store.py), None without one: blocks copied to host memory,
    # written to a disk from there, copied back, and given up; blocks that could not be written, or
    # read back unchanged; tokens whose KV was copied back, by where it had been.
    kv_blocks_stored: int | None = None
    kv_blocks_written: int | None = None
    kv_blocks_restored: int | None = None
    kv_blocks_dropped: int | None = None
    kv_store_errors: int | None = None
    kv_bytes_stored: int | None = None
    kv_bytes_restored: int | None = None
    prefix_tokens_from_memory: int | None = None
    prefix_tokens_from_disk: int | None = None
    prefix_tokens_from_peers: int | None = None
    # Totals of transfers between replicas (offload/peer_storage.py), None without any: blocks that
    # did not come are counted by why.
    kv_transfer_bytes_sent: int | None = None
    kv_transfer_bytes_received: int | None = None
    kv_transfer_seconds_sent: float | None = None
    kv_transfer_seconds_received: float | None = None
    kv_transfer_misses_late: int | None = None
    kv_transfer_misses_overwritten: int | None = None
    kv_transfer_misses_peer_ended: int | None = None
    kv_transfer_misses_damaged: int | None = None
    kv_transfer_misses_unreachable: int | None = None
    # Totals of constraints (`ConstraintStats`), None before one was asked for.
    constraints_compiled: int | None = None
    constraint_compile_seconds: float | None = None
    constraint_masks: int | None = None
    constraint_mask_seconds: float | None = None
    # Figures of a meter (core/step_meter.py), None without one. Of this step: the share of its time
    # that the device needs for it at least, and how long its bytes, and its operations, take at
    # the device's peaks. The others are totals: that least time, the predicted time, the measured
    # one (of a pipeline, that of a stage), and the number of steps by what bound them.
    roofline_share: float | None = None
    memory_seconds: float | None = None
    compute_seconds: float | None = None
    floor_seconds: float | None = None
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    num_memory_bound: int | None = None
    num_compute_bound: int | None = None
    num_overhead_bound: int | None = None
    # Of a model with experts whose meter counts them. Totals: the tokens that each expert got, in
    # all layers; those that each rank computed, where ranks have whole experts; for each layer that
    # has experts, those of the rank that had most in each step. No total: for each such layer, the
    # tokens of the expert that got most, to the mean of all.
    expert_tokens: tuple[int, ...] = ()
    expert_rank_tokens: tuple[int, ...] = ()
    expert_busiest_rank_tokens: tuple[int, ...] = ()
    expert_imbalance: tuple[float, ...] = ()

    @classmethod
    def idle(cls, num_blocks: int = 0) -> StepStats:
        """Return the record of an engine with ``num_blocks`` blocks that has done nothing yet."""
        nothing: dict[str, Any] = {each.name: 0 for each in fields(cls) if each.default is MISSING}
        return cls(**nothing | {"num_free_blocks": num_blocks})

    def as_json(self) -> dict[str, Any]:
        """Return all fields by name. ``dataclasses.asdict`` would copy each, for every step."""
        return dict(zip(_STEP_FIELDS, _step_values(self), strict=True))

    @property
    def kv_utilisation(self) -> float:
        """Share of the block pool that requests hold."""
        total = self.num_free_blocks + self.num_cached_blocks + self.num_used_blocks
        return self.num_used_blocks / total if total else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of admitted prompt tokens that the prefix cache already held."""
        return self.prefix_tokens_hit / max(1, self.prefix_tokens_queried)


_STEP_FIELDS = tuple(each.name for each in fields(StepStats))
_step_values = attrgetter(*_STEP_FIELDS)


# Fields of which a sum says nothing: the mean, or the largest, of the replicas'.
_MEANS = (
    *("kv_waste", "decode_seconds", "prompt_token_seconds", "roofline_share"),
    "expert_imbalance",
)


def summed(
    stats: Sequence[StepStats], num_waiting: int = 0, num_waiting_tokens: int = 0
) -> StepStats:
    """Return the figures of several engines as of one: sums; means of shares and of times a token;
    of lists, the same by position. ``num_waiting`` samples more wait, with so many tokens."""
    if not stats:
        return StepStats.idle()
    values: dict[str, Any] = {}
    for name in _STEP_FIELDS:
        known = [value for each in stats if (value := getattr(each, name)) is not None]
        if not known:
            values[name] = None
        elif isinstance(known[0], tuple):
            by_position = zip_longest(*filter(None, known), fillvalue=0)
            values[name] = tuple(_together(name, each) for each in by_position)
        else:
            values[name] = _together(name, known)
    values["num_waiting"] += num_waiting
    values["num_waiting_tokens"] += num_waiting_tokens
    return StepStats(**values)


def _together(name: str, known: Sequence[float]) -> float:
    return sum(known) / len(known) if name in _MEANS else sum(known)


def _gap(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
