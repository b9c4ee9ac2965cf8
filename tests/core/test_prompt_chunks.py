from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.prompt_chunks import STEP_TOKENS, PromptChunks, with_step_of


def through(total: int, chunk: int, depth: int, seconds) -> float:
    """Followed chunk by chunk: each stage computes one at a time, in their order."""
    free = [0.0] * depth
    for start in range(0, total, chunk):
        arrives = 0.0
        for stage in range(depth):
            taken = seconds(min(chunk, total - start))
            free[stage] = arrives = max(arrives, free[stage]) + taken
    return free[-1]


def reading(ridge: int):
    """Times of a stage that reads its weights while it computes, as on a GPU."""
    return lambda num_tokens: max(ridge, num_tokens) + 0.1 * ridge


TIMES = {
    "additive": with_step_of(100),
    "default": with_step_of(STEP_TOKENS),
    "roofline": reading(250),
    "experts": reading(3000),
}


@pytest.mark.parametrize("seconds", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("depth", [2, 3, 4, 8])
@pytest.mark.parametrize("total", [1, 20, 150, 716, 2000, 8592, 40_000])
def test_no_other_size_is_much_sooner(seconds, depth, total):
    chunk = PromptChunks(depth, 2048, seconds).size(total)
    found = through(total, chunk, depth, seconds)
    least = min(through(total, size, depth, seconds) for size in range(1, min(total, 2048) + 1, 7))
    assert 1 <= chunk <= 2048
    assert found <= 1.04 * least
    assert found <= through(total, min(total, 2048), depth, seconds) * (1 + 1e-9)


@pytest.mark.parametrize("total", [2000, 8000, 30_000])
def test_with_additive_steps_it_is_the_root(total):
    chunk = PromptChunks(4, 100_000, with_step_of(100)).size(total)
    assert chunk == pytest.approx(sqrt(total * 100 / 3), rel=0.25)


def test_what_one_step_reads_anyway_is_not_read_twice():
    assert PromptChunks(4, 2048, reading(300)).size(280) == 280


def test_where_prompts_do_not_end_steps_are_full():
    assert PromptChunks(4, 2048).size(10**7) == 2048


def test_steps_may_be_smaller_than_the_least_size():
    chunks = PromptChunks(2, 5)
    assert chunks.size(4) == 4 and chunks.size(1000) == 5


@given(st.integers(2, 9), st.integers(1, 5000), st.integers(0, 10**6), st.floats(0.0, 5000))
def test_chunks_are_equal(depth, most, total, step):
    chunk = PromptChunks(depth, most, with_step_of(step)).size(total)
    count = max(1, -(-total // chunk))
    assert 1 <= chunk <= most
    assert chunk == max(1, -(-total // count))
