"""What of a draft was right.

A forward pass samples a token after the last known one of a request, and after each token of its
draft, with the random numbers of those places. A drafted token is right if it is the one that was
sampled where it stands; then the token sampled after it counts too. So what comes out is, token for
token, what single steps would have sampled, whoever made the draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from octavo.core.batch import Draft


class Verified(NamedTuple):
    """The rows whose tokens count, 0 for that of the last known token and i + 1 for the draft's i:
    a path from the root. And the tokens, which are one for each."""

    rows: list[int]
    token_ids: list[int]

    @property
    def path(self) -> list[int]:
        """The drafted tokens that were right, of which more is known than that."""
        return [row - 1 for row in self.rows[1:]]


def verify(draft: Draft, token_ids: Sequence[int], unsound: Collection[int] = ()) -> Verified:
    """Walk down a draft as far as it is right.

    Args:
        token_ids: [1 + len(draft)], what was sampled in each row.
        unsound: rows that are no numbers, or in which no token could be sampled. The walk ends
            before them, so that the next step meets them in its first row, as without a draft.
    """
    children = {
        (parent, token_id): index
        for index, (parent, token_id) in enumerate(zip(draft.parents, draft.token_ids, strict=True))
    }
    rows: list[int] = []
    node: int | None = -1
    while node is not None and node + 1 not in unsound:
        rows.append(node + 1)
        node = children.get((node, token_ids[node + 1]))
    return Verified(rows, [token_ids[row] for row in rows])
