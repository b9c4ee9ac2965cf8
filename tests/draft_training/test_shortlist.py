from __future__ import annotations

import numpy as np

from octavo.draft_training.shortlist import coverage, shortlist


def test_tokens_that_come_most_often_are_listed_in_ascending_order():
    assert shortlist([7, 7, 3, 7, 3, 5], [], 2, 10).tolist() == [3, 7]


def test_what_the_model_says_counts_more_than_what_it_was_told():
    assert shortlist([8], [2] * 9, 1, 10).tolist() == [8]
    assert shortlist([8], [2] * 11, 1, 10).tolist() == [2]


def test_a_list_is_filled_up_with_the_lowest_ids():
    assert shortlist([9], [], 4, 12).tolist() == [0, 1, 2, 9]


def test_a_list_is_no_longer_than_the_vocabulary():
    assert shortlist([1], [], 100, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_coverage_is_the_part_that_is_in_the_list():
    assert coverage(np.array([1, 5]), np.array([1, 1, 2, 5])) == 0.75
    assert coverage(np.array([1, 5]), np.array([], dtype=np.int64)) == 0.0
