"""The share of the running requests that one step takes, where several steps are in flight.

Stages of a pipeline compute different steps at the same time. A request that decodes can be in one
of them only, since its next token is not known before the last stage has sampled it. If a step took
every request that is ready, requests that start together would stay together, in one step at a
time, and all stages but one would be idle. So a pipeline of d stages gets a d-th of them in each
step, and a d-th of the prompt tokens that are due::

    requests 0 1 2 3 4 5 6 7, two stages     step 1: 0 1 2 3     step 2: 4 5 6 7     step 3: 0 1 …

How requests are grouped changes no token: it only decides when each is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # planners ask for shares without an engine
    from octavo.core.request import Request

# Prompt tokens that a step may have however few are due: each stage of a step pays for its weights.
MIN_PROMPT_TOKENS = 256


class StepShare(Protocol):
    """Limits what a step takes of all that is ready."""

    def decoding(self, ready: Sequence[Request], running: Sequence[Request]) -> Sequence[Request]:
        """Return the requests that decode in the next step, of those that are ready to. ``running``
        are all, with those in flight and those whose prompts are under way."""
        ...

    def prompt_tokens(self, due: Iterable[int]) -> float:
        """Return the most prompt tokens of the next step. ``due``: those that each request has yet
        to compute, in their order; not all of them need be read."""
        ...


class WholeShare:
    """Everything that is ready, where one step is computed at a time."""

    def decoding(self, ready: Sequence[Request], running: Sequence[Request]) -> Sequence[Request]:
        return ready

    def prompt_tokens(self, due: Iterable[int]) -> float:
        return inf


class PipelineShare:
    """A part of the requests for each of the steps in flight.

    Args:
        depth: steps in flight, one for each stage.
        max_tokens: of a step; more than ``depth`` times as many prompt tokens make no difference.
    """

    def __init__(self, depth: int, max_tokens: int):
        self._depth, self._max_tokens = depth, max_tokens

    def decoding(self, ready: Sequence[Request], running: Sequence[Request]) -> Sequence[Request]:
        num_decoding = sum([request.num_uncomputed_tokens <= 1 for request in running])
        return ready[: -(-num_decoding // self._depth)]

    def prompt_tokens(self, due: Iterable[int]) -> float:
        total = 0
        for count in due:
            total += count
            if total >= self._depth * self._max_tokens:
                break
        return max(MIN_PROMPT_TOKENS, -(-total // self._depth))
