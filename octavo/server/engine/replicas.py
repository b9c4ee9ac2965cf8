"""`ReplicaSet`, the `EngineClient` of several engines of one model, each in a process of its own.

Requests wait here, in one queue that is fair among tenants, until a replica has a place for them;
then a router chooses one of those that have. Limits, suspicions and quarantines are of all
replicas, since one `Front` has them::

    submit ─► ReplicaPool ─► router ─► Replica ─► its engine's process
                  ▲                       │
                  └─── its engine died ───┘

A place is free where fewer samples are under way than run at once, and a quarter more, so that the
engine has the next at hand. A replica that dies gives its requests back, and others take them.

A suspect runs where it can do the least harm: on a replica that has nothing else to do; else on
one that is being started, as soon as it is ready; else where the fewest requests are. Where streams
go on after a crash, it waits for no start: nothing would be lost.

Where prompts are computed apart (``core/disaggregation.py``), there are two pools, and a request
moves from one to the other: its first replica reports the first tokens, saves the KV, and hands it
over; another goes on, as after a crash, but gets the KV rather than computes it. If all replicas of
a pool are down, those of the other do its work.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from octavo.base.errors import ConfigError, EngineError, EngineUnavailableError, OctavoError
from octavo.core.block_store import following_keys, root_key
from octavo.core.disaggregation import LongerThan, PrefillRule, Role, able_to, goes_apart
from octavo.core.routing import MAX_KEYS, Ask, Router, TrackedReplica
from octavo.core.scheduler import SchedulerConfig
from octavo.core.stats import StepStats, summed
from octavo.server.engine.front import Front
from octavo.server.engine.generation import EngineFacts, EngineState
from octavo.server.engine.introductions import Introductions
from octavo.server.engine.output_record import OutputRecord
from octavo.server.engine.process import Launcher
from octavo.server.engine.replica_pool import ReplicaPool
from octavo.server.engine.supervisor import Supervisor
from octavo.server.engine.waiting_queue import EngineLink, PendingGeneration, QueuedWork
from octavo.server.engine.wire import Message, record_from_list
from octavo.serving.outputs import Delta

if TYPE_CHECKING:
    from octavo.cost.step_facts import StepFacts

_log = logging.getLogger("octavo.server")


class Launchers(Protocol):
    """Makes the launchers of a server's replicas."""

    def launch_ahead(self) -> None:
        """Begin to start the first engines."""
        ...

    def create(self, number: int) -> Launcher:
        """Return the launcher of a replica. ConfigError if there can be none."""
        ...

    def close(self) -> None:
        """End what was started ahead and is not needed, and give back what replicas held."""
        ...

    def describe(self) -> str:
        """Return where the replicas run, for the log."""
        ...


CreateLauncher = Callable[[int], Launcher]
"""Returns the launcher of a replica by its number; ConfigError if there can be none."""

# Tokens of a prompt that are worth being computed apart, as long as their time is not known.
_USUAL_PREFILL_TOKENS = 256
_KEYS_AT_ONCE = 512  # of a prompt, between two turns of the event loop: half a millisecond
_QUEUE = SchedulerConfig()  # for what a level of priority is worth, in steps of waiting
_STATES = (EngineState.READY, EngineState.RESTARTING, EngineState.STARTING)  # best first


