"""One server of a simulation: production's own engine, over a simulated executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from octavo.assembly.engine import build_engine
from octavo.base.errors import EngineError, RequestError
from octavo.core.batch import Batch
from octavo.core.clock import VirtualClock
from octavo.core.engine import Engine, EngineStep
from octavo.core.request import Request
from octavo.executor.simulated import SimulatedExecutor
from octavo.settings.engine import EngineConfig
from octavo.sim.agenda import Agenda
from octavo.sim.costs import BatchCost
from octavo.sim.synthetic_drafts import acceptance, draft_proposer


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What one replica is.

    Args:
        config: of its engine, as of a real one; ``config.cache.num_blocks`` is the KV pool.
        cost: seconds of a step.
        depth, feeds_tokens, host_seconds: how steps overlap; see ``SimulatedExecutor``.
    """

    config: EngineConfig
    cost: BatchCost
    depth: int = 1
    feeds_tokens: bool = False
    host_seconds: float = 0.0


@dataclass(slots=True)
class ReplicaTotals:
    """What a replica has done. ``busy_s``: with at least one step under way."""

    name: str
    num_steps: int = 0
    busy_s: float = 0.0
    last_step_s: float = 0.0  # when it ended
    tokens_computed: int = 0
    num_preemptions: int = 0
    prefix_tokens_queried: int = 0
    prefix_tokens_hit: int = 0
    num_drafts: int = 0
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    num_failures: int = 0


class ReplicaStepTimes(NamedTuple):
    """A step of a replica, and when it was."""

    replica: str
    begun: float
    ended: float
    step: EngineStep


class ReplicaListener(Protocol):
    """Who stands before a replica, and hears what comes of requests."""

    def received(self, request: Request, token_ids: list[int], now: float) -> None:
        """Tokens of an answer have come."""
        ...

    def ended(self, request: Request, now: float) -> None:
        """No more will come."""
        ...

    def refused(self, request: Request, error: RequestError) -> None:
        """The request cannot be served. Not said while it is being added."""
        ...


class Replica:
    """Drives an engine as ``EngineLoop`` does: it obeys and steps in turns, so that what comes
    while a step runs waits for its end.

    Args:
        watch: called with every step that has ended; None costs nothing.
    """

    def __init__(
        self,
        name: str,
        spec: ReplicaSpec,
        agenda: Agenda,
        listener: ReplicaListener,
        watch: Callable[[ReplicaStepTimes], None] | None = None,
    ):
        self.name = name
        self.spec = spec
        self.is_up = True
        self.requests: dict[str, Request] = {}  # that it has, and that have not ended
        self._agenda = agenda
        self._listener = listener
        self._watch = watch
        self._totals = ReplicaTotals(name)
        self._start_engine()

    def _start_engine(self) -> None:
        spec, speculation = self.spec, self.spec.config.speculation
        self._clock = VirtualClock()
        self._cost = _CheckedCost(spec.cost)
        self._inbox: list[Callable[[], object]] = []
        self._begun: deque[float] = deque()  # of the steps in flight
        self._awaits_step = False
        executor = SimulatedExecutor(
            self._cost,
            self._clock,
            spec.config.cache.num_blocks,
            _next_token,
            spec.depth,
            feeds_tokens=spec.feeds_tokens,
            host_seconds=spec.host_seconds,
            accept=None if speculation is None else acceptance(speculation).path,
        )
        proposer = None if speculation is None else draft_proposer(speculation)
        self.engine = build_engine(spec.config, executor, self._clock, proposer)

    # -- from outside ------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._tell(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """Whoever has asked wants no more of it: nothing of it is delivered from now on."""
        if self.requests.pop(request_id, None) is not None:
            self._tell(lambda: self.engine.abort(request_id))

    def fail(self) -> list[Request]:
        """It dies, and comes back with an empty memory when ``is_up`` is set; returns the requests
        that it had."""
        lost = list(self.requests.values())
        self._totals = replace(self.totals(), num_failures=self._totals.num_failures + 1)
        self.is_up = False
        self.requests.clear()
        self._start_engine()
        return lost

    def begin(self) -> None:
        """Begin what steps can be begun now, if none is being waited for."""
        if self._awaits_step or not (self.is_up and self.engine.has_unfinished_requests):
            return
        self._clock.advance_to(self._agenda.now)
        while len(self._begun) < self.spec.depth:
            begun = self._clock.now()
            if not self.engine.begin_step():
                break
            self._cost.check()
            self._begun.append(begun)
        engine, ends = self.engine, self.engine.next_result_at
        if ends is not None:
            self._awaits_step = True
            self._agenda.at(ends, lambda: self._finish(engine))

    def totals(self) -> ReplicaTotals:
        """What it has done so far, its engines before a failure included."""
        before, scheduler = self._totals, self.engine.scheduler
        drafts = scheduler.drafts
        return replace(
            before,
            num_preemptions=before.num_preemptions + scheduler.num_preemptions,
            prefix_tokens_queried=before.prefix_tokens_queried + scheduler.prefix_tokens_queried,
            prefix_tokens_hit=before.prefix_tokens_hit + scheduler.prefix_tokens_hit,
            num_drafts=before.num_drafts + drafts.num_drafts,
            draft_tokens=before.draft_tokens + drafts.num_tokens,
            draft_tokens_accepted=before.draft_tokens_accepted + drafts.num_accepted,
        )

    # -- inside ------------------------------------------------------------------------------

    def _tell(self, command: Callable[[], object]) -> None:
        if self._awaits_step:
            self._inbox.append(command)
        else:
            command()

    def _add(self, request: Request) -> None:
        if request.request_id not in self.requests:
            return  # aborted before the engine came to hear of it
        try:
            self.engine.add(request)
        except RequestError as error:
            del self.requests[request.request_id]
            refusal = error
            self._agenda.at(self._agenda.now, lambda: self._listener.refused(request, refusal))

    def _finish(self, engine: Engine) -> None:
        """The oldest step ends."""
        if engine is not self.engine:
            return  # one that has failed meanwhile
        step, now = engine.finish_step(), self._agenda.now
        self._awaits_step = False
        begun, totals = self._begun.popleft(), self._totals
        totals.num_steps += 1
        totals.tokens_computed += step.stats.num_tokens
        totals.busy_s += now - max(begun, totals.last_step_s)
        totals.last_step_s = now
        if self._watch is not None:
            self._watch(ReplicaStepTimes(self.name, begun, now, step))
        self._deliver(step, now)
        commands, self._inbox = self._inbox, []
        for command in commands:
            command()

    def _deliver(self, step: EngineStep, now: float) -> None:
        requests, received = self.requests, self._listener.received
        for update in step.updates:
            request = update.request
            if request.request_id not in requests:
                continue  # nobody listens any more
            received(request, update.new_token_ids, now)
            if request.finish_reason is not None:
                del requests[request.request_id]
                self._listener.ended(request, now)


class _CheckedCost:
    """The cost of steps. For what it raises the engine would blame the requests of the step, and
    let them fail, one after the other."""

    def __init__(self, cost: BatchCost):
        self._cost = cost
        self._error: Exception | None = None

    def __call__(self, batch: Batch) -> float:
        try:
            return self._cost(batch)
        except Exception as error:
            self._error = error
            raise

    def check(self) -> None:
        """Raises an EngineError if the last step had no cost."""
        if self._error is not None:
            raise EngineError(f"a step could not be costed: {self._error}") from self._error


def _next_token(request: Request, position: int) -> int:
    """A token that is in no prompt and in no other answer: its request's seed is its number."""
    return ~(request.seed << 32 | position)
