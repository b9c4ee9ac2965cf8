"""The types that cross between the engine and an executor, `Batch` and `StepOutput` above all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.request import Request
from octavo.core.state_types import StateStep

# Messages of ``StepOutput.errors`` where the model's numbers, and not a request, are wrong.
DAMAGED = "the model produced NaN or infinite values for this request"
BAD_LOGITS = "the model's logits are NaN, +inf, or all -inf"
# And where the request asks for something impossible.
OVERFLOW = "logit_bias or penalties made a logit NaN or infinite"
# Begins an error of a request that its constraint has ended: it is the request's fault.
CONSTRAINT_PROBLEM = "structured_outputs: "
NO_TOKEN_LEFT = (
    "structured_outputs, allowed_token_ids, bad_words, min_tokens and logit_bias leave no token to "
    "sample"
)


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens that may follow a request's known ones: a chain, or a tree of them.

    ``parents`` has for each token the index of the one that it follows, or -1 for the last known
    token. Parents come before their children, and siblings differ, so that the tokens which turn
    out to be right lie on one path::

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
        """Return a draft in which each token follows the one before."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self) - 1))

    def first(self, count: int) -> Draft:
        """Return the first ``count`` tokens, which are a tree too."""
        if count >= len(self):
            return self
        return Draft(self.token_ids[:count], self.parents[:count])

    def children(self) -> dict[tuple[int, int], int]:
        """Return the index of each token, by its parent's index and its token id."""
        edges = zip(self.parents, self.token_ids, strict=True)
        return {edge: index for index, edge in enumerate(edges)}

    def depths(self) -> list[int]:
        """Return the depth of each token in the tree: 0 for those that follow the last known
        token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def path(self, token_ids: Iterable[int]) -> list[int]:
        """Return the indices of the draft tokens that agree with ``token_ids``, up to the first
        that does not."""
        children = self.children()
        path: list[int] = []
        for token_id in token_ids:
            index = children.get((path[-1] if path else -1, token_id))
            if index is None:
                break
            path.append(index)
        return path


@dataclass(slots=True)  # not frozen: one is made for every token, in a third of the time
class ScheduledRequest:
    """Tokens of a request, from position ``start`` on, that one step computes::

        | known tokens ................ | draft ....... |
        start                           end             start + num_tokens

    ``num_sampled`` is the number of tokens that the executor may sample: 0 where the step stops
    short of the last known token, else 1, or more:

    - with a ``draft``: its accepted tokens, along one path, and the token that follows them;
    - without one, by multi-step decoding: each further token goes on from the one before.

    ``states`` is None for models without recurrent layers.

    The block tables have room for all of these tokens. Draft tokens take one place each, in their
    order, whatever positions they stand for. Before the next step reads them, the executor has to
    move the accepted ones to the places of their positions.
    """

    request: Request
    start: int
    num_tokens: int
    num_sampled: int
    draft: Draft | None = None
    states: StateStep | None = None

    @property
    def num_seen(self) -> int:
        """Number of tokens before ``start`` that the first of these attends to."""
        sink_window = self.request.sink_window
        return self.start if sink_window is None else min(self.start, sink_window.num_tokens - 1)

    @property
    def samples(self) -> bool:
        """True if the step reaches the last known token, so that a next one is sampled."""
        return self.num_sampled > 0

    @property
    def end(self) -> int:
        """Position after the last known token that is computed; draft tokens come after it."""
        end = self.start + self.num_tokens
        return end if self.draft is None else end - len(self.draft)


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step: any mix of prompt chunks and single tokens.

    ``block_copies`` are (source, destination) block ids, to be copied in this order before anything
    else of the step runs; ids beyond the pool are blocks of a store (``core/block_store.py``). A
    batch may consist of copies alone, without items. ``Executor.submit`` reads block tables from
    ``item.request.block_tables`` before it returns, and not later.
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
        """Number of tokens without draft tokens."""
        return self.num_tokens - sum([len(i.draft) for i in self.items if i.draft is not None])

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens in chunks of prompts; a prompt's single last token does not count."""
        items = self.items
        return sum([item.num_tokens for item in items if item.num_tokens > 1 and not item.draft])

    @property
    def num_seqs(self) -> int:
        return len(self.items)

    @property
    def num_multi_steps(self) -> int:
        """Number of tokens that a request alone in its batch may decode; 1 in all other cases."""
        alone = len(self.items) == 1 and self.items[0].draft is None
        return max(1, self.items[0].num_sampled) if alone else 1

    @property
    def is_pure_decode(self) -> bool:
        """True if nothing of a prompt is computed, except the last token of one."""
        return all(item.num_tokens == 1 or item.draft is not None for item in self.items)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token that is there, and the most likely ones."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step, by request id.

    ``token_ids`` holds a list for each item that samples, of 1 to ``num_sampled`` tokens. A request
    in ``errors`` has none: its row could not be sampled, and only this request ends.
    """

    token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
