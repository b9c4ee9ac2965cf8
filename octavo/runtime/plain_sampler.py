"""The sampler of GPUs in PyTorch ops: slow, on any device, the reference of the kernels in tests.

It uses the sampling steps of ``sampler.py``, but applies all of them to all rows and sorts whole
rows, because parameters are on the device, where no control flow may depend on them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.cuda import sampling
from octavo.kernels.cuda.sampling import Asked, SampledTokens, SamplingTensors, field
from octavo.runtime.logits import (
    apply_temperature,
    apply_top_k,
    apply_top_p,
    apply_typical_p,
    draw,
    highest,
    most_likely,
    penalize,
    token_weights,
)
from octavo.runtime.random import philox

_WORD = 0xFFFFFFFF


class PlainSampler:
    """A ``DeviceSampler`` without kernels."""

    def sample(
        self, logits: Tensor, rows: SamplingTensors, asked: Asked, out: SampledTokens
    ) -> None:
        num_rows = logits.shape[0]
        records, slots = rows.records[:num_rows], rows.slots[:num_rows]
        changed = _edited(logits, records, rows) if asked.edits else logits
        if asked.masks and rows.masks is not None:
            changed = _masked(changed, field(records, sampling.MASK_ROW, torch.int32), rows.masks)
        peaks, likeliest = highest(changed)
        drawn = _draw(changed, _RowParameters.of(records), asked.cuts)
        is_greedy = field(records, sampling.TEMPERATURE, torch.float32) == 0
        status = _status(logits.amax(-1), peaks)
        token_ids = torch.where(is_greedy, likeliest, drawn) * (status == sampling.HAS_TOKEN)
        out.token_ids[:num_rows] = token_ids
        out.status[:num_rows] = status
        rows.last_tokens[slots.long()] = token_ids.int()
        if asked.num_top is not None:
            _write_logprobs(logits, token_ids, asked.num_top, out.logprobs[:num_rows])

    def resolve(self, token_ids: Tensor, last_tokens: Tensor) -> None:
        slots = (-1 - token_ids).clamp(min=0).long()
        token_ids.copy_(torch.where(token_ids < 0, last_tokens[slots], token_ids))


class _RowParameters(NamedTuple):
    """The parameters that shape the distributions of R rows, and their random numbers: [R]."""

    temperature: Tensor
    log_min_p: Tensor
    typical_p: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, records: Tensor) -> _RowParameters:
        return cls(
            field(records, sampling.TEMPERATURE, torch.float32),
            field(records, sampling.LOG_MIN_P, torch.float32),
            field(records, sampling.TYPICAL_P, torch.float64),
            field(records, sampling.TOP_K, torch.int32),
            field(records, sampling.TOP_P, torch.float64),
            _uniform(
                field(records, sampling.SEED, torch.int64),
                field(records, sampling.SAMPLE_INDEX, torch.int32).long() & _WORD,
                field(records, sampling.POSITION, torch.int32).long(),
            ),
        )


def _edited(logits: Tensor, records: Tensor, rows: SamplingTensors) -> Tensor:
    """Return the logits with biases and penalties."""
    assert rows.edits is not None and rows.edit_starts is not None
    ends = rows.edit_starts[1 : len(logits) + 1]
    columns = torch.arange(rows.edits.shape[1], dtype=torch.int32, device=logits.device)
    index = torch.searchsorted(ends, columns, right=True)  # R for padding columns
    token_ids, counts = rows.edits[0].long(), rows.edits[2]
    repetition, frequency, presence = (
        field(records, word, torch.float32)[index.clamp(max=len(logits) - 1)]
        for word in (sampling.REPETITION, sampling.FREQUENCY, sampling.PRESENCE)
    )
    longer = torch.cat([logits, logits[:1]])
    values = longer[index, token_ids] + rows.edits[1].view(torch.float32)
    penalized = penalize(values, counts, repetition, frequency, presence)
    changed = torch.where(counts < 0, values, penalized)
    return longer.index_put((index, token_ids), changed)[: len(logits)]


def _masked(logits: Tensor, mask_rows: Tensor, masks: Tensor) -> Tensor:
    """Return the logits, -inf where a row has a mask and the token's bit is 0."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    words = masks[mask_rows.clamp(min=0).long()][:, tokens >> 5]
    is_allowed = (words >> (tokens & 31) & 1).bool() | (mask_rows < 0).unsqueeze(1)
    return logits.masked_fill(~is_allowed, -math.inf)


