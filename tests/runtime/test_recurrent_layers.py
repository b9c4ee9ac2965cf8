"""Models with recurrent layers: answers that do not depend on how they were computed, and native
kernels that agree with the reference ops."""

from __future__ import annotations

import pytest
import torch
from faults import FaultyScheduler, UnreliableExecutor, every
from hybrid_models import RECURRENCES, VOCAB, make_hybrid
from paging_variants import VARIANTS, make_requests
from tiny_hybrids import make_model

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cpu import library

needs_native = pytest.mark.skipif(not library.runnable(), reason="no native library was built")
KERNELS = ["reference", pytest.param("native", marks=needs_native)]


def requests():
    return make_requests(VOCAB, count=6, most=60, longest_answer=10)


@pytest.fixture(scope="module")
def hybrid(bench_of):
    made = {name: make_hybrid(name) for name in RECURRENCES}
    return lambda name: bench_of(*made[name])


@pytest.fixture(scope="module", params=RECURRENCES)
def name(request):
    return request.param


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request):
    return {"kernels": request.param, "kv_cache_dtype": "f32"}


@pytest.fixture(scope="module")
def alone(hybrid, run_all, name, kernels):
    """The answers when every request runs by itself, with nothing cached."""
    engine = hybrid(name).engine(prefix_caching=False, state_slots=8, **kernels)
    return run_all(engine, requests(), together=False)[0]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("variant", ["budget 1", "budget 7", "tiny pool", "unchunked"])
def test_answers_are_the_same_to_the_last_bit(hybrid, run_all, name, kernels, alone, variant):
    options = dict(VARIANTS[variant])
    if kernels["kernels"] == "native" and "block_size" in options:
        options = {"num_blocks": 12}
    engine = hybrid(name).engine(state_slots=24, **kernels, **options)
    answers, _ = run_all(engine, requests())
    assert answers == alone


def test_faults_and_preemptions_change_nothing(hybrid, run_all, name, kernels, alone):
    engine = hybrid(name).engine(state_slots=8, **kernels)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    engine.executor = UnreliableExecutor(engine.executor, raises=every(7))
    answers, _ = run_all(engine, requests(), together=True)
    assert engine.scheduler.num_preemptions > 5
    unhurt = {key: answer for key, answer in answers.items() if answer == alone[key]}
    assert len(unhurt) >= len(alone) - 2


def test_a_warm_cache_changes_nothing(hybrid, run_all, name, kernels, alone):
    engine = hybrid(name).engine(state_slots=40, **kernels)
    run_all(engine, requests())
    answers, _ = run_all(engine, requests())
    assert answers == alone
    assert engine.scheduler.prefix_tokens_hit >= 32


def test_the_next_turn_goes_on_from_the_answer(hybrid, run_all, name, kernels):
    """What it computes of the turn before is less than a block, and what it says is the same."""
    params = SamplingParams(temperature=0, max_tokens=39, ignore_eos=True)
    turns = hybrid(name).engine(state_slots=12, max_multi_steps=4, **kernels)
    first = Request("first", [3 * i % VOCAB for i in range(21)], params, 0.0)
    run_all(turns, [first])
    prompt = [*first.token_ids, 5, 6, 7]  # 59 of these 63 were computed
    second = Request("second", prompt, params, 0.0)
    answer, steps = run_all(turns, [second])
    assert second.stats.num_cached_tokens == 48
    assert sum(item.num_tokens for item in steps[0].batch.items) == len(prompt) - 48
    cold = hybrid(name).engine(prefix_caching=False, state_slots=12, **kernels)
    assert run_all(cold, [Request("second", prompt, params, 0.0)])[0] == answer


@needs_native
def test_multi_step_decoding_goes_on_from_its_own_states(hybrid, run_all, name):
    answers = []
    for num_steps in (1, 8):
        engine = hybrid(name).engine(state_slots=8, kernels="native", max_multi_steps=num_steps)
        found, steps = run_all(engine, requests(), together=False)
        answers.append(found)
    assert answers[0] == answers[1]
    assert any(step.batch.num_multi_steps > 1 for step in steps)


@needs_native
@pytest.mark.parametrize("case", ["lfm2", "granite-odd", "falcon", "qwen3-next"])
def test_families_say_what_transformers_says(case, load_bench, run_all, tmp_path):
    """64 tokens, with chunks, preemptions and hits: of prompts that begin alike."""
    model = make_model(case)
    model.save_pretrained(tmp_path)
    prompts = [[*range(5, 45), last] for last in (3, 4, 5)]
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    theirs = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    bench = load_bench(tmp_path)
    engine = bench.engine(
        state_slots=9, kernels="native", kv_cache_dtype="f32", max_num_batched_tokens=17
    )
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(8))
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    asked = [Request(str(i), prompt, params, 0.0) for i, prompt in enumerate(prompts)]
    answers, _ = run_all(engine, asked, together=True)
    assert [answers[str(i)][0] for i in range(len(prompts))] == theirs
    assert engine.scheduler.num_preemptions > 3 and engine.scheduler.prefix_tokens_hit > 0


@needs_native
def test_native_kernels_agree_with_the_reference(hybrid, run_all, name):
    answers = []
    for kernels in ("reference", "native"):
        engine = hybrid(name).engine(state_slots=8, kernels=kernels, kv_cache_dtype="f32")
        answers.append(run_all(engine, requests())[0])
    ours, theirs = answers
    for key, (tokens, logprobs) in ours.items():
        assert theirs[key][0] == tokens
        for a, b in zip(logprobs, theirs[key][1], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
