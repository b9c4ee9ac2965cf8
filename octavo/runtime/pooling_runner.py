"""Runs batches of a model that pools: the hidden states of a step become vectors."""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

import numpy as np

from octavo.core.batch import DAMAGED, Batch, StepOutput
from octavo.core.executor import FinishedStep, LogitsObserver, StepHandle
from octavo.runtime.forward import Forward
from octavo.runtime.hidden_states import StepFollower
from octavo.runtime.pooler import Pooler


class PooledForward(Forward, Protocol):
    """A forward pass whose hidden states can be read."""

    def last_hidden_states(self) -> np.ndarray:
        """Return the hidden states of the last batch behind the last norm, float32
        [T, hidden_size]. Valid until the next pass."""
        ...


class PoolingRunner:
    """Takes the place of ``ModelRunner`` for a model without a head, from which nothing is
    sampled."""

    def __init__(self, forward: PooledForward, pooler: Pooler):
        self.forward = forward
        self.pooler = pooler
        self.logits_observer: LogitsObserver | None = None
        self.follower: StepFollower | None = None

    @property
    def kernel_seconds(self) -> float:
        return self.forward.kernel_seconds

    def submit(self, batch: Batch) -> StepHandle:
        """Compute a batch. Requests with NaN or infinite numbers are in ``errors`` alone."""
        self.pooler.forget((*batch.finished_ids, *batch.preempted_ids))
        if batch.block_copies:
            self.forward.kv_cache.copy_blocks(batch.block_copies)
        output = StepOutput({})
        if not batch.items:
            self.forward.kv_cache.wait()
            return FinishedStep(output)
        rows = self.forward.submit(batch).result()
        hidden = self.forward.last_hidden_states()
        for index, item in enumerate(batch.items):
            first, end = int(rows.starts[index]), int(rows.starts[index + 1])
            request_id = item.request.request_id
            at = bisect_left(rows.damaged, first)
            if at < len(rows.damaged) and rows.damaged[at] < end:
                output.errors[request_id] = DAMAGED
                continue
            result = self.pooler.take(item.request, item.start, hidden[first:end])
            if result is not None:
                output.pooled[request_id] = result
        return FinishedStep(output)
