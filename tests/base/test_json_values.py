"""JSON has no infinity."""

from __future__ import annotations

import math

import pytest

from octavo.base.json_values import finite_or_none


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, None])
def test_what_is_not_finite_is_null(value):
    assert finite_or_none(value) is None


def test_numbers_stay():
    assert finite_or_none(0.0) == 0.0 and finite_or_none(-1.5) == -1.5
