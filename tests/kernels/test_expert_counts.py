"""Counts of experts, as figures of steps."""

from __future__ import annotations

import json

from octavo.kernels.expert_counts import ExpertCounts


def test_figures_by_expert_layer_and_rank():
    counts = ExpertCounts(2, 4, num_ranks=2)
    counts.loads[:] = [[4, 2, 1, 1], [0, 8, 0, 0]]
    counts.rank_rows[:] = [[6, 2, 7], [8, 0, 8]]
    figures = counts.figures()
    assert figures == {
        "expert_tokens": (4, 10, 1, 1),
        "expert_imbalance": (2.0, 4.0),
        "expert_rank_tokens": (14, 2),
        "expert_busiest_rank_tokens": (7, 8),
    }
    assert json.loads(json.dumps(figures)) == {key: list(value) for key, value in figures.items()}


def test_before_any_token_and_where_no_rank_has_whole_experts():
    assert ExpertCounts(2, 3, 0).figures() == {
        "expert_tokens": (0, 0, 0),
        "expert_imbalance": (0.0, 0.0),
    }


def test_a_model_without_experts_has_none():
    assert ExpertCounts(0, 0, 0).figures() == {}
