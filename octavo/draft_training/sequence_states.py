"""Computes hidden states of whole sequences with the engine's own kernels.

They are read where a head reads them in use: from a rank that keeps the residual stream of its
steps (``runtime/hidden_states.py``). So training sees the arithmetic of inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from octavo.base.errors import ModelError
from octavo.core.batch import Batch, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.models.config import ModelConfig
from octavo.models.registry import CausalLM
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.hidden_states import ComputedTokens, States
from octavo.runtime.rank import Rank
from octavo.speculation.native_target import normalized

_STEP_TOKENS = 2048
_NUM_SEQS = 64  # the most sequences of a step


class SequenceHiddenStates(NamedTuple):
    """Hidden states of a sequence of T tokens.

    ``hidden``: after the final norm, float32 [T, d]. ``streams``: the residual stream at n depths,
    concatenated, float32 [T, n d].
    """

    hidden: np.ndarray
    streams: np.ndarray


class HiddenStates:
    """Runs a loaded model over sequences, and returns their hidden states.

    Args:
        max_length: the longest sequence, in tokens.
        depths: the numbers of layers after which the residual stream is kept.

    Raises:
        ConfigError: the model cannot be run as ``spec`` says.
    """

    def __init__(
        self,
        spec: RankSpec,
        model: CausalLM,
        config: ModelConfig,
        max_length: int,
        depths: Sequence[int] = (),
    ):
        body: Any = model
        norm = body.model.norm
        self._norm = normalized(norm.weight.value, norm.eps)
        self._block_size = spec.block_size
        self._budget = max(_STEP_TOKENS, max_length)
        self._kept = _StateCollector(config.num_layers, depths)
        self._rank = Rank.of_model(spec, model, config)
        self._rank.keep_hidden_states({config.num_layers, *depths})
        # Every sequence of a step begins a block of its own.
        num_blocks = self._budget // self._block_size + _NUM_SEQS
        self._rank.start(RankLimits(num_blocks, _NUM_SEQS, max_length, self._budget))
        self._rank.follow(self._kept)

    def of(self, sequences: Sequence[Sequence[int]]) -> Iterator[SequenceHiddenStates]:
        """Yield the states of each sequence, in their order.

        Raises:
            ModelError: the model's hidden states are not finite.
        """
        for number, step in enumerate(self._steps(sequences)):
            output = self._rank.run(Batch(number, tuple(self._items(step))))
            if output.errors:
                raise ModelError(f"no heads can be trained: {next(iter(output.errors.values()))}")
            for last, streams in self._kept.rows:
                yield SequenceHiddenStates(self._norm(last), streams)

    def close(self) -> None:
        self._rank.close()

    def _steps(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        step: list[Sequence[int]] = []
        for sequence in sequences:
            if sum(map(len, step)) + len(sequence) > self._budget or len(step) == _NUM_SEQS:
                yield step
                step = []
            step.append(sequence)
        if step:
            yield step

    def _items(self, step: Sequence[Sequence[int]]) -> Iterator[ScheduledRequest]:
        """Yield an item for each sequence, which computes all of it and samples nothing."""
        block = 0
        for index, sequence in enumerate(step):
            request = Request(str(index), list(sequence), SamplingParams(), 0.0)
            count = -(-len(sequence) // self._block_size)
            request.block_ids = list(range(block, block + count))
            block += count
            yield ScheduledRequest(request, 0, len(sequence), 0)


class _StateCollector:
    """A ``StepFollower`` that keeps, of each request of the latest step, the stream after ``last``
    layers, and those after ``depths`` layers, concatenated."""

    def __init__(self, last: int, depths: Sequence[int]):
        self._last, self._depths = last, depths
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []

    def follow(self, batch: Batch, computed: Sequence[ComputedTokens], states: States) -> None:
        self.rows = []
        for each in computed:
            last = states(self._last)[each.rows]
            streams = [states(depth)[each.rows] for depth in self._depths]
            self.rows.append((last, np.concatenate([last[:, :0], *streams], axis=1)))
