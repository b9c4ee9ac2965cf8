"""What crosses between the engine and an executor: these types, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.request import Request

# What is said in ``StepOutput.errors`` when the model's numbers, and not a request, are wrong.
DAMAGED = "the model produced NaN or infinite values for this request"
BAD_LOGITS = "the model's logits are NaN, +inf, or all -inf"


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Tokens ``[start, start + num_tokens)`` of a request, to be computed in one step."""

    request: Request
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, so that a next one is sampled."""
        return self.start + self.num_tokens >= len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step: any mix of prompt chunks and single tokens.

    ``block_copies`` are (source, destination) block ids, to be copied before anything else of the
    step runs. Block tables are read from ``item.request.block_ids`` during ``Executor.submit``,
    and not after it.

    With ``max_rounds`` above 1, all items decode, and there are slots for that many tokens of
    each: the executor may go on by itself, up to so many rounds, each from the tokens of the one
    before. What it computes beyond the end of a request is dropped.
    """

    step_id: int
    items: tuple[ScheduledRequest, ...]
    finished_ids: tuple[str, ...] = ()
    preempted_ids: tuple[str, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    max_rounds: int = 1

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @property
    def num_seqs(self) -> int:
        return len(self.items)

    @property
    def is_pure_decode(self) -> bool:
        return all(item.num_tokens == 1 for item in self.items)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token that is there, and the most likely ones."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced, by request id.

    ``token_ids`` holds a list for each item that samples, of one token a round. A request in
    ``errors`` has none: its row could not be sampled, and it alone ends.
    """

    token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
