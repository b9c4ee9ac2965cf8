"""The record of one request of a load test, and its metrics.

Times are seconds on one clock, which begins with the run; whether they were taken from sockets or
from a simulator makes no difference here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """One request that was sent.

    A request is ``completed`` if its whole answer came, ``unfinished`` if the run was interrupted
    before that, else it has failed.
    """

    request_id: str
    scheduled: float  # when it should have been sent
    sent: float
    ended: float  # when nothing more could come
    queue_time: float = 0.0  # of waiting for a place below the concurrency limit
    connected: float | None = None
    first_byte: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    event_times: list[float] = field(default_factory=list)  # of events with content
    event_tokens: list[int | None] = field(default_factory=list)  # tokens in each, where known
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    output_tokens_from: str = "events"  # counted by "usage", "tokenizer" or "events"
    finish_reason: str | None = None
    status: int = 200
    error: str | None = None
    unfinished: bool = False
    text: str | None = None

    @property
    def completed(self) -> bool:
        return self.error is None and self.first_token is not None and self.last_token is not None

    @property
    def send_lag(self) -> float:
        """Seconds by which the load generator itself was late."""
        return self.sent - self.scheduled - self.queue_time

    @property
    def ttft(self) -> float:
        assert self.first_token is not None
        return self.first_token - self.sent

    @property
    def e2el(self) -> float:
        assert self.last_token is not None
        return self.last_token - self.sent

    @property
    def delay(self) -> float:
        """Seconds from the time at which it should have been sent to that at which it was."""
        return self.sent - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None where there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Gaps between events with content; one event may carry several tokens."""
        return [after - before for before, after in pairwise(self.event_times)]

    @property
    def normalized_latency(self) -> float | None:
        """E2EL for each output token (Yu et al., "Orca", OSDI 2022); None without tokens."""
        return self.e2el / self.output_tokens if self.output_tokens else None

    def tokens_of_events(self) -> list[int]:
        """Return the tokens of each event. Where the number is not known, it is the rest of the
        total, spread evenly."""
        if None not in self.event_tokens:
            return list(self.event_tokens)  # type: ignore[arg-type]
        known = sum(count for count in self.event_tokens if count is not None)
        unknown = self.event_tokens.count(None)
        left = max(0, self.output_tokens - known)
        shares = (left * (i + 1) // unknown - left * i // unknown for i in range(unknown))
        return [next(shares) if count is None else count for count in self.event_tokens]

    def as_json(self) -> dict[str, Any]:
        """Return every field, by its name, times in seconds."""
        return dataclasses.asdict(self)
