"""`TrialTurns`, which decides which constraint is tried when, and until when.

Most constraints take a few milliseconds to compile, and those of somebody who wants to do harm all
that they may have. So each is tried shortly at first. One that does not end in this time waits
behind the others, and is begun anew when its turn comes:

    come ──▶ short ──▶ answered
               │ takes longer
               └─▶ long ──▶ answered, or refused as too complex
                     │ there is no turn for it in time
                     └─▶ busy: the client may try again

Tenants take turns in both lines.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

# Of a processor.
SHORT_CPU_SECONDS = 0.04
LONG_CPU_SECONDS = 0.5
# By the clock, from when it came: after this, one that still waits behind others has come in vain,
# and one that has had so much of a processor is too complex.
SECONDS = 1.8
_ENOUGH_CPU_SECONDS = 0.15
# Likewise, where other programs have the processors.
PATIENCE = 4.0
_MAX_RUNNING = 2
_MAX_LONG = 1  # of these: others do not wait for them


@dataclass(eq=False, slots=True)
class Trial:
    """A constraint that is tried, or waits for that."""

    number: int
    asked: dict[str, Any]
    tenant: str
    came_at: float
    is_long: bool = False

    @property
    def cpu_seconds(self) -> float:
        """Seconds of a processor that it may take now."""
        return LONG_CPU_SECONDS if self.is_long else SHORT_CPU_SECONDS


@dataclass(slots=True)
class _Line:
    """Trials that wait: the first of each tenant in turn."""

    waiting: OrderedDict[str, deque[Trial]] = field(default_factory=OrderedDict)

    def add(self, trial: Trial) -> None:
        self.waiting.setdefault(trial.tenant, deque()).append(trial)

    def next(self) -> Trial | None:
        """Take out the first trial of the tenant that comes next."""
        if not self.waiting:
            return None
        tenant, own = self.waiting.popitem(last=False)
        trial = own.popleft()
        if own:
            self.waiting[tenant] = own
        return trial

    def take_out_before(self, time: float) -> list[Trial]:
        """Take out all that came before a time."""
        found = []
        for tenant, own in list(self.waiting.items()):
            while own and own[0].came_at < time:
                found.append(own.popleft())
            if not own:
                del self.waiting[tenant]
        return found


class TrialTurns:
    """The trials that wait and run. Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        self._short, self._long = _Line(), _Line()
        self._running: list[Trial] = []

    def add(self, trial: Trial) -> None:
        """Have a trial wait for its first turn."""
        self._short.add(trial)

    def next(self) -> Trial | None:
        """Return the trial that begins to run now; None if there is none, or no place."""
        if len(self._running) >= _MAX_RUNNING:
            return None
        num_long = sum(trial.is_long for trial in self._running)
        trial = self._short.next()
        if trial is None and num_long < _MAX_LONG:
            trial = self._long.next()
        if trial is not None:
            self._running.append(trial)
        return trial

    def end(self, trial: Trial) -> None:
        """Note that one does not run any more."""
        self._running.remove(trial)

    def is_to_go_on(self, trial: Trial) -> bool:
        """Tell whether one that has ended, since it took more than a short trial may, is to have a
        long one, for which it then waits."""
        if trial.is_long:
            return False
        trial.is_long = True
        self._long.add(trial)
        return True

    def overdue(self, now: float) -> list[Trial]:
        """Take out and return those that wait in vain."""
        return self._long.take_out_before(now - SECONDS) + self._short.take_out_before(
            now - PATIENCE
        )

    def is_over(self, trial: Trial, cpu_seconds: float, now: float) -> bool:
        """Tell whether one that runs, and has had so much of a processor, is to end."""
        age = now - trial.came_at
        is_late = trial.is_long and age >= SECONDS and has_had_enough(cpu_seconds)
        return is_late or age >= PATIENCE


def has_had_enough(cpu_seconds: float) -> bool:
    """Tell whether one that took so much of a processor, and has not ended, is too complex, and not
    just unlucky."""
    return cpu_seconds >= _ENOUGH_CPU_SECONDS
