from __future__ import annotations

import pytest

from octavo import SamplingParams
from octavo.errors import InvalidRequestError


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.top_p) == (1, 16, 1.0, 1.0)
    assert (params.top_k, params.min_p, params.seed, params.logprobs) == (0, 0.0, None, None)


def test_lists_and_single_strings_are_accepted():
    params = SamplingParams(stop="\n", stop_token_ids=[1, 2], bad_words=["x"], logit_bias={"3": 1})
    assert params.stop == ("\n",) and params.stop_token_ids == (1, 2)
    assert params.bad_words == ("x",) and params.logit_bias == {3: 1.0}
    assert SamplingParams(stop=None).stop == () and SamplingParams(seed=-1).seed is None


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, 129, 2**31, True, 1.5, "1"]),
        ("best_of", [0, 129]),
        ("presence_penalty", [-2.1, 2.1, float("nan"), True]),
        ("frequency_penalty", [-2.1, 2.1, 1e308]),
        ("repetition_penalty", [0.0, -1, float("inf")]),
        ("temperature", [-0.1, float("nan"), float("inf"), "hot", True]),
        ("top_p", [0.0, 1.1, float("nan")]),
        ("min_p", [-0.1, 1.1]),
        ("typical_p", [0.0, 1.1]),
        ("top_k", [-2, 1.0, 2**31]),
        ("seed", [-2, 2**64, 1.5]),
        ("max_tokens", [0, -1, 2**31, True]),
        ("min_tokens", [-1, 17]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
        ("stop", [["a"] * 17, [""], [1]]),
        ("stop_token_ids", [[-1], [1.5], [True]]),
        ("allowed_token_ids", [[], [-1]]),
        ("logit_bias", [{1: 101}, {1: float("nan")}, {"x": 1}, {-1: 1}]),
        ("bad_words", [["a"] * 129, [""], ["a" * 4097], ["a" * 100] * 41]),
    ],
)
def test_each_bound_is_enforced_and_named(field, values):
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field and field in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128},
        {"temperature": 0.0},
        {"temperature": 2},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"seed": 2**64 - 1},
        {"max_tokens": None, "min_tokens": 500},
        {"logprobs": 20, "prompt_logprobs": 0},
        {"n": 2, "best_of": 2},
        {"logit_bias": {5: -100.0}},
    ],
)
def test_the_ends_of_the_ranges_are_inside(fields):
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == value


def test_best_of_is_at_least_n_and_stop_needs_text():
    with pytest.raises(InvalidRequestError, match="best_of"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_an_unknown_field_is_an_error_that_names_it():
    with pytest.raises(TypeError, match="structured_outputs"):
        SamplingParams(structured_outputs={})


def test_changes_are_validated_too():
    assert SamplingParams().with_changes(n=2).num_samples == 2
    with pytest.raises(InvalidRequestError):
        SamplingParams().with_changes(n=0)
