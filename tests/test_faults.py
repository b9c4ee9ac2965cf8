from __future__ import annotations

import pytest

from octavo import faults


def test_nothing_happens_unless_armed():
    assert not any(faults.hit(point) for point in faults.POINTS)


def test_every_and_sometimes():
    with faults.armed({"runner.nan": faults.every(3)}):
        assert [faults.hit("runner.nan") for _ in range(6)] == [False, False, True] * 2
        assert not faults.hit("executor.submit")
    assert not faults.hit("runner.nan")
    first, again = faults.sometimes(0.5, 7), faults.sometimes(0.5, 7)
    drawn = [first() for _ in range(200)]
    assert drawn == [again() for _ in range(200)] and 60 < sum(drawn) < 140


def test_an_unknown_point_is_refused():
    with pytest.raises(ValueError, match="nonsense"), faults.armed({"nonsense": faults.every(1)}):
        pass
