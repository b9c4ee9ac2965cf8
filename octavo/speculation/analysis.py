"""What guessing is worth: tokens of a step, speed, and how much to guess.

A step with a draft of k tokens computes k + 1 rows and brings the drafted tokens that are right, up
to the first wrong one, and the token that follows them. Two figures for how good a drafter is are
easily mixed up:

- the *acceptance probability* alpha: that a drafted token is right if all before it were;
- the *acceptance rate*, which servers report: accepted tokens of drafted ones, whatever came before
  them. Of drafts of k tokens it is (expected_tokens(alpha, k) - 1) / k, and less than alpha.

Tokens of a step are no linear function of either: k * alpha + 1 takes each drafted token for
independent of those before it, and is right for k = 1 only.

Formulas are those of Leviathan et al. (ICML 2023, section 3) where one alpha holds for all
positions; with rates by position they are sums of products. Costs are relative to each other, or
seconds: both work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Beyond this length nothing is looked for: a draft without cost and without error has no best one.
MAX_LENGTH = 64
MAX_BATCH = 1024

# Seconds of a step of so many rows.
RowCost = Callable[[int], float]
# Seconds of a step of (requests, rows of each).
StepCost = Callable[[int, int], float]


# -- tokens of a step -----------------------------------------------------------------------------


def expected_tokens(alpha: float, length: int) -> float:
    """Of a step with ``length`` drafted tokens, each right with probability ``alpha``: those that
    are right, and the one that follows."""
    _check_probability(alpha)
    _check_length(length)
    if alpha == 1.0:
        return length + 1.0
    return (1.0 - alpha ** (length + 1)) / (1.0 - alpha)


def expected_tokens_by_rates(rates: Sequence[float]) -> float:
    """The same, where the drafted token at position i is right with probability ``rates[i]`` if
    all before it were."""
    right, tokens = 1.0, 1.0
    for rate in rates:
        _check_probability(rate)
        right *= rate
        tokens += right
    return tokens


def rates_of_shares(shares: Sequence[float]) -> list[float]:
    """Acceptance probabilities by position, from what servers report by position: the share of all
    drafts that was right up to there.

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
    """The alpha at which drafts of ``length`` tokens bring ``mean_length`` a step, the token that
    follows them included: the inverse of `expected_tokens`, by bisection.

    Raises:
        ValueError: such a mean is impossible: it is from 1 to ``length + 1``.
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


def speedup(tokens: float, length: int, cost_ratio: float) -> float:
    """Of a lone request, where further rows of a step are free: ``tokens`` a step, for the time of
    the step and of drafting ``length`` tokens at ``cost_ratio`` of a step each."""
    _check_cost("cost_ratio", cost_ratio)
    return tokens / (1.0 + length * cost_ratio)


def operations_factor(tokens: float, length: int, operations_ratio: float = 0.0) -> float:
    """How many times the operations of plain decoding a token takes (Leviathan et al., Theorem
    3.11). ``operations_ratio``: of one drafted token to one token of the target."""
    _check_cost("operations_ratio", operations_ratio)
    return (length * operations_ratio + length + 1) / tokens


def can_improve(alpha: float, cost_ratio: float) -> bool:
    """Whether any length is faster than none (their Corollary 3.9)."""
    _check_probability(alpha)
    return alpha > cost_ratio


def best_length(alpha: float, cost_ratio: float, most: int = MAX_LENGTH) -> int:
    """The fastest length of a lone request's drafts, 0 where none is faster than plain decoding."""
    return best_length_by_rates([alpha] * most, cost_ratio)


def best_length_by_rates(rates: Sequence[float], cost_ratio: float) -> int:
    """The same with rates by position; no longer than there are rates."""
    best, fastest = 0, 1.0
    right, tokens = 1.0, 1.0
    for length, rate in enumerate(rates, start=1):
        right *= rate
        tokens += right
        if (speed := speedup(tokens, length, cost_ratio)) > fastest:
            best, fastest = length, speed
    return best


# -- many requests --------------------------------------------------------------------------------


