from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import DeadlineError, EngineUnavailableError
from octavo.core.batch import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.generation import EngineObserver, Generation, GenerationRequest
from octavo.server.engine.response_cache import Recording, ResponseCache, answer_key
from octavo.serving.outputs import Delta

MIB = 1 << 20


def make_request(prompt=(1, 2, 3), *, deterministic=True, salt="", **params):
    return GenerationRequest(
        "r",
        list(prompt),
        SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **params}),
        0.0,
        cache_salt=salt,
        streams=True,
        is_deterministic=deterministic,
    )


async def read(generation):
    """All deltas, and what the engine said of the prompt."""
    async with generation:
        deltas = [delta async for step in generation for delta in step]
    return deltas, generation.prompt_logprobs


@pytest.mark.parametrize(
    "params", [{}, {"n": 3}, {"logprobs": 5}, {"prompt_logprobs": 2}, {"temperature": 1, "seed": 7}]
)
def test_the_second_answer_is_the_first_one_chunk_by_chunk(fake_engine, params):
    async def check():
        cache = ResponseCache(fake_engine, MIB)
        first = await read(cache.submit(make_request(**params)))
        again = cache.submit(make_request(**params))
        assert again.is_from_cache and again.is_over
        assert await read(again) == first
        assert len(first[0]) == 4 * params.get("n", 1)
        assert len(fake_engine.requests) == 1
        assert (cache.num_queries, cache.num_hits, len(cache)) == (2, 1, 1)

    asyncio.run(check())


def test_what_is_to_be_kept_from_caches_is_not_kept(fake_engine):
    async def check():
        cache = ResponseCache(fake_engine, MIB)
        for _ in range(2):
            await read(cache.submit(make_request(cache_prompt=False)))
        assert len(fake_engine.requests) == 2
        assert (cache.num_queries, len(cache), cache.num_bytes) == (0, 0, 0)

    asyncio.run(check())


def test_a_hit_can_be_collected_and_has_stats(fake_engine):
    async def check():
        cache = ResponseCache(fake_engine, MIB)
        first = await cache.submit(make_request(n=2)).collect()
        generation = cache.submit(make_request(n=2))
        assert await generation.collect() == first
        stats = generation.stats
        assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (3, 3)
        assert stats.num_output_tokens == 8
        assert (stats.ttft, stats.e2e, stats.tpot) == (0.0, 0.0, None)

    asyncio.run(check())


def test_requests_that_are_not_deterministic_always_go_to_the_engine(fake_engine):
    async def check():
        cache = ResponseCache(fake_engine, MIB)
        for _ in range(2):
            generation = cache.submit(make_request(deterministic=False))
            assert not generation.is_from_cache
            await generation.collect()
        assert len(fake_engine.requests) == 2
        assert len(cache) == 0

    asyncio.run(check())


DIFFERENT = {
    "window": 64,
    "attention_sinks": 4,
    "n_keep": 8,
    "n": 2,
    "best_of": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "typical_p": 0.5,
    "top_n_sigma": 1.0,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.5,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 50,
    "dry_sequence_breakers": ("x",),
    "seed": 9,
    "stop": ("x",),
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "max_tokens": 5,
    "min_tokens": 2,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": (1, 2),
    "bad_words": ("x",),
    "detokenize": False,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "speculative": {"enabled": False},
    "cache_prompt": False,
    "structured_outputs": {"regex": "a+"},
    "thinking_token_budget": 3,
    "thought_texts": {"begin": "<think>", "ends": ["</think>"], "closing": "</think>"},
}


def test_every_parameter_of_the_answer_is_in_the_key():
    # How outputs are cut is the reader's business.
    names = {field.name for field in dataclasses.fields(SamplingParams)} - {"output_kind"}
    assert set(DIFFERENT) == names
    base = {"temperature": 1.0, "seed": 1}
    keys = [answer_key(make_request(**{**base, name: value})) for name, value in DIFFERENT.items()]
    keys.append(answer_key(make_request(**base)))
    keys.append(answer_key(make_request(**base, salt="a")))
    keys.append(answer_key(make_request(prompt=(1, 2), **base)))
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


def test_what_does_not_change_the_answer_is_not_in_the_key():
    # The server draws a seed where the client gave none.
    assert answer_key(make_request(seed=1)) == answer_key(make_request(seed=2))
    one = make_request(logit_bias={1: 2.0, 3: 4.0})
    two = make_request(logit_bias={3: 4.0, 1: 2.0})
    assert answer_key(one) == answer_key(two)


