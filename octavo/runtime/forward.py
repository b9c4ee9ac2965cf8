"""What runs a model over a batch, as the runner sees it, and what that leaves.

There are two: op by op (``eager_forward.py``), and in one native call (``native_forward.py``). A
forward chooses tokens too, since it knows best where its logits are; all that comes after is the
runner's, and the same for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from octavo.core.batch import Batch, ScheduledRequest, TokenLogprobs
from octavo.core.executor import LogitsObserver, Probe

if TYPE_CHECKING:
    from torch import Tensor

# Of PyTorch where it runs the model, and arrays where that need not even be installed.
Logits: TypeAlias = "np.ndarray | Tensor"


class Blocks(Protocol):
    """The memory behind the block ids."""

    @property
    def num_blocks(self) -> int: ...

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None: ...


@dataclass(slots=True)
class Rows:
    """What a pass over a batch of T tokens and S items leaves, until the next one."""

    starts: Sequence[int] | np.ndarray  # [S + 1]; the rows of item i are [starts[i], starts[i + 1])
    damaged: Sequence[int]  # rows with a NaN or an infinity, in their order
    sampled: list[ScheduledRequest]  # the items that sample, in their order
    tokens: list[list[int]]  # of each of these
    # By place in ``sampled``: why there is no valid token; what was asked about the tokens.
    reasons: dict[int, str]
    logprobs: dict[int, list[TokenLogprobs]]


class Observed(Protocol):
    """Who keeps the observer of logits that a probe attaches: the runner."""

    logits_observer: LogitsObserver | None

    @property
    def kernel_seconds(self) -> float: ...


class Forward(Protocol):
    """A model's pass over a batch, on one device, with the KV cache that it reads and writes."""

    @property
    def kv_cache(self) -> Blocks: ...

    @property
    def kernel_seconds(self) -> float:
        """Time spent in the model so far."""
        ...

    def run(self, batch: Batch) -> Rows:
        """Compute a batch. What it leaves is valid until ``run`` is called again."""
        ...

    def logits(self, rows: range) -> Logits:
        """Logits [R, V] of a few rows of the last batch, valid until the next call of anything."""
        ...

    def logprobs(self, rows: range, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """What those logits say of a token each, and their ``num_top`` most likely ones."""
        ...

    def probe(self, runner: Observed) -> Probe: ...
