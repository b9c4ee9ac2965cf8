"""What goes from logits to tokens on a device, and what comes back: tensors that stay in place.

There are two samplers that take them, ``TritonSampler`` (``sampler.py``) and ``PlainSampler``
(``runtime/plain_sampler.py``), its twin in operations of PyTorch. Neither waits for the device nor
asks it anything, so that what they do can be captured in a graph, and is right for all steps whose
rows ask for no more (``Asked``).

All that is known of a row is one record of sixteen words, so that a step uploads one piece.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

# A record, by the word at which each of its fields begins. Those of 64 bits have two words.
TOP_P, TYPICAL_P, SEED = 0, 2, 4  # float64, float64, 64 bits
TEMPERATURE, LOG_MIN_P = 6, 7  # float32; a temperature of 0 takes the likeliest token
TOP_K, SAMPLE_INDEX, POSITION = 8, 9, 10  # int32, unsigned bits, int32; no top_k is 0
LOGPROBS = 11  # int32: how many most likely tokens are asked for, -1 for no log-probabilities
REPETITION, FREQUENCY, PRESENCE = 12, 13, 14  # float32
MASK_ROW = 15  # int32: the row of the masks, -1 for none
RECORD = struct.Struct("=2dQ2fiIii3fi")
RECORD_WORDS = RECORD.size // 4

# What became of a row: it has a token, or none, and then why.
HAS_TOKEN, BAD_LOGITS, OVERFLOW, NO_TOKEN_LEFT = range(4)

# What is found of a row that asks for log-probabilities, likewise.
TOTAL, PEAK, LOGIT, RANK = 0, 2, 3, 4  # int64, float32, float32, int32
MAX_TOP = 20  # most likely tokens
TOP_IDS, TOP_LOGITS = 6, 6 + MAX_TOP  # int32, float32; the fifth word is nobody's
LOGPROB_WORDS = 6 + 2 * MAX_TOP


class Asked(NamedTuple):
    """What at least one row of a step asks of a sampler. The launches of a step depend on this, and
    on the shapes of tensors, and on nothing else."""

    cuts: bool = False  # top_k, top_p or typical_p
    masks: bool = False
    edits: bool = False  # logit_bias or penalties
    num_top: int | None = None  # most likely tokens, with log-probabilities; None for neither
    typical: bool = False  # typical_p, which is a cut


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How each of R rows becomes a token, on the device.

    ``records``, ``slots`` and ``last_tokens`` stay where they are. ``masks`` and the edits are as
    large as a step wants them, so that a graph which has captured them holds for that step alone;
    the edits are of the R rows that are sampled, without padding.
    """

    records: Tensor  # int32 [R, RECORD_WORDS]
    slots: Tensor  # int32 [R]: where the token of a row is remembered, -1 for nowhere
    last_tokens: Tensor  # int32 [seats + 1], of which the last is where nobody looks
    masks: Tensor | None = None  # int32 [M, at least V / 32]: bits of tokens that may come
    edit_starts: Tensor | None = None  # int32 [R + 1]: where the edits of each row begin
    # int32 [3, E]: token ids, no two the same in a row; the bits of a float32 that is added to the
    # logit; and how often the output has the token: 0 if only the prompt has it, -1 if neither.
    # E is a multiple of 4, and the last columns may be no row's.
    edits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What became of R rows or more."""

    answers: Tensor  # int32 [2, R]: token ids, 0 where there is none; HAS_TOKEN, or why not
    logprobs: Tensor  # int32 [R, JUDGED_WORDS], written for the rows that ask for log-probabilities

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
    """From logits to tokens, without a word from the host."""

    def sample(
        self, logits: Tensor, rows: SamplingTensors, asked: Asked, out: SampledTokens
    ) -> None:
        """The next tokens: into ``out``, and remembered at their seats.

        Args:
            logits: float32 [R, V], for as many of the first rows of all else; as they were when the
                call is over, and maybe not meanwhile.
        """
        ...

    def resolve(self, token_ids: Tensor, last_tokens: Tensor) -> None:
        """Put the last token of seat s where ``token_ids`` (int32 [T]) say -1 - s."""
        ...


def field(records: Tensor, word: int, dtype: torch.dtype) -> Tensor:
    """A field of all records (int32 [R, words]) as a view: [R] of its own type."""
    return records.view(dtype)[:, word * 4 // dtype.itemsize]
