"""An executor that misbehaves on demand, to show that nobody else is hurt."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace

from octavo.core.batch import DAMAGED, Batch, StepOutput
from octavo.core.executor import Executor, FinishedStep, StepHandle


class FaultyExecutor:
    """Another executor, with prompts that it cannot stand.

    Args:
        poison: what happens in a step with a request whose prompt holds a token, by kind:
            ``raise`` (an exception), ``exit`` (the process ends), ``kill`` (as if by the system),
            ``hang`` (the step never ends), ``slow`` (it takes 0.2 s longer), ``nan`` (its row has
            no valid numbers). A token id each.
    """

    def __init__(self, executor: Executor, poison: Mapping[str, int]):
        unknown = set(poison) - {"raise", "exit", "kill", "hang", "slow", "nan"}
        if unknown:
            raise ValueError(f"no such faults: {sorted(unknown)}")
        self._executor = executor
        self._poison = dict(poison)

    @property
    def depth(self) -> int:
        return self._executor.depth

    def kv_capacity(self) -> int:
        return self._executor.kv_capacity()

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
        handle = self._executor.submit(batch)
        if damaged:
            handle = FinishedStep(_damage(handle.result(), damaged))
        return handle

    def close(self) -> None:
        self._executor.close()


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
