"""The interface of forward passes, and their output.

There are three: on PyTorch ops (``eager_forward.py``), in one native call (``native_forward.py``),
and launched asynchronously on a GPU (``cuda_forward.py``). A forward also samples, because it knows
where its logits are; verification, damage reports and log-probabilities of prompts are the same for
all, in ``model_runner.py``.
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

    from octavo.lora.targets import LowRank

# Tensors where PyTorch runs the model; arrays of native kernels, which do not need PyTorch.
Logits: TypeAlias = "np.ndarray | Tensor"


class KVBlocks(Protocol):
    """The blocks of a KV cache."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def host_blocks(self) -> np.ndarray:
        """The blocks of the host KV cache: uint8 [host blocks, bytes of a block], a view. Their ids
        follow those of the pool in ``copy_blocks``."""
        ...

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None: ...

    def wait(self) -> None:
        """Wait for copies after which no step was submitted."""
        ...

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        """Move the KV of positions ``sources``, which ascend, to the positions from ``target`` on,
        none of which is beyond its source. ``block_ids``: the sequence's block table."""
        ...


@dataclass(slots=True)
class ForwardOutput:
    """The output of a forward pass over T tokens of S items, valid until the next pass.

    ``tokens``, ``reasons``, ``logprobs`` and ``probabilities`` have an entry for each item that
    samples, in their order: the tokens of its decode steps, or with a draft the one after the last
    known token and those after each token of the draft.
    """

    starts: Sequence[int] | np.ndarray  # [S + 1]; the rows of item i are [starts[i], starts[i + 1])
    damaged: Sequence[int]  # rows with a NaN or an infinity, in their order
    tokens: list[list[int]] = field(default_factory=list)
    # Why there is no valid token, by item and by the token's index.
    reasons: dict[int, dict[int, str]] = field(default_factory=dict)
    # For items that ask, one for each token; None where there is no valid one.
    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    # For weighed items: the distributions that tokens were drawn from, float32 [tokens, V].
    probabilities: dict[int, np.ndarray] = field(default_factory=dict)

    def result(self) -> ForwardOutput:
        """Return itself: a forward that computes before ``submit`` returns has nothing to await."""
        return self


class SampledRows:
    """The rows of a step that are sampled, item after item.

    Args:
        starts: as in ``ForwardOutput``.
        weighed: ids of the requests whose rows return probabilities too.
    """

    def __init__(
        self,
        batch: Batch,
        starts: Sequence[int] | np.ndarray,
        weighed: Collection[str] = (),
    ):
        self.requests: list[Request | DraftedRow] = []  # the request of each row
        self.at: list[int] = []  # the row in the step
        self.weighed: list[int] = []  # indices of the rows that return probabilities
        self._ends: list[int] = []  # where the rows of each item end
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
        """Store in ``rows`` what was sampled: a token for each row, reasons by row for those that
        have none, and a function that returns the log-probabilities of a row."""
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
        """Store the distributions of the weighed rows, float32 [W, V], in ``rows``."""
        given = begin = 0
        for place, end in enumerate(self._ends):
            if given < len(self.weighed) and self.weighed[given] == begin:
                rows.probabilities[place] = probabilities[given : given + end - begin]
                given += end - begin
            begin = end


class LoraWeights(Protocol):
    """The weights of one adapter, as a forward reads them."""

    @property
    def num_bytes(self) -> int: ...


class Loras(Protocol):
    """A forward that applies adapters.

    ``shapes``: (outputs, inputs) of each parameter that they may change, by name; the inputs of the
    embedding are tokens.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]: ...

    def pack(self, changes: Mapping[str, LowRank]) -> LoraWeights:
        """Return the weights of an adapter, whose changes fit the parameters. For any thread."""
        ...


class PendingForward(Protocol):
    """A submitted forward pass."""

    def result(self) -> ForwardOutput:
        """Wait for the pass. Its output is valid until the next pass but one is submitted."""
        ...


class ObservedRunner(Protocol):
    """The runner as a probe sees it: it keeps the observer of logits that a probe attaches."""

    logits_observer: LogitsObserver | None

    @property
    def kernel_seconds(self) -> float: ...


class Forward(Protocol):
    """A model's pass over batches on one device, with its KV cache."""

    @property
    def kv_cache(self) -> KVBlocks: ...

    @property
    def depth(self) -> int:
        """Number of passes that may be in flight: submitted, and their results not taken."""
        ...

    @property
    def feeds_tokens(self) -> bool:
        """Whether a request may be in several of them, see ``core/executor.py``."""
        ...

    def feeds(self, request: Request) -> bool:
        """Return whether a pass may go on from a token of this request that is still in flight;
        see ``core/executor.py``."""
        ...

    @property
    def kernel_seconds(self) -> float:
        """Time spent in the model so far."""
        ...

    def open_loras(self, dtype: str) -> Loras:
        """Return what packs adapters for this forward, which from then on applies those of a
        batch's requests. ``dtype``: as ``lora_dtype`` of ``EngineArgs``.

        ConfigError if it cannot have any.
        """
        ...

    def exit_after(self, num_layers: int) -> Forward:
        """Return a forward of the first layers followed by the last norm and the head, on the same
        KV cache. ConfigError if the model cannot exit there."""
        ...

    def submit(self, batch: Batch, weighed: Collection[str] = ()) -> PendingForward:
        """Start to compute a batch, all of whose inputs are read before this returns.

        ``weighed``: ids of requests, none of them greedy, whose rows return probabilities too. Such
        a pass must end before the next is submitted, and so must one before ``logits``,
        ``logprobs`` or ``hidden_states`` are called for it.
        """
        ...

    def logits(self, rows: range) -> Logits:
        """Return the logits [R, V] of rows of the last batch, valid until the next call."""
        ...

    def logprobs(self, rows: range, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Return the log-probability of a token in each row, and of its ``num_top`` likeliest."""
        ...

    def hidden_states(self, depth: int) -> np.ndarray:
        """Return the hidden states of the last batch after ``depth`` layers, float32
        [T, hidden_size], if the forward keeps them. Valid until the next pass."""
        ...

    def probe(self, runner: ObservedRunner) -> Probe: ...
