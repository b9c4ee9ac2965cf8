"""Which of the drafted tokens are right.

A forward pass samples a token after the last known one of a request, and after each token of its
draft, with the random numbers of those places. By the rule that is used unless another one is asked
for, :class:`ExactAcceptance`, a drafted token is right if it is the one that was sampled where it stands;
then the token sampled after it counts too. So what comes out is, token for token, what single steps
would have sampled, whoever made the draft. Other rules are in ``acceptance.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.core.batch import Batch, Draft
from octavo.core.request import Request

if TYPE_CHECKING:
    import numpy as np


class Verified(NamedTuple):
    """The rows whose tokens count, 0 for that of the last known token and i + 1 for the draft's i:
    a path from the root. And the tokens, which are one for each."""

    rows: list[int]
    token_ids: list[int]

    @property
    def path(self) -> list[int]:
        """The drafted tokens that were right, of which more is known than that."""
        return [row - 1 for row in self.rows[1:]]


class SampledDraft(NamedTuple):
    """A draft, and what a pass made of its rows.

    Args:
        token_ids: [1 + len(draft)], what was sampled in each row.
        unsound: rows that are no numbers, or in which no token could be sampled; not the first. A
            walk down the draft ends before them, so that the next step meets them in its first row,
            as without a draft.
        probabilities: float32 [1 + len(draft), V], from which each row's token was drawn, with all
            that the request asks for (masks, penalties, cuts); of unsound rows they mean nothing.
            None where nobody asked for them.
    """

    request: Request
    draft: Draft
    token_ids: Sequence[int]
    unsound: Collection[int] = ()
    probabilities: np.ndarray | None = None

    def along(self, path: Iterable[int], last: int | None = None) -> Verified:
        """The drafted tokens of a path from the root, by their indices, and the token after them:
        ``last``, or what was sampled there."""
        rows, token_ids = [0], []
        for index in path:
            token_ids.append(self.draft.token_ids[index])
            if index + 1 in self.unsound:
                return Verified(rows, token_ids)
            rows.append(index + 1)
        token_ids.append(self.token_ids[rows[-1]] if last is None else last)
        return Verified(rows, token_ids)


class Acceptance(Protocol):
    """A rule by which drafted tokens are accepted."""

    def weighs(self, batch: Batch) -> Collection[str]:
        """The requests, by their ids, whose drafts cannot be judged without probabilities."""
        ...

    def verify(self, sampled_draft: SampledDraft) -> Verified:
        """Walk down a draft as far as it is accepted.

        The token after the last accepted one is none of those that were drafted there.
        """
        ...


class ExactAcceptance:
    """Accepts what was sampled."""

    def weighs(self, batch: Batch) -> Collection[str]:
        return ()

    def verify(self, sampled_draft: SampledDraft) -> Verified:
        children = sampled_draft.draft.children()
        rows: list[int] = []
        node: int | None = -1
        while node is not None and node + 1 not in sampled_draft.unsound:
            rows.append(node + 1)
            node = children.get((node, sampled_draft.token_ids[node + 1]))
        return Verified(rows, [sampled_draft.token_ids[row] for row in rows])
