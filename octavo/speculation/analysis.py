"""Formulas for the expected tokens, the speed-up and the best draft length of speculative decoding.

A step with a draft of k tokens computes k + 1 rows. It brings the draft tokens up to the first
rejected one, and the token that follows them. Two figures for the quality of a drafter are easily
mixed up:

- the *acceptance probability* alpha: that a draft token is accepted if all before it were;
- the *acceptance rate*, which servers report: accepted tokens by draft tokens. For drafts of k
  tokens it is (expected_tokens(alpha, k) - 1) / k, which is less than alpha.

The tokens of a step are not linear in either: k * alpha + 1 takes draft tokens for independent of
those before them, and is right for k = 1 only.

With one alpha for all positions the formulas are those of Leviathan et al. (ICML 2023, section 3);
with rates by position they are sums of products. Costs may be seconds or relative to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The longest draft that is considered: one without cost and without errors has no best length.
MAX_LENGTH = 64
MAX_BATCH = 1024

# Seconds of a step of so many rows.
RowCost = Callable[[int], float]
# Seconds of a step of (requests, rows of each).
BatchStepCost = Callable[[int, int], float]


# -- tokens of a step -----------------------------------------------------------------------------


def expected_tokens(alpha: float, length: int) -> float:
    """Expected tokens of a step with ``length`` draft tokens, each accepted with probability
    ``alpha`` if all before it were; the token after them is counted."""
    _check_probability(alpha)
    _check_length(length)
    if alpha == 1.0:
        return length + 1.0
    return (1.0 - alpha ** (length + 1)) / (1.0 - alpha)


def expected_tokens_by_rates(rates: Sequence[float]) -> float:
    """The same as `expected_tokens`, with the acceptance probability ``rates[i]`` at position i."""
    right, tokens = 1.0, 1.0
    for rate in rates:
        _check_probability(rate)
        right *= rate
        tokens += right
    return tokens


def rates_of_shares(shares: Sequence[float]) -> list[float]:
    """Acceptance probabilities by position, from the shares that servers report: of all drafts,
    those that were accepted up to and including a position.

    Raises:
        ValueError: a share is no probability, or greater than the one before it.
    """
    rates = []
    before = 1.0
    for share in shares:
        _check_probability(share)
        if share > before:
            raise ValueError(f"a share of drafts cannot grow with the position: {share} > {before}")
        rates.append(share / before if before else 0.0)
        before = share
    return rates


def acceptance_probability(mean_length: float, length: int) -> float:
    """The alpha at which `expected_tokens` of drafts of ``length`` is ``mean_length``.

    Raises:
        ValueError: ``mean_length`` is not from 1 to ``length + 1``.
    """
    _check_length(length)
    if length == 0 or not 1.0 <= mean_length <= length + 1:
        raise ValueError(
            f"drafts of {length} tokens bring 1 to {length + 1} tokens a step, not {mean_length}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(middle, length) < mean_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


# -- one request ----------------------------------------------------------------------------------


def operations_factor(tokens: float, length: int, operations_ratio: float = 0.0) -> float:
    """Operations of a token relative to plain decoding (Leviathan et al., Theorem 3.11).

    ``operations_ratio``: the operations of one draft token to those of one token of the target.
    """
    _check_cost("operations_ratio", operations_ratio)
    return (length * operations_ratio + length + 1) / tokens


# -- many requests --------------------------------------------------------------------------------


def batched_speedup(
    tokens: float,
    length: int,
    batch: int,
    step_cost: BatchStepCost,
    draft_cost: Callable[[int], float] = lambda batch: 0.0,
) -> float:
    """Speed-up of ``batch`` requests that share their steps and each draft ``length`` tokens.

    Args:
        tokens: expected tokens of a step for each request.
        step_cost: the cost of a step of (requests, rows of each).
        draft_cost: the cost of drafting one token for each of so many requests.
    """
    with_drafts = step_cost(batch, length + 1) + length * draft_cost(batch)
    return tokens * step_cost(batch, 1) / with_drafts


def break_even_batch(
    tokens: float,
    length: int,
    step_cost: BatchStepCost,
    draft_cost: Callable[[int], float] = lambda batch: 0.0,
    most: int = MAX_BATCH,
) -> int | None:
    """The least batch at which such drafts are no faster than plain decoding; None if they are
    faster up to a batch of ``most``."""
    for batch in range(1, most + 1):
        if batched_speedup(tokens, length, batch, step_cost, draft_cost) <= 1.0:
            return batch
    return None


def linear_step(row_cost: float) -> BatchStepCost:
    """A step that takes 1 for its first row and ``row_cost`` for each further one."""
    _check_cost("row_cost", row_cost)
    return lambda batch, rows: 1.0 + row_cost * (batch * rows - 1)


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast of the speed-up by draft length, for given rates and costs.

    Args:
        rates: acceptance probabilities by position; drafts are at most as long.
        cost_ratio: the cost of drafting a token for every request, relative to a plain step.
        step_cost: the cost of a step of (requests, rows of each).
    """

    rates: tuple[float, ...]
    cost_ratio: float
    batch: int
    step_cost: BatchStepCost

    def tokens(self, length: int) -> float:
        """Expected tokens of a step for each request."""
        return expected_tokens_by_rates(self.rates[:length])

    def speedup(self, length: int) -> float:
        return batched_speedup(
            self.tokens(length), length, self.batch, self.step_cost, self._draft_cost
        )

    @property
    def best_length(self) -> int:
        """The fastest draft length; 0 if plain decoding is faster."""
        return max(range(len(self.rates) + 1), key=self.speedup)

    def break_even_batch(self, length: int) -> int | None:
        """The same as the function `break_even_batch`; None for drafts of no token."""
        if length == 0:
            return None
        return break_even_batch(self.tokens(length), length, self.step_cost, self._draft_cost)

    def _draft_cost(self, batch: int) -> float:
        return self.cost_ratio * self.step_cost(batch, 1)


