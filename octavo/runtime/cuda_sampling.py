"""Inputs of the GPU's sampler, and the log-probabilities that it returns.

``kernels/cuda/sampling.py`` defines the layout of both. The sampling parameters of a request stay
the same from step to step and are packed once; only the position of the token changes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.core.batch import BAD_LOGITS, NO_TOKEN_LEFT, OVERFLOW, TokenLogprobs
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cuda import sampling
from octavo.kernels.cuda.sampling import RECORD, RECORD_WORDS, Asked
from octavo.runtime.cuda_inputs import aligned
from octavo.runtime.logits import WEIGHT_ONE
from octavo.runtime.sampling_row import DraftedRow, SamplingRow, is_greedy, make_together

# Requests are rows as they are: a ``SamplingRow`` of one would copy its output.
Row = SamplingRow | DraftedRow | Request
HostBuffer = Callable[[int, torch.dtype], Tensor]

REASONS = {
    sampling.BAD_LOGITS: BAD_LOGITS,
    sampling.OVERFLOW: OVERFLOW,
    sampling.NO_TOKEN_LEFT: NO_TOKEN_LEFT,
}
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
_SEED_BITS = 2**64 - 1


def needs_host(params: SamplingParams) -> str | None:
    """Return why sampling a token needs its predecessors on the host, None if it does not.

    A mask that depends on a request's tokens is another reason (``Request.is_masked``). All other
    parameters are known to the device before the step.
    """
    if params.has_penalties:
        return "penalties depend on how often each token has come, which the host counts"
    return None


class SamplingArrays:
    """The sampler's inputs of a step, which are written anew for each step.

    Masks and edits get new buffers each time, because the device may still read the last ones.

    Args:
        records: int32 [rows, RECORD_WORDS] in host memory, contiguous.
        vocab_size: tokens beyond it are ignored in biases and penalties.
        host_buffer: ``Stream.host_buffer``, for masks and edits.
    """

    def __init__(self, records: Tensor, vocab_size: int, host_buffer: HostBuffer):
        assert records.dtype == torch.int32 and records.shape[1] == RECORD_WORDS
        self.records = records
        # As in ``SamplingTensors``, where the rows need them: new tensors at each step.
        self.masks: Tensor | None = None
        self.edit_starts: Tensor | None = None
        self.edits: Tensor | None = None
        self._words = records.numpy()
        self._bytes = self._words.data.cast("B")
        self._vocab_size, self._host_buffer = vocab_size, host_buffer
        self._known: dict[int, _RequestSampling] = {}  # by id() of requests, of the last step

    def write(self, rows: Sequence[Row], positions: Sequence[int]) -> Asked:
        """Write the records of rows, and the masks and edits that they need; return their options.

        ``positions``: the positions of the tokens to sample in the output of their requests.
        """
        known, kept = self._known, dict[int, _RequestSampling]()
        records, size = self._bytes, RECORD.size
        end, num_top = 0, -1
        cuts = edits = typical = False
        for row in rows:
            owner = row.request if isinstance(row, DraftedRow) else row
            key = id(owner)
            entry = kept.get(key)
            if entry is None:
                entry = kept[key] = known.get(key) or _RequestSampling(owner)
            records[end : end + size] = entry.record
            end += size
            cuts |= entry.has_cuts
            typical |= entry.has_typical
            edits |= entry.has_edits
            num_top = max(num_top, entry.num_top)
        self._known = kept
        self._words[: len(rows), sampling.POSITION] = positions
        self.edit_starts = self.edits = None
        if edits:
            self._write_edits(rows)
        masks = self._write_masks(rows)
        return Asked(cuts, masks, edits, None if num_top < 0 else num_top, typical)

    def _write_masks(self, rows: Sequence[Row]) -> bool:
        """Write the masks of rows; return whether there are any."""
        self.masks = None
        masks: list[array[int]] = []
        make_together(rows)
        for index, row in enumerate(rows):
            if isinstance(row, Request) and row.mask is None:
                continue
            bits = row.bitmask()
            if bits is not None:
                self._words[index, sampling.MASK_ROW] = len(masks)
                masks.append(bits)
        if masks:
            self.masks = self._table(len(masks), len(masks[0]))
            np.stack([np.frombuffer(bits, np.int32) for bits in masks], out=self.masks.numpy())
        return bool(masks)

    def _write_edits(self, rows: Sequence[Row]) -> None:
        own = [self._edits_of(row) for row in rows]
        self.edit_starts = self._host_buffer(len(rows) + 1, torch.int32)
        starts = self.edit_starts.numpy()
        np.cumsum([edits.shape[1] for edits in own], out=starts[1:])
        self.edits = self._table(3, aligned(int(starts[-1])))
        np.concatenate(own, axis=1, out=self.edits.numpy()[:, : starts[-1]])

    def _table(self, num_rows: int, width: int) -> Tensor:
        """Allocate zeros, int32 [num_rows, width], in host memory."""
        return self._host_buffer(num_rows * width, torch.int32).view(num_rows, width)

    def _edits_of(self, row: Row) -> np.ndarray:
        owner = row.request if isinstance(row, DraftedRow) else row
        entry = self._known[id(owner)]
        if not entry.has_edits:
            return _NO_EDITS
        if entry.edits is None or entry.edits.num_followed > owner.num_output_tokens:
            entry.edits = LogitEdits(owner.params, owner.prompt_token_ids, self._vocab_size)
        entry.edits.follow(owner)
        return entry.edits.after(row.drafted if isinstance(row, DraftedRow) else ())


class _RequestSampling:
    """The sampling record of a request, and the edits of its logits."""

    __slots__ = ("edits", "has_cuts", "has_edits", "has_typical", "num_top", "owner", "record")

    def __init__(self, owner: SamplingRow | Request):
        params = owner.params
        self.owner = owner  # kept alive, because entries are found by its id()
        self.record = _record(params, owner.seed, owner.sample_index)
        draws = not is_greedy(params)
        self.has_typical = draws and params.typical_p < 1
        self.has_cuts = self.has_typical or (draws and (params.top_k > 0 or params.top_p < 1))
        self.has_edits = bool(params.logit_bias) or params.has_penalties
        self.num_top = -1 if params.logprobs is None else params.logprobs
        self.edits: LogitEdits | None = None


def _record(params: SamplingParams, seed: int, sample_index: int) -> bytes:
    """Pack the sampling parameters of a request; position and mask follow at each step."""
    return RECORD.pack(
        params.top_p,
        params.typical_p,
        seed & _SEED_BITS,
        0.0 if is_greedy(params) else params.temperature,
        math.log(params.min_p) if params.min_p > 0 else -math.inf,
        max(params.top_k, 0),
        sample_index,
        0,
        -1 if params.logprobs is None else params.logprobs,
        # Beyond float32 is infinite, as in a conversion by torch.
        params.repetition_penalty if params.repetition_penalty <= _LARGEST_FLOAT else math.inf,
        params.frequency_penalty,
        params.presence_penalty,
        -1,
    )


_NO_EDITS = np.zeros((3, 0), np.int32)


class LogitEdits:
    """The tokens of one request whose logits change, as columns of ``SamplingTensors.edits``.

    Tokens are counted as they are sampled, so that a step costs its new tokens and the copy of the
    columns: twelve bytes for each distinct token. (The device itself could count all tokens for
    all requests, but 256 requests with a vocabulary of 128k would take 128 MiB, with or without
    penalties.)
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int], vocab_size: int):
        self._vocab_size = vocab_size
        self.num_followed = 0  # tokens of the output that are counted
        self._counts_output = params.has_penalties
        bias = {t: b for t, b in (params.logit_bias or {}).items() if 0 <= t < vocab_size}
        seen = set(prompt) if params.repetition_penalty != 1 else set()
        seen = {t for t in seen if 0 <= t < vocab_size}
        token_ids = [*bias, *(seen - bias.keys())]
        self._places = {token_id: place for place, token_id in enumerate(token_ids)}
        self._columns = np.zeros((3, len(token_ids) + 64), np.int32)
        self._columns[0, : len(token_ids)] = token_ids
        self._columns[1, : len(bias)] = np.array([*bias.values()], np.float32).view(np.int32)
        self._columns[2, : len(token_ids)] = [0 if t in seen else -1 for t in token_ids]

    def follow(self, owner: SamplingRow | Request) -> None:
        """Count the new tokens of a request's output."""
        if self._counts_output and owner.num_output_tokens > self.num_followed:
            self._count(owner.output_since(self.num_followed))
            self.num_followed = owner.num_output_tokens

    def after(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the columns as they would be after further tokens."""
        later = self
        if token_ids and self._counts_output:
            later = copy(self)
            later._places, later._columns = self._places.copy(), self._columns.copy()
            later._count(token_ids)
        return later._columns[:, : len(later._places)]

    def _count(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                continue
            place = self._places.setdefault(token_id, len(self._places))
            if place == self._columns.shape[1]:
                self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], 1)
            self._columns[0, place] = token_id
            self._columns[2, place] = max(self._columns[2, place], 0) + 1


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The log-probabilities of the rows of a step, on the host."""

    words: np.ndarray  # int32 [R, LOGPROB_WORDS]
    vocab_size: int

    def entry(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Return the log-probabilities of a row's token and of the ``num_top`` most likely ones."""
        words, num_top = self.words[row], min(num_top, self.vocab_size)
        floats = words.view(np.float32)
        total = int(words[sampling.TOTAL : sampling.TOTAL + 2].view(np.int64)[0])
        norm = float(floats[sampling.PEAK]) + math.log(total / WEIGHT_ONE)
        ids = words[sampling.TOP_IDS : sampling.TOP_IDS + num_top].tolist()
        logits = floats[sampling.TOP_LOGITS : sampling.TOP_LOGITS + num_top].tolist()
        return TokenLogprobs(
            token_id,
            float(floats[sampling.LOGIT]) - norm,
            int(words[sampling.RANK]),
            tuple((top_id, logit - norm) for top_id, logit in zip(ids, logits, strict=True)),
        )
