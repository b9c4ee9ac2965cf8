"""Placement of experts: every expert is somewhere, and no rank has too many or too much to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.cost.expert_placement import imbalance, place_experts
from octavo.kernels.expert_places import ExpertPlaces, deal_out


@st.composite
def cases(draw):
    num_experts = draw(st.integers(1, 24))
    num_ranks = draw(st.integers(1, num_experts))
    least = -(-num_experts // num_ranks)
    slots = draw(st.integers(least, least + 4))
    layer = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    return draw(st.lists(layer, min_size=1, max_size=3)), num_ranks, slots


@given(cases())
def test_experts_are_placed_within_bounds_and_no_worse_than_in_order(case):
    loads, num_ranks, slots = case
    places = place_experts(loads, num_ranks, slots)
    assert len(places.layers) == len(loads)
    for layer in places.layers:
        assert len(layer) == len(loads[0])
        for ranks in layer:
            assert ranks, "an expert is on no rank"
            assert sorted(set(ranks)) == list(ranks)
            assert set(ranks) <= set(range(num_ranks))
        held = [sum(rank in ranks for ranks in layer) for rank in range(num_ranks)]
        assert 1 <= min(held) <= max(held) <= slots
    in_order = ExpertPlaces((deal_out(len(loads[0]), num_ranks),) * len(loads))
    best = imbalance(loads, places, num_ranks)
    assert 1 - 1e-9 <= best <= imbalance(loads, in_order, num_ranks) + 1e-9


def test_the_busiest_experts_have_copies():
    loads = [[90, 10, 10, 10]]
    assert imbalance(loads, place_experts(loads, 2), 2) == pytest.approx(100 / 60)
    places = place_experts(loads, 2, 3)
    assert places.layers[0][0] == (0, 1)
    assert imbalance(loads, places, 2) < 1.1


def test_experts_that_got_nothing_are_placed_as_they_come():
    assert place_experts([[0] * 7], 2).layers == (deal_out(7, 2),)
    assert deal_out(7, 2) == ((0,),) * 3 + ((1,),) * 4
    assert imbalance([[0] * 7], place_experts([[0] * 7], 2), 2) == 1.0


@pytest.mark.parametrize(
    ("ranks", "slots", "said"),
    [(5, None, "5 ranks cannot share 4 experts"), (2, 1, "cannot have all 4: 2 are the fewest")],
)
def test_what_cannot_be_placed(ranks, slots, said):
    with pytest.raises(ConfigError, match=said):
        place_experts([[1, 2, 3, 4]], ranks, slots)
