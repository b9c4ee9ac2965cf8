"""Runs batches on a model in this process, on the CPU or on one CUDA device."""

from __future__ import annotations

from octavo.core.batch import Batch
from octavo.core.executor import FinishedStep
from octavo.runtime.model_runner import ModelRunner


class LocalExecutor:
    """One process, one device, one batch at a time."""

    depth = 1

    def __init__(self, runner: ModelRunner):
        self.runner = runner

    def kv_capacity(self) -> int:
        return self.runner.kv_cache.num_blocks

    def submit(self, batch: Batch) -> FinishedStep:
        return FinishedStep(self.runner.run(batch))

    def close(self) -> None:
        del self.runner
