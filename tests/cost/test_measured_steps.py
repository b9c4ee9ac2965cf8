"""Measured steps: between what was measured, and beyond."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.fields import Fields
from octavo.cost.measured_steps import MeasuredSteps, Spread, pass_terms, regime_of
from octavo.cost.step_cost import StepFeatures
from octavo.cost.work import Span, passes

STEPS = MeasuredSteps(
    {
        "step": 1e-3,
        "sequence": 1e-5,
        "pass": 2e-3,
        "rows_from_1": 1e-4,
        "rows_from_64": 2e-5,
        "sampled_from_0": 1e-4,
        "decode_key": 1e-8,
        "prompt_score": 1e-9,
    },
    {"decode": Spread(0.95, 1.1), "prompt": Spread(0.8, 1.3)},
    most_rows=512,
    most_seqs=64,
    most_keys=100_000,
    drift=0.01,
)


def features(*spans: Span) -> StepFeatures:
    return StepFeatures.of(next(passes(spans)))


def test_rows_cost_what_each_piece_of_the_line_says():
    def seconds(rows: int) -> float:
        return STEPS.seconds(features(Span(0, rows, 0)))

    assert seconds(2) - seconds(1) == pytest.approx(1e-4, rel=0.01)
    assert seconds(100) - seconds(99) == pytest.approx(2e-5, rel=0.05)


@given(rows=st.integers(1, 5000), seqs=st.integers(1, 300))
def test_pieces_add_up_to_the_whole(rows, seqs):
    made = features(*[Span(3, 1)] * seqs, Span(0, rows, 0))
    terms = list(pass_terms(made))
    assert sum(value for name, value in terms if name.startswith("rows")) == rows + seqs - 1
    assert sum(value for name, value in terms if name.startswith("sampled")) == seqs


@given(
    spans=st.lists(
        st.builds(Span, st.integers(0, 3000), st.integers(1, 400), st.integers(0, 1), st.none()),
        min_size=1,
    ),
    more=st.builds(Span, st.integers(0, 3000), st.integers(1, 400), st.just(1), st.none()),
)
def test_more_work_never_takes_less(spans, more):
    assert STEPS.seconds(features(*spans, more)) >= STEPS.seconds(features(*spans)) - 1e-12


def test_regimes():
    assert regime_of(features(Span(9, 1))) == "decode"
    assert regime_of(features(Span(0, 9))) == "prompt"
    assert regime_of(features(Span(9, 1), Span(0, 9))) == "mixed"


def test_what_lies_beyond_is_said_and_less_certain():
    def width(rows: int) -> float:
        found = STEPS.prediction(features(Span(0, rows, 0)))
        return found.high / found.low

    assert STEPS.prediction(features(Span(0, 512))).source == "measured"
    assert STEPS.prediction(features(Span(0, 513))).source == "extrapolated"
    assert width(512) < width(1024) < width(4096)


def test_an_unknown_regime_has_the_widest_interval():
    mixed = STEPS.prediction(features(Span(9, 1), Span(0, 9)))
    assert mixed.high == pytest.approx(mixed.value * 1.3 * 1.01)
    assert mixed.low == pytest.approx(mixed.value * 0.8 / 1.01)


def test_as_json_and_back():
    fields = Fields(Path("x.json"), STEPS.as_json())
    assert MeasuredSteps.of_json(fields) == STEPS
