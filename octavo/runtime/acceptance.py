"""Other rules than the exact one, by which drafted tokens are accepted.

:class:`TypicalAcceptance` accepts what is likely enough, which changes what a model says; :class:`SyntheticAcceptance`
asks no model. Neither looks at anything but a request's own rows and its own random numbers: so the
same drafts give the same answer, whatever else runs.
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
from octavo.runtime.verification import ExactAcceptance, SampledDraft, Verified

# A stream of random numbers, apart from the one that a request samples with.
_SYNTHETIC = 2 << 16

# Of typical acceptance, as its authors choose them.
TYPICAL_THRESHOLD = 0.09
TYPICAL_SCALE = 0.3


def _children(draft: Draft) -> dict[int, list[int]]:
    """The indices of the tokens that follow each token, or -1, in their order."""
    children: dict[int, list[int]] = defaultdict(list)
    for index, parent in enumerate(draft.parents):
        children[parent].append(index)
    return children


def _coin(request: Request, depth: int) -> float:
    """A random number of the token that is ``depth`` places after the next one of a request."""
    place = request.num_output_tokens + depth
    return uniform(request.seed, request.sample_index, place, _SYNTHETIC)


class TypicalAcceptance:
    """Accepts a token whose probability is above a threshold, that is lower where the entropy H of
    the distribution is higher: min(0.09, 0.3 exp(-H)). Of all paths so accepted the longest counts.

    Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
    2024. The distribution is not that of the model: what a drafter likes becomes more likely. A
    greedy request has only one token that is likely, so the rule is the exact one for it.
    """

    def __init__(self) -> None:
        self._exact = ExactAcceptance()

    def weighs(self, batch: Batch) -> Collection[str]:
        return frozenset(
            item.request.request_id
            for item in batch.items
            if item.draft is not None and not is_greedy(item.request.params)
        )

    def verify(self, sampled_draft: SampledDraft) -> Verified:
        if sampled_draft.probabilities is None:
            return self._exact.verify(sampled_draft)
        paths: dict[int, list[int]] = {-1: []}  # to each token that is accepted
        for node, siblings in sorted(
            _children(sampled_draft.draft).items()
        ):  # parents before children
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
    """The probability above which a token of this distribution [V] is typical."""
    p = probabilities[probabilities > 0.0].astype(np.float64)
    entropy = -float((p * np.log(p)).sum())
    return min(TYPICAL_THRESHOLD, TYPICAL_SCALE * float(np.exp(-entropy)))


class SyntheticAcceptance:
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
            if node not in children or _coin(request, depth) >= rate:
                break
            path.append(node := children[node][0])
        return path

    def verify(self, sampled_draft: SampledDraft) -> Verified:
        path = self.path(sampled_draft.request, sampled_draft.draft)
        node = path[-1] if path else -1
        refused = {
            sampled_draft.draft.token_ids[index] for index in _children(sampled_draft.draft)[node]
        }
        sampled = sampled_draft.token_ids[node + 1]
        # What has been refused is not to come all the same: then the nearest token that may.
        others = chain(range(sampled, -1, -1), count(sampled + 1))
        return sampled_draft.along(path, next(i for i in others if i not in refused))
