"""Builds draft trees, or chains, from the candidates of a head, one depth at a time.

At each depth the likeliest nodes are extended, and the likeliest of all nodes become the draft. A
node is never likelier than its parent, so the draft is a tree (EAGLE-2, Li et al. 2024, arXiv
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

# A further row costs a verifying step about a tenth or a sixth of its time, so tokens that are
# accepted less often do not pay; and heads are overconfident.
MIN_PROBABILITY = 0.25
_TREE_WIDTH = 4


class DraftTreeShape(NamedTuple):
    """The limits of a draft tree.

    Args:
        max_tokens: the most tokens of a draft.
        depth: the most tokens of a path.
        width: candidates that are considered after each node that is extended.
        beams: nodes that are extended at each depth.
        min_probability: nodes are left out whose whole path is right less often than this.
    """

    max_tokens: int
    depth: int
    width: int
    beams: int
    min_probability: float


def tree_shape(
    config: SpeculativeConfig, fields: Fields, default: int, beams: int
) -> DraftTreeShape:
    """The shape of a head's drafts, from the ``fields`` of its folder's config: a chain, or a tree
    if more draft tokens are asked for than the folder has acceptance rates for."""
    known = fields.section("octavo", {})
    depth = len(known.entries("acceptance")) if "acceptance" in known else MAX_DRAFT_TOKENS
    asked = config.num_speculative_tokens or min(default, depth or default)
    least = min_probability_of(config)
    if asked <= depth or not depth:
        return DraftTreeShape(asked, asked, 1, 1, least)
    return DraftTreeShape(asked, depth, _TREE_WIDTH, min(beams, _TREE_WIDTH), least)


def min_probability_of(config: SpeculativeConfig) -> float:
    """The least probability of a draft token's path, as configured or by default."""
    given = config.min_probability
    return MIN_PROBABILITY if given is None else given


class DraftTree:
    """Candidates for the tokens after the last known one of a request, which is node -1."""

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
        """Depth of a node: 0 right after the last known token, which itself is at -1."""
        return -1 if node < 0 else self._depths[node]

    def add(self, parent: int, candidates: Iterable[tuple[int, float]]) -> list[int]:
        """Add candidates (token, log-probability) for the token after a node.

        Returns the nodes of those that are likely enough.
        """
        before = 0.0 if parent < 0 else self._logprobs[parent]
        nodes: list[int] = []
        for token_id, logprob in candidates:
            if before + logprob >= self._least:  # false for a NaN
                nodes.append(len(self._token_ids))
                self._token_ids.append(token_id)
                self._parents.append(parent)
                self._depths.append(self.depth(parent) + 1)
                self._logprobs.append(before + logprob)
        return nodes

    def best(self, nodes: Sequence[int]) -> list[int]:
        """Choose the nodes to extend among some of one depth."""
        most = min(self._shape.depth, self.opening.max_tokens)
        open_nodes = [node for node in nodes if self._depths[node] + 1 < most]
        return sorted(open_nodes, key=self._rank)[: self._shape.beams]

    def draft(self) -> Draft | None:
        """The likeliest nodes as a draft; None if there are none."""
        count = min(self._shape.max_tokens, self.opening.max_tokens)
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
    """The drafts of trees that have a token, by request id."""
    drafts = ((tree.opening.request.request_id, tree.draft()) for tree in trees)
    return {request_id: draft for request_id, draft in drafts if draft is not None}
