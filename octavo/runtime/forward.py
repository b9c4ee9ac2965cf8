"""What runs a model over a batch, as the runner sees it, and what that leaves.

There are three: op by op (``eager_forward.py``), in one native call (``native_forward.py``), and on
a GPU that is told ahead what to do (``cuda_forward.py``). A forward chooses tokens too, since it
knows best where its logits are; all that comes after is the runner's, and the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from octavo.core.batch import Batch, TokenLogprobs
from octavo.core.executor import LogitsObserver, Probe
from octavo.core.request import Request
from octavo.runtime.sampling_row import DraftedRow, rows_of

if TYPE_CHECKING:
    from torch import Tensor

# Of PyTorch where it runs the model, and arrays where that need not even be installed.
Logits: TypeAlias = "np.ndarray | Tensor"


class KVBlocks(Protocol):
    """The memory behind the block ids."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def host_blocks(self) -> np.ndarray:
        """Blocks in host memory, which can be copied to and from under the ids that follow those of
        the pool: uint8 [shelf blocks, bytes of a block], as it is and not as a copy."""
        ...

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None: ...

    def wait(self) -> None:
        """Until copies that were asked for have been made, if nothing was run after them."""
        ...

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        """Move what a sequence has in some slots, in ascending order, to the slots from ``target``
        on, none of which lies behind its own source. A slot is that of a position, by the
        sequence's block table."""
        ...


@dataclass(slots=True)
class ForwardOutput:
    """What a pass over a batch of T tokens and S items leaves, until the next one.

    ``sampled`` and the like are per item that samples, by their place among these: the tokens of
    its decode steps, or with a draft the one that follows the last known token, and then those that
    follow each token of the draft.
    """

    starts: Sequence[int] | np.ndarray  # [S + 1]; the rows of item i are [starts[i], starts[i + 1])
    damaged: Sequence[int]  # rows with a NaN or an infinity, in their order
    tokens: list[list[int]] = field(default_factory=list)
    # Why there is no valid token, by its place in the list.
    reasons: dict[int, dict[int, str]] = field(default_factory=dict)
    # Of those who ask, one for each token; None where there is no valid one.
    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    # Of those who are weighed: what their tokens were drawn from, float32 [tokens, V].
    probabilities: dict[int, np.ndarray] = field(default_factory=dict)

    def result(self) -> ForwardOutput:
        """Return itself: a forward that computes before ``submit`` returns has nothing to await."""
        return self


class SampledRows:
    """The rows of a step that become tokens, item after item.

    Args:
        starts: as in ``ForwardOutput``.
        weighed: requests, by their ids, whose rows are asked for probabilities too.
    """

    def __init__(
        self,
        batch: Batch,
        starts: Sequence[int] | np.ndarray,
        weighed: Collection[str] = (),
    ):
        self.requests: list[Request | DraftedRow] = []  # what each row is sampled for
        self.at: list[int] = []  # where it is in the step
        self.weighed: list[int] = []  # those of these rows that are asked for probabilities
        self._ends: list[int] = []  # of each item that samples
        for index, item in enumerate(batch.items):
            if not item.samples:
                continue
            end = int(starts[index + 1])
            if item.draft is None:
                self.requests.append(item.request)
                self.at.append(end - 1)
            else:
                self.requests += rows_of(item.request, item.draft)
                self.at += range(end - 1 - len(item.draft), end)
            if weighed and item.request.request_id in weighed:
                self.weighed += range(self._ends[-1] if self._ends else 0, len(self.at))
            self._ends.append(len(self.at))

    def give(
        self,
        rows: ForwardOutput,
        token_ids: Sequence[int],
        reasons: Mapping[int, str],
        logprobs: Callable[[int], TokenLogprobs | None],
    ) -> None:
        """Hand out what was sampled: a token for each row, reasons by row for those that have none,
        and a function of a row for what was asked of its token."""
        begin = 0
        for place, end in enumerate(self._ends):
            rows.tokens.append([*token_ids[begin:end]])
            if reasons:
                rows.reasons[place] = {
                    row - begin: reasons[row] for row in range(begin, end) if row in reasons
                }
            if self.requests[begin].params.logprobs is not None and begin not in reasons:
                rows.logprobs[place] = [logprobs(row) for row in range(begin, end)]
            begin = end

    def give_probabilities(self, rows: ForwardOutput, probabilities: np.ndarray) -> None:
        """Hand out what was found for the rows that are weighed, float32 [W, V]."""
        given = begin = 0
        for place, end in enumerate(self._ends):
            if given < len(self.weighed) and self.weighed[given] == begin:
                rows.probabilities[place] = probabilities[given : given + end - begin]
                given += end - begin
            begin = end


class PendingForward(Protocol):
    """A pass that was begun."""

    def result(self) -> ForwardOutput:
        """Wait for it. What it leaves is valid until the next pass but one is begun."""
        ...


class ObservedRunner(Protocol):
    """Who keeps the observer of logits that a probe attaches: the runner."""

    logits_observer: LogitsObserver | None

    @property
    def kernel_seconds(self) -> float: ...


class Forward(Protocol):
    """A model's pass over a batch, on one device, with the KV cache that it reads and writes."""

    @property
    def kv_cache(self) -> KVBlocks: ...

    @property
    def depth(self) -> int:
        """How many passes may have been begun whose results were not taken."""
        ...

    def feeds(self, request: Request) -> bool:
        """Whether a pass may go on from a token of this request that was not taken. See
        ``core/executor.py``."""
        ...

    @property
    def kernel_seconds(self) -> float:
        """Time spent in the model so far."""
        ...

    def exit_after(self, num_layers: int) -> Forward:
        """A forward of the first layers, whose output goes to the last norm and the head, on the
        same KV cache. ConfigError if the model cannot be ended there."""
        ...

    def submit(self, batch: Batch, weighed: Collection[str] = ()) -> PendingForward:
        """Begin to compute a batch. All that is read of it is read before this returns.

        ``weighed``: the ids of requests whose rows are asked for probabilities too. None of them is
        greedy. Such a pass, and one of which anything below is asked, ends before the next begins.
        """
        ...

    def logits(self, rows: range) -> Logits:
        """Logits [R, V] of a few rows of the last batch, valid until the next call of anything."""
        ...

    def logprobs(self, rows: range, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """What those logits say of a token each, and their ``num_top`` most likely ones."""
        ...

    def hidden_states(self, depth: int) -> np.ndarray:
        """Float32 [T, hidden_size] of the last batch, after so many layers, where the forward was
        made to keep them (``hidden_states.py``). Valid until the next run."""
        ...

    def probe(self, runner: ObservedRunner) -> Probe: ...
