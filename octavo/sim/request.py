"""A request on its way through a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.base.renamed import RenamedAttribute
from octavo.measure.request_record import RequestRecord
from octavo.sim.prompts import PromptSpec


@dataclass(eq=False, slots=True)
class SimRequest:
    """One request that was sent, and its answer so far.

    ``number``: how many were sent before it. ``token_ids``: of its prompt. ``replica``: the name of
    the one that served it last. ``times_sent``: more than 1 if a replica failed meanwhile.
    """

    prompt: PromptSpec
    number: int
    token_ids: list[int]
    record: RequestRecord
    output: list[int] = field(default_factory=list)
    first_scheduled: float | None = None
    num_preemptions: int = 0
    replica: str = ""
    times_sent: int = 0
    is_over: bool = False

    ask = RenamedAttribute("prompt")

    @property
    def num_missing(self) -> int:
        """Number of tokens of the answer that are still to come."""
        return self.prompt.output_len - len(self.output)

    def take(self, token_ids: list[int], now: float) -> None:
        """Record tokens of the answer."""
        self.record.event_times.append(now)
        self.record.event_tokens.append(len(token_ids))
        self.output.extend(token_ids)

    def begin_anew(self) -> None:
        """Drop the answer so far: the replica that computed it has failed."""
        self.record.cached_tokens = None
        self.record.event_times.clear()
        self.record.event_tokens.clear()
        self.output.clear()
        self.first_scheduled = None

    def end(self, now: float, finish_reason: str | None = None) -> None:
        """Record that the answer is complete, or that nothing more will come."""
        record = self.record
        record.ended = now
        if record.event_times:
            record.first_byte = record.first_token = record.event_times[0]
            record.last_token = record.event_times[-1]
        record.output_tokens = len(self.output)
        record.finish_reason = finish_reason
        self.is_over = True

    def fail(self, now: float, error: str, status: int = 200) -> None:
        """Record that nothing more will come, because of an error."""
        self.record.error, self.record.status = error, status
        self.end(now)
