"""`Elastic` has the replicas of a server come and go with its load, as `ScalingPolicy` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from octavo.base.errors import ConfigError, OctavoError
from octavo.core.scaling import Change, Load, ScalingLimits, ScalingPolicy
from octavo.server.engine.generation import EngineObserver, EngineState
from octavo.server.engine.replicas import Replica, ReplicaSet

_log = logging.getLogger("octavo.server")

_SECONDS_BETWEEN_LOOKS = 0.25
# After a replica that could not be started, this long goes by until the next one is tried.
_SECONDS_AFTER_FAILURE = 30.0


class Elastic:
    """Adds and drains replicas. Belongs to the event loop of its `ReplicaSet`.

    Args:
        clock: seconds, as `time.monotonic` has them.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        limits: ScalingLimits,
        observer: EngineObserver,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._replicas = replicas
        self._limits = limits
        self._policy = ScalingPolicy(limits)
        self._observer = observer
        self._clock = clock
        self._not_before = 0.0
        self._expected: int | None = None  # the number of the replica that was added last

    async def run(self) -> None:
        """Look at the load every now and then, until this is cancelled."""
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            with contextlib.suppress(OctavoError):  # the server is stopping, or nothing is up yet
                self.look()

    def look(self) -> None:
        """Look at the load now, and begin what the policy decides."""
        now = self._clock()
        self._note_failure(now)
        self._remove_failed()
        match self._policy.decide(now, self.load()):
            case Change.UP if now >= self._not_before:
                self._add(now)
            case Change.DOWN:
                self._drain()

    def load(self) -> Load:
        """Return the load as the policy sees it."""
        serving = [each for each in self._replicas.replicas if not each.is_draining]
        return Load(
            num_ready=sum(each.is_up for each in serving),
            num_coming=sum(each.is_coming for each in serving),
            num_samples=self._replicas.num_samples,
            places=self._replicas.facts.max_num_seqs,
            predicted_ttft=self._replicas.predicted_ttft(),
        )

    def _add(self, now: float) -> None:
        try:
            self._expected = number = self._replicas.add()
        except ConfigError as error:
            self._not_before = now + _SECONDS_AFTER_FAILURE
            _log.warning("no replica can be added: %s", error)
            return
        _log.info("replica %d is added: the predicted TTFT is over its target", number)
        self._observer.on_scaled("up")

    def _drain(self) -> None:
        replica = min(self._drainable(), key=_load_of)
        _log.info("replica %d is drained: one less has been enough", replica.number)
        self._replicas.drain(replica.number)
        self._observer.on_scaled("down")

    def _drainable(self) -> list[Replica]:
        return [each for each in self._replicas.replicas if not each.is_draining]

    def _remove_failed(self) -> None:
        """Remove replicas that do not start any more, where others serve."""
        if any(each.is_up for each in self._replicas.replicas):
            for each in self._drainable():
                if each.state is EngineState.FAILED:
                    self._replicas.remove(each.number)

    def _note_failure(self, now: float) -> None:
        """Wait a while if the replica that was added last has gone without having served."""
        if self._expected is None:
            return
        found = next((r for r in self._replicas.replicas if r.number == self._expected), None)
        if found is None:
            self._not_before = now + _SECONDS_AFTER_FAILURE
        if found is None or found.is_up:
            self._expected = None


def _load_of(replica: Replica) -> tuple[int, int]:
    """Order replicas: first those that do not serve, then by their requests, the newest first."""
    return (len(replica.entries) if replica.is_up else -1, -replica.number)