# -- how much to draft ----------------------------------------------------------------------------


def best_drafts(
    chains: Sequence[Sequence[float]],
    step_cost: RowCost,
    num_rows: int | None = None,
    num_tokens: int | None = None,
) -> list[int]:
    """Tokens of each chain to verify, for requests that share a step.

    For a number of rows the best choice is the likeliest tokens, which are the first ones of each
    chain, since no token is likelier to be accepted than the one before it. So all numbers of rows
    are tried.

    Args:
        chains: for each request, the probabilities that its draft tokens are accepted, each given
            those before it.
        step_cost: the cost of a step of so many rows.
        num_rows: rows of the step without drafts; None is one for each chain.
        num_tokens: tokens that it brings without drafts; None is one for each chain.
    """
    gains: list[tuple[float, int]] = []
    for index, chain in enumerate(chains):
        right = 1.0
        for probability in chain:
            right *= probability
            gains.append((right, index))
    # The sort is stable, so tokens of a chain stay in order.
    gains.sort(key=_gain, reverse=True)
    rows = len(chains) if num_rows is None else num_rows
    tokens = float(len(chains) if num_tokens is None else num_tokens)
    best, fastest = 0, tokens / step_cost(rows)
    for count, (gain, _) in enumerate(gains, start=1):
        tokens += gain
        if (speed := tokens / step_cost(rows + count)) > fastest:
            best, fastest = count, speed
    lengths = [0] * len(chains)
    for _, index in gains[:best]:
        lengths[index] += 1
    return lengths


def _gain(gain: tuple[float, int]) -> float:
    return gain[0]


# -- checks ---------------------------------------------------------------------------------------


def _check_probability(value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"a probability must be from 0 to 1, not {value}")


def _check_length(length: int) -> None:
    if length < 0:
        raise ValueError(f"a draft length must be 0 or more, not {length}")


def _check_cost(name: str, value: float) -> None:
    if not value >= 0.0:
        raise ValueError(f"{name} must not be negative: {value}")
