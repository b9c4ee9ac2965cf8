"""The reference sampler: a chain of small pure functions from logits to tokens, batched over rows.

    logits [R, V]        NaN, +inf or nothing but -inf: an error, of that row alone
      | a mask (allowed_token_ids, bad_words, min_tokens, ...), logit_bias, penalties
      |-- temperature 0: the most likely token, of equals the lowest id
      `-- top_n_sigma, temperature, min_p, typical_p, top_k, top_p, xtc; then one draw by
          inverse CDF

A row's result depends on nothing but the row, bit for bit (``runtime/logits.py`` says how), so that
a seeded request gives the same tokens whatever else runs beside it.

A row pays only for what it asks: rows that share a step are gathered, changed and put together
again; greedy rows cost one maximum, and top_k and top_p rank only as many tokens as can survive.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.batch import BAD_LOGITS, NO_TOKEN_LEFT, OVERFLOW, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.runtime.logits import (
    MAX_XTC_THRESHOLD,
    WEIGHT_ONE,
    apply_logit_bias,
    apply_mask,
    apply_min_p,
    apply_penalties,
    apply_temperature,
    apply_top_k,
    apply_top_n_sigma,
    apply_top_p,
    apply_typical_p,
    draw,
    exclude_top_choices,
    highest,
    most_likely,
    token_weights,
)
from octavo.runtime.random import XTC_STREAM, uniform, uniforms
from octavo.runtime.sampling_row import SamplingRow, biases_of

# Logits worked on at a time. On CPU: what stays in the second-level cache; on CUDA: 100 MiB.
_CHUNK_SIZE = {"cpu": 2**19, "cuda": 2**22}


class SamplerOutput(NamedTuple):
    """One entry per row. A row in ``errors`` (row index -> reason) has a meaningless token id."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str]


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
    """Sample the next token of each row of ``logits`` (float32 [R, V], not modified).

    Logprobs, for rows that ask for them, are those of ``logits`` before any change. Nothing that
    a row contains raises: what cannot be sampled is reported in ``errors``.
    """
    assert logits.dtype == torch.float32 and logits.shape[0] == len(rows)
    token_ids: list[int] = []
    errors: dict[int, str] = {}
    for chunk in _row_chunks(logits):
        chunk_ids, chunk_errors = _sample_chunk(logits[chunk], rows[chunk])
        token_ids += chunk_ids
        errors |= {chunk.start + i: reason for i, reason in chunk_errors.items()}

    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    asked = [i for i, r in enumerate(rows) if r.params.logprobs is not None and i not in errors]
    if asked:
        counts = [rows[i].params.logprobs or 0 for i in asked]
        entries = compute_logprobs(
            _select(logits, asked), [token_ids[i] for i in asked], max(counts)
        )
        for i, count, entry in zip(asked, counts, entries, strict=True):
            logprobs[i] = entry._replace(top=entry.top[:count])
    return SamplerOutput(token_ids, logprobs, errors)


def compute_logprobs(
    logits: Tensor, token_ids: Tensor | Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Compute log-probabilities of ``token_ids`` [R] and of the ``num_top`` most likely tokens.

    Computed from float32 ``logits`` [R, V] as they are. ``rank`` is one more than the number of
    tokens with a greater logit. A row that holds NaN or +inf, or only -inf, gets NaN.
    """
    chosen = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1)
    entries: list[TokenLogprobs] = []
    for chunk in _row_chunks(logits):
        part, own_ids = logits[chunk], chosen[chunk]
        own = part.gather(1, own_ids)
        rank = (part > own).sum(-1) + 1
        top = most_likely(part, min(num_top, logits.shape[1]))
        peak = part.amax(-1)
        totals = token_weights(part).sum(-1).tolist()
        for max_logit, total, token_id, logit, place, top_ids, top_logits in zip(
            peak.tolist(),
            totals,
            own_ids[:, 0].tolist(),
            own[:, 0].tolist(),
            rank.tolist(),
            top.token_ids.tolist(),
            top.logits.tolist(),
            strict=True,
        ):
            is_valid = math.isfinite(max_logit)
            norm = max_logit + math.log(total / WEIGHT_ONE) if is_valid else math.nan
            pairs = tuple((t, x - norm) for t, x in zip(top_ids, top_logits, strict=True))
            entries.append(TokenLogprobs(token_id, logit - norm, place, pairs))
    return entries


def probabilities(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return the distributions that ``sample`` draws from, of rows that are not greedy: float32
    [R, V]; undefined for rows without a token.
    """
    params = [row.params for row in rows]
    shaped = _shape(_constrain(logits, rows), params)
    num_tokens = shaped.shape[1]
    ranked = most_likely(shaped, num_tokens)
    top_k = torch.tensor([p.top_k or num_tokens for p in params], device=logits.device)
    top_p = _floats([p.top_p for p in params], logits.device, torch.float64)
    weights = token_weights(apply_top_p(apply_top_k(ranked.logits, top_k), top_p))
    thresholds = _floats(_xtc_thresholds(rows), logits.device, torch.float64)
    weights = exclude_top_choices(weights, thresholds).double()
    shares = (weights / weights.sum(-1, keepdim=True)).float()
    return torch.zeros_like(shares).scatter(1, ranked.token_ids, shares)


def _sample_chunk(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], dict[int, str]]:
    """Return token ids of all rows, and errors by row index."""
    token_ids = [0] * len(rows)
    errors: dict[int, str] = {}
    plain: list[int] = []
    constrained: list[int] = []
    for i, row in enumerate(rows):
        (constrained if row.is_constrained else plain).append(i)
    for choose, indices in ((_choose_plain, plain), (_choose_constrained, constrained)):
        if indices:
            chosen, reasons = choose(_select(logits, indices), [rows[i] for i in indices])
            for i, token_id in zip(indices, chosen, strict=True):
                token_ids[i] = token_id
            errors |= {indices[j]: reason for j, reason in reasons.items()}
    return token_ids, errors


