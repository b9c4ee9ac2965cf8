"""Hidden states of whole sequences, by the engine's own kernels.

A model whose head is the identity says its hidden states where another says logits: all that runs
models runs it, with the arithmetic that the head will see in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from octavo.core.batch import Batch, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ModelError
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.linear import LMHead
from octavo.layers.module import Module
from octavo.models.config import ModelConfig
from octavo.models.registry import CausalLM
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.rank import Rank

_STEP_TOKENS = 2048
_BLOCK, _LARGEST = 32, 127  # values of a block of Q8_0, and the largest code


class HiddenStates:
    """What a loaded model hands to its head; the model stays as it is.

    ``max_length``: of a sequence, in tokens. ConfigError if it cannot be run as ``spec`` says.
    """

    def __init__(self, spec: RankSpec, model: CausalLM, config: ModelConfig, max_length: int):
        self._block_size, self._size = spec.block_size, config.hidden_size
        self._budget = max(_STEP_TOKENS, max_length)
        # Every sequence of a step begins a block of its own.
        num_seqs = 64
        num_blocks = self._budget // self._block_size + num_seqs
        self._num_seqs = num_seqs
        self._rank = Rank.of_model(spec, cast(CausalLM, _Headless(model, config)), config)
        self._rank.start(RankLimits(num_blocks, num_seqs, max_length, self._budget))

    def of(self, sequences: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        """After the final norm, float32 [tokens, d] of each sequence, in their order.

        ModelError where the model's numbers are no numbers.
        """
        for number, step in enumerate(self._steps(sequences)):
            seen = _Rows(self._size)
            self._rank.probe().observe_logits(seen)
            output = self._rank.run(Batch(number, tuple(self._items(step))))
            if output.errors:
                raise ModelError(f"no heads can be trained: {next(iter(output.errors.values()))}")
            for index in range(len(step)):
                yield np.concatenate(seen.rows[str(index)])

    def close(self) -> None:
        self._rank.close()

    def _steps(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        step: list[Sequence[int]] = []
        for sequence in sequences:
            if sum(map(len, step)) + len(sequence) > self._budget or len(step) == self._num_seqs:
                yield step
                step = []
            step.append(sequence)
        if step:
            yield step

    def _items(self, step: Sequence[Sequence[int]]) -> Iterator[ScheduledRequest]:
        """Each computes the whole of a prompt, and samples nothing."""
        block = 0
        for index, sequence in enumerate(step):
            request = Request(str(index), list(sequence), SamplingParams(), 0.0)
            count = -(-len(sequence) // self._block_size)
            request.block_ids = list(range(block, block + count))
            block += count
            yield ScheduledRequest(request, 0, len(sequence), 0)


class _Rows:
    """Sees the logits of prompts (a ``LogitsObserver``), the first ``size`` of all positions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.rows: dict[str, list[np.ndarray]] = {}

    def wants(self, request: Request) -> range:
        return range(request.num_prompt_tokens)

    def observe(self, request: Request, start: int, logits: np.ndarray) -> None:
        self.rows.setdefault(request.request_id, []).append(logits[:, : self._size].copy())


class _Headless(Module):
    """A model with the identity in place of its head, and zeros in the rows below it: there must
    be one for each token."""

    def __init__(self, model: Any, config: ModelConfig):
        self.config = replace(config, tie_embeddings=False)
        self.model = model.model
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        identity = _identity(config.vocab_size, config.hidden_size)
        self.lm_head.weight = self.lm_head.weight.holding(identity)

    def forward(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        return self.model(token_ids, ctx)

    def compute_logits(self, hidden: Activations, ctx: ForwardContext) -> Activations:
        return self.lm_head(hidden, ctx)


def _identity(rows: int, size: int) -> StoredWeight:
    """Ones on the diagonal: in Q8_0, a quarter of the floats, where rows are made of its blocks."""
    diagonal = np.arange(min(rows, size))
    if size % _BLOCK:
        floats = np.zeros((rows, size), dtype=np.float32)
        floats[diagonal, diagonal] = 1
        return StoredWeight(GGMLType.F32, floats.view(np.uint8), floats.shape)
    blocks = np.zeros((rows, size // _BLOCK), dtype=[("scale", "<f2"), ("codes", "i1", _BLOCK)])
    blocks["scale"] = 1 / _LARGEST
    blocks["codes"][diagonal, diagonal // _BLOCK, diagonal % _BLOCK] = _LARGEST
    data = blocks.view(np.uint8).reshape(rows, -1)
    return StoredWeight(GGMLType.Q8_0, data, (rows, size))