def test_tenants_do_not_share_answers(fake_engine):
    async def check():
        cache = ResponseCache(fake_engine, MIB)
        for salt in ("a", "b"):
            generation = cache.submit(make_request(salt=salt))
            assert not generation.is_from_cache
            await generation.collect()
        assert cache.submit(make_request(salt="a")).is_from_cache

    asyncio.run(check())


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_broken_answers_are_not_kept(fake_engine, reason):
    async def check():
        cache = ResponseCache(fake_engine, MIB)
        generation = cache.submit(make_request(n=2))
        generation.push([Delta(0, "a", [1], finish_reason="stop")])
        generation.push([Delta(1, "b", [1], finish_reason=reason, error="because")])
        assert generation.is_over
        assert len(cache) == 0

    asyncio.run(check())


def test_answers_that_fail_or_are_left_are_not_kept(fake_engine):
    async def check():
        cache = ResponseCache(fake_engine, MIB)
        fake_engine.error_after, fake_engine.error = 2, DeadlineError("too late")
        with pytest.raises(DeadlineError):
            await cache.submit(make_request()).collect()
        fake_engine.error_after = None
        async with cache.submit(make_request()) as generation:
            await anext(generation)
        await asyncio.sleep(0.01)
        assert len(cache) == 0
        assert len(fake_engine.aborted) == 1
        fake_engine.submit_error = EngineUnavailableError("stopping")
        with pytest.raises(EngineUnavailableError):
            cache.submit(make_request())

    asyncio.run(check())


def test_a_generation_that_is_begun_anew_is_kept_once(fake_engine):
    async def check():
        cache = ResponseCache(fake_engine, MIB)
        generation = cache.submit(make_request(max_tokens=2))
        generation.push([Delta(0, "lost", [1])])
        generation.restart()
        completions = await generation.collect()
        again = await cache.submit(make_request(max_tokens=2)).collect()
        assert again == completions
        assert "lost" not in again[0].text

    asyncio.run(check())


def test_a_consumer_cannot_spoil_what_is_kept(fake_engine):
    async def check():
        cache = ResponseCache(fake_engine, MIB)
        first, _ = await read(cache.submit(make_request(logprobs=2)))
        again, _ = await read(cache.submit(make_request(logprobs=2)))
        for delta in again:
            delta.text, delta.finish_reason = "spoiled", "error"
            delta.token_ids.clear()
            delta.logprobs.clear()
        assert (await read(cache.submit(make_request(logprobs=2))))[0] == first

    asyncio.run(check())


def test_the_observer_is_told_of_hits(fake_engine):
    class Told(EngineObserver):
        def __init__(self):
            self.events = []

        def on_submitted(self, generation):
            self.events.append(("submitted", generation.is_from_cache))

        def on_finished(self, generation, reason):
            self.events.append(("finished", reason, generation.stats.num_output_tokens))

    async def check():
        told = Told()
        cache = ResponseCache(fake_engine, MIB, told)
        await cache.submit(make_request()).collect()
        assert told.events == []  # the engine tells of its own
        await cache.submit(make_request()).collect()
        assert told.events == [("submitted", True), ("finished", "length", 4)]

    asyncio.run(check())


def test_the_least_recently_used_goes_first(fake_engine):
    async def check():
        probe = ResponseCache(fake_engine, MIB)
        await probe.submit(make_request(prompt=(1,))).collect()
        cache = ResponseCache(fake_engine, 3 * probe.num_bytes)
        for token in (1, 2, 3, 1, 4):  # the second 1 is a hit
            await cache.submit(make_request(prompt=(token,))).collect()
        assert len(cache) == 3
        hits = [cache.submit(make_request(prompt=(token,))).is_from_cache for token in (1, 3, 4)]
        assert hits == [True, True, True]
        assert not cache.submit(make_request(prompt=(2,))).is_from_cache
        cache.clear()
        assert (len(cache), cache.num_bytes) == (0, 0)

    asyncio.run(check())


def test_an_answer_larger_than_the_cache_is_not_kept_and_drives_nothing_out(fake_engine):
    async def check():
        cache = ResponseCache(fake_engine, 4096)
        await cache.submit(make_request()).collect()
        await cache.submit(make_request(max_tokens=200, logprobs=20)).collect()
        assert len(cache) == 1
        assert cache.submit(make_request()).is_from_cache

    asyncio.run(check())


