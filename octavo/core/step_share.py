"""The share of the running requests that one step takes, where several steps are in flight.

Stages of a pipeline compute different steps at the same time. A request that decodes can be in one
of them only, since its next token is not known before the last stage has sampled it. If a step took
every request that is ready, requests that start together would stay together, in one step at a
time, and all stages but one would be idle. So a pipeline of d stages gets a d-th of them in each
step, and prompts in chunks by which all that are due are soonest through (`prompt_chunks`)::

    requests 0 1 2 3 4 5 6 7, two stages     step 1: 0 1 2 3     step 2: 4 5 6 7     step 3: 0 1 …

How requests are grouped changes no token: it only decides when each is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Protocol

from octavo.core.prompt_chunks import PromptChunks, StageSeconds

if TYPE_CHECKING:  # planners ask for shares without an engine
    from octavo.core.request import Request


class StepShare(Protocol):
    """Limits what a step takes of all that is ready."""

    def decoding(self, ready: Sequence[Request], running: Sequence[Request]) -> Sequence[Request]:
        """Return the requests that decode in the next step, of those that are ready to. ``running``
        are all, with those in flight and those whose prompts are under way."""
        ...

    def prompt_tokens(self, prompts: Sequence[Request], waiting: int) -> float:
        """Return the most prompt tokens of the next step. ``prompts``: requests with more than one
        token to compute. ``waiting``: the tokens of requests that are not running yet."""
        ...


class WholeShare:
    """Everything that is ready, where one step is computed at a time."""

    def decoding(self, ready: Sequence[Request], running: Sequence[Request]) -> Sequence[Request]:
        return ready

    def prompt_tokens(self, prompts: Sequence[Request], waiting: int) -> float:
        return inf


class PipelineShare:
    """A part of the requests for each of the steps in flight.

    Chunks of prompts stay as large as they were while these are computed, so that they come out
    equal; what comes in the meantime has them sized again.

    Args:
        depth: steps in flight, one for each stage.
        max_tokens: of a step.
        seconds: of chunks in the slowest stage, as far as known; see `PromptChunks`.
    """

    def __init__(self, depth: int, max_tokens: int, seconds: StageSeconds | None = None):
        self._depth = depth
        self._chunks = PromptChunks(depth, max_tokens, seconds)
        self._due, self._chunk = 0, 1

    def decoding(self, ready: Sequence[Request], running: Sequence[Request]) -> Sequence[Request]:
        num_decoding = sum([request.num_uncomputed_tokens <= 1 for request in running])
        return ready[: -(-num_decoding // self._depth)]

    def prompt_tokens(self, prompts: Sequence[Request], waiting: int) -> float:
        due = waiting + sum([request.num_uncomputed_tokens for request in prompts])
        if due > self._due:
            self._chunk = self._chunks.size(due)
        self._due = due
        return self._chunk
