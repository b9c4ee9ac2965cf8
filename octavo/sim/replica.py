"""One server of a simulation, with production's own engine over a simulated executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from octavo.assembly.engine import build_engine
from octavo.base.errors import ConfigError, EngineError, RequestError
from octavo.core.batch import Batch
from octavo.core.clock import VirtualClock
from octavo.core.disaggregation import Role
from octavo.core.drafting import DraftProposer
from octavo.core.engine import Engine, EngineStep
from octavo.core.prompt_chunks import StageSeconds
from octavo.core.request import Request
from octavo.cost.pipeline import Pipeline, StageTimes
from octavo.executor.simulated import SimulatedExecutor, StageSpan
from octavo.settings.engine import EngineConfig
from octavo.settings.speculation import SpeculativeConfig
from octavo.sim.agenda import Agenda
from octavo.sim.arrived_kv import ArrivedKV
from octavo.sim.costs import BatchCost, BatchStageCost
from octavo.speculation.synthetic import SyntheticProposer

if TYPE_CHECKING:
    from octavo.runtime.acceptance import SyntheticAcceptance

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Configuration of one replica.

    Args:
        config: of its engine, as of a real one; ``config.cache.num_blocks`` is the KV pool.
        cost: seconds of a step.
        depth, feeds_tokens, host_seconds, stage_cost: how steps overlap; see
            ``SimulatedExecutor``.
        chunk_seconds: of a stage; see `octavo.core.prompt_chunks`.
    """

    config: EngineConfig
    cost: BatchCost
    depth: int = 1
    feeds_tokens: bool = False
    host_seconds: float = 0.0
    stage_cost: BatchStageCost | None = None
    chunk_seconds: StageSeconds | None = None

    @classmethod
    def of_pipeline(cls, config: EngineConfig, pipeline: Pipeline) -> ReplicaSpec:
        """Stages work on a batch each."""
        return cls(
            config,
            pipeline.seconds,
            depth=len(pipeline.stages),
            stage_cost=pipeline.times,
            chunk_seconds=pipeline.chunk_seconds,
        )


@dataclass(slots=True)
class ReplicaTotals:
    """Counters of a replica. ``busy_s``: seconds with at least one step under way."""

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
    role: Role | None = None


class ReplicaStepTimes(NamedTuple):
    """A step of a replica, with the moments at which it began and ended; of a pipeline, also those
    at which each stage computed it."""

    replica: str
    begun: float
    ended: float
    step: EngineStep
    stages: tuple[StageSpan, ...] = ()


class ReplicaListener(Protocol):
    """Receives what comes of the requests of a replica."""

    def received(self, request: Request, token_ids: list[int], now: float) -> None:
        """Handle new tokens of an answer."""
        ...

    def ended(self, request: Request, now: float) -> None:
        """Handle the end of an answer."""
        ...

    def refused(self, request: Request, error: RequestError) -> None:
        """Handle a request that cannot be served. Never called while the request is being added."""
        ...


