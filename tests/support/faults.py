"""Fault injection: a scheduler, an executor and a forward pass that fail on demand.

build_engine(config, UnreliableExecutor(executor, raises=sometimes(0.1, seed=1)))
engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
runner.forward = FaultyForward(runner.forward, damages=every(9))
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.admission import AdmissionPolicy
from octavo.core.batch import DAMAGED, Batch, StepOutput, TokenLogprobs
from octavo.core.block_manager import BlockManager
from octavo.core.drafting import DraftProposer
from octavo.core.executor import Executor, ExecutorAround, Probe, StepHandle
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.executor.faulty import FaultyStep

if TYPE_CHECKING:
    import numpy as np

    from octavo.runtime.forward import (
        Forward,
        ForwardOutput,
        KVBlocks,
        Logits,
        ObservedRunner,
        PendingForward,
    )

# Returns whether a fault happens this time.
Trigger = Callable[[], bool]


def never() -> bool:
    return False


def every(count: int) -> Trigger:
    """Return a trigger that fires at each ``count``-th call."""
    calls = 0

    def trigger() -> bool:
        nonlocal calls
        calls += 1
        return calls % count == 0

    return trigger


def sometimes(rate: float, seed: int) -> Trigger:
    """Return a trigger that fires with probability ``rate``, by a random ``seed``."""
    rng = random.Random(seed)
    return lambda: rng.random() < rate


class FaultyScheduler(Scheduler):
    """A scheduler that preempts requests without need.

    Args:
        preempts: whether a running request is preempted before a step: as in real preemption, one
            that has produced a token since its admission, and that is not in flight.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        admission: AdmissionPolicy | None = None,
        proposer: DraftProposer | None = None,
        *,
        preempts: Trigger,
    ):
        super().__init__(config, block_manager, admission, proposer)
        self._preempts = preempts

    @classmethod
    def in_place_of(cls, scheduler: Scheduler, *, preempts: Trigger) -> FaultyScheduler:
        """Return a faulty scheduler with the parts of another, for an engine without requests."""
        return cls(
            scheduler.config,
            scheduler.block_manager,
            scheduler.admission,
            scheduler.proposer,
            preempts=preempts,
        )

    def schedule(self) -> Batch:
        if self._preempts():
            for request in self.running:
                if self.may_preempt(request):
                    self.retract(request)
                    break
        return super().schedule()


class UnreliableExecutor(ExecutorAround):
    """An executor whose steps fail now and then.

    Args:
        raises: whether a step raises, asked when it is submitted, before anything is done, and
            again when all of it is done.
        damages: whether the first row of a step has no valid numbers.
    """

    def __init__(self, executor: Executor, *, raises: Trigger = never, damages: Trigger = never):
        super().__init__(executor)
        self._raises, self._damages = raises, damages

    def submit(self, batch: Batch) -> StepHandle:
        if self._raises():
            raise RuntimeError("a step that raises, as was asked for")
        damaged: dict[str, str] = {}
        if batch.items and self._damages():
            damaged[batch.items[0].request.request_id] = DAMAGED
        return _UnreliableStep(super().submit(batch), damaged, self._raises)


@dataclass(frozen=True, slots=True)
class _UnreliableStep(FaultyStep):
    raises: Trigger

    def result(self) -> StepOutput:
        output = FaultyStep.result(self)
        if self.raises():
            raise RuntimeError("a step that raises when it is done, as was asked for")
        return output


class FaultyForward:
    """Wraps a forward pass that sometimes reports NaN.

    Args:
        damages: whether the first row of a batch is reported as NaN.
    """

    def __init__(self, forward: Forward, damages: Trigger):
        self._forward = forward
        self._damages = damages

    @property
    def kv_cache(self) -> KVBlocks:
        return self._forward.kv_cache

    @property
    def kernel_seconds(self) -> float:
        return self._forward.kernel_seconds

    @property
    def depth(self) -> int:
        return self._forward.depth

    @property
    def feeds_tokens(self) -> bool:
        return self._forward.feeds_tokens

    def feeds(self, request: Request) -> bool:
        return self._forward.feeds(request)

    def submit(self, batch: Batch, weighed: Collection[str] = ()) -> PendingForward:
        return _FaultyRows(self._forward.submit(batch, weighed), self._damages)

    def logits(self, rows: range) -> Logits:
        return self._forward.logits(rows)

    def logprobs(self, rows: range, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        return self._forward.logprobs(rows, token_ids, num_top)

    def hidden_states(self, depth: int) -> np.ndarray:
        return self._forward.hidden_states(depth)

    def probe(self, runner: ObservedRunner) -> Probe:
        return self._forward.probe(runner)


@dataclass(frozen=True, slots=True)
class _FaultyRows:
    pending: PendingForward
    damages: Trigger

    def result(self) -> ForwardOutput:
        rows = self.pending.result()
        if self.damages():
            rows.damaged = sorted({0, *rows.damaged})
        return rows
