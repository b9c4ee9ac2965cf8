"""The servers of a simulation, as replicas behind a router, with or without
disaggregated prefill."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from octavo.base.errors import ConfigError, QueueFullError, RequestError
from octavo.core.disaggregation import LongerThan, PrefillRule, Role, able_to
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.sim.agenda import Agenda
from octavo.sim.replica import Replica, ReplicaSpec, ReplicaStepTimes, ReplicaTotals, check_drafts
from octavo.sim.request import SimRequest
from octavo.sim.router import Routing, check_router, routings_named
from octavo.sim.settings import Outage


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Disaggregated prefill: the first ``num_prefill`` replicas compute prompts and the first
    token, the others the rest of the answers (Zhong et al., "DistServe"; Patel et al., "Splitwise";
    both 2024).

    Args:
        transfer_seconds: until the KV of so many tokens is where the answer is computed.
        rule: which prompts; by default all.
    """

    num_prefill: int
    transfer_seconds: Callable[[int], float]
    rule: PrefillRule = LongerThan(-1)


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """All servers.

    Args:
        replica: what each of them is.
        router: the rule by which replicas are chosen, of ``sim.settings.ROUTER_NAMES``.

    Raises:
        ConfigError: numbers contradict each other, or a setting cannot be simulated.
    """

    replica: ReplicaSpec
    num_replicas: int = 1
    router: str = "least_loaded"
    outages: tuple[Outage, ...] = ()
    disaggregation: Disaggregation | None = None

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"there is at least one replica, not {self.num_replicas}")
        apart = self.disaggregation
        if apart is not None and not 0 < apart.num_prefill < self.num_replicas:
            raise ConfigError(
                f"of {self.num_replicas} replicas, {apart.num_prefill} cannot be set apart for "
                "prompts: at least one for prompts and one for answers are needed"
            )
        for outage in self.outages:
            if not 0 <= outage.replica < self.num_replicas:
                raise ConfigError(
                    f"there is no replica {outage.replica} to fail: they are numbered from 0 to "
                    f"{self.num_replicas - 1}"
                )
            if outage.at_s < 0 or outage.lasts_s < 0:
                raise ConfigError("an outage neither begins before 0 s nor lasts less than that")
        check_router(self.router)
        check_drafts(self.replica.config.speculation)


