"""Other rules than the exact one, by which drafted tokens are accepted.

:class:`Rejection` keeps the distribution, and not the tokens; :class:`Typical` keeps neither;
:class:`Synthetic` asks no model. All of them take their random numbers from the request's own, at
the place of the token that is judged and apart from those that it samples with: so the same drafts
give the same answer, whatever else runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain, count

import numpy as np

from octavo.core.batch import Batch, Distribution, Draft
from octavo.core.request import Request
from octavo.runtime.random import uniform
from octavo.runtime.sampling_row import is_greedy
from octavo.runtime.verification import Exact, SampledDraft, Verified

# Streams of random numbers. Siblings have a coin each: the first of them this one, and so on.
_RESIDUAL, _SYNTHETIC, _COINS = 1 << 16, 2 << 16, 3 << 16

# Of typical acceptance, as its authors choose them.
TYPICAL_THRESHOLD = 0.09
TYPICAL_SCALE = 0.3


def _children(draft: Draft) -> dict[int, list[int]]:
    """The indices of the tokens that follow each token, or -1, in their order."""
    children: dict[int, list[int]] = defaultdict(list)
    for index, parent in enumerate(draft.parents):
        children[parent].append(index)
    return children


def _coin(request: Request, depth: int, stream: int) -> float:
    """A random number of the token that is ``depth`` places after the next one of a request."""
    return uniform(request.seed, request.sample_index, request.num_output_tokens + depth, stream)


class _Weighing(ABC):
    """A rule that looks at probabilities, of drafts whose requests are not greedy. For the others
    it is the exact one."""

    def __init__(self) -> None:
        self._exact = Exact()

    def weighs(self, batch: Batch) -> Collection[str]:
        return frozenset(
            item.request.request_id
            for item in batch.items
            if item.draft is not None and not is_greedy(item.request.params)
        )

    def verify(self, guess: SampledDraft) -> Verified:
        if guess.probabilities is None:
            return self._exact.verify(guess)
        return self._judge(guess, guess.probabilities)

    @abstractmethod
    def _judge(self, guess: SampledDraft, probabilities: np.ndarray) -> Verified:
        """As ``verify``, by the probabilities [1 + len(draft), V] of the draft's rows."""


class Rejection(_Weighing):
    """Accepts a token x that was sampled from q with probability min(1, p(x) / q(x)), where the
    request would draw from p; else draws from what q leaves of it, max(0, p - q).

    What comes out has the distribution p, whatever q is. Leviathan, Kalman and Matias, "Fast
    Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al. 2023. Siblings
    have their turns in the order of the draft, each with what those before have left of p, as in
    SpecInfer (Miao et al., ASPLOS 2024). A token of which no q is known was not sampled at all: for
    it, q is 1 at x. A greedy request draws nothing, so the rule is the exact one for it.
    """

    def _judge(self, guess: SampledDraft, probabilities: np.ndarray) -> Verified:
        children = _children(guess.draft)
        path: list[int] = []
        node = -1
        while siblings := children.get(node):
            chosen, token_id = _choose(guess, probabilities[node + 1], siblings, len(path))
            if chosen is None:
                return guess.along(path, token_id)
            path.append(node := chosen)
            if node + 1 in guess.unsound:
                break
        return guess.along(path)


def _choose(
    guess: SampledDraft, probabilities: np.ndarray, siblings: Sequence[int], depth: int
) -> tuple[int | None, int]:
    """Which of the tokens that are drafted for one place is accepted, if any; and the token."""
    draft, request = guess.draft, guess.request
    rest = probabilities.astype(np.float64)
    for number, index in enumerate(siblings):
        token_id = draft.token_ids[index]
        drawn_from = draft.drawn_from[index] if draft.drawn_from is not None else None
        q = _spread(drawn_from, token_id, len(rest))
        if _coin(request, depth, _COINS + number) * q[token_id] < rest[token_id]:
            return index, token_id
        left = np.maximum(rest - q, 0.0)
        left[token_id] = 0.0
        total = left.sum()
        if total == 0.0:  # only rounding tells p from q
            break
        rest = left / total
    cumulated = rest.cumsum()
    target = _coin(request, depth, _RESIDUAL) * cumulated[-1]
    return None, int(cumulated.searchsorted(target, side="right"))