class Replica:
    """Drives an engine as ``EngineLoop`` does: commands that come while a step runs wait for its
    end.

    Args:
        watch: called with every step that has ended; None costs nothing.
        role: None where each replica computes whole requests.
    """

    def __init__(
        self,
        name: str,
        spec: ReplicaSpec,
        agenda: Agenda,
        listener: ReplicaListener,
        watch: Callable[[ReplicaStepTimes], None] | None = None,
        role: Role | None = None,
    ):
        self.name = name
        self.role = role
        self.spec = spec
        self.is_up = True
        self.requests: dict[str, Request] = {}  # unfinished ones
        self._agenda = agenda
        self._listener = listener
        self._watch = watch
        self._totals = ReplicaTotals(name, role=role)
        self._start_engine()

    def _start_engine(self) -> None:
        spec, speculation = self.spec, self.spec.config.speculation
        self._clock = VirtualClock()
        self._cost = _CheckedCost(spec.cost, spec.stage_cost)
        self._inbox: list[Callable[[], object]] = []
        # Of the steps in flight: when each was begun, by the engine and by each stage.
        self._begun: deque[tuple[float, tuple[StageSpan, ...]]] = deque()
        self._awaits_step = False
        self._executor = executor = SimulatedExecutor(
            self._cost,
            self._clock,
            spec.config.cache.num_blocks,
            _next_token,
            spec.depth,
            feeds_tokens=spec.feeds_tokens,
            host_seconds=spec.host_seconds,
            stage_cost=None if spec.stage_cost is None else self._cost.of_stages,
            accept=None if speculation is None else acceptance(speculation).path,
        )
        proposer = None if speculation is None else draft_proposer(speculation)
        self._arrived: ArrivedKV | None = None
        if self.role is not None:
            cache = spec.config.cache
            self._arrived = ArrivedKV(cache.num_blocks, cache.block_size, cache.windows)
        self.engine = build_engine(
            spec.config,
            executor,
            self._clock,
            proposer,
            self._arrived,
            stage_seconds=spec.chunk_seconds,
        )

    # -- from outside ------------------------------------------------------------------------

    def add(self, request: Request, *, has_kv: bool = False) -> None:
        """Send it a request. ``has_kv``: the KV of its tokens has arrived from another replica."""
        self.requests[request.request_id] = request
        if has_kv and self._arrived is not None:
            self._arrived.arrive(request.request_id)
        self._tell(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """Stop a request: nothing more of it is delivered."""
        if self.requests.pop(request_id, None) is not None:
            self._forget_kv(request_id)
            self._tell(lambda: self.engine.abort(request_id))

    def fail(self) -> list[Request]:
        """Lose the engine and its cache, and return the requests that it had; setting ``is_up``
        ends the outage."""
        lost = list(self.requests.values())
        self._totals = replace(self.totals(), num_failures=self._totals.num_failures + 1)
        self.is_up = False
        self.requests.clear()
        self._start_engine()
        return lost

    def begin(self) -> None:
        """Begin the steps that can be begun now, unless one is being waited for."""
        if self._awaits_step or not (self.is_up and self.engine.has_unfinished_requests):
            return
        self._clock.advance_to(self._agenda.now)
        while len(self._begun) < self.spec.depth:
            begun = self._clock.now()
            if not self.engine.begin_step():
                break
            self._cost.check()
            self._begun.append((begun, self._executor.last_stages))
        engine, ends = self.engine, self.engine.next_result_at
        if ends is not None:
            self._awaits_step = True
            self._agenda.at(ends, lambda: self._finish(engine))

    def totals(self) -> ReplicaTotals:
        """Return the counters so far, those of engines before a failure included. KV that has
        arrived is no hit of the prefix cache."""
        before, scheduler = self._totals, self.engine.scheduler
        drafts = scheduler.drafts
        arrived = 0 if self._arrived is None else self._arrived.num_tokens
        queried = scheduler.prefix_tokens_queried - arrived
        hit = scheduler.prefix_tokens_hit - arrived
        return replace(
            before,
            num_preemptions=before.num_preemptions + scheduler.num_preemptions,
            prefix_tokens_queried=before.prefix_tokens_queried + queried,
            prefix_tokens_hit=before.prefix_tokens_hit + hit,
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
            return  # aborted before the engine received it
        try:
            self.engine.add(request)
        except RequestError as error:
            del self.requests[request.request_id]
            self._forget_kv(request.request_id)
            refusal = error
            self._agenda.at(self._agenda.now, lambda: self._listener.refused(request, refusal))

    def _finish(self, engine: Engine) -> None:
        """Finish the oldest step."""
        if engine is not self.engine:
            return  # the engine has failed meanwhile
        step, now = engine.finish_step(), self._agenda.now
        self._awaits_step = False
        (begun, stages), totals = self._begun.popleft(), self._totals
        totals.num_steps += 1
        totals.tokens_computed += step.stats.num_tokens
        totals.busy_s += now - max(begun, totals.last_step_s)
        totals.last_step_s = now
        if self._watch is not None:
            self._watch(ReplicaStepTimes(self.name, begun, now, step, stages))
        self._deliver(step, now)
        commands, self._inbox = self._inbox, []
        for command in commands:
            command()

    def _deliver(self, step: EngineStep, now: float) -> None:
        requests, received = self.requests, self._listener.received
        for update in step.updates:
            request = update.request
            if request.request_id not in requests:
                continue  # aborted
            received(request, update.new_token_ids, now)
            if request.finish_reason is not None:
                del requests[request.request_id]
                self._forget_kv(request.request_id)
                self._listener.ended(request, now)

    def _forget_kv(self, request_id: str) -> None:
        if self._arrived is not None:
            self._arrived.forget(request_id)


class _CheckedCost:
    """The cost of steps, whose errors are kept: raised within the engine, they would be blamed on
    the requests of the step, which would fail one after the other."""

    def __init__(self, cost: BatchCost, stage_cost: BatchStageCost | None = None):
        self._cost, self._stage_cost = cost, stage_cost
        self._error: Exception | None = None

    def __call__(self, batch: Batch) -> float:
        return self._kept(self._cost, batch)

    def of_stages(self, batch: Batch) -> StageTimes:
        assert self._stage_cost is not None
        return self._kept(self._stage_cost, batch)

    def _kept(self, cost: Callable[[Batch], T], batch: Batch) -> T:
        try:
            return cost(batch)
        except Exception as error:
            self._error = error
            raise

    def check(self) -> None:
        """Raise an EngineError if the last step had no cost."""
        if self._error is not None:
            raise EngineError(f"a step could not be costed: {self._error}") from self._error


def _next_token(request: Request, position: int) -> int:
    """Return a token that is in no prompt and in no other answer: the seed of a request is its
    number."""
    return ~(request.seed << 32 | position)


# -- speculative decoding without a model, with drafts that cost nothing --------------------------


def check_drafts(config: SpeculativeConfig | None) -> None:
    """Raise a ConfigError if a simulation cannot tell how often drafts are accepted."""
    if config is not None:
        acceptance(config)


def acceptance(config: SpeculativeConfig) -> SyntheticAcceptance:
    """Return a rule that accepts draft tokens at given rates, by request and position alone."""
    rates = config.synthetic_acceptance_rates
    if config.method != "auto" or rates is None:
        raise ConfigError(
            "a simulation has no text to draft from: give the rates at which drafts are accepted, "
            "as in --speculative-config '{\"synthetic_acceptance_rates\": [0.8, 0.7, 0.6]}'"
        )
    from octavo.runtime.acceptance import SyntheticAcceptance  # and numpy, for which no start waits

    return SyntheticAcceptance(rates)


def draft_proposer(config: SpeculativeConfig) -> DraftProposer:
    rates = acceptance(config).rates
    return SyntheticProposer(config.num_speculative_tokens or len(rates))
