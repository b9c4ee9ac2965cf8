"""The steps of sampling: pure functions over logits [R, V] and per-row parameters.

Each returns a new tensor. A row of the result depends on nothing but that row and its parameters:
not on its neighbours, their number, or the threads. Elementwise operations and maxima have that
property anyway. Sums of floats have not, since their order is the library's choice; so
probabilities are summed as integer weights (``token_weights``), for which every order gives the
same bits. Where the order of tokens matters, equal logits are ordered by token id
(``most_likely``), so that cutting and drawing have one answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Weight of a row's most likely token. Tokens less likely than 2**-44 of it are never drawn, and
# the weights of MAX_VOCAB_SIZE tokens still sum to less than 2**63.
WEIGHT_ONE = 2.0**44
MAX_VOCAB_SIZE = 2**19 - 1
# No two tokens are likelier than this, so that xtc with a higher threshold never cuts.
MAX_XTC_THRESHOLD = 0.5


class RankedLogits(NamedTuple):
    """The most likely tokens of each row, most likely first: float32 and int64 [R, K]."""

    logits: Tensor
    token_ids: Tensor


# ---- Constraints. M rows, or (row, token id) pairs, name the logits that change; others are kept.


def apply_mask(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """Set the logits of tokens whose bit is 0 to -inf, in the named rows.

    Args: logits float32 [R, V]; rows int64 [M]; bits uint8 [M, at least V / 8], as those of
    ``core/token_mask.py``. Returns a new [R, V].
    """
    vocab_size = logits.shape[1]
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    bits = bits[:, : (vocab_size + 7) // 8]
    is_allowed = (bits.unsqueeze(-1) >> shifts & 1).flatten(1)[:, :vocab_size].bool()
    return logits.index_copy(0, rows, logits[rows].masked_fill(~is_allowed, -math.inf))


def apply_logit_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """Adds ``bias`` (float32 [M]) to the named logits. No pair may be named twice.

    Args: logits float32 [R, V]; rows, token_ids int64 [M]. Returns a new [R, V].
    """
    return logits.index_put((rows, token_ids), logits[rows, token_ids] + bias)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Makes tokens that have been seen less likely.

    ``repetition`` divides positive logits and multiplies the others, for every named token;
    ``frequency`` is subtracted once per occurrence in the output, ``presence`` once if there is
    any. The first is that of Keskar et al. 2019 (CTRL), the others those of OpenAI's API.

    Args:
        logits: float32 [R, V].
        rows, token_ids: int64 [M]; tokens of the prompt or the output, each named once.
        counts: int64 [M]; occurrences in the output, 0 for a token of the prompt alone.
        repetition, frequency, presence: float32 [R].
    """
    seen = penalize(
        logits[rows, token_ids], counts, repetition[rows], frequency[rows], presence[rows]
    )
    return logits.index_put((rows, token_ids), seen)


