"""An executor without a model: a cost function and a virtual clock.

It runs the production scheduler and block manager, so what is simulated is their own behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from octavo.core.batch import Batch, StepOutput
from octavo.core.clock import VirtualClock
from octavo.core.request import Request


def filler_token(request: Request) -> int:
    """A next token that no prompt contains and that differs between requests and positions."""
    return -1 - crc32(f"{request.request_id} {len(request.token_ids)}".encode())


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step that is over when the clock says so."""

    ready_at: float
    output: StepOutput
    clock: VirtualClock

    def result(self) -> StepOutput:
        self.clock.advance_to(self.ready_at)
        return self.output


class SimulatedExecutor:
    """Computes no tokens and takes no time.

    Args:
        cost: seconds of a batch; see :mod:`octavo.sim.cost_model`.
        clock: the clock of the engine, which a step's result moves to the step's end.
        num_blocks: the size of the simulated KV pool.
        next_token: the token that a request gets. The default makes up tokens; a replay can
            return those that a real run produced.
        depth: batches in flight. Each begins when the one before it is through the first of
            ``depth`` equal stages, as in a pipeline.
    """

    def __init__(
        self,
        cost: Callable[[Batch], float],
        clock: VirtualClock,
        num_blocks: int,
        next_token: Callable[[Request], int] = filler_token,
        depth: int = 1,
    ):
        self._cost = cost
        self._clock = clock
        self._num_blocks = num_blocks
        self._next_token = next_token
        self._depth = depth
        self._first_stage_free_at = 0.0

    @property
    def depth(self) -> int:
        return self._depth

    def kv_capacity(self) -> int:
        return self._num_blocks

    def submit(self, batch: Batch) -> SimulatedStep:
        cost = self._cost(batch)
        start = max(self._clock.now(), self._first_stage_free_at)
        self._first_stage_free_at = start + cost / self._depth
        tokens = {
            item.request.request_id: [self._next_token(item.request)]
            for item in batch.items
            if item.samples
        }
        return SimulatedStep(start + cost, StepOutput(tokens), self._clock)

    def close(self) -> None:
        pass
