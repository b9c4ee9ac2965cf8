"""Drafts that grow from a head's guesses, a depth at a time: chains; trees, where rows are cheap.

At each depth the likeliest nodes are gone on from, and of all that was found the likeliest are
drafted: a node is never likelier than the one before it (EAGLE-2, Li et al. 2024, arXiv
2406.16858).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo.base.fields import Fields
from octavo.core.batch import Draft
from octavo.core.drafting import DraftingRequest
from octavo.core.sampling_params import MAX_DRAFT_TOKENS
from octavo.settings.speculation import SpeculativeConfig

# A further row costs a verification about as much as a tenth or a sixth of a step, so what is
# accepted less often does not pay; heads are surer of themselves than they are right.
MIN_PROBABILITY = 0.25
_TREE_WIDTH = 4


class DraftTreeShape(NamedTuple):
    """How drafts grow.

    Args:
        max_tokens: of a draft.
        depth: of its tokens, at most.
        width: guesses that are looked at, after each node that is gone on from.
        beams: such nodes at each depth.
        min_probability: that all tokens down to a node are right; those below it are left out.
    """

    max_tokens: int
    depth: int
    width: int
    beams: int
    min_probability: float


def tree_shape(
    config: SpeculativeConfig, fields: Fields, default: int, beams: int
) -> DraftTreeShape:
    """Chains; or trees, where more tokens are asked for than the folder of heads, with the
    ``fields`` of its config, has an acceptance for."""
    known = fields.section("octavo", {})
    depth = len(known.entries("acceptance")) if "acceptance" in known else MAX_DRAFT_TOKENS
    asked = config.num_speculative_tokens or min(default, depth or default)
    least = min_probability_of(config)
    if asked <= depth or not depth:
        return DraftTreeShape(asked, asked, 1, 1, least)
    return DraftTreeShape(asked, depth, _TREE_WIDTH, min(beams, _TREE_WIDTH), least)


def min_probability_of(config: SpeculativeConfig) -> float:
    said = config.min_probability
    return MIN_PROBABILITY if said is None else said


class DraftTree:
    """What may follow the last known token of an opening's request. Node -1 is that token."""

    def __init__(self, opening: DraftingRequest, shape: DraftTreeShape):
        self.opening = opening
        self._shape = shape
        self._least = math.log(shape.min_probability) if shape.min_probability > 0 else -math.inf
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._logprobs: list[float] = []  # of all tokens down to a node

    def token_id(self, node: int) -> int:
        return self.opening.request.token_ids[-1] if node < 0 else self._token_ids[node]

    def depth(self, node: int) -> int:
        """0 for those after the last known token, which itself is at -1."""
        return -1 if node < 0 else self._depths[node]

    def add(self, parent: int, guesses: Iterable[tuple[int, float]]) -> list[int]:
        """Take in tokens that may follow a node, with the logarithms of their probabilities.
        Returns the nodes of those that are likely enough."""
        before = 0.0 if parent < 0 else self._logprobs[parent]
        nodes: list[int] = []
        for token_id, logprob in guesses:
            if before + logprob >= self._least:  # which a NaN is not
                nodes.append(len(self._token_ids))
                self._token_ids.append(token_id)
                self._parents.append(parent)
                self._depths.append(self.depth(parent) + 1)
                self._logprobs.append(before + logprob)
        return nodes

    def best(self, nodes: Sequence[int]) -> list[int]:
        """Those of some nodes, all of one depth, that are gone on from."""
        most = min(self._shape.depth, self.opening.room)
        open_nodes = [node for node in nodes if self._depths[node] + 1 < most]
        return sorted(open_nodes, key=self._rank)[: self._shape.beams]

    def draft(self) -> Draft | None:
        """The likeliest tokens, as many as there may be."""
        count = min(self._shape.max_tokens, self.opening.room)
        nodes = sorted(range(len(self._token_ids)), key=self._rank)[:count]
        places = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        if not nodes:
            return None
        return Draft(
            tuple(self._token_ids[node] for node in nodes),
            tuple(places[self._parents[node]] for node in nodes),
        )

    def _rank(self, node: int) -> tuple[float, int]:
        return -self._logprobs[node], node  # parents have lower numbers than their children


def drafts_of(trees: Sequence[DraftTree]) -> dict[str, Draft]:
    """Those that have a token, by request."""
    drafts = ((tree.opening.request.request_id, tree.draft()) for tree in trees)
    return {request_id: draft for request_id, draft in drafts if draft is not None}