def _status(raw_peaks: Tensor, peaks: Tensor) -> Tensor:
    """Return the status of rows by their greatest logits before and after all changes."""
    status = torch.where(peaks == -math.inf, sampling.NO_TOKEN_LEFT, sampling.OVERFLOW)
    status = torch.where(peaks.isfinite(), sampling.HAS_TOKEN, status)
    return torch.where(raw_peaks.isfinite(), status, sampling.BAD_LOGITS)


def _draw(logits: Tensor, shape: _RowParameters, has_cuts: bool) -> Tensor:
    """Draw a random token of each row, as if none were greedy."""
    vocab_size = logits.shape[1]
    is_greedy = shape.temperature == 0
    shaped = apply_temperature(logits, torch.where(is_greedy, 1.0, shape.temperature))
    shaped = shaped.masked_fill(shaped < shape.log_min_p.unsqueeze(1), -math.inf)
    if not has_cuts:
        return draw(token_weights(shaped), shape.uniform).clamp(max=vocab_size - 1)
    typical = apply_typical_p(shaped, shape.typical_p)
    shaped = torch.where((shape.typical_p < 1).unsqueeze(1), typical, shaped)
    has_top_k = (shape.top_k > 0) & (shape.top_k < vocab_size)
    has_top_p = shape.top_p < 1
    ranked = most_likely(shaped, vocab_size)
    kept = apply_top_k(ranked.logits, torch.where(has_top_k, shape.top_k, vocab_size))
    kept = torch.where(has_top_p.unsqueeze(1), apply_top_p(kept, shape.top_p), kept)
    place = draw(token_weights(kept), shape.uniform).clamp(max=vocab_size - 1)
    cut = ranked.token_ids.gather(1, place.unsqueeze(1))[:, 0]
    uncut = draw(token_weights(shaped), shape.uniform).clamp(max=vocab_size - 1)
    return torch.where(has_top_k | has_top_p, cut, uncut)


def _uniform(seed: Tensor, sample_index: Tensor, position: Tensor) -> Tensor:
    """Return the random numbers of ``runtime/random.py``: float64 [R]."""
    nothing = torch.zeros_like(position)
    counter = (position & _WORD, nothing, sample_index, nothing)
    high, low, _, _ = philox(counter, (seed & _WORD, seed >> 32 & _WORD))
    return (high << 21 | low >> 11).double() * 2.0**-53


def _write_logprobs(logits: Tensor, token_ids: Tensor, num_top: int, logprobs: Tensor) -> None:
    """Write the log-probability data of a token of each row and of the most likely ones."""
    own = logits.gather(1, token_ids.long().unsqueeze(1))
    top = most_likely(logits, min(num_top, logits.shape[1]))
    field(logprobs, sampling.TOTAL, torch.int64).copy_(token_weights(logits).sum(-1))
    field(logprobs, sampling.PEAK, torch.float32).copy_(logits.amax(-1))
    field(logprobs, sampling.LOGIT, torch.float32).copy_(own[:, 0])
    field(logprobs, sampling.RANK, torch.int32).copy_((logits > own).sum(-1) + 1)
    width = top.token_ids.shape[1]
    logprobs[:, sampling.TOP_IDS : sampling.TOP_IDS + width] = top.token_ids
    floats = logprobs.view(torch.float32)
    floats[:, sampling.TOP_LOGITS : sampling.TOP_LOGITS + width] = top.logits
