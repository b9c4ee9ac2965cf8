"""Inputs and results of sampling on a device, as tensors that stay in place.

Two samplers take them, ``TritonSampler`` (``sampler.py``) and ``PlainSampler``
(``runtime/plain_sampler.py``) in operations of PyTorch. Neither synchronizes with the device, so
that their work can be captured in a graph, which is valid for all steps whose rows need no more
options (``Asked``).

The options of a row are one record of sixteen words, so that a step uploads one tensor.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

# Fields of a record, by their first word. Fields of 64 bits have two words.
TOP_P, TYPICAL_P, SEED = 0, 2, 4  # float64, float64, 64 bits
TEMPERATURE, LOG_MIN_P = 6, 7  # float32; a temperature of 0 takes the likeliest token
TOP_K, SAMPLE_INDEX, POSITION = 8, 9, 10  # int32, unsigned bits, int32; no top_k is 0
LOGPROBS = 11  # int32: requested number of likeliest tokens, -1 for no log-probabilities
REPETITION, FREQUENCY, PRESENCE = 12, 13, 14  # float32
MASK_ROW = 15  # int32: the row of the masks, -1 for none
RECORD = struct.Struct("=2dQ2fiIii3fi")
RECORD_WORDS = RECORD.size // 4

# Status of a row: it has a token, or the reason why not.
HAS_TOKEN, BAD_LOGITS, OVERFLOW, NO_TOKEN_LEFT = range(4)

# Fields of a row's log-probabilities, likewise.
TOTAL, PEAK, LOGIT, RANK = 0, 2, 3, 4  # int64, float32, float32, int32
MAX_TOP = 20  # most likely tokens
TOP_IDS, TOP_LOGITS = 6, 6 + MAX_TOP  # int32, float32; the sixth word is unused
LOGPROB_WORDS = 6 + 2 * MAX_TOP


class Asked(NamedTuple):
    """Options that at least one row of a step uses. The launches of a step depend on them, and on
    the shapes of tensors, and on nothing else."""

    cuts: bool = False  # top_k, top_p or typical_p
    masks: bool = False
    edits: bool = False  # logit_bias or penalties
    num_top: int | None = (
        None  # likeliest tokens with log-probabilities; None for no log-probabilities
    )
    typical: bool = False  # typical_p, which is a cut


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Options of R rows that become tokens, on the device.

    ``records``, ``slots`` and ``last_tokens`` stay in place. ``masks`` and the edits have the size
    that a step needs, so that a graph which has captured them is valid for that step alone; the
    edits are of the R rows that are sampled, without padding.
    """

    records: Tensor  # int32 [R, RECORD_WORDS]
    slots: Tensor  # int32 [R]: slot that stores the token of a row, -1 for none
    last_tokens: Tensor  # int32 [slots + 1]; the last entry is never read
    masks: Tensor | None = None  # int32 [M, at least V / 32]: bits of allowed tokens
    edit_starts: Tensor | None = None  # int32 [R + 1]: where the edits of each row begin
    # int32 [3, E]: token ids, unique in a row; the bits of a float32 that is added to the
    # logit; and the token's count in the output: 0 if only the prompt has it, -1 if neither.
    # E is a multiple of 4, and the last columns may be padding.
    edits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Results of R rows or more."""

    answers: Tensor  # int32 [2, R]: token ids, 0 where there is none; HAS_TOKEN, or why not
    logprobs: Tensor  # int32 [R, LOGPROB_WORDS], written for rows that request log-probabilities

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device | str) -> Self:
        answers = torch.zeros((2, num_rows), dtype=torch.int32, device=device)
        return cls(answers, torch.zeros(num_rows, LOGPROB_WORDS, dtype=torch.int32, device=device))

    @property
    def token_ids(self) -> Tensor:
        return self.answers[0]

    @property
    def status(self) -> Tensor:
        return self.answers[1]


class DeviceSampler(Protocol):
    """Sampling of tokens from logits, without synchronizing with the host."""

    def sample(
        self, logits: Tensor, rows: SamplingTensors, asked: Asked, out: SampledTokens
    ) -> None:
        """Sample the next tokens into ``out``, and store them in their slots of ``last_tokens``.

        Args:
            logits: float32 [R, V], for the first R rows of all other tensors. They may change
                during the call, and are restored at its end.
        """
        ...

    def resolve(self, token_ids: Tensor, last_tokens: Tensor) -> None:
        """Replace entries of ``token_ids`` (int32 [T]) that are -1 - s by the last token of slot
        s."""
        ...


def field(records: Tensor, word: int, dtype: torch.dtype) -> Tensor:
    """View of a field of all records (int32 [R, words]): [R] of its own type."""
    return records.view(dtype)[:, word * 4 // dtype.itemsize]