class Replica:
    """One engine of a `ReplicaSet`, with what was sent to it.

    ``role``: None where each replica computes whole requests.
    """

    def __init__(
        self,
        number: int,
        owner: ReplicaSet,
        launcher: Launcher,
        engine_timeout: float,
        role: Role | None = None,
    ):
        self.number = number
        self.role = role
        self.supervisor = Supervisor(launcher, self, engine_timeout=engine_timeout)
        self.stats = StepStats.idle()
        self.is_draining = False
        self.entries: dict[PendingGeneration, None] = {}
        self.view: TrackedReplica | None = None  # since it was first ready
        self._owner = owner
        self.num_samples = 0  # of the entries
        self._most_samples = 0

    @property
    def name(self) -> str:
        """Its name for the router: as in a simulation, since the choice may depend on it."""
        return f"replica {self.number}"

    @property
    def state(self) -> EngineState:
        return self.supervisor.state

    @property
    def is_up(self) -> bool:
        """True if it may be sent requests, now or when it has a place."""
        return self.state is EngineState.READY and not self.is_draining

    @property
    def has_place(self) -> bool:
        return self.is_up and self.num_samples < self._most_samples

    @property
    def is_coming(self) -> bool:
        """True if it will probably be ready after a while."""
        is_coming = self.state in (EngineState.STARTING, EngineState.RESTARTING)
        return is_coming and not self.is_draining

    def describe(self) -> dict[str, Any]:
        """Return its state, its load and its restarts, for operators."""
        is_drained = self.is_draining and self.state is EngineState.READY
        return {
            "replica": self.number,
            "state": "draining" if is_drained else self.state.value,
            **({} if self.role is None else {"role": self.role.value}),
            "requests": len(self.entries),
            "num_running": self.stats.num_running,
            "num_waiting": self.stats.num_waiting,
            "kv_usage": self.stats.kv_utilisation,
            "num_restarts": self.supervisor.num_restarts,
        }

    def send(self, message: Message) -> None:
        self.supervisor.send(message)

    def begin(self, *, caches_prefixes: bool) -> None:
        """Begin with an engine that has just become ready: it knows nothing."""
        facts = self.supervisor.facts
        assert facts is not None
        self.stats = StepStats.idle(facts.num_blocks)
        self._most_samples = facts.max_num_seqs + max(1, facts.max_num_seqs // 4)
        num_blocks = facts.num_blocks if caches_prefixes else 0
        self.view = TrackedReplica(self.name, facts.block_size, num_blocks)

    def take(self, entry: PendingGeneration) -> None:
        """Note a request that is sent to it."""
        self.entries[entry] = None
        self.num_samples += entry.work.samples
        if self.view is not None and entry.ask is not None:
            self.view.sent(entry.generation.request.request_id, entry.ask)

    def release(self, entry: PendingGeneration) -> None:
        """Forget a request, which is over, or runs elsewhere."""
        del self.entries[entry]
        self.num_samples -= entry.work.samples
        if self.view is not None:
            self.view.ended(entry.generation.request.request_id)

    # -- SupervisorListener ------------------------------------------------------------------

    def on_engine_state(self, state: EngineState, detail: str) -> None:
        self._owner.on_replica_state(self, state, detail)

    def on_engine_death(self, at_work: Sequence[str]) -> bool:
        return self._owner.on_replica_death(self, at_work)

    def on_engine_message(self, message: Message) -> None:
        self._owner.on_replica_message(self, message)


class ReplicaSet(Front):
    """An `EngineClient` over several engines in processes. Belongs to one event loop.

    Args:
        create_launcher: see `CreateLauncher`; the first replicas have the numbers from 0 on.
        num_replicas: with which it starts.
        create_router: makes what chooses among the replicas of a pool that have a place.
        caches_prefixes: whether their engines keep the KV of prompts.
        num_prefill: of the first replicas, those that compute prompts for the others.
        links_kv: these may be on other machines than those that answer, which connect to them.
        prefill_rule: which prompts they compute; None for those whose KV takes less time to pass on
            than to compute, by ``set_step_facts``.
        arguments, options: those of `Front`.
    """

    def __init__(
        self,
        create_launcher: CreateLauncher,
        num_replicas: int,
        create_router: Callable[[], Router],
        *arguments: Any,
        caches_prefixes: bool = True,
        num_prefill: int = 0,
        links_kv: bool = False,
        prefill_rule: PrefillRule | None = None,
        engine_timeout: float = 300.0,
        **options: Any,
    ):
        super().__init__(*arguments, **options)
        self._create_launcher = create_launcher
        self._caches_prefixes = caches_prefixes
        self._engine_timeout = engine_timeout
        self._num_prefill = num_prefill
        self._learns_prefill_rule = prefill_rule is None
        self._prefill_rule = prefill_rule or LongerThan(_USUAL_PREFILL_TOKENS)
        roles = (Role.PREFILL, Role.DECODE) if num_prefill else (None,)
        self._pools = {role: ReplicaPool(create_router(), role) for role in roles}
        self.num_queued_samples = 0  # that wait for a place
        self._num_arrivals = 0
        self._num_steps = 0  # of all replicas
        self._num_restarts_of_removed = 0
        self._is_stopping = False
        self._is_given_up = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_number = 0
        self.replicas: list[Replica] = []
        self._introductions = Introductions(lambda: self.replicas if links_kv else ())
        for _ in range(num_replicas):
            self._create_replica()

    def _create_replica(self) -> Replica:
        number, role = self._next_number, None
        if self._num_prefill:
            role = Role.PREFILL if number < self._num_prefill else Role.DECODE
        launcher = self._create_launcher(number)
        replica = Replica(number, self, launcher, self._engine_timeout, role)
        self.replicas.append(replica)
        self._next_number += 1
        return replica

    # -- EngineClient ------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """The state of the replica that is best off."""
        states = {replica.state for replica in self.replicas}
        return next((state for state in _STATES if state in states), EngineState.FAILED)

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    @property
    def stats(self) -> StepStats:
        """The sums over all replicas, with what waits here; see `summed`."""
        return summed(
            [replica.stats for replica in self.replicas],
            self.num_queued_samples,
            sum(pool.queue.num_tokens for pool in self._pools.values()),
        )

    @property
    def num_samples(self) -> int:
        """Samples that are not over: those that wait here, and those that replicas have."""
        at_replicas = sum(replica.num_samples for replica in self.replicas)
        return self.num_queued_samples + at_replicas

    def predicted_ttft(self) -> float | None:
        """Return the predicted seconds to its first token of a request that came now, as long as
        requests are on the mean; None if unknown."""
        if self._ttft_admission is None:
            return None
        num_tokens = self._ttft_admission.prompt_tokens
        stats, waiting = self._load_before("", num_tokens)
        return self._ttft_admission.predict(self.facts, stats, waiting, num_tokens)

    @property
    def num_restarts(self) -> int:
        running = sum(replica.supervisor.num_restarts for replica in self.replicas)
        return self._num_restarts_of_removed + running

    def enable_snapshots(self, is_enabled: bool) -> None:
        self._shows_snapshots = is_enabled
        for replica in self.replicas:
            self._send_snapshots_op(replica)

    # -- start and stop ----------------------------------------------------------------------

    async def start(self) -> None:
        """Launch all engines, and return when all are ready.

        Raises:
            ModelError, ConfigError, EngineError: what kept one of them from starting.
        """
        await asyncio.gather(*map(_start, self.replicas))

    def set_step_facts(self, facts: StepFacts) -> None:
        """Have all engines, and every later one, measure their steps against a prediction of
        their times; see `ProcessEngine.set_step_facts`."""
        steps = facts.step_model()
        self._step_facts = facts
        if self._ttft_admission is not None:
            self._ttft_admission.set_step_model(steps, self.facts)
        if self._num_prefill and self._learns_prefill_rule:
            from octavo.offload.restore_rule import TRANSFER_RATE, predicted_prefill_rule

            self._prefill_rule = predicted_prefill_rule(
                *(steps, self.facts.max_num_batched_tokens, self.facts.max_model_len),
                token_seconds=self.facts.kv_bytes_per_token / TRANSFER_RATE,
            )
        for replica in self.replicas:
            self._send_step_facts(replica)

    async def wait_until_given_up(self) -> None:
        """Return when all replicas are down for good without having been asked to stop."""
        await self._is_given_up.wait()

    async def stop(self, why: str = "the server is stopping") -> None:
        """End all generations, which are told why, and all engines. May be repeated."""
        self._is_stopping = True
        self._fail_all(EngineUnavailableError(why), "abort")
        await asyncio.gather(*(replica.supervisor.stop() for replica in self.replicas))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- operators ---------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """Return the state, the load and the restarts of each replica."""
        return [replica.describe() for replica in self.replicas]

    def add(self) -> int:
        """Begin to start one more replica, and return its number.

        Raises:
            ConfigError: this machine has no room for one more.
        """
        self._check_open()
        replica = self._create_replica()
        self._run_in_background(self._start_added(replica))
        return replica.number

    async def _start_added(self, replica: Replica) -> None:
        try:
            await replica.supervisor.start()
        except OctavoError as error:
            if not self._is_stopping and not replica.is_draining:
                _log.error("replica %d does not start: %s", replica.number, error)
                self._remove(replica)

    def drain(self, number: int) -> None:
        """Send nothing more to a replica, and end it when its last request is over.

        Raises:
            KeyError: there is none of this number.
            ConfigError: it is the last.
        """
        replica = self._removable(number)
        if not replica.is_draining:
            replica.is_draining = True
            detail = "draining: it gets no more requests"
            self._observer.on_engine_state(replica.state, detail, number)
            self._end_if_drained(replica)
            self._send_next_suspect()

    def remove(self, number: int) -> None:
        """End a replica now: its requests fare as after a crash, though none is suspected.

        Raises:
            KeyError, ConfigError: as `drain` does.
        """
        replica = self._removable(number)
        replica.is_draining = True
        self._run_in_background(self._end(replica))

    def _removable(self, number: int) -> Replica:
        replica = {each.number: each for each in self.replicas}[number]
        others = [each for each in self.replicas if each is not replica and not each.is_draining]
        if not any(each.state is not EngineState.FAILED for each in others):
            raise ConfigError(
                f"replica {number} is the last one that serves: add another one before"
            )
        return replica

    def _end_if_drained(self, replica: Replica) -> None:
        if replica.is_draining and not replica.entries and replica in self.replicas:
            self._run_in_background(self._end(replica))

    async def _end(self, replica: Replica) -> None:
        if replica not in self.replicas:
            return
        self._remove(replica)
        await replica.supervisor.stop()

    def _remove(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        self._facts = None
        self._num_restarts_of_removed += replica.supervisor.num_restarts
        entries = list(replica.entries)
        for entry in entries:
            self._take_back(entry, "the replica was removed while this request ran")
        self._observer.on_removed(replica.number)
        self._dispatch_again(entries)

    def _run_in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- from a replica ----------------------------------------------------------------------

    def on_replica_state(self, replica: Replica, state: EngineState, detail: str) -> None:
        self._observer.on_engine_state(state, detail, replica.number)
        if state is EngineState.READY:
            self._facts = None  # another one may be the least now
            replica.begin(caches_prefixes=self._caches_prefixes)
            self._send_step_facts(replica)
            self._send_snapshots_op(replica)
            self._introductions.begin(replica)
            self._send_next_suspect()  # before others: nothing is there to be harmed
            self._fill()
        elif self.has_given_up:
            self._fail_unavailable()
            self._is_given_up.set()
        elif state is EngineState.FAILED:
            self._send_next_suspect()  # it need not wait for this one any more

    def on_replica_death(self, replica: Replica, at_work: Sequence[str]) -> bool:
        entries = list(replica.entries)
        is_explained = self._take_death(replica, at_work)
        replica.stats = StepStats.idle()
        if replica.role is Role.PREFILL:
            for other in self.replicas:
                if other.state is EngineState.READY:
                    other.send({"op": "peer_ended", "replica": replica.number})
        self._dispatch_again([*entries, *self._recall_suspects()])
        self._end_if_drained(replica)
        return is_explained

    def on_replica_message(self, replica: Replica, message: Message) -> None:
        match message["ev"]:
            case "step":
                before, replica.stats = replica.stats, record_from_list(message["record"])
                self._num_steps += 1
                self._take_step(replica, message, before, replica.stats)
                self._fill()
                self._observer.on_step(replica.stats, replica.number)
                if message.get("snapshot"):
                    self._show(replica, message["snapshot"])
            case "idle" | "pong":
                replica.stats = record_from_list(message["record"])
            case "handed_over":
                replica.stats = record_from_list(message["record"])
                self._hand_over(replica, message)
            case "invited" | "unlinked":
                self._introductions.go_on(replica, message)
            case "snapshot":
                self._show(replica, message["snapshot"])
            case "refused":
                self._take_refusal(replica, message)

    def _show(self, replica: Replica, snapshot: dict[str, Any]) -> None:
        self._observer.on_snapshot(replica.stats.step_id, snapshot, replica.number)

    def _send_snapshots_op(self, replica: Replica) -> None:
        if replica.state is EngineState.READY:
            replica.send({"op": "snapshots", "is_enabled": self._shows_snapshots})

    def _send_step_facts(self, replica: Replica) -> None:
        if self._step_facts is not None and replica.state is EngineState.READY:
            replica.send({"op": "meter", "facts": self._step_facts.as_json()})

    # -- to a replica ------------------------------------------------------------------------

    def _dispatch(self, entry: PendingGeneration) -> None:
        """Queue it, or, if it is a suspect, queue it for an isolated run."""
        if entry.ask is None:
            self._place(entry)
            request, block_size = entry.generation.request, self.facts.block_size
            if not self._wants_keys(entry):
                entry.ask = Ask(len(request.prompt_token_ids))
            elif len(request.prompt_token_ids) <= _KEYS_AT_ONCE * block_size:
                entry.ask = Ask.of(request.prompt_token_ids, block_size, request.kv_salt)
            else:
                self._run_in_background(self._dispatch_with_keys(entry))
                return
        if self._crash_isolation.is_suspected(entry.fingerprint):
            self._crash_isolation.enqueue(entry)
            self._send_next_suspect()
        else:
            self._pool_of(entry).add(entry)
            self.num_queued_samples += entry.work.samples
            self._fill()

    def _pool_of(self, entry: PendingGeneration) -> ReplicaPool:
        """Return the pool whose replicas take a request next."""
        if not self._num_prefill:
            return self._pools[None]
        return self._pools[Role.PREFILL if self._goes_apart(entry) else Role.DECODE]

    def _goes_apart(self, entry: PendingGeneration) -> bool:
        """Return whether the prompt of a request is computed by a prefill replica: not, if the
        request goes on from there already, or if its KV could not be passed on."""
        request, facts = entry.generation.request, self.facts
        if entry.record is not None and not entry.record.is_empty:
            return False
        if not request.params.cache_prompt or OutputRecord.of(request.params) is None:
            return False
        if facts.sink_windows.of(request.params, facts.max_model_len) is not None:
            return False
        assert entry.ask is not None
        views = [replica.view for replica in able_to(Role.DECODE, self.replicas) if replica.view]
        return goes_apart(entry.ask, self._prefill_rule, views)

    def _place(self, entry: PendingGeneration) -> None:
        """Give it its place among its tenant's requests: by priority and arrival, as a scheduler
        does."""
        priority = entry.generation.request.priority
        level = max(-_QUEUE.max_priority, min(_QUEUE.max_priority, priority))
        num_steps = self._num_steps // max(1, len(self.replicas))
        entry.queue_key = (level * _QUEUE.ageing_steps + num_steps, self._num_arrivals)
        self._num_arrivals += 1

    def _wants_keys(self, entry: PendingGeneration) -> bool:
        is_cached = self._caches_prefixes and entry.generation.request.params.cache_prompt
        uses_keys = any(pool.router.uses_keys for pool in self._pools.values())
        return uses_keys and is_cached

    async def _dispatch_with_keys(self, entry: PendingGeneration) -> None:
        """Dispatch a request with a long prompt, whose keys take a while: others get their turns
        meanwhile."""
        request, block_size = entry.generation.request, self.facts.block_size
        tokens = request.prompt_token_ids[: MAX_KEYS * block_size]
        key, keys = root_key(request.kv_salt), list[bytes]()
        for begin in range(0, len(tokens), _KEYS_AT_ONCE * block_size):
            part = tokens[begin : begin + _KEYS_AT_ONCE * block_size]
            keys += following_keys(key, part, block_size)
            key = keys[-1] if keys else key
            await asyncio.sleep(0)
        entry.ask = Ask(len(request.prompt_token_ids), keys[::-1])
        self._dispatch_again([entry])

    def _fill(self) -> None:
        """Send queued requests to replicas that have a place for them."""
        for pool in self._pools.values():
            if len(pool.queue):
                self._fill_from(pool)

    def _fill_from(self, pool: ReplicaPool) -> None:
        able = able_to(pool.role, self.replicas)
        free = {each.name: each for each in able if each.has_place}
        suspects = []
        for entry in pool.in_order() if free else ():
            assert entry.ask is not None
            self.num_queued_samples -= entry.work.samples
            if self._crash_isolation.is_suspected(entry.fingerprint):
                pool.remove(entry)
                suspects.append(entry)
                continue
            views = [replica.view for replica in free.values() if replica.view is not None]
            view = pool.router.choose(entry.ask, views) if len(views) > 1 else views[0]
            num_cached = max(view.cached_tokens(entry.ask.keys), entry.ask.num_coming)
            pool.admit(entry, entry.ask.num_tokens - num_cached)
            replica = free[view.name]
            self._send(entry, replica)
            if not replica.has_place:
                del free[view.name]
                if not free:
                    break
        for entry in suspects:
            self._crash_isolation.enqueue(entry)
        if suspects:
            self._send_next_suspect()

    def _hand_over(self, replica: Replica, message: Message) -> None:
        """Send a request that has its first tokens on to a replica that goes on with it."""
        entry = self._entry_of(replica, message["id"])
        if entry is None:
            return  # it was aborted meanwhile
        replica.supervisor.note_success()
        self._requeue(entry)
        entry.num_recalls += 1
        entry.kv_from = (replica.number, message["tokens"])
        assert entry.ask is not None
        entry.ask = dataclasses.replace(entry.ask, num_coming=message["tokens"])
        self._dispatch_again([entry])
        self._end_if_drained(replica)

    def _dispatch_again(self, entries: Sequence[PendingGeneration]) -> None:
        """Dispatch what has come back from a replica and is not over."""
        for entry in entries:
            is_known = self._entries.get(entry.generation.request.request_id) is entry
            if is_known and not entry.is_sent and not entry.is_queued:
                self._dispatch(entry)
        self._send_next_suspect()

    def _recall_suspects(self) -> list[PendingGeneration]:
        """Take back requests that have become suspects and wait at other replicas: they are equal
        to one that was in the step which crashed."""
        found = [
            entry
            for replica in self.replicas
            for entry in replica.entries
            if not entry.has_begun and self._crash_isolation.is_suspected(entry.fingerprint)
            if not self._crash_isolation.is_running(entry)
        ]
        for entry in found:
            assert entry.engine is not None
            entry.engine.send({"op": "abort", "id": entry.sent_id})
            self._requeue(entry)
            entry.num_recalls += 1
        return found

    # -- Front -------------------------------------------------------------------------------

    def _known_facts(self) -> EngineFacts | None:
        """Return the facts of the replica with the least room: what was free when each of them
        started may differ, and any may get a request."""
        known = (replica.supervisor.facts for replica in self.replicas)
        return min(
            (facts for facts in known if facts is not None),
            key=lambda facts: (facts.max_model_len, facts.num_blocks),
            default=None,
        )

    def _engine_for_suspect(self) -> EngineLink | None:
        up = [replica for replica in self.replicas if replica.is_up]
        best = min(up, key=lambda replica: len(replica.entries), default=None)
        if best is None or not best.entries or self._resumes_streams:
            return best
        return None if any(replica.is_coming for replica in self.replicas) else best

    def _load_before(self, tenant: str, num_tokens: int) -> tuple[StepStats, QueuedWork]:
        """Return those of the replica that has least to do: what waits is shared out evenly among
        the replicas that are up, and compute prompts."""
        first = next(iter(self._pools))
        stats = [replica.stats for replica in able_to(first, self.replicas)]
        least = min(stats, key=_num_tokens_to_come, default=StepStats.idle())
        waiting = self._waiting_queue.work_before(tenant, num_tokens)
        return least, QueuedWork(0, 0, 0).plus(waiting, 1 / max(1, len(stats)))

    def _note_success(self, engine: EngineLink | None) -> None:
        if isinstance(engine, Replica):
            engine.supervisor.note_success()

    def _send(
        self, entry: PendingGeneration, engine: EngineLink, *, isolated: bool = False
    ) -> None:
        assert isinstance(engine, Replica)
        if self._hands_over(entry, engine) and not isolated and entry.record is None:
            entry.record = OutputRecord.of(entry.generation.request.params)
        super()._send(entry, engine, isolated=isolated)
        engine.take(entry)
        self._observer.on_routed(engine.number)

    def _may_go_on(self, entry: PendingGeneration) -> bool:
        """Another engine was to go on in any case with what was to be handed over."""
        is_apart = isinstance(entry.engine, Replica) and self._hands_over(entry, entry.engine)
        return super()._may_go_on(entry) or (is_apart and entry.record is not None)

    def _hands_over(self, entry: PendingGeneration, replica: Replica) -> bool:
        """Return whether a replica computes the prompt of a request alone."""
        pool = entry.pool
        return pool is not None and pool.role is replica.role is Role.PREFILL

    def _further_fields(
        self, entry: PendingGeneration, engine: EngineLink, *, isolated: bool
    ) -> Message:
        assert isinstance(engine, Replica)
        if self._hands_over(entry, engine) and not isolated:
            return {"hands_over": True}
        kv_from, entry.kv_from = entry.kv_from, None
        if kv_from is None or kv_from[0] == engine.number:
            return {}
        return {"kv": {"replica": kv_from[0], "tokens": kv_from[1]}}

    def _push(self, entry: PendingGeneration, deltas: list[Delta], now: float) -> None:
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        if num_tokens and isinstance(entry.engine, Replica) and entry.engine.view is not None:
            view, stats = entry.engine.view, entry.generation.stats
            request_id = entry.generation.request.request_id
            view.began(request_id, stats.num_cached_tokens, stats.miss_reason)
            view.grew(request_id, num_tokens)
            if entry.pool is not None:  # it runs isolated
                entry.pool.queue.charge(entry, num_tokens)
        super()._push(entry, deltas, now)

    def _requeue(self, entry: PendingGeneration) -> None:
        replica = entry.engine
        super()._requeue(entry)
        if isinstance(replica, Replica):
            replica.release(entry)

    def _close(self, entry: PendingGeneration, reason: str) -> None:
        if entry.is_queued and entry.pool is not None:
            entry.pool.remove(entry)
            self.num_queued_samples -= entry.work.samples
        replica = entry.engine
        if isinstance(replica, Replica):
            replica.release(entry)
        super()._close(entry, reason)
        if isinstance(replica, Replica):
            self._end_if_drained(replica)
        self._fill()


async def _start(replica: Replica) -> None:
    try:
        await replica.supervisor.start()
    except EngineError as error:
        raise EngineError(f"replica {replica.number}: {error}") from None


def _num_tokens_to_come(stats: StepStats) -> int:
    return stats.num_due_tokens + stats.num_waiting_tokens
