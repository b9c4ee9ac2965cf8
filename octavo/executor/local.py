"""Runs batches on a model in this process, on the CPU or on one CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo.core.batch import Batch, StepOutput
from octavo.core.executor import FinishedStep

if TYPE_CHECKING:
    from octavo.runtime.prompt_logits import LogitsObserver


class _Blocks(Protocol):
    @property
    def num_blocks(self) -> int: ...


class Runner(Protocol):
    """What computes batches; see ``runtime/model_runner.py`` and ``runtime/native_runner.py``."""

    @property
    def kv_cache(self) -> _Blocks: ...
    @property
    def kernel_seconds(self) -> float:
        """Time spent in the model so far: what is left of a step's time is the engine's."""
        ...

    logits_observer: LogitsObserver | None  # sees the prompts' logits from the next step on

    def run(self, batch: Batch) -> StepOutput: ...


class LocalExecutor:
    """One process, one device, one batch at a time."""

    depth = 1

    def __init__(self, runner: Runner):
        self.runner = runner

    def kv_capacity(self) -> int:
        return self.runner.kv_cache.num_blocks

    def submit(self, batch: Batch) -> FinishedStep:
        return FinishedStep(self.runner.run(batch))

    def close(self) -> None:
        del self.runner