# -- whatever is asked in whatever order ----------------------------------------------------------

ASKED = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from([(1,), (2,), (1, 2), (65, 66, 67)]),
        "deterministic": st.booleans(),
        "salt": st.sampled_from(["", "a"]),
        "n": st.integers(1, 2),
        "max_tokens": st.integers(1, 6),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 2),
        "logprobs": st.sampled_from([None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, 1]),
    }
)


def hash_of(request: GenerationRequest, index: int) -> list[int]:
    """A model of which the answer depends on the prompt, and on the seed if it samples."""
    params = request.params
    seed = (params.seed, index) if params.temperature else 0
    draw = hash((tuple(request.prompt_token_ids), seed))
    return [(draw >> (4 * place)) % 128 for place in range(1 + draw % 7)]


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.tuples(ASKED, st.booleans()), max_size=25),
    max_bytes=st.sampled_from([0, 2000, 5000, MIB]),
)
def test_a_hit_is_what_a_fresh_generation_gives(byte_tokenizer, fake_engine_type, asked, max_bytes):
    async def check():
        engine = fake_engine_type(byte_tokenizer)
        engine.answer = hash_of
        cache = ResponseCache(engine, max_bytes)
        for options, is_left in asked:
            generation = cache.submit(make_request(**options))
            if is_left:
                generation.close()
                continue
            assert await read(generation) == await read(engine.submit(make_request(**options)))
            assert cache.num_bytes <= max_bytes
            if max_bytes == MIB and options["deterministic"]:
                assert cache.submit(make_request(**options)).is_from_cache

    asyncio.run(check())


LOGPROBS = st.floats(max_value=0, allow_nan=False)
ENTRIES = st.builds(
    TokenLogprobs,
    st.integers(0, 2**31),
    LOGPROBS,
    st.integers(1, 10**6),
    st.lists(st.tuples(st.integers(0, 2**31), LOGPROBS), max_size=3).map(tuple),
)
DELTAS = st.lists(
    st.builds(
        Delta,
        st.integers(0, 1),
        st.text(max_size=4),
        st.lists(st.integers(0, 2**31), max_size=3),
        st.lists(ENTRIES, max_size=2),
    ),
    max_size=12,
)
ENDS = st.builds(
    Delta,
    st.just(0),
    st.text(max_size=4),
    st.just([1]),
    finish_reason=st.sampled_from(["stop", "length"]),
    stop_reason=st.one_of(st.none(), st.integers(0, 99), st.text(max_size=3)),
    cumulative_logprob=st.one_of(st.none(), LOGPROBS),
)


@settings(max_examples=100, deadline=None)
@given(DELTAS, ENDS, ENDS, st.lists(ENTRIES, max_size=4))
def test_a_recording_replays_any_deltas(deltas, end, other_end, prompt_logprobs):
    other_end.index = 1
    deltas = [*deltas, end, other_end]
    recording = Recording(deltas, prompt_logprobs)

    async def check():
        generation: Generation = recording.replay(make_request(n=2))
        assert await read(generation) == (deltas, prompt_logprobs)
        assert generation.is_over
        assert generation.finish_reason == end.finish_reason

    asyncio.run(check())


@pytest.mark.parametrize("num_logprobs", [None, 5])
def test_its_bytes_are_those_that_python_takes(num_logprobs):
    """The accounts agree with the allocator: never less than it, and not wildly more."""

    def answer(number: int) -> list[Delta]:
        top = tuple((token, -1.0 / (token + 1)) for token in range(num_logprobs or 0))
        entries = [] if num_logprobs is None else [TokenLogprobs(1, -math.pi, 1, top)]
        deltas = [Delta(0, f"word {number} ", [number], list(entries)) for _ in range(60)]
        deltas[-1].finish_reason, deltas[-1].cumulative_logprob = "length", -1.5
        return deltas

    class Silent:
        def submit(self, request):
            return Generation(request, abort=lambda _: None)

    cache = ResponseCache(Silent(), 400_000)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(400):
            cache.submit(make_request(prompt=(number,))).push(answer(number))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert cache.num_bytes <= cache.max_bytes
    assert 20 < len(cache) < 400
    assert taken <= cache.num_bytes <= 1.5 * taken
