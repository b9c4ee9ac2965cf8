"""Scores tokens from rows of logits.

Rows are taken one at a time, on the CPU, with sums in float64: none depends on others of its batch,
and each stays in the cache while it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from octavo.base.errors import EngineError, OctavoError
from octavo.core.batch import BAD_LOGITS
from octavo.core.request import Request
from octavo.quality.windows import ScoringWindows


class ScoredRow(NamedTuple):
    """The prediction of a model at one position.

    ``number``: index of the scored token. ``nll``: its -ln p, in nats. ``top``: the most probable
    token. ``distances``: float32 [V], ln p(top) - ln p(token). ``log_sum``: -ln p(top).
    """

    number: int
    nll: float
    top: int
    distances: np.ndarray
    log_sum: float


class RowSink(Protocol):
    """A consumer of rows besides the perplexity."""

    def take(self, scored: ScoredRow) -> None:
        """Take a row. Every scored token comes once, in no order; the row is not valid after the
        call."""
        ...


class Scorer:
    """Observes the logits of windows (a ``LogitsObserver``): the request "7" is window 7.

    ``nll``: float64 [num_scored]; NaN where nothing was observed yet. ``failure``: an error of a
    sink or of the logits. It must not be raised within the engine, which would blame the request
    for it.
    """

    def __init__(self, windows: ScoringWindows, sinks: Sequence[RowSink] = ()):
        self.nll = np.full(windows.num_scored, np.nan)
        self.num_seen = 0
        self.nll_sum = 0.0  # so far
        self.failure: OctavoError | None = None
        self._windows, self._sinks = windows, sinks
        # A preempted window returns to positions that were scored before.
        self._next = [windows.first_judge] * len(windows)

    @property
    def perplexity(self) -> float:
        """Perplexity of the tokens scored so far."""
        return math.exp(self.nll_sum / self.num_seen) if self.num_seen else math.nan

    def wants(self, request: Request) -> range:
        if self.failure is not None:
            return range(0)
        return range(self._next[int(request.request_id)], self._windows.ctx - 1)

    def observe(self, request: Request, first: int, logits: np.ndarray) -> None:
        window = int(request.request_id)
        if self.failure is not None:
            return
        try:
            for position, row in enumerate(logits, start=first):
                self._take(window, position, row)
                self._next[window] = position + 1
        except OctavoError as error:
            self.failure = error

    def _take(self, window: int, position: int, logits: np.ndarray) -> None:
        windows = self._windows
        if not np.isfinite(logits).all():
            raise EngineError(f"window {window}, position {position}: {BAD_LOGITS}")
        top = int(logits.argmax())
        distances = logits[top] - logits
        log_sum = log_sum_of(distances)
        nll = log_sum + float(distances[windows.token_ids[window, position + 1]])
        number = window * windows.num_scored_each + position - windows.first_judge
        scored = ScoredRow(number, nll, top, distances, log_sum)
        for sink in self._sinks:
            sink.take(scored)
        self.nll[number] = nll
        self.nll_sum += nll
        self.num_seen += 1


def log_sum_of(distances: np.ndarray) -> float:
    """Return ln of the sum of e^-distance: -ln p of the token that distances are from."""
    return math.log(np.exp(np.negative(distances, dtype=np.float64)).sum())
