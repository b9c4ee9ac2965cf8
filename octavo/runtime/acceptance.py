"""Acceptance rules of speculative decoding beside the exact one of ``verification.py``.

:class:`TypicalAcceptance` accepts tokens that are likely enough, which changes the distribution of
the output; :class:`SyntheticAcceptance` accepts at random, without regard to the model. Both use
only a request's own rows and its own random numbers: the same drafts give the same answer, whatever
else is in the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain, count

import numpy as np

from octavo.core.batch import Batch, Draft
from octavo.core.request import Request
from octavo.runtime.random import uniform
from octavo.runtime.sampling_row import is_greedy
from octavo.runtime.verification import ExactAcceptance, SampledDraft, VerifiedDraft

# A stream of random numbers other than the one that a request samples with.
_SYNTHETIC = 2 << 16

# Typical acceptance: the constants of the Medusa paper.
TYPICAL_THRESHOLD = 0.09
TYPICAL_SCALE = 0.3


def _children(draft: Draft) -> dict[int, list[int]]:
    """Return the indices of the tokens that follow each token of a draft; -1 is the root."""
    children: dict[int, list[int]] = defaultdict(list)
    for index, parent in enumerate(draft.parents):
        children[parent].append(index)
    return children


def _coin(request: Request, depth: int) -> float:
    """Return a uniform random number for the token ``depth`` places after a request's next one."""
    place = request.num_output_tokens + depth
    return uniform(request.seed, request.sample_index, place, _SYNTHETIC)


class TypicalAcceptance:
    """Accepts a token whose probability exceeds min(0.09, 0.3 exp(-H)), with H the entropy of the
    distribution it comes from. Of all accepted paths of a draft the longest counts.

    Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
    2024. The output is not distributed as the model's: tokens that the drafter prefers become more
    likely. A greedy request has a single likely token, so its drafts are verified exactly.
    """

    def __init__(self) -> None:
        self._exact = ExactAcceptance()

    def weighs(self, batch: Batch) -> Collection[str]:
        return frozenset(
            item.request.request_id
            for item in batch.items
            if item.draft is not None and not is_greedy(item.request.params)
        )

    def verify(self, sampled_draft: SampledDraft) -> VerifiedDraft:
        if sampled_draft.probabilities is None:
            return self._exact.verify(sampled_draft)
        paths: dict[int, list[int]] = {-1: []}  # to each token that is accepted
        nodes = sorted(_children(sampled_draft.draft).items())  # parents before children
        for node, siblings in nodes:
            if node not in paths or node + 1 in sampled_draft.unsound:
                continue
            row = sampled_draft.probabilities[node + 1]
            threshold = typical_threshold(row)
            for index in siblings:
                token_id = sampled_draft.draft.token_ids[index]
                if row[token_id] > threshold or token_id == sampled_draft.token_ids[node + 1]:
                    paths[index] = [*paths[node], index]
        longest: list[int] = max(paths.values(), key=len)  # of equals the first
        return sampled_draft.along(longest)


def typical_threshold(probabilities: np.ndarray) -> float:
    """Return the probability above which typical acceptance takes a token of a distribution [V]."""
    p = probabilities[probabilities > 0.0].astype(np.float64)
    entropy = -float((p * np.log(p)).sum())
    return min(TYPICAL_THRESHOLD, TYPICAL_SCALE * float(np.exp(-entropy)))


class SyntheticAcceptance:
    """Accepts drafted tokens at random, for load tests and simulations of them.

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
        """Return the indices of the accepted tokens, which do not depend on the model."""
        children = _children(draft)
        path: list[int] = []
        node = -1
        for depth, rate in enumerate(self.rates):
            if node not in children or _coin(request, depth) >= rate:
                break
            path.append(node := children[node][0])
        return path

    def verify(self, sampled_draft: SampledDraft) -> VerifiedDraft:
        path = self.path(sampled_draft.request, sampled_draft.draft)
        node = path[-1] if path else -1
        rejected = {
            sampled_draft.draft.token_ids[index] for index in _children(sampled_draft.draft)[node]
        }
        sampled = sampled_draft.token_ids[node + 1]
        # A rejected token must not be sampled after all: take the nearest one that was not drafted.
        others = chain(range(sampled, -1, -1), count(sampled + 1))
        return sampled_draft.along(path, next(i for i in others if i not in rejected))
