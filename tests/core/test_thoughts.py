"""Thoughts in tokens: they are counted, and end when their budget is spent."""

from __future__ import annotations

import random

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.thoughts import ThoughtBudget, ThoughtCount, ThoughtTokens
from octavo.core.token_mask import create_mask

TEXTS = [b"<think>", b"</think>", b"\n", b"a", b"<", b"/think>", b"\xc3", b"\xa9", b"<call>", b"th"]
BEGIN, END, NEWLINE, A, LESS, REST, FIRST, SECOND, CALL, TH = range(10)


def thoughts(*, inside):
    return ThoughtTokens(b"<think>", (b"</think>", b"<call>"), TEXTS.__getitem__, inside)


def budget(number, *, inside=True):
    return ThoughtBudget(thoughts(inside=inside), number, [NEWLINE, END], len(TEXTS))


def allowed(mask):
    bits = mask.bitmask()
    return None if bits is None else [i for i in range(len(TEXTS)) if bits[i >> 5] >> (i & 31) & 1]


@pytest.mark.parametrize(
    ("inside", "tokens", "expected"),
    [
        (True, [A, A, END, A], 3),
        (True, [A, LESS, REST, A], 3),
        (False, [BEGIN, A, END, A, A], 2),
        (False, [NEWLINE, LESS, TH, A], 0),
        (True, [A, CALL, A], 2),
        (False, [BEGIN, A, END, BEGIN, A, END], 4),
        (True, [A, A], 2),
        (False, [A, A], 0),
    ],
)
def test_tokens_of_thoughts_are_counted(inside, tokens, expected):
    count = ThoughtCount(thoughts(inside=inside))
    count.add(tokens)
    assert count.num_tokens == expected


def test_a_spent_budget_leaves_the_closing_tokens_alone():
    mask = budget(2)
    assert allowed(mask) is None
    mask.advance([A, A])
    assert allowed(mask) == [NEWLINE]
    mask.advance([NEWLINE])
    assert allowed(mask) == [END]
    mask.advance([END])
    assert allowed(mask) is None


def test_the_closing_tokens_are_forced():
    mask = budget(1)
    assert mask.forced_tokens(4) == () and mask.num_allowed([A, A]) == 2
    mask.advance([A])
    assert mask.forced_tokens(4) == (NEWLINE, END) and mask.forced_tokens(1) == (NEWLINE,)
    assert mask.num_allowed([NEWLINE, END, A]) == 3 and mask.num_allowed([NEWLINE, A]) == 1
    mask.advance([NEWLINE, END])
    assert mask.forced_tokens(4) == ()


def test_a_thought_that_ends_by_itself_is_left_alone():
    mask = budget(3)
    mask.advance([A, END])
    assert allowed(mask) is None
    mask.advance([A] * 9)
    assert allowed(mask) is None


def test_a_budget_of_nothing_closes_at_once():
    mask = budget(0)
    assert allowed(mask) == [NEWLINE]


def test_all_thoughts_count_wherever_they_begin():
    mask = budget(3, inside=False)
    mask.advance([A, BEGIN, A, END, A, BEGIN])
    assert allowed(mask) is None  # two tokens were thoughts
    mask.advance([A])
    assert allowed(mask) == [NEWLINE]
    mask.advance([NEWLINE, END, A, A])
    assert allowed(mask) is None
    mask.advance([BEGIN])
    assert mask.forced_tokens(4) == (NEWLINE, END)  # nothing is left for another one


def test_no_character_is_split():
    mask = budget(1)
    mask.advance([FIRST])
    assert allowed(mask) is None
    mask.advance([SECOND])
    assert allowed(mask) == [NEWLINE]


def test_wrong_drafts_are_forgotten_and_copies_are_their_own():
    rng = random.Random(1)
    for _ in range(200):
        mask, tokens = budget(rng.randrange(4), inside=rng.random() < 0.5), []
        for _ in range(12):
            drafted = rng.choices(range(len(TEXTS)), k=rng.randrange(1, 4))
            kept = rng.randrange(len(drafted) + 1)
            before = mask.fork()
            mask.advance(drafted)
            mask.rollback(len(drafted) - kept)
            tokens += drafted[:kept]
            assert mask.num_tokens == len(tokens) == before.num_tokens + kept
            fresh = budget(mask._budget, inside=mask._places[0].is_inside)
            fresh.advance(tokens)
            assert allowed(fresh) == allowed(mask)


def test_other_masks_go_first():
    """Where they exclude what would close the thought, it goes on."""
    params = SamplingParams(allowed_token_ids=[A])
    mask = create_mask(params, len(TEXTS), thought=budget(1))
    mask.advance([A])
    assert allowed(mask) == [A]
    alone = create_mask(SamplingParams(), len(TEXTS), thought=budget(1))
    alone.advance([A])
    assert allowed(alone) == [NEWLINE]
