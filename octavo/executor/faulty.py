"""Fault injection: a scheduler, an executor and a forward pass that fail on demand.

engine.executor = FaultyExecutor(engine.executor, raises=sometimes(0.1, seed=1))
engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
runner.forward = FaultyForward(runner.forward, damages=every(9))
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.core.admission import AdmissionPolicy
from octavo.core.batch import DAMAGED, Batch, StepOutput, TokenLogprobs
from octavo.core.block_manager import BlockManager
from octavo.core.drafting import DraftProposer
from octavo.core.executor import Executor, ExecutorAround, Probe, StepHandle
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler, SchedulerConfig

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


class FaultyExecutor(ExecutorAround):
    """Wraps an executor with steps that fail and prompts that make them fail.

    Args:
        poison: what happens in a step with a request whose prompt holds a token, by kind:
            ``raise`` (an exception), ``exit`` (the process ends), ``kill`` (as if by the system),
            ``hang`` (the step never ends), ``slow`` (it takes 0.2 s longer), ``nan`` (its row has
            no valid numbers). A token id each.
        raises: whether a step raises, asked when it is submitted, before anything is done, and
            again when all of it is done.
        damages: whether the first row of a step has no valid numbers.
    """

    def __init__(
        self,
        executor: Executor,
        poison: Mapping[str, int] | None = None,
        *,
        raises: Trigger = never,
        damages: Trigger = never,
    ):
        poison = dict(poison or {})
        unknown = set(poison) - {"raise", "exit", "kill", "hang", "slow", "nan"}
        if unknown:
            raise ValueError(f"no such faults: {sorted(unknown)}")
        super().__init__(executor)
        self._poison = poison
        self._raises = raises
        self._damages = damages

    def submit(self, batch: Batch) -> StepHandle:
        damaged: dict[str, str] = {}
        for kind, token_id in self._poison.items():
            guilty = [
                item.request.request_id
                for item in batch.items
                if token_id in item.request.prompt_token_ids
            ]
            if kind == "nan":
                damaged = dict.fromkeys(guilty, DAMAGED)
            elif guilty:
                _misbehave(kind)
        if self._raises():
            raise RuntimeError("a step that raises, as was asked for")
        if batch.items and self._damages():
            damaged[batch.items[0].request.request_id] = DAMAGED
        return _FaultyStep(self._executor.submit(batch), damaged, self._raises)


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


@dataclass(frozen=True, slots=True)
class _FaultyStep:
    """A step whose result comes late, damaged, or not at all."""

    step: StepHandle
    damaged: dict[str, str]
    raises: Trigger

    @property
    def ready_at(self) -> float | None:
        return self.step.ready_at

    def result(self) -> StepOutput:
        output = self.step.result()
        if self.raises():
            raise RuntimeError("a step that raises when it is done, as was asked for")
        return _damage(output, self.damaged) if self.damaged else output


def _damage(output: StepOutput, damaged: dict[str, str]) -> StepOutput:
    tokens = {name: ids for name, ids in output.token_ids.items() if name not in damaged}
    return replace(output, token_ids=tokens, errors={**output.errors, **damaged})


def _misbehave(kind: str) -> None:
    match kind:
        case "raise":
            raise RuntimeError("a poisoned prompt, as was asked for")
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            while True:
                time.sleep(1)
        case "slow":
            time.sleep(0.2)