def _choose_constrained(
    logits: Tensor, rows: Sequence[SamplingRow]
) -> tuple[list[int], dict[int, str]]:
    token_ids, reasons = _choose_plain(_constrain(logits, rows), rows, OVERFLOW, NO_TOKEN_LEFT)
    is_usable = logits.amax(-1).isfinite().tolist()
    return token_ids, reasons | {i: BAD_LOGITS for i, ok in enumerate(is_usable) if not ok}


def _choose_plain(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    not_finite: str = BAD_LOGITS,
    all_masked: str = BAD_LOGITS,
) -> tuple[list[int], dict[int, str]]:
    """Return token ids of all rows by unchanged logits, and errors by row index."""
    peaks, best = highest(logits)
    errors = {
        i: all_masked if peak == -math.inf else not_finite
        for i, peak in enumerate(peaks.tolist())
        if not math.isfinite(peak)
    }
    token_ids = best.tolist()
    drawn = [i for i, row in enumerate(rows) if not row.is_greedy and i not in errors]
    if drawn:
        chosen = _draw_rows(_select(logits, drawn), [rows[i] for i in drawn])
        for i, token_id in zip(drawn, chosen, strict=True):
            token_ids[i] = token_id
    return token_ids, errors


def _constrain(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply masks, biases and penalties of rows, in the order of vLLM's sampler.

    Token ids outside the vocabulary are ignored.
    """
    device, vocab_size = logits.device, logits.shape[1]
    masked = [i for i, row in enumerate(rows) if row.bits is not None]
    if masked:
        bits = np.stack([np.frombuffer(row.bits, np.uint8) for row in rows if row.bits is not None])
        logits = apply_mask(
            logits, torch.tensor(masked, device=device), torch.from_numpy(bits).to(device)
        )
    biases = [
        {t: amount for t, amount in biases_of(row).items() if 0 <= t < vocab_size} for row in rows
    ]
    if any(biases):
        index, token_ids = (
            torch.from_numpy(array).to(device) for array in _flatten([list(b) for b in biases])
        )
        amounts = _floats([amount for bias in biases for amount in bias.values()], device)
        logits = apply_logit_bias(logits, index, token_ids, amounts)

    params = [row.params for row in rows]
    if any(p.has_penalties for p in params):
        index, token_ids, counts = (
            torch.from_numpy(array).to(device) for array in _seen_tokens(rows, vocab_size)
        )
        logits = apply_penalties(
            logits,
            index,
            token_ids,
            counts,
            _floats([p.repetition_penalty for p in params], device),
            _floats([p.frequency_penalty for p in params], device),
            _floats([p.presence_penalty for p in params], device),
        )
    return logits


def _seen_tokens(
    rows: Sequence[SamplingRow], vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct (row, token id) pairs to penalize, and their counts in the outputs."""
    columns = [r.seen_tokens().columns() if r.params.has_penalties else ((), ()) for r in rows]
    index, token_ids = _flatten([ids for ids, _ in columns])
    _, counts = _flatten([counts for _, counts in columns])
    is_known = (token_ids >= 0) & (token_ids < vocab_size)
    return index[is_known], token_ids[is_known], counts[is_known]


def _draw_rows(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw one random token per row."""
    device = logits.device
    params = [row.params for row in rows]
    logits, vocab_size = _shape(logits, params), logits.shape[1]
    numbers = uniforms(
        [row.seed for row in rows],
        [row.sample_index for row in rows],
        [row.num_output_tokens for row in rows],
    )
    xtc = _xtc_thresholds(rows)
    widths, row_weights = _cut_widths(logits, params)
    widths = [
        width or (vocab_size if threshold <= MAX_XTC_THRESHOLD else 0)
        for width, threshold in zip(widths, xtc, strict=True)
    ]
    token_ids = [0] * len(rows)
    for indices in _similar(widths):
        part = _select(logits, indices)
        uniform = torch.from_numpy(numbers[indices]).to(device)
        width = max(widths[i] for i in indices)
        if width == 0:
            chosen = draw(token_weights(part), uniform)
        else:
            ranked = most_likely(part, width)
            top_k = torch.tensor([widths[i] for i in indices], device=device)
            top_p = _floats([params[i].top_p for i in indices], device, torch.float64)
            kept = apply_top_k(ranked.logits, top_k)
            kept = apply_top_p(kept, top_p, _select(row_weights, indices))
            thresholds = _floats([xtc[i] for i in indices], device, torch.float64)
            weights = exclude_top_choices(token_weights(kept), thresholds)
            column = draw(weights, uniform).unsqueeze(1)
            chosen = ranked.token_ids.gather(1, column)[:, 0]
        for i, token_id in zip(indices, chosen.tolist(), strict=True):
            token_ids[i] = token_id
    return token_ids


def _shape(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply top_n_sigma, temperature, min_p and typical_p, which need no ranking by others."""
    num_sigmas = {i: p.top_n_sigma for i, p in enumerate(params) if p.top_n_sigma > 0}
    logits = _on_rows(apply_top_n_sigma, logits, num_sigmas)
    logits = apply_temperature(logits, _floats([p.temperature for p in params], logits.device))
    min_p = {i: p.min_p for i, p in enumerate(params) if p.min_p > 0}
    logits = _on_rows(apply_min_p, logits, min_p)
    typical_p = {i: p.typical_p for i, p in enumerate(params) if p.typical_p < 1}
    return _on_rows(apply_typical_p, logits, typical_p)


def _xtc_thresholds(rows: Sequence[SamplingRow]) -> list[float]:
    """Return the threshold of xtc of each row; 1 where chance has it cut nothing."""
    thresholds = [1.0] * len(rows)
    for i, row in enumerate(rows):
        if row.params.xtc_probability > 0:
            number = uniform(row.seed, row.sample_index, row.num_output_tokens, XTC_STREAM)
            if number < row.params.xtc_probability:
                thresholds[i] = row.params.xtc_threshold
    return thresholds


def _cut_widths(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[list[int], Tensor]:
    """Return how many of each row's most likely tokens top_k and top_p rank, 0 if both are off.

    Also int64 [R]: the weight of the whole row where top_p alone cuts it, else 0. There, tokens
    of at most (1 - top_p) / 2V of the mass are left out: all of them together cannot reach the
    1 - top_p that is cut off, so that the cut comes before any of them.
    """
    vocab_size = logits.shape[1]
    widths = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    row_weights = torch.zeros(len(params), dtype=torch.int64, device=logits.device)
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1 and widths[i] == 0]
    if nucleus:
        weights = token_weights(_select(logits, nucleus))
        total = weights.sum(-1)
        top_p = _floats([params[i].top_p for i in nucleus], logits.device, torch.float64)
        bound = ((1 - top_p) * total / (2 * vocab_size)).long()
        counts = (weights > bound.unsqueeze(1)).sum(-1).tolist()
        for i, count in zip(nucleus, counts, strict=True):
            widths[i] = count
        row_weights[nucleus] = total
    return widths, row_weights


def _similar(widths: Sequence[int]) -> Iterator[list[int]]:
    """Yield row indices in groups, in which no width is twice that of another."""
    groups = defaultdict(list)
    for i, width in enumerate(widths):
        groups[0 if width == 0 else max(64, width - 1).bit_length()].append(i)
    yield from groups.values()


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    num_rows, vocab_size = logits.shape
    step = max(1, _CHUNK_SIZE.get(logits.device.type, _CHUNK_SIZE["cuda"]) // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _select(tensor: Tensor, indices: Sequence[int]) -> Tensor:
    """Return rows of a tensor; the tensor itself, uncopied, if they are all."""
    if len(indices) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, torch.tensor(indices, device=tensor.device))


def _on_rows(
    function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, values: dict[int, float]
) -> Tensor:
    """Apply a sampling step to the rows that have a value for it."""
    if not values:
        return logits
    indices = list(values)
    amounts = _floats(list(values.values()), logits.device, torch.float64)
    changed = function(_select(logits, indices), amounts)
    if len(indices) == logits.shape[0]:
        return changed
    return logits.index_copy(0, torch.tensor(indices, device=logits.device), changed)


def _flatten(token_ids_by_row: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return row indices and token ids of a ragged list: int64 [M], int64 [M]."""
    ragged = [np.asarray(token_ids, dtype=np.int64) for token_ids in token_ids_by_row]
    rows = np.repeat(np.arange(len(ragged)), [len(token_ids) for token_ids in ragged])
    return rows, np.concatenate(ragged)


def _floats(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