def _spread(drawn_from: Distribution | None, token_id: int, vocab_size: int) -> np.ndarray:
    """What a token was drawn from, as float64 [V] that sums to 1.

    If nothing is said, or it makes no sense, that is the token itself: right for whatever has no
    part in choosing it.
    """
    if drawn_from is not None:
        weights = np.asarray(drawn_from.probabilities, np.float64)
        ids = np.asarray(range(len(weights)) if drawn_from.token_ids is None
                         else drawn_from.token_ids, np.int64)  # fmt: skip
        spread = _summed(ids, weights, vocab_size)
        if spread is not None and spread[token_id] > 0.0:
            return spread
    one = np.zeros(vocab_size)
    one[token_id] = 1.0
    return one


def _summed(ids: np.ndarray, weights: np.ndarray, vocab_size: int) -> np.ndarray | None:
    """Weights by token, divided by their sum; None where there is nothing that could be divided."""
    if ids.shape != weights.shape or not ids.size or ids.min() < 0:
        return None
    total = weights.sum()
    if not (weights.min() >= 0.0 and 0.0 < total < np.inf):  # NaN is neither
        return None
    kept = ids < vocab_size
    spread: np.ndarray = np.bincount(ids[kept], weights[kept], minlength=vocab_size) / total
    return spread


class Typical(_Weighing):
    """Accepts a token whose probability is above a threshold, that is lower where the entropy H of
    the distribution is higher: min(0.09, 0.3 exp(-H)). Of all paths so accepted the longest counts.

    Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
    2024. The distribution is not that of the model: what a drafter likes becomes more likely. A
    greedy request has only one token that is likely, so the rule is the exact one for it.
    """

    def _judge(self, guess: SampledDraft, probabilities: np.ndarray) -> Verified:
        paths: dict[int, list[int]] = {-1: []}  # to each token that is accepted
        for node, siblings in sorted(_children(guess.draft).items()):  # parents before children
            if node not in paths or node + 1 in guess.unsound:
                continue
            row = probabilities[node + 1]
            threshold = typical_threshold(row)
            for index in siblings:
                token_id = guess.draft.token_ids[index]
                if row[token_id] > threshold or token_id == guess.token_ids[node + 1]:
                    paths[index] = [*paths[node], index]
        longest: list[int] = max(paths.values(), key=len)  # of equals the first
        return guess.along(longest)


def typical_threshold(probabilities: np.ndarray) -> float:
    """The probability above which a token of this distribution [V] is typical."""
    p = probabilities[probabilities > 0.0].astype(np.float64)
    entropy = -float((p * np.log(p)).sum())
    return min(TYPICAL_THRESHOLD, TYPICAL_SCALE * float(np.exp(-entropy)))


class Synthetic:
    """Accepts at random, whatever the model says: for load tests, and to simulate them.

    Args:
        rates: ``rates[i]`` is the probability that the i-th token of a draft is accepted, given
            that those before it are; 0 beyond the last rate. Of siblings, the first has this chance
            and the others have none.
    """

    def __init__(self, rates: Sequence[float]):
        self.rates = tuple(rates)

    def weighs(self, batch: Batch) -> Collection[str]:
        return ()

    def path(self, request: Request, draft: Draft) -> list[int]:
        """The indices of the tokens that are accepted: known before any model is asked."""
        children = _children(draft)
        path: list[int] = []
        node = -1
        for depth, rate in enumerate(self.rates):
            if node not in children or _coin(request, depth, _SYNTHETIC) >= rate:
                break
            path.append(node := children[node][0])
        return path

    def verify(self, guess: SampledDraft) -> Verified:
        path = self.path(guess.request, guess.draft)
        node = path[-1] if path else -1
        refused = {guess.draft.token_ids[index] for index in _children(guess.draft)[node]}
        sampled = guess.token_ids[node + 1]
        # What has been refused is not to come all the same: then the nearest token that may.
        others = chain(range(sampled, -1, -1), count(sampled + 1))
        return guess.along(path, next(i for i in others if i not in refused))
