"""Runs batches on a model in this process, on the CPU or on one CUDA device."""

from __future__ import annotations

from typing import Protocol

from octavo.core.batch import Batch
from octavo.core.executor import Probe, StepHandle
from octavo.core.request import Request


class Rank(Protocol):
    """What computes batches; see ``runtime/rank.py``."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def feeds(self, request: Request) -> bool: ...

    def submit(self, batch: Batch) -> StepHandle: ...

    def probe(self) -> Probe: ...

    def close(self) -> None: ...


class LocalExecutor:
    """One process, one rank that has been started, and as many batches at a time as it takes."""

    def __init__(self, rank: Rank):
        self.rank = rank

    @property
    def depth(self) -> int:
        return self.rank.depth

    @property
    def feeds_tokens(self) -> bool:
        return self.rank.depth > 1

    def feeds(self, request: Request) -> bool:
        return self.rank.feeds(request)

    def kv_capacity(self) -> int:
        return self.rank.num_blocks

    def submit(self, batch: Batch) -> StepHandle:
        return self.rank.submit(batch)

    def probe(self) -> Probe:
        return self.rank.probe()

    def close(self) -> None:
        self.rank.close()
