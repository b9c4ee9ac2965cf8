"""A timed mask is the mask that it times."""

from __future__ import annotations

from octavo.bench.structured.timed_mask import TimedMask
from octavo.core.token_mask import BadWords


def test_it_does_what_its_mask_does_and_notes_the_time_of_each():
    seconds: list[float] = []
    plain, timed = BadWords([(1, 2), (3,)], 40), TimedMask(BadWords([(1, 2), (3,)], 40), seconds)
    for token_ids, taken_back in (([1], 0), ([2, 1], 1), ([3], 2)):
        for mask in (plain, timed):
            mask.advance(token_ids)
            mask.rollback(taken_back)
        assert timed.bitmask() == plain.bitmask() and timed.num_tokens == plain.num_tokens
        assert timed.num_allowed([1, 2]) == plain.num_allowed([1, 2])
    other = timed.fork()
    other.advance([5])
    assert other.bitmask() != timed.bitmask()
    assert len(seconds) == 5 and min(seconds) > 0
    assert (timed.seconds, timed.is_over, timed.problem) == (0.0, False, None)
    assert not timed.parts()
