"""What crosses between the engine and an executor: these types, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.request import Request

# What is said in ``StepOutput.errors`` when the model's numbers, and not a request, are wrong.
DAMAGED = "the model produced NaN or infinite values for this request"
BAD_LOGITS = "the model's logits are NaN, +inf, or all -inf"
# And when it is what the request asks for.
OVERFLOW = "logit_bias or penalties made a logit NaN or infinite"
NO_TOKEN_LEFT = "allowed_token_ids, bad_words, min_tokens and logit_bias leave no token to sample"


NO_STATE = -1


class StateStep(NamedTuple):
    """The slots of states of one step of a request (``state_slots.py``): what it goes on from
    (NO_STATE where a sequence begins), and what it writes; that of no other item of a batch."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses at the tokens that follow a request's known ones: a chain, or a tree of them.

    ``parents`` has for each token the index of the one that it follows, or -1 for the last known
    token. Parents come before their children, and siblings differ, so that the tokens which turn
    out to be right lead down one path::

        token_ids   7   8   3   9          (known) ── 7 ── 8 ── 9
        parents    -1   0   0   1                     └── 3
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.token_ids) or not all(
            -1 <= parent < index for index, parent in enumerate(self.parents)
        ):
            raise ValueError(f"parents come before their children: {self.parents}")
        if len(set(zip(self.parents, self.token_ids, strict=True))) < len(self.token_ids):
            raise ValueError("tokens that follow the same one differ")

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> Draft:
        """Each token follows the one before."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self) - 1))

    def first(self, count: int) -> Draft:
        """The first ``count`` tokens, which are a tree too."""
        if count >= len(self):
            return self
        return Draft(self.token_ids[:count], self.parents[:count])

    def children(self) -> dict[tuple[int, int], int]:
        """The index of each token, by the index of the one that it follows and what it is."""
        edges = zip(self.parents, self.token_ids, strict=True)
        return {edge: index for index, edge in enumerate(edges)}

    def depths(self) -> list[int]:
        """How far each token is from the last known one: 0 for those that follow it."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def path(self, token_ids: Iterable[int]) -> list[int]:
        """The indices along which the draft says what ``token_ids`` say, as far as it does."""
        children = self.children()
        path: list[int] = []
        for token_id in token_ids:
            index = children.get((path[-1] if path else -1, token_id))
            if index is None:
                break
            path.append(index)
        return path


@dataclass(slots=True)  # not frozen, only because one is made for every token: it takes a third
class ScheduledRequest:
    """Tokens of a request, from position ``start`` on, to be computed in one step::

        | known tokens ................ | draft ....... |
        start                           end             start + num_tokens

    ``num_sampled`` is how many tokens the executor may sample: none where the step stops short of
    the last known token, else one, or up to that many:

    - with a ``draft``, as many of it as are right, along one path, and the one that follows;
    - without one, by multi-step scheduling: each further step goes on from the token before.

    ``states`` are None for models whose layers keep something of each token, and nothing else.

    There are slots for all of them. A draft takes one for each of its tokens, in their order,
    whatever the positions they stand for; those of the path that was right have to be where their
    positions say before the next step reads them, which is the executor's business.
    """

    request: Request
    start: int
    num_tokens: int
    num_sampled: int
    draft: Draft | None = None
    states: StateStep | None = None

    @property
    def num_seen(self) -> int:
        """Tokens before ``start`` that the first of these sees."""
        sink_window = self.request.sink_window
        return self.start if sink_window is None else min(self.start, sink_window.num_tokens - 1)

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, so that a next one is sampled."""
        return self.num_sampled > 0

    @property
    def end(self) -> int:
        """The position after the last known token that is computed: the draft's, if it has one."""
        end = self.start + self.num_tokens
        return end if self.draft is None else end - len(self.draft)


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step: any mix of prompt chunks and single tokens.

    ``block_copies`` are (source, destination) block ids, to be copied before anything else of the
    step runs, in their order; ids beyond the pool are those of a shelf (``core/block_store.py``).
    There are batches of copies alone, without items. Block tables are read from
    ``item.request.block_tables`` during ``Executor.submit``, and not after it.
    """

    step_id: int
    items: tuple[ScheduledRequest, ...]
    finished_ids: tuple[str, ...] = ()
    preempted_ids: tuple[str, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([item.num_tokens for item in self.items])

    @property
    def num_known_tokens(self) -> int:
        """Without those that are guesses."""
        return self.num_tokens - sum([len(i.draft) for i in self.items if i.draft is not None])

    @property
    def num_prompt_tokens(self) -> int:
        """In pieces of prompts; the single token with which one may end is no such piece."""
        items = self.items
        return sum([item.num_tokens for item in items if item.num_tokens > 1 and not item.draft])

    @property
    def num_seqs(self) -> int:
        return len(self.items)

    @property
    def num_multi_steps(self) -> int:
        """Number of steps that a lone request may decode in one call, 1 for any other batch."""
        alone = len(self.items) == 1 and self.items[0].draft is None
        return max(1, self.items[0].num_sampled) if alone else 1

    @property
    def is_pure_decode(self) -> bool:
        """Whether nothing of a prompt is computed, but for a last token of one."""
        return all(item.num_tokens == 1 or item.draft is not None for item in self.items)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token that is there, and the most likely ones."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced, by request id.

    ``token_ids`` holds a list for each item that samples, of one token up to ``num_sampled``. A
    request in ``errors`` has none: its row could not be sampled, and it alone ends.
    """

    token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
