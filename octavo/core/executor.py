"""Where a batch is run, as the engine sees it; implemented in :mod:`octavo.executor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.core.batch import Batch, StepOutput


class StepHandle(Protocol):
    """A submitted step. ``ready_at`` is its end in simulated time, None in real time."""

    @property
    def ready_at(self) -> float | None: ...

    def result(self) -> StepOutput:
        """Wait for the step and return what it produced. Called once, in order of submission."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a step that was over when ``submit`` returned."""

    output: StepOutput
    ready_at: float | None = None

    def result(self) -> StepOutput:
        return self.output


@dataclass(frozen=True, slots=True)
class FailedStep:
    """The handle of a step that raised while it was submitted."""

    error: Exception
    ready_at: float | None = None

    def result(self) -> StepOutput:
        raise self.error


class Executor(Protocol):
    """Runs batches in the order of their submission.

    A step that raises may be run again, in parts and without its block copies: whatever it had
    written until then is written over.

    ``submit`` reads all it needs from the batch (block tables too) before it returns, because the
    scheduler may change them afterwards.
    """

    @property
    def depth(self) -> int:
        """How many batches may be in flight: 1, or the number of pipeline stages."""
        ...

    def kv_capacity(self) -> int:
        """Blocks that fit into the memory set aside for KV."""
        ...

    def submit(self, batch: Batch) -> StepHandle: ...

    def close(self) -> None: ...
