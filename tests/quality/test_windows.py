from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import BenchmarkError
from octavo.quality.windows import check_settings, cut, tokenize
from octavo.text.folder_tokenizer import load_folder_tokenizer


def scored_by_llama_cpp(num_tokens: int, n_ctx: int) -> list[int]:
    """Places in a text of the tokens that llama-perplexity scores, loop by loop as it counts."""
    places = []
    first = n_ctx // 2
    for chunk in range(num_tokens // n_ctx):
        start = chunk * n_ctx
        places += [start + first + i + 1 for i in range(n_ctx - first - 1)]
    return places


@given(st.integers(3, 40), st.integers(0, 300))
def test_the_scored_tokens_are_those_of_llama_cpp(ctx: int, num_tokens: int) -> None:
    tokens = np.arange(num_tokens)
    expected = scored_by_llama_cpp(num_tokens, ctx)
    if not expected:
        with pytest.raises(BenchmarkError, match=f"has {num_tokens} tokens.*window takes {ctx}"):
            cut(tokens, ctx)
        return
    windows = cut(tokens, ctx)
    assert windows.token_ids[:, windows.first_judge + 1 :].ravel().tolist() == expected
    assert windows.num_scored == len(expected)


@given(st.integers(2, 40), st.integers(0, 300), st.sampled_from(["half", "all"]))
def test_windows_are_the_text(ctx: int, extra: int, score: str) -> None:
    if score == "half" and ctx < 3:
        return
    tokens = np.arange(ctx + extra)
    windows = cut(tokens, ctx, score=score)
    whole = len(windows) * ctx
    assert windows.token_ids.ravel().tolist() == list(range(whole))
    assert whole <= len(tokens) < whole + ctx
    if score == "all":
        assert windows.num_scored == whole - len(windows)


def test_bos_takes_the_place_of_every_first_token() -> None:
    windows = cut(list(range(10)), 4, bos_token_id=99)
    assert windows.token_ids.tolist() == [[99, 1, 2, 3], [99, 5, 6, 7]]


def test_so_many_tokens_at_most() -> None:
    assert len(cut(list(range(100)), 8, max_tokens=31)) == 3
    assert len(cut(list(range(100)), 8, max_tokens=1000)) == 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((2, "half", None), "give at least 3"),
        ((1, "all", None), "give at least 2"),
        ((8, "some", None), "half or all"),
        ((8, "half", 7), "7 tokens are less than one window of 8"),
    ],
)
def test_settings_that_score_nothing(settings: tuple, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        check_settings(*settings)


def test_the_smallest_windows() -> None:
    assert cut([1, 2, 3], 3).num_scored == 1
    assert cut([1, 2], 2, score="all").num_scored == 1


def test_bos_as_the_model_wants_it(tiny_model, bos_model) -> None:
    plain, with_bos = load_folder_tokenizer(tiny_model), load_folder_tokenizer(bos_model)
    assert plain.bos_token_id == with_bos.bos_token_id == 257
    assert (plain.leading_bos, with_bos.leading_bos) == (None, 257)
    ids = plain.encode("one <eos> two")
    assert 256 not in ids  # the text of a special token is text
    assert tokenize("one <eos> two", plain) == (ids, None)
    assert tokenize("one <eos> two", with_bos) == ([257, *ids], 257)
