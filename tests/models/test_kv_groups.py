from __future__ import annotations

from collections import Counter

import pytest
from kv_layers import kv_layers

from octavo.models.kv_groups import KVGroups, group_layers, one_table


def test_layers_that_see_all_are_one_group():
    assert group_layers(kv_layers(None, None, None)) == one_table(3)
    assert one_table(3).windows == (None,)


def test_layers_of_one_window_are_one_group():
    groups = group_layers(kv_layers(512, 512))
    assert groups.windows == (512,) and groups.places == ((0, 0), (0, 1))


def test_kinds_of_layers_are_dealt_out_to_groups_of_one_size():
    # Gemma 3 270M: every sixth layer of 18 sees all.
    groups = group_layers(kv_layers(*[None if i % 6 == 5 else 512 for i in range(18)]))
    assert groups.windows == (None, 512, 512, 512, 512, 512)
    assert groups.layers_per_block == 3
    assert [groups.places[i] for i in (5, 11, 17)] == [(0, 0), (0, 1), (0, 2)]
    assert [groups.places[i] for i in (0, 1, 2, 3)] == [(1, 0), (1, 1), (1, 2), (2, 0)]


@pytest.mark.parametrize("num_full, num_window", [(4, 22), (5, 29), (8, 40), (10, 52), (1, 1)])
def test_no_place_is_taken_twice_and_little_is_left_empty(num_full, num_window):
    groups = group_layers(kv_layers(*[None] * num_full, *[1024] * num_window))
    assert len(set(groups.places)) == num_full + num_window
    assert all(place < groups.layers_per_block for _, place in groups.places)
    room = groups.num_groups * groups.layers_per_block
    assert room <= 1.1 * (num_full + num_window)
    in_groups = Counter(group for group, _ in groups.places)
    assert sorted(in_groups) == list(range(groups.num_groups))


def test_a_slot_takes_as_much_in_every_group():
    groups = group_layers(kv_layers(*[None] * 3, *[512] * 15))
    assert groups.bytes_of_slot(18 * 100) == 3 * 100


def test_layers_that_keep_more_than_others_share_a_table_with_them():
    mixed = [*kv_layers(None, 512), *kv_layers(512, heads=4)]
    assert group_layers(mixed) == one_table(3)


def test_layers_of_a_stage_are_in_the_groups_of_the_model():
    """Layers that follow each other are in different groups, so that blocks of stages are small."""
    layers = kv_layers(*[None if i % 6 == 5 else 512 for i in range(36)])
    groups = group_layers(layers, num_stages=2)
    assert sorted(groups.windows, key=str) == sorted(group_layers(layers).windows, key=str)
    stages = [groups.of_layers(range(18)), groups.of_layers(range(18, 36))]
    assert [stage.windows for stage in stages] == [groups.windows] * 2
    numbers = [group for stage in stages for group, _ in stage.places]
    assert numbers == [group for group, _ in groups.places]
    for stage in stages:
        assert len(set(stage.places)) == 18
        assert max(place for _, place in stage.places) < stage.layers_per_block
    size = sum(stage.layers_per_block for stage in stages)
    assert groups.layers_per_block <= size <= groups.layers_per_block + 1


def test_a_stage_without_layers_that_keep_anything():
    assert one_table(3).of_layers(range(3, 3)) == KVGroups((None,), (), 1)
