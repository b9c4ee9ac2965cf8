"""Who guesses at the next tokens of requests, as the engine sees it (:mod:`octavo.speculation`).

A guess is a ``Draft``, computed together with the last known token of its request; those of its
tokens that are right need no step of their own (speculative decoding; Leviathan et al., ICML 2023;
trees as in SpecInfer, ASPLOS 2024). Whatever is guessed, the answer is what it would be without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from octavo.core.batch import Batch, Draft
from octavo.core.request import Request


class DraftingRequest(NamedTuple):
    """A request that decodes in the next step, and how many tokens may be guessed for it.

    ``request.token_ids`` are all known, all but the last are computed, and ``request.block_ids``
    have slots for the last one and ``room`` more.
    """

    request: Request
    room: int


class DraftProposer(Protocol):
    """Makes drafts. It is called between two steps, on the thread of the engine, and must not raise
    for what it has been given: no guess is always an answer."""

    @property
    def max_tokens(self) -> int:
        """The most that it ever guesses for a request at once."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent in ``propose`` and ``observe`` so far."""
        ...

    def wants(self, request: Request) -> bool:
        """Whether it may guess at the next tokens of a request, as things are.

        If so, the request waits for the end of each of its steps, where others would run ahead, and
        ``propose`` is asked; if not, it costs nothing.
        """
        ...

    def propose(
        self, openings: Sequence[DraftingRequest], batch_tokens: int
    ) -> Mapping[str, Draft]:
        """Drafts by request id, for as many of the openings as it likes; none is empty.

        ``batch_tokens`` are the tokens that the step computes anyhow. Drafts longer than their
        opening's room are cut, and those that the step's budget has no room for.
        """
        ...

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """A draft was verified: so many of its tokens, down one path, were right.

        ``request.token_ids`` have them, and the one that followed. The request may have ended with
        them, and been forgotten.
        """
        ...

    def observe_step(self, batch: Batch, seconds: float) -> None:
        """A step took so long, from when it could run to when its results were there."""
        ...

    def forget(self, request: Request) -> None:
        """A request has ended, or lost its blocks: nothing kept for it is of use."""
        ...
