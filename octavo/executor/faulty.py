"""Fault injection into a server's engine: requests whose prompts make their steps fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.core.batch import DAMAGED, Batch, StepOutput
from octavo.core.executor import Executor, ExecutorAround, StepHandle


class FaultyExecutor(ExecutorAround):
    """Wraps an executor with steps that fail where a prompt holds a certain token.

    Args:
        poison: the token id by the kind of fault: ``raise`` (an exception), ``exit`` (the process
            ends), ``kill`` (as if by the system), ``hang`` (the step never ends), ``slow`` (it
            takes 0.2 s longer), ``nan`` (the row of the request has no valid numbers).
    """

    def __init__(self, executor: Executor, poison: Mapping[str, int]):
        unknown = set(poison) - {"raise", "exit", "kill", "hang", "slow", "nan"}
        if unknown:
            raise ValueError(f"no such faults: {sorted(unknown)}")
        super().__init__(executor)
        self._poison = poison

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
        return FaultyStep(super().submit(batch), damaged)


@dataclass(frozen=True, slots=True)
class FaultyStep:
    """A step in which some requests have no valid numbers: ``damaged`` has their errors."""

    step: StepHandle
    damaged: dict[str, str]

    @property
    def ready_at(self) -> float | None:
        return self.step.ready_at

    def result(self) -> StepOutput:
        output = self.step.result()
        if not self.damaged:
            return output
        tokens = {name: ids for name, ids in output.token_ids.items() if name not in self.damaged}
        return replace(output, token_ids=tokens, errors={**output.errors, **self.damaged})


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
