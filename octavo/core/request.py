"""One generation, with its tokens, its KV blocks and its status, which the scheduler changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from octavo.core.sampling_params import SamplingParams
from octavo.core.sink_window import SinkWindow
from octavo.core.state_types import StateChain
from octavo.core.stats import RequestStats
from octavo.core.token_counts import SeenTokens, TokenCounts
from octavo.core.token_mask import Bits, MaskPart, TokenMask


class RequestStatus(Enum):
    """The status of a request. A preempted request is WAITING with ``num_preemptions > 0``."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_FINISHED = RequestStatus.FINISHED  # asked for every token, and an Enum is slow to look it up


class FinishReason(Enum):
    """The reason why a generation ended; values are those of the OpenAI API, plus ``error``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False, slots=True)
class Request:
    """One generation. ``n > 1`` is n requests that fork from the first one's prompt.

    There is no prefill or decode mode. A request knows ``token_ids`` (prompt, then output), and of
    these the first ``num_computed_tokens`` have their KV in the blocks of ``block_ids``::

        token_ids   [ prompt ............... | output ... ]
        computed    [ KV exists ... )[ in flight )
        block_ids   [ b0 ][ b1 ][ b2 ][ b3 ]   the last one may be partly empty

    Where groups of layers have block tables of their own, the others are ``further_tables``, and
    entries may be ``kv_tables.GONE``.

    A step computes some of the tokens that are still missing; when it reaches the last known token,
    the next one is sampled from the model's logits there. Where steps overlap, the next step may be
    planned before that token is known: it is awaited, and counts as known.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    seed: int = 0
    sample_index: int = 0
    eos_token_ids: tuple[int, ...] = ()
    # Tokens that it may generate. A mask follows the tokens of one request: none is shared.
    mask: TokenMask | None = field(default=None, repr=False)
    # Tenants with different salts never share a cached block.
    cache_salt: str = ""
    # For fair shares among waiting requests (core/fair_queue.py): a tenant of twice the weight gets
    # twice the tokens.
    tenant: str = ""
    weight: float = 1.0
    # The request whose prompt this one shares, for n > 1.
    fork_of: Request | None = field(default=None, repr=False)
    # Its steps have no other requests than the samples of its prompt: if one of them fails, this
    # prompt is the cause.
    isolated: bool = False

    # Counts of its tokens, for penalties: made when they are first asked for.
    counts: TokenCounts | None = field(init=False, default=None, repr=False)
    token_ids: list[int] = field(init=False)
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    num_computed_tokens: int = field(init=False, default=0)
    block_ids: list[int] = field(init=False, default_factory=list)
    further_tables: list[list[int]] = field(init=False, default_factory=list)
    num_published_blocks: int = field(init=False, default=0)
    # Set by the block manager: the KV pool that its blocks are in.
    pool: int = field(init=False, default=0)
    # State slots that it holds while it runs, of a model with recurrent layers.
    states: StateChain | None = field(init=False, default=None)
    # In steps under way: tokens that are computed, drafts included, and tokens that will certainly
    # be sampled (where their number is open, none is certain).
    num_tokens_in_flight: int = field(init=False, default=0)
    num_awaited_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    # Set by the engine: whether the executor goes on from its tokens before they are known here.
    is_fed: bool = field(init=False, default=False)
    # Set by the scheduler: the tokens that its queries attend to, None for all.
    sink_window: SinkWindow | None = field(init=False, default=None)
    # Set by the scheduler: the number of tokens at which the generation ends by length.
    max_total_tokens: int = field(init=False, default=0)
    # Set by the scheduler: the order of admission, smaller first.
    queue_key: tuple[int, int] = field(init=False, default=(0, 0))
    # Set by the scheduler: when it was first admitted, in numbers that only grow.
    turn: int = field(init=False, default=0)
    # Set by the scheduler: known tokens when it was last admitted. More by now is progress.
    num_tokens_at_admission: int = field(init=False, default=0)
    # Keys of its first full blocks, as far as they were asked for (core/block_store.py); and those
    # that it waits for, or has waited for since it was queued.
    block_keys: list[bytes] = field(init=False, default_factory=list, repr=False)
    awaited_keys: tuple[bytes, ...] = field(init=False, default=(), repr=False)
    # Prompt positions whose log-probabilities were already reported.
    num_prompt_logprobs: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)
    # The stop token id or stop string; None for end of text and for other reasons.
    stop_reason: int | str | None = field(init=False, default=None)
    error: str | None = field(init=False, default=None)
    stats: RequestStats = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.stats = RequestStats(self.arrival_time, len(self.prompt_token_ids))

    @property
    def block_tables(self) -> tuple[list[int], ...]:
        """The block table of each group of layers; ``block_ids`` is the first."""
        return (self.block_ids, *self.further_tables)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    def output_since(self, count: int) -> list[int]:
        """Return the output without its first ``count`` tokens, at the cost of those returned."""
        return self.token_ids[len(self.prompt_token_ids) + count :]

    def seen_tokens(self) -> SeenTokens:
        """Return how often each token occurs in the output, for penalties."""
        counts = self.counts
        if counts is None or counts.num_tokens > self.num_output_tokens:
            has_repetition = self.params.repetition_penalty != 1.0
            counts = TokenCounts(self.prompt_token_ids if has_repetition else ())
            self.counts = counts
        if counts.num_tokens < self.num_output_tokens:
            counts.advance(self.output_since(counts.num_tokens))
        return SeenTokens(counts, {})

    @property
    def is_masked(self) -> bool:
        """True if the mask may make a token depend on those before it: then tokens come one by
        one."""
        return self.mask is not None and not self._up_to_date(self.mask).is_over

    @property
    def mask_seconds(self) -> float:
        """Time that ``bitmask`` is likely to take, see ``TokenMask``."""
        return 0.0 if self.mask is None else self.mask.seconds

    def mask_parts(self) -> Sequence[MaskPart]:
        """Return the parts of the mask that can be made beforehand, see ``TokenMask``."""
        return () if self.mask is None else self._up_to_date(self.mask).parts()

    def bitmask(self) -> Bits | None:
        """Return the tokens that may follow the known ones (see ``TokenMask``); None if all may."""
        return None if self.mask is None else self._up_to_date(self.mask).bitmask()

    def _up_to_date(self, mask: TokenMask) -> TokenMask:
        """Return the mask after it has followed the known tokens."""
        behind = self.num_output_tokens - mask.num_tokens
        if behind > 0:
            mask.advance(self.token_ids[-behind:])
        elif behind < 0:
            mask.rollback(-behind)
        return mask

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of known and awaited tokens that no step has computed or is computing: 1 for a
        request that decodes, more for one that prefills."""
        return (
            len(self.token_ids)
            + self.num_awaited_tokens
            - self.num_computed_tokens
            - self.num_tokens_in_flight
        )

    @property
    def is_finished(self) -> bool:
        return self.status is _FINISHED
