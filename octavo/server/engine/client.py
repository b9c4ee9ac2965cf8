"""`ProcessEngine`, the `EngineClient` of one engine in a process of its own.

Requests become messages to that process, and its messages become deltas (`Front`). When the engine
dies, the next one gets what can be run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.base.errors import EngineUnavailableError
from octavo.core.stats import StepStats
from octavo.server.engine.front import Front
from octavo.server.engine.generation import EngineFacts, EngineState
from octavo.server.engine.process import Launcher
from octavo.server.engine.supervisor import Supervisor
from octavo.server.engine.waiting_queue import EngineLink, PendingGeneration, QueuedWork
from octavo.server.engine.wire import Message, record_from_list

if TYPE_CHECKING:
    from octavo.cost.step_facts import StepFacts


class ProcessEngine(Front):
    """An `EngineClient` whose engine runs in a process of its own. Belongs to one event loop.

    Args:
        arguments, options: those of `Front`.
    """

    def __init__(
        self,
        launcher: Launcher,
        *arguments: Any,
        engine_timeout: float = 300.0,
        **options: Any,
    ):
        super().__init__(*arguments, **options)
        self._supervisor = Supervisor(launcher, self, engine_timeout=engine_timeout)
        self._stats = StepStats.idle()

    # -- EngineClient ------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def is_stopping(self) -> bool:
        return self._supervisor.is_stopping

    @property
    def stats(self) -> StepStats:
        return self._stats

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    def enable_snapshots(self, is_enabled: bool) -> None:
        self._shows_snapshots = is_enabled
        if self.state is EngineState.READY:
            self._send_snapshots_op()

    # -- start and stop ----------------------------------------------------------------------

    async def start(self) -> None:
        """Launch the engine, and return when it is ready.

        Raises:
            ModelError, ConfigError, EngineError: what kept it from starting.
        """
        await self._supervisor.start()

    def set_step_facts(self, facts: StepFacts) -> None:
        """Have the engine, and every later one, measure its steps against a prediction of their
        times.

        The admission by predicted TTFT uses the same prediction.

        Raises:
            ConfigError: the device has no known peak for what the model computes in.
        """
        steps = facts.step_model()
        self._step_facts = facts
        if self._ttft_admission is not None:
            self._ttft_admission.set_step_model(steps, self.facts)
        if self.state is EngineState.READY:
            self._send_step_facts()

    async def wait_until_given_up(self) -> None:
        """Return when the engine is down for good without having been asked to stop."""
        await self._supervisor.wait_until_given_up()

    async def stop(self, why: str = "the server is stopping") -> None:
        """End all generations, which are told why, and the engine. May be repeated."""
        self._fail_all(EngineUnavailableError(why), "abort")
        await self._supervisor.stop()

    # -- SupervisorListener ------------------------------------------------------------------

    def on_engine_state(self, state: EngineState, detail: str) -> None:
        self._observer.on_engine_state(state, detail)
        match state:
            case EngineState.READY:
                self._stats = StepStats.idle(self.facts.num_blocks)
                self._send_step_facts()
                if self._shows_snapshots:
                    self._send_snapshots_op()
                for entry in list(self._entries.values()):
                    self._dispatch(entry)
            case EngineState.FAILED:
                self._fail_unavailable()

    def on_engine_death(self, at_work: Sequence[str]) -> bool:
        is_explained = self._take_death(self._supervisor, at_work)
        self._stats = StepStats.idle()
        return is_explained

    def on_engine_message(self, message: Message) -> None:
        match message["ev"]:
            case "step":
                before, self._stats = self._stats, record_from_list(message["record"])
                self._take_step(self._supervisor, message, before, self._stats)
                self._observer.on_step(self._stats)
                if message.get("snapshot"):
                    self._observer.on_snapshot(self._stats.step_id, message["snapshot"])
            case "idle" | "pong":
                self._stats = record_from_list(message["record"])
            case "snapshot":
                self._observer.on_snapshot(self._stats.step_id, message["snapshot"])
            case "refused":
                self._take_refusal(self._supervisor, message)

    # -- Front -------------------------------------------------------------------------------

    def _known_facts(self) -> EngineFacts | None:
        return self._supervisor.facts

    def _dispatch(self, entry: PendingGeneration) -> None:
        """Send it to the engine, or, if it is a suspect, queue it for an isolated run."""
        if self.state is not EngineState.READY:
            return  # all are sent when it is
        if self._crash_isolation.is_suspected(entry.fingerprint):
            self._crash_isolation.enqueue(entry)
            self._send_next_suspect()
        else:
            self._send(entry, self._supervisor)

    def _engine_for_suspect(self) -> EngineLink | None:
        return self._supervisor if self.state is EngineState.READY else None

    def _load_before(self, tenant: str, num_tokens: int) -> tuple[StepStats, QueuedWork]:
        return self._stats, self._waiting_queue.work_before(tenant, num_tokens)

    def _note_success(self, engine: EngineLink | None) -> None:
        self._supervisor.note_success()

    def _send_snapshots_op(self) -> None:
        self._supervisor.send({"op": "snapshots", "is_enabled": self._shows_snapshots})

    def _send_step_facts(self) -> None:
        if self._step_facts is not None:
            self._supervisor.send({"op": "meter", "facts": self._step_facts.as_json()})
