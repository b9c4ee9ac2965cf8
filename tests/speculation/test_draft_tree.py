"""Growing drafts: chains and trees of the likeliest tokens, within the room that there is."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_heads import requests

from octavo.base.fields import Fields
from octavo.core.drafting import DraftingRequest
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.draft_tree import DraftTree, DraftTreeShape, drafts_of, tree_shape

REQUEST = requests(1)[0]


def grown(
    shape: DraftTreeShape, room: int, seed: int
) -> tuple[DraftTree, dict[tuple[int, ...], float]]:
    """A tree over random candidates, and the probability of every path that was looked at."""
    rng = random.Random(seed)
    tree = DraftTree(DraftingRequest(REQUEST, room), shape)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    front, depth = [-1], 0
    while front:
        made = []
        for node in front:
            tokens = rng.sample(range(50), shape.width)
            shares = sorted((rng.random() / shape.width for _ in tokens), reverse=True)
            for token_id, share in zip(tokens, shares, strict=True):
                for child in tree.add(node, [(token_id, math.log(share))]):
                    paths[child] = (*paths[node], token_id)
                    chances[paths[child]] = chances[paths[node]] * share
                    made.append(child)
        front, depth = tree.best(made), depth + 1
        assert len(front) <= shape.beams
    assert depth <= min(shape.depth, room)
    return tree, chances


@given(
    st.builds(
        DraftTreeShape,
        max_tokens=st.integers(1, 12),
        depth=st.integers(1, 5),
        width=st.integers(1, 4),
        beams=st.integers(1, 3),
        min_probability=st.sampled_from([0.0, 0.01, 0.2]),
    ),
    st.integers(1, 10),
    st.integers(0, 10**6),
)
def test_the_likeliest_of_all_that_was_looked_at_is_drafted(shape, room, seed):
    tree, chances = grown(shape, room, seed)
    draft = tree.draft()
    del chances[()]
    if draft is None:
        assert not chances
        return
    count = min(shape.max_tokens, room, len(chances))
    drafted = []
    for index in range(len(draft)):
        path, node = [], index
        while node >= 0:
            path.append(draft.token_ids[node])
            node = draft.parents[node]
        drafted.append(chances[tuple(reversed(path))])
    assert drafted == sorted(chances.values(), reverse=True)[:count]
    assert min(drafted) >= shape.min_probability - 1e-12
    assert max(draft.depths()) < min(shape.depth, room)
    if shape.width == 1:
        assert draft.parents == tuple(range(-1, len(draft) - 1))


def test_a_nan_is_no_candidate():
    tree = DraftTree(DraftingRequest(REQUEST, 4), DraftTreeShape(4, 4, 2, 1, 0.0))
    assert tree.add(-1, [(5, math.nan)]) == []
    assert drafts_of([tree]) == {}


@pytest.mark.parametrize(
    ("asked", "octavo", "expected"),
    [
        (None, {}, (3, 3, 1, 1)),
        (6, {}, (6, 6, 1, 1)),
        (None, {"acceptance": [0.3, 0.2]}, (2, 2, 1, 1)),
        (2, {"acceptance": [0.3, 0.2]}, (2, 2, 1, 1)),
        (6, {"acceptance": [0.3, 0.2]}, (6, 2, 4, 2)),
        (6, {"acceptance": []}, (6, 6, 1, 1)),
    ],
)
def test_more_tokens_than_a_head_is_deep_are_a_tree(tmp_path, asked, octavo, expected):
    config = SpeculativeConfig(method="recurrent", model="x", num_speculative_tokens=asked)
    shape = tree_shape(config, Fields(tmp_path, {"octavo": octavo}), 3, beams=2)
    assert shape[:4] == expected
    assert shape.min_probability == 0.25
