"""Verification of drafts in speculative decoding: the acceptance rules and their default.

A forward pass samples a token after the last known one of a request, and after each token of its
draft, with the random numbers of those positions. The default rule, :class:`ExactAcceptance`,
accepts a drafted token if it equals the one sampled at its position; then the token sampled after
it counts too. So the output is, token for token, that of single steps, whatever made the draft.
Other rules are in ``acceptance.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.core.batch import Batch, Draft
from octavo.core.request import Request

if TYPE_CHECKING:
    import numpy as np


class VerifiedDraft(NamedTuple):
    """The result of verifying a draft: the accepted path, and the tokens it yields.

    ``rows`` are those whose tokens count, 0 for the last known token and i + 1 for token i of the
    draft; ``token_ids`` has one token for each.
    """

    rows: list[int]
    token_ids: list[int]

    @property
    def path(self) -> list[int]:
        """The indices of the accepted tokens that have a row of their own in the step."""
        return [row - 1 for row in self.rows[1:]]


class SampledDraft(NamedTuple):
    """A draft, with what a forward pass has sampled in its rows.

    Args:
        token_ids: [1 + len(draft)], what was sampled in each row.
        unsound: rows with a NaN or an infinity, or in which no token could be sampled; never the
            first. A path ends before them, so that the next step meets them in its first row, as
            it would without a draft.
        probabilities: float32 [1 + len(draft), V], the distributions that the tokens were drawn
            from, after masks, penalties, top_k and top_p; undefined for unsound rows. None unless
            the acceptance rule asked for them.
    """

    request: Request
    draft: Draft
    token_ids: Sequence[int]
    unsound: Collection[int] = ()
    probabilities: np.ndarray | None = None

    def along(self, path: Iterable[int], last: int | None = None) -> VerifiedDraft:
        """Return the tokens of a path from the root, given by its indices, and the token after it:
        ``last``, or the one that was sampled there."""
        rows, token_ids = [0], []
        for index in path:
            token_ids.append(self.draft.token_ids[index])
            if index + 1 in self.unsound:
                return VerifiedDraft(rows, token_ids)
            rows.append(index + 1)
        token_ids.append(self.token_ids[rows[-1]] if last is None else last)
        return VerifiedDraft(rows, token_ids)


class Acceptance(Protocol):
    """A rule that decides which drafted tokens are accepted."""

    def weighs(self, batch: Batch) -> Collection[str]:
        """Return the ids of the requests whose drafts are verified by their probabilities."""
        ...

    def verify(self, sampled_draft: SampledDraft) -> VerifiedDraft:
        """Return the accepted path of a draft and the token after it, which is none of those
        that were drafted at its position."""
        ...


class ExactAcceptance:
    """Accepts a drafted token if it is the one that was sampled at its position."""

    def weighs(self, batch: Batch) -> Collection[str]:
        return ()

    def verify(self, sampled_draft: SampledDraft) -> VerifiedDraft:
        children = sampled_draft.draft.children()
        rows: list[int] = []
        node: int | None = -1
        while node is not None and node + 1 not in sampled_draft.unsound:
            rows.append(node + 1)
            node = children.get((node, sampled_draft.token_ids[node + 1]))
        return VerifiedDraft(rows, [sampled_draft.token_ids[row] for row in rows])
