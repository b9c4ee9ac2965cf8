"""An engine that goes on with the answer of another one: the same tokens, text and figures."""

from __future__ import annotations

import random

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.generation import GenerationStats
from octavo.server.engine.output_record import OutputRecord
from octavo.serving.load import load_engine
from octavo.serving.outputs import Delta
from octavo.serving.text_engine import OutputSoFar
from octavo.settings.engine import EngineArgs

PARAMS = [
    {"temperature": 0.0, "logprobs": 3},
    {"seed": 5, "n": 3, "top_p": 0.9},
    {"seed": 6, "presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    {"seed": 7, "stop": ("zz", "q\x00", "ab"), "min_tokens": 10},
    {"seed": 7, "stop": ("e",), "include_stop_str_in_output": True, "min_tokens": 20},
    {"seed": 8, "bad_words": ("e", "ab"), "logit_bias": {65: 2.0}},
    {"seed": 9, "min_tokens": 40, "logprobs": 0, "ignore_eos": False},
    {"seed": 10, "prompt_logprobs": 2, "logprobs": 1, "n": 2},
    {"seed": 11, "allowed_token_ids": tuple(range(97, 123))},
    {"seed": 12, "detokenize": False},
]


@pytest.fixture(scope="module")
def engine(tiny_model):
    return load_engine(EngineArgs(str(tiny_model), max_num_seqs=4)).text_engine


def run(engine, params, num_steps=None, resumed=()):
    """The deltas of so many steps, or of all."""
    group = engine.add("r", None, list(b"some prompt"), params, resumed=resumed)
    deltas = []
    while engine.has_unfinished_requests and num_steps != 0:
        deltas += engine.step()[0]
        num_steps = None if num_steps is None else num_steps - 1
    engine.abort(group.request_id)
    return deltas


def whole(deltas):
    """What a client has of all samples."""
    found = {}
    for delta in deltas:
        text, ids, logprobs, prompt, _ = found.get(delta.index, ("", [], [], [], None))
        end = delta.finish_reason and (
            delta.finish_reason, delta.stop_reason, delta.cumulative_logprob
        )  # fmt: skip
        found[delta.index] = (
            text + delta.text,
            ids + list(delta.token_ids),
            logprobs + list(delta.logprobs),
            prompt + list(delta.prompt_logprobs),
            end,
        )
    return found


@pytest.mark.parametrize("number", range(len(PARAMS)))
def test_the_rest_is_what_would_have_come(engine, number):
    """Wherever the first engine ends, and the second one too."""
    params = SamplingParams(**{"ignore_eos": True, "max_tokens": 60, **PARAMS[number]})
    rng = random.Random(number)
    expected = whole(run(engine, params))
    for _ in range(4):
        record = OutputRecord.of(params)
        deltas = []
        for num_steps in (rng.randrange(2, 30), rng.randrange(1, 20), None):
            resumed = () if record.is_empty else [OutputSoFar(*one) for one in record.resumed()]
            if not record.is_empty and not resumed:
                break  # it was over before
            new = run(engine, params, num_steps, resumed)
            new = [delta for delta in new if delta.finish_reason != "abort"]
            for delta in new:
                record.add(delta)
            deltas += new
            if all(end for *_, end in whole(deltas).values()) and len(whole(deltas)) == params.n:
                break
        assert whole(deltas) == expected


def test_the_best_of_several_begin_anew():
    assert OutputRecord.of(SamplingParams(n=1, best_of=3)) is None


def test_statistics_are_of_all_engines_together():
    record = OutputRecord(1)
    record.add(Delta(0, "abc", [1, 2, 3]))
    first = GenerationStats(
        8, num_cached_tokens=4, miss_reason="evicted", queue_time=0.1, ttft=1.0, prefill_time=0.9,
        num_draft_tokens=3, num_accepted_tokens=1,
    )  # fmt: skip
    record.go_on(first)
    record.add(Delta(0, "de", [4, 5], finish_reason="length"))
    later = GenerationStats(
        8, num_cached_tokens=0, queue_time=2.0, ttft=3.0, tpot=9.0, e2e=5.0, prefill_time=1.0,
        num_preemptions=1, num_draft_tokens=2, num_accepted_tokens=2,
    )  # fmt: skip
    record.correct(later)
    assert (later.num_cached_tokens, later.miss_reason) == (4, "evicted")
    assert (later.queue_time, later.ttft, later.prefill_time, later.e2e) == (0.1, 1.0, 0.9, 5.0)
    assert (later.decode_time, later.tpot) == (4.0, 1.0)
    assert (later.num_preemptions, later.num_draft_tokens, later.num_accepted_tokens) == (1, 5, 3)
    assert record.resumed() == []