def penalize(
    logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Return the penalized logits of tokens that were seen; all arguments are [M]."""
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - frequency * counts
    return logits - presence * (counts > 0)


# ---- Distributions. Logits in, logits out; what is cut becomes -inf.


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return (logits - row maximum) / temperature, for float32 [R, V] and [R].

    The maximum is subtracted first, so that no temperature can overflow.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted.div_(temperature.unsqueeze(1))


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Cuts tokens less likely than ``min_p`` (float64 [R]) times the most likely one.

    Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling".
    """
    floor = (logits.amax(-1) + min_p.log()).to(logits.dtype)
    return logits.masked_fill(logits < floor.unsqueeze(1), -math.inf)


def apply_top_n_sigma(logits: Tensor, num_sigmas: Tensor) -> Tensor:
    """Cuts tokens whose logits are more than ``num_sigmas`` (float64 [R]) standard deviations of
    the row's logits below the greatest; those that are -inf do not count.

    Tang et al. 2024, "Top-nσ: Not All Logits Are You Need". Distances are summed in units of
    1/4096, up to 512, so that sums are exact.
    """
    below = logits.amax(-1, keepdim=True) - logits
    off = (below.clamp(max=512.0) * 4096.0).long().masked_fill(logits == -math.inf, 0)
    count = (logits != -math.inf).sum(-1).double()
    mean = off.sum(-1).double() / count
    variance = (off * off).sum(-1).double() / count - mean * mean
    limit = (num_sigmas * (variance.clamp(min=0.0).sqrt() / 4096.0)).to(logits.dtype)
    return logits.masked_fill(below > limit.unsqueeze(1), -math.inf)


def apply_typical_p(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Keeps the tokens whose information is nearest to the row's entropy.

    As few as hold ``typical_p`` (float64 [R]) of the mass. Meister et al. 2022, "Locally Typical
    Sampling". Sorts the whole row.
    """
    weights = token_weights(logits)
    total = weights.sum(-1, keepdim=True)
    # -log p = surprise + log Z, and log Z cancels from its distance to the entropy.
    surprise = (logits.amax(-1, keepdim=True) - logits).double()
    terms = torch.where(weights > 0, weights * surprise, 0.0).long()
    mean = terms.sum(-1, keepdim=True).double() / total
    order = most_likely((mean - surprise).abs().neg().float(), logits.shape[1]).token_ids
    keep = _mass_before(weights.gather(1, order)) < typical_p.unsqueeze(1) * total
    keep = torch.zeros_like(keep).scatter(1, order, keep)
    return logits.masked_fill(~keep, -math.inf)


def apply_top_k(ranked: Tensor, top_k: Tensor) -> Tensor:
    """Cuts all but the first ``top_k`` (int64 [R]) of logits [R, K], most likely first."""
    place = torch.arange(ranked.shape[1], device=ranked.device)
    return ranked.masked_fill(place >= top_k.unsqueeze(1), -math.inf)


def apply_top_p(ranked: Tensor, top_p: Tensor, row_weight: Tensor | None = None) -> Tensor:
    """Cuts tokens once those before them hold ``top_p`` (float64 [R]) of the mass.

    The first token always stays. Holtzman et al. 2020, "The Curious Case of Neural Text
    Degeneration".

    Args:
        ranked: float32 [R, K], most likely first.
        row_weight: int64 [R], the weight of the whole row where ``ranked`` is only its head.
            Without it, or where it is less than that of ``ranked``, ``ranked`` is all there is.
    """
    weights = token_weights(ranked)
    total = weights.sum(-1)
    if row_weight is not None:
        total = torch.maximum(total, row_weight)
    keep = _mass_before(weights) < (top_p * total).unsqueeze(1)
    keep[:, 0] = True
    return ranked.masked_fill(~keep, -math.inf)


def exclude_top_choices(weights: Tensor, threshold: Tensor) -> Tensor:
    """Return the weights (int64 [R, K], most likely first) without all but the least likely of the
    tokens that have at least ``threshold`` (float64 [R]) of the mass; above `MAX_XTC_THRESHOLD`, as
    they are.

    XTC, "exclude top choices": p-e-w, text-generation-webui, pull request 6335.
    """
    enough = (threshold * weights.sum(-1)).unsqueeze(1)
    num_top = ((weights > 0) & (weights >= enough)).sum(-1)
    num_cut = torch.where(threshold <= MAX_XTC_THRESHOLD, (num_top - 1).clamp(min=0), 0)
    place = torch.arange(weights.shape[1], device=weights.device)
    return weights.masked_fill(place < num_cut.unsqueeze(1), 0)


def most_likely(logits: Tensor, num: int) -> RankedLogits:
    """Return the ``num`` greatest logits of rows (float32 [R, V]), of equals the lowest id first.

    A topk over float32 may return any of equal logits. Keys that hold the logit in their high
    bits and the token id in their low ones are all different, so that there is one answer.
    """
    vocab_size = logits.shape[1]
    ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)  # the lowest id is greatest
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # integers in the order of the floats
    keys = bits.long().bitwise_left_shift_(32).bitwise_or_(ids)
    keys = keys.topk(num, -1).values
    token_ids = (vocab_size - 1) - (keys & 0xFFFFFFFF)
    return RankedLogits(logits.gather(1, token_ids), token_ids)


def highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's maximum (NaN if the row has one) and the lowest id that has it: [R], [R].

    ``Tensor.max`` does the same eight times slower on CPU, where only ``amax`` is vectorized:
    so blocks first, and then the first block that holds the maximum.
    """
    vocab_size, width = logits.shape[1], 256
    if vocab_size < 2 * width:
        return logits.max(-1)
    split = vocab_size - vocab_size % width
    blocks = logits[:, :split].reshape(logits.shape[0], -1, width).amax(-1)
    if split < vocab_size:
        blocks = torch.cat([blocks, logits[:, split:].amax(-1, keepdim=True)], dim=1)
    starts = blocks.argmax(-1, keepdim=True) * width
    columns = starts + torch.arange(width, device=logits.device)
    columns.clamp_(max=vocab_size - 1)
    peak, place = logits.gather(1, columns).max(-1, keepdim=True)
    return peak[:, 0], columns.gather(1, place)[:, 0]


def token_weights(logits: Tensor) -> Tensor:
    """Return integer weights of probabilities: int64 [R, V], WEIGHT_ONE for the greatest logit.

    Sums of integers are exact, hence the same in any order.
    """
    assert logits.shape[1] <= MAX_VOCAB_SIZE
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted.exp_().mul_(WEIGHT_ONE).long()


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverse CDF: return the column (int64 [R]) in which the running sum of weights
    (int64 [R, K]) exceeds ``uniform`` (float64 [R], in [0, 1)) times the total. Never a column of
    weight 0."""
    cdf = weights.cumsum(-1)
    # uniform is at most 1 - 2**-53, by which the product always rounds to less than the total.
    target = (uniform * cdf[:, -1]).long()
    return torch.searchsorted(cdf, target.unsqueeze(1), right=True)[:, 0]


def _mass_before(weights: Tensor) -> Tensor:
    return weights.cumsum(-1) - weights
