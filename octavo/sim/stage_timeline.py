"""Timeline of the stages of simulated pipelines: the first steps, and how busy each stage is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.executor.simulated import StageSpan
from octavo.sim.replica import ReplicaStepTimes

MOST_STEPS = 64  # that are kept, of one replica
_WIDTH = 64  # columns of the text
_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of steps, in turns
_BUBBLE = "."


class StagedStep(NamedTuple):
    """A step, by stage; ``num_seqs`` requests with ``num_tokens`` are in it."""

    number: int
    num_seqs: int
    num_tokens: int
    stages: tuple[StageSpan, ...]


@dataclass(slots=True)
class _Busy:
    """Seconds that each stage of a replica computed, of those from its first to its last step."""

    seconds: list[float]
    begun: float
    ended: float

    @property
    def shares(self) -> list[float]:
        span = self.ended - self.begun
        return [seconds / span if span else 0.0 for seconds in self.seconds]


@dataclass(slots=True)
class StageTimeline:
    """Notes the steps of pipelines; of others it notes nothing."""

    steps: list[StagedStep] = field(default_factory=list)
    _replica: str | None = None
    _busy: dict[str, _Busy] = field(default_factory=dict)

    def note(self, times: ReplicaStepTimes) -> None:
        stages = times.stages
        if not stages:
            return
        begun, ended = stages[0].begun, stages[-1].ended
        busy = self._busy.setdefault(times.replica, _Busy([0.0] * len(stages), begun, ended))
        busy.ended = ended
        for index, span in enumerate(stages):
            busy.seconds[index] += span.ended - span.begun
        self._replica = self._replica or times.replica
        if times.replica == self._replica and len(self.steps) < MOST_STEPS:
            stats = times.step.stats
            self.steps.append(StagedStep(len(self.steps), stats.num_seqs, stats.num_tokens, stages))

    def as_json(self) -> dict[str, Any] | None:
        """Return None where there is no pipeline. ``steps`` are the first ones of one replica;
        ``busy`` has the share of time that each stage computes, by replica, and ``bubbles`` what
        is left of all stages together."""
        if not self._busy:
            return None
        busy = {name: each.shares for name, each in self._busy.items()}
        shares = [share for each in busy.values() for share in each]
        return {
            "replica": self._replica,
            "busy": busy,
            "bubbles": 1.0 - sum(shares) / len(shares),
            "steps": [
                {
                    "num_seqs": step.num_seqs,
                    "num_tokens": step.num_tokens,
                    "stages": [[span.begun, span.ended] for span in step.stages],
                }
                for step in self.steps
            ],
        }

    def as_text(self) -> str:
        """Return a row for each stage, with a letter for each of the first steps; nothing where
        there is no pipeline."""
        if not self.steps or self._replica is None:
            return ""
        steps = self.steps[: 4 * len(self.steps[0].stages)]
        begin = steps[0].stages[0].begun
        # As long as the first stage has steps of these.
        column = (steps[-1].stages[0].ended - begin) / _WIDTH
        shares = self._busy[self._replica].shares
        lines = [
            f"Stages of {self._replica}, first steps: letters are steps, dots are waits; "
            f"{column * 1e3:.3g} ms a column",
            *(
                f"  stage {stage}  {''.join(_cells(steps, stage, begin, column))}  "
                f"busy {share:.0%} of the run"
                for stage, share in enumerate(shares)
            ),
        ]
        return "\n".join(lines) + "\n"


def _cells(steps: Sequence[StagedStep], stage: int, begin: float, column: float) -> Iterator[str]:
    """Yields the step that a stage computes in the middle of each column."""
    for index in range(_WIDTH):
        at = begin + (index + 0.5) * column
        here = (s for s in steps if s.stages[stage].begun <= at < s.stages[stage].ended)
        found = next(here, None)
        yield _BUBBLE if found is None else _NAMES[found.number % len(_NAMES)]