class Fleet:
    """Sends each request to a replica, and again when that replica fails; reports when it has
    ended.

    Args:
        on_end: called with each request that is over.
        watch: called with every step of every replica.
    """

    def __init__(
        self,
        spec: FleetSpec,
        agenda: Agenda,
        on_end: Callable[[SimRequest], None],
        watch: Callable[[ReplicaStepTimes], None] | None = None,
    ):
        self._agenda = agenda
        self._on_end = on_end
        self._apart = spec.disaggregation
        self._sim_requests: dict[str, SimRequest] = {}
        roles: list[Role | None] = [None] * spec.num_replicas
        kinds: list[Role | None] = [None]
        if self._apart is not None:
            num_prefill = self._apart.num_prefill
            roles = [Role.PREFILL] * num_prefill
            roles += [Role.DECODE] * (spec.num_replicas - num_prefill)
            kinds = [Role.PREFILL, Role.DECODE]
        self.replicas = [
            Replica(f"replica {index}", spec.replica, agenda, self, watch, role)
            for index, role in enumerate(roles)
        ]
        routings = routings_named(spec.router, self.replicas, len(kinds))
        self._pools = [
            _Pool(kind, self.replicas, routing)
            for kind, routing in zip(kinds, routings, strict=True)
        ]
        for outage in spec.outages:
            self._plan(outage)

    def send(self, sim_request: SimRequest) -> None:
        """Queue a request at a replica. What comes of it, even a refusal, is reported later."""
        sim_request.times_sent += 1
        self._sim_requests[sim_request.prompt.request_id] = sim_request
        request = self._request(sim_request, sim_request.token_ids, sim_request.num_missing)
        if self._goes_apart(request):
            request = self._request(sim_request, sim_request.token_ids, max_tokens=1)
            self._pools[0].add(sim_request, request)
        else:
            self._pools[-1].add(sim_request, request)

    def _goes_apart(self, request: Request) -> bool:
        """Return whether a prefill replica computes the prompt of a request."""
        first, *others = self._pools
        if self._apart is None or not any(able.role is first.role for able in first.able):
            return False
        (second,) = others
        decode_replicas = second.able
        return second.routing.goes_apart(request, self._apart.rule, decode_replicas)

    def abort(self, sim_request: SimRequest) -> None:
        """Stop serving a request whose client has hung up."""
        for pool in self._pools:
            pool.abort(sim_request)
        self._sim_requests.pop(sim_request.prompt.request_id)

    def begin(self) -> None:
        """Begin every step that can be begun now."""
        for each in self.replicas:
            each.begin()

    def totals(self) -> list[ReplicaTotals]:
        return [each.totals() for each in self.replicas]

    # -- calls from replicas -----------------------------------------------------------------

    def received(self, request: Request, token_ids: list[int], now: float) -> None:
        sim_request = self._sim_requests[request.request_id]
        for pool in self._pools:
            pool.routing.received(request, len(token_ids))
        if not sim_request.output:
            sim_request.first_scheduled = request.stats.first_scheduled_time
            sim_request.record.cached_tokens = request.stats.num_cached_tokens
        sim_request.take(token_ids, now)

    def ended(self, request: Request, now: float) -> None:
        self._is_over(request)
        sim_request = self._sim_requests[request.request_id]
        sim_request.num_preemptions += request.num_preemptions
        if self._apart is None or not self._is_first_token_of_more(sim_request, request):
            del self._sim_requests[request.request_id]
            assert request.finish_reason is not None
            sim_request.end(now, request.finish_reason.value)
            self._on_end(sim_request)
            return
        arrives = now + self._apart.transfer_seconds(request.num_prompt_tokens)
        attempt = sim_request.times_sent
        self._agenda.at(arrives, lambda: self._go_on(sim_request, attempt))

    def refused(self, request: Request, error: RequestError) -> None:
        self._is_over(request)
        sim_request = self._sim_requests.pop(request.request_id, None)
        if sim_request is not None:  # its client may have hung up
            status = 429 if isinstance(error, QueueFullError) else 400
            sim_request.fail(self._agenda.now, str(error), status)
            self._on_end(sim_request)

    # -- inside ------------------------------------------------------------------------------

    def _is_over(self, request: Request) -> None:
        for pool in self._pools:
            pool.routing.ended(request.request_id)

    def _request(self, sim_request: SimRequest, token_ids: list[int], max_tokens: int) -> Request:
        return Request(
            sim_request.prompt.request_id,
            token_ids,
            _params(max_tokens),
            self._agenda.now,
            sim_request.prompt.priority,
            tenant=sim_request.prompt.tenant,
            seed=sim_request.number,
        )

    def _is_first_token_of_more(self, sim_request: SimRequest, request: Request) -> bool:
        """True if a request that has ended was for the prompt and the first token alone."""
        is_first = len(sim_request.output) == 1 and request.params.max_tokens == 1
        return is_first and sim_request.num_missing > 0

    def _go_on(self, sim_request: SimRequest, attempt: int) -> None:
        """Continue an answer where the KV of its prompt has arrived."""
        if not sim_request.is_over and sim_request.times_sent == attempt:
            known = sim_request.token_ids + sim_request.output
            request = self._request(sim_request, known, sim_request.num_missing)
            self._pools[-1].add(sim_request, request, has_kv=True)

    def _plan(self, outage: Outage) -> None:
        self._agenda.at(outage.at_s, lambda: self._fail(outage))
        if math.isfinite(outage.lasts_s):
            self._agenda.at(outage.at_s + outage.lasts_s, lambda: self._come_back(outage))

    def _fail(self, outage: Outage) -> None:
        replica = self.replicas[outage.replica]
        lost = replica.fail()
        for pool in self._pools:
            pool.routing.failed(replica)
        for request in lost:
            sim_request = self._sim_requests[request.request_id]
            sim_request.begin_anew()
            self.send(sim_request)

    def _come_back(self, outage: Outage) -> None:
        self.replicas[outage.replica].is_up = True
        for pool in self._pools:
            pool.send_those_who_wait()


class _Pool:
    """Replicas that do the same work, and the requests that wait since no replica is up.

    Args:
        replicas: all of the fleet: where those of the role are down, others do its work.
    """

    def __init__(self, role: Role | None, replicas: Sequence[Replica], routing: Routing):
        self._replicas = replicas
        self.role = role
        self.routing = routing
        self._waiting: dict[str, tuple[SimRequest, Request, bool]] = {}

    @property
    def able(self) -> list[Replica]:
        """The replicas that take its requests now."""
        return able_to(self.role, self._replicas)

    def add(self, sim_request: SimRequest, request: Request, *, has_kv: bool = False) -> None:
        able = self.able
        if not able:
            self._waiting[request.request_id] = (sim_request, request, has_kv)
            return
        chosen = self.routing.choose(request, able, request.num_prompt_tokens if has_kv else 0)
        sim_request.replica = chosen.name
        chosen.add(request, has_kv=has_kv)

    def abort(self, sim_request: SimRequest) -> None:
        self._waiting.pop(sim_request.prompt.request_id, None)
        for replica in self._replicas:
            replica.abort(sim_request.prompt.request_id)
        self.routing.ended(sim_request.prompt.request_id)

    def send_those_who_wait(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for sim_request, request, has_kv in waiting.values():
            self.add(sim_request, request, has_kv=has_kv)


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
