"""The interface of drafters, which propose draft tokens; implemented in `octavo.speculation`.

A ``Draft`` is computed together with the last known token of its request, and accepted draft tokens
need no step of their own (speculative decoding; Leviathan et al., ICML 2023; trees as in SpecInfer,
ASPLOS 2024). Whatever is drafted, the answer is the same as without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from octavo.core.batch import Batch, Draft
from octavo.core.request import Request


class DraftingRequest(NamedTuple):
    """A request that decodes in the next step, and the number of tokens that may be drafted for it.

    ``request.token_ids`` are all known, all but the last are computed, and ``request.block_ids``
    have slots for the last one and ``max_tokens`` more.
    """

    request: Request
    max_tokens: int


class DraftProposer(Protocol):
    """Makes drafts. It is called between two steps, on the engine's thread, and must not raise
    because of the requests that it is given: it may always propose none."""

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens that it drafts for a request at once."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent in ``propose`` and ``observe`` so far."""
        ...

    def wants(self, request: Request) -> bool:
        """Return whether it may draft the next tokens of a request, as things are.

        If so, ``propose`` is called for the request, which waits for the end of each of its steps
        where others would run ahead; if not, the request pays nothing.
        """
        ...

    def propose(
        self, requests: Sequence[DraftingRequest], /, batch_tokens: int
    ) -> Mapping[str, Draft]:
        """Return drafts by request id, for any of the requests; no draft is empty.

        ``batch_tokens`` is the number of tokens that the step computes in any case. Drafts are cut
        to their request's ``max_tokens`` and to the step's budget.
        """
        ...

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Learn from a verified draft, ``num_accepted`` of whose tokens were accepted.

        ``request.token_ids`` have these, and the token that followed. The request may have ended
        with them, and been forgotten.
        """
        ...

    def observe_step(self, batch: Batch, seconds: float) -> None:
        """Learn how long a step took, from when it could run to its results."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended or lost its blocks."""
        ...
