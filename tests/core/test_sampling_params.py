from __future__ import annotations

import copy
import dataclasses
import multiprocessing.reduction

import numpy as np
import pytest

from octavo import RequestOutputKind, SamplingParams
from octavo.base.errors import InvalidRequestError
from octavo.core.sampling_params import SpeculativeParams


def pickled(params):
    """What another process of the caller's would get."""
    pickler = multiprocessing.reduction.ForkingPickler
    return pickler.loads(pickler.dumps(params))


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
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)
    with pytest.raises(InvalidRequestError, match="watermarking.* is not supported: "):
        SamplingParams(watermarking=True)


def test_changes_are_validated_too():
    assert SamplingParams().with_changes(n=2).num_samples == 2
    with pytest.raises(InvalidRequestError):
        SamplingParams().with_changes(n=0)


def test_fields_may_be_assigned_and_are_validated_again():
    params = SamplingParams(n=2)
    params.max_tokens = 5
    params.stop = "x"
    params.best_of = 4
    assert params == SamplingParams(n=2, max_tokens=5, stop=["x"], best_of=4)
    for name, value in [("top_p", 0), ("n", 5), ("temperature", "hot"), ("detokenize", False)]:
        before = params.clone()
        with pytest.raises(InvalidRequestError):
            setattr(params, name, value)
        assert params == before
    with pytest.raises(AttributeError, match="temprature"):
        params.temprature = 1
    params.watermarking = None
    with pytest.raises(InvalidRequestError, match="watermarking"):
        params.watermarking = True


@pytest.mark.parametrize(
    "make",
    [SamplingParams.clone, copy.copy, copy.deepcopy, dataclasses.replace, pickled],
)
def test_copies_have_nothing_in_common(make):
    params = SamplingParams(
        temperature=0.3,
        logit_bias={3: 1.5},
        stop=["a"],
        speculative={"enabled": False},
        output_kind=RequestOutputKind.DELTA,
    )
    other = make(params)
    assert other == params and other is not params
    other.logit_bias = {4: 1}
    other.temperature = 1
    assert params.logit_bias == {3: 1.5} and params.temperature == 0.3


@pytest.mark.parametrize(
    ("name", "value", "own"),
    [
        ("n", np.int64(2), 2),
        ("temperature", np.float32(0.5), 0.5),
        ("top_k", np.int32(5), 5),
        ("max_tokens", np.array(7), 7),
        ("seed", np.uint64(2**63), 2**63),
        ("ignore_eos", np.bool_(True), True),
        ("stop_token_ids", np.array([3, 4]), (3, 4)),
        ("allowed_token_ids", [np.int16(3), 4], (3, 4)),
        ("logit_bias", {np.int64(3): np.float64(1.5)}, {3: 1.5}),
        ("speculative", {"num_speculative_tokens": np.int8(2)}, SpeculativeParams(True, 2)),
    ],
)
def test_numbers_of_numpy_are_numbers(name, value, own):
    stored = getattr(SamplingParams(**{name: value}), name)
    assert stored == own and type(stored) is type(own)
    assigned = SamplingParams()
    setattr(assigned, name, value)
    assert getattr(assigned, name) == own
    if isinstance(own, tuple):
        assert {type(each) for each in stored} == {int}


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", np.float32(2)), ("n", np.bool_(True)), ("temperature", np.nan), ("top_k", np.ones(2))],
)
def test_numbers_of_numpy_are_checked_like_others(name, value):
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: value})


VLLM_DEFAULTS = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "temperature": 1.0, "watermarking": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None,
    "stop": None, "stop_token_ids": None, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0,
    "logprobs": None, "prompt_logprobs": None, "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None, "logprob_token_ids": None, "flat_logprobs": False,
    "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False, "output_kind": RequestOutputKind.CUMULATIVE,
    "stream_interval": None, "skip_clone": False, "structured_outputs": None, "logit_bias": None,
    "allowed_token_ids": None, "extra_args": None, "bad_words": None,
    "skip_reading_prefix_cache": None, "thinking_token_budget": None, "repetition_detection": None,
    "routed_experts_prompt_start": 0, "trace_decode_token_ids": None,
}  # fmt: skip


def test_every_field_of_vllm_may_be_given_its_default():
    assert SamplingParams(**VLLM_DEFAULTS) == SamplingParams()
    for name, value in VLLM_DEFAULTS.items():
        if name not in {field.name for field in dataclasses.fields(SamplingParams)}:
            with pytest.raises(InvalidRequestError, match=f"^{name}: .* is not supported: "):
                SamplingParams(**{name: "something else"})
            assert getattr(SamplingParams(), name) == value


def test_kinds_of_output_are_named():
    with pytest.raises(InvalidRequestError, match="output_kind.*RequestOutputKind.DELTA"):
        SamplingParams(output_kind="delta")
