from __future__ import annotations

from octavo import SamplingParams
from octavo.core.request import Request
from octavo.core.token_counts import SeenTokens, TokenCounts


def counted(seen: SeenTokens) -> dict[int, int]:
    return dict(zip(*seen.columns(), strict=True))


def test_tokens_are_counted_as_they_come():
    counts = TokenCounts([5, 3, 5])
    assert counted(SeenTokens(counts, {})) == {5: 0, 3: 0}
    counts.advance([3, 7, 7])
    assert counted(SeenTokens(counts, {})) == {5: 0, 3: 1, 7: 2} and counts.num_tokens == 3
    later = SeenTokens(counts, counts.after([7, 9, 9]))
    assert counted(later) == {5: 0, 3: 1, 7: 3, 9: 2}
    assert counted(SeenTokens(counts, {})) == {5: 0, 3: 1, 7: 2}  # nothing has come yet


def test_a_request_counts_its_own_and_begins_anew_where_tokens_are_taken_back():
    request = Request("r", [1, 2], SamplingParams(repetition_penalty=1.5), 0.0)
    request.token_ids += [2, 4, 4]
    assert counted(request.seen_tokens()) == {1: 0, 2: 1, 4: 2}
    del request.token_ids[-1:]
    assert counted(request.seen_tokens()) == {1: 0, 2: 1, 4: 1}
    other = Request("s", [1, 2], SamplingParams(presence_penalty=1.0), 0.0)
    other.token_ids += [9]
    assert counted(other.seen_tokens()) == {9: 1}  # of the prompt, only repetition knows
