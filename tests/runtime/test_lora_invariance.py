"""Answers with adapters do not depend, in any bit, on what runs beside them: other adapters, the
model alone, chunks, prefix hits, preemptions, drafts, adapters that come and go."""

from __future__ import annotations

import random

import pytest
from hash_model import FunctionProposer
from made_adapters import PROJECTIONS, write_adapter
from paging_variants import VARIANTS, make_requests

from octavo.core.adapters import salt_of
from octavo.core.batch import Draft
from octavo.lora.limits import LoraLimits
from octavo.lora.peft_folder import digest_of

KERNELS = ("reference", "native")
LIMITS = LoraLimits(max_loras=8, max_rank=256, max_bytes=1 << 30)


@pytest.fixture(scope="module")
def adapters(tiny_model, tmp_path_factory):
    """Of several ranks; one of few modules, and one of all that can be changed."""
    folder = tmp_path_factory.mktemp("adapters")
    made = [
        write_adapter(folder / f"{rank}", tiny_model, seed=rank, rank=rank) for rank in (1, 4, 17)
    ]
    made.append(write_adapter(folder / "v", tiny_model, seed=5, rank=8, names=("v_proj",)))
    everything = (*PROJECTIONS, "embed_tokens")
    made.append(write_adapter(folder / "all", tiny_model, rank=33, names=everything, head=True))
    return [(str(each), digest_of(each)) for each in made]


def requests_with(engine, adapters, vocab_size: int = 256):
    """The requests of ``make_requests``, each with one of the adapters, or with none."""
    rng, requests = random.Random(7), make_requests(vocab_size)
    chosen = None
    for request in requests:
        if request.fork_of is None:  # else it has that of its prompt
            chosen = rng.choice([None, *adapters])
        if chosen is not None:
            request.adapter = engine.scheduler.adapters.adapter(*chosen)
            request.cache_salt = salt_of("", request.adapter.digest)
    return requests


@pytest.fixture(scope="module", params=KERNELS)
def alone(request, bench, run_all, adapters):
    """The answers of one request after the other, without caches."""
    engine = bench.engine(kernels=request.param, prefix_caching=False, loras=LIMITS)
    answers, _ = run_all(engine, requests_with(engine, adapters), together=False)
    return request.param, answers


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_the_same_in_any_company(variant, alone, bench, run_all, adapters):
    kernels, expected = alone
    sizes = dict(VARIANTS[variant])
    if kernels == "native" and sizes.get("block_size", 16) % 16:  # which has only multiples of 16
        sizes |= {"block_size": 16, "num_blocks": max(8, sizes["num_blocks"] // 8)}
    engine = bench.engine(kernels=kernels, loras=LIMITS, **sizes)
    answers, _ = run_all(engine, requests_with(engine, adapters))
    assert answers == expected


@pytest.mark.parametrize("threads", [2, 3])
def test_answers_do_not_depend_on_the_number_of_threads(threads, bench, run_all, adapters, alone):
    kernels, expected = alone
    engine = bench.engine(kernels=kernels, loras=LIMITS, threads=threads)
    answers, _ = run_all(engine, requests_with(engine, adapters))
    assert answers == expected


@pytest.mark.parametrize("limits", [LoraLimits(1, 256, 1 << 30), LoraLimits(2, 256, 400_000)])
def test_adapters_come_and_go(limits, alone, bench, run_all, adapters):
    kernels, expected = alone
    engine = bench.engine(kernels=kernels, loras=limits)
    requests = requests_with(engine, adapters)
    answers, steps = run_all(engine, requests)
    assert answers == expected
    pool = engine.scheduler.adapters
    for step in steps:
        at_once = {item.request.adapter for item in step.batch.items} - {None}
        assert len(at_once) <= limits.max_loras
    assert pool.num_bytes <= limits.max_bytes
    if limits.max_bytes < 1 << 30:
        assert pool.num_dropped > 0


def test_drafts_change_nothing(alone, bench, run_all, adapters):
    kernels, expected = alone
    texts = {}

    def propose(prompt, num_tokens):
        """What comes next, with a wrong token in some of the drafts."""
        draft = texts[tuple(prompt)][num_tokens : num_tokens + 4]
        if draft and num_tokens % 3 == 0:
            draft[-1] = (draft[-1] + 1) % 256
        return Draft.chain(draft) if draft else None

    engine = bench.engine(kernels=kernels, loras=LIMITS, proposer=FunctionProposer(propose))
    requests = requests_with(engine, adapters)
    for request in requests:
        prompt = request.prompt_token_ids
        texts[tuple(prompt)] = [*prompt, *expected[request.request_id][0]]
    answers, _ = run_all(engine, requests)
    assert answers == expected
    assert engine.scheduler.drafts.num_accepted > 20


def test_requests_without_adapters_have_the_bits_of_a_model_without(alone, bench, run_all):
    kernels, _ = alone
    plain = bench.engine(kernels=kernels)
    with_pool = bench.engine(kernels=kernels, loras=LIMITS)
    assert run_all(plain, make_requests(256))[0] == run_all(with_pool, make_requests(256))[0]


def test_base_requests_beside_adapters_have_the_bits_of_the_model(alone, bench, run_all, adapters):
    """`alone` ran those without an adapter one by one, through an engine that had met adapters."""
    kernels, expected = alone
    engine = bench.engine(kernels=kernels, loras=LIMITS)
    plain = [r for r in requests_with(engine, adapters) if r.adapter is None and not r.fork_of]
    without = bench.engine(kernels=kernels)
    answers, _ = run_all(without, plain)
    assert plain
    assert answers == {name: expected[name] for name in answers}
