"""From how many requests on whole experts on devices pay."""

from __future__ import annotations

import pytest

from octavo.planner import Traffic, plan
from octavo.planner.whole_experts import whole_experts


def found(model: str, hardware: str, concurrency: int = 1, **layout: int):
    return whole_experts(plan(model, hardware, Traffic(concurrency=concurrency), **layout).verdict)


def test_beside_copies_they_pay_where_each_has_some_requests():
    one, many = (found("deepseek-v3", "h200:8", count, tp=1, dp=8, ep=8) for count in (1, 64))
    assert one.whole > one.without and many.whole < many.without
    assert one.is_copied and one.streams == 1 and 1 < one.ahead_from <= many.streams
    assert f"ahead from {one.ahead_from} on" in one.text and "on each copy" in one.text


def test_beside_ranks_that_share_each_matrix_the_busiest_makes_the_others_wait():
    for ep in (1, 8):  # of either layout, the same is said
        alone = found("deepseek-v3", "h200:8", tp=8, ep=ep)
        assert alone.whole > alone.without and alone.ahead_from is None
        assert "with experts cut" in alone.text and "not ahead" in alone.text


@pytest.mark.parametrize(
    ("model", "hardware", "layout"),
    [
        ("llama-3.1-8b", "h100-sxm:2", {"tp": 2}),
        ("mixtral-8x7b", "h200", {}),
        ("mixtral-8x7b", "h200:16", {"tp": 1, "dp": 16}),  # more devices than experts
    ],
)
def test_nothing_is_said_where_nothing_can_be_shared(model, hardware, layout):
    assert found(model, hardware, **layout) is None
