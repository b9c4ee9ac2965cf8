"""Drafting by heads without attention, which read one hidden state of a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import DraftingRequest
from octavo.core.request import Request
from octavo.runtime.hidden_states import ComputedTokens, States
from octavo.speculation.draft_tree import DraftTreeShape


class LastStates:
    """A ``StepFollower`` that keeps each request's latest hidden state after ``depth`` layers.

    ``norm``: applied to the state, float32 [hidden_size], before it is kept.
    """

    def __init__(self, depth: int, norm: Callable[[np.ndarray], np.ndarray] = np.copy):
        self._depth = depth
        self._norm = norm
        self._kept: dict[str, tuple[int, np.ndarray]] = {}  # position, state

    def follow(self, batch: Batch, computed: Sequence[ComputedTokens], states: States) -> None:
        """Keep the states that the step's tokens are sampled from."""
        ends = [each for each in computed if each.samples]
        if ends:
            of_step = states(self._depth)
            for each in ends:
                self._kept[each.request.request_id] = (
                    each.end - 1,
                    self._norm(of_step[each.rows[-1]]),
                )

    def of(self, request: Request) -> np.ndarray | None:
        """The state that the last known token was sampled from, float32 [hidden_size]; None if its
        step was not followed."""
        position, state = self._kept.get(request.request_id, (-1, None))
        return state if position == len(request.token_ids) - 2 else None

    def forget(self, request: Request) -> None:
        self._kept.pop(request.request_id, None)


class StateProposer:
    """A ``DraftProposer`` over the states of ``LastStates``. Subclasses implement :meth:`draft`."""

    def __init__(self, states: LastStates, shape: DraftTreeShape):
        self.max_tokens = shape.max_tokens
        self.shape = shape
        self.seconds = 0.0
        self._states = states

    def wants(self, request: Request) -> bool:
        return True

    def propose(self, openings: Sequence[DraftingRequest], batch_tokens: int) -> dict[str, Draft]:
        begin = time.perf_counter()
        found = [(opening, self._states.of(opening.request)) for opening in openings]
        seen = [(opening, state) for opening, state in found if state is not None]
        drafts: dict[str, Draft] = {}
        if seen:
            drafts = self.draft([o for o, _ in seen], np.stack([state for _, state in seen]))
        self.seconds += time.perf_counter() - begin
        return drafts

    def draft(self, openings: Sequence[DraftingRequest], states: np.ndarray) -> dict[str, Draft]:
        """Drafts by request id; ``states`` are float32 [openings, hidden_size]."""
        raise NotImplementedError

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        pass

    def observe_step(self, batch: Batch, seconds: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        self._states.forget(request)