def batched_speedup(
    tokens: float,
    length: int,
    batch: int,
    step_cost: StepCost,
    draft_cost: Callable[[int], float] = lambda batch: 0.0,
) -> float:
    """Of ``batch`` requests that all draft ``length`` tokens, and get ``tokens`` of a step each.

    Args:
        step_cost: of (requests, rows of each).
        draft_cost: of drafting one token for each of so many requests.
    """
    with_drafts = step_cost(batch, length + 1) + length * draft_cost(batch)
    return tokens * step_cost(batch, 1) / with_drafts


def break_even_batch(
    tokens: float,
    length: int,
    step_cost: StepCost,
    draft_cost: Callable[[int], float] = lambda batch: 0.0,
    most: int = MAX_BATCH,
) -> int | None:
    """The least batch at which such drafts are no faster than plain decoding; None if they are
    faster at all batches up to ``most``."""
    for batch in range(1, most + 1):
        if batched_speedup(tokens, length, batch, step_cost, draft_cost) <= 1.0:
            return batch
    return None


def linear_step(row_cost: float) -> StepCost:
    """A step that takes 1 for its first row and ``row_cost`` for each further one."""
    _check_cost("row_cost", row_cost)
    return lambda batch, rows: 1.0 + row_cost * (batch * rows - 1)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What drafts of each length bring a batch, where all that matters is known.

    Args:
        rates: acceptance probabilities by position; no draft is longer.
        cost_ratio: of drafting a token for every request, to a step that decodes them plainly.
        step_cost: of (requests, rows of each).
    """

    rates: tuple[float, ...]
    cost_ratio: float
    batch: int
    step_cost: StepCost

    def tokens(self, length: int) -> float:
        """Of a step, for each request."""
        return expected_tokens_by_rates(self.rates[:length])

    def speedup(self, length: int) -> float:
        return batched_speedup(
            self.tokens(length), length, self.batch, self.step_cost, self._draft_cost
        )

    @property
    def best_length(self) -> int:
        """The fastest; 0 where none is faster than plain decoding."""
        return max(range(len(self.rates) + 1), key=self.speedup)

    def break_even_batch(self, length: int) -> int | None:
        """See `break_even_batch`; None, too, for no draft at all."""
        if length == 0:
            return None
        return break_even_batch(self.tokens(length), length, self.step_cost, self._draft_cost)

    def _draft_cost(self, batch: int) -> float:
        return self.cost_ratio * self.step_cost(batch, 1)


# -- how much to draft ----------------------------------------------------------------------------


def best_draft(probabilities: Sequence[float], step_cost: RowCost) -> int:
    """How many tokens of a chain to verify, for the most tokens a second of a lone request.

    Args:
        probabilities: that a token of the chain is right, if all before it were.
        step_cost: of a step of so many rows, one of which is computed anyhow. What drafting costs
            may be part of it.
    """
    best, fastest = 0, 1.0 / step_cost(1)
    right, tokens = 1.0, 1.0
    for length, probability in enumerate(probabilities, start=1):
        right *= probability
        tokens += right
        if (speed := tokens / step_cost(length + 1)) > fastest:
            best, fastest = length, speed
    return best


def best_drafts(
    chains: Sequence[Sequence[float]],
    step_cost: RowCost,
    num_rows: int | None = None,
    num_tokens: int | None = None,
) -> list[int]:
    """The same for requests that share a step: how many tokens of each chain to verify.

    The likeliest tokens come first. Since no token of a chain is likelier to be reached than the
    one before it, those are the first ones of each chain, and no other choice of as many rows
    brings more; what is left is the number of rows, and all are tried.

    Args:
        num_rows: that the step computes anyhow; None is one for each chain.
        num_tokens: that it brings anyhow; None is one for each chain.
    """
    gains: list[tuple[float, int]] = []
    for index, chain in enumerate(chains):
        right = 1.0
        for probability in chain:
            right *= probability
            gains.append((right, index))
    # Equal ones stay in the order of their chain: it makes no difference which chain has them.
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
        raise ValueError(f"a probability is from 0 to 1, not {value}")


def _check_length(length: int) -> None:
    if length < 0:
        raise ValueError(f"a draft has no fewer than 0 tokens, not {length}")


def _check_cost(name: str, value: float) -> None:
    if not value >= 0.0:
        raise ValueError(f"{name} must not be negative: {value}")
