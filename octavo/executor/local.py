"""Runs batches on a model in this process, on the CPU or on one CUDA device."""

from __future__ import annotations

from typing import Protocol

from octavo.core.batch import Batch, StepOutput
from octavo.core.executor import FinishedStep, Probe


class Rank(Protocol):
    """What computes batches; see ``runtime/rank.py``."""

    @property
    def num_blocks(self) -> int: ...

    def run(self, batch: Batch) -> StepOutput: ...

    def probe(self) -> Probe: ...

    def close(self) -> None: ...


class LocalExecutor:
    """One process, one rank that has been started, one batch at a time."""

    depth = 1
    feeds_tokens = False

    def __init__(self, rank: Rank):
        self.rank = rank

    def kv_capacity(self) -> int:
        return self.rank.num_blocks

    def submit(self, batch: Batch) -> FinishedStep:
        return FinishedStep(self.rank.run(batch))

    def probe(self) -> Probe:
        return self.rank.probe()

    def close(self) -> None:
        self.rank.close()
