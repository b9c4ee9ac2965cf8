"""Sinks and windows of requests: against a cache shifted by hand, and against themselves."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from faults import FaultyScheduler, every

from octavo.core import sink_window
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.sink_window import SinkWindow, SinkWindowRules
from octavo.kernels.cpu import library
from octavo.kernels.dispatch import create_ops
from octavo.kernels.reference import rope
from octavo.layers.tensors import with_tensors

KERNELS = [
    "reference",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
    ),
]
CONTEXT = 96
LENGTH = 560  # of a prompt: longer than two turns
FREE = SinkWindowRules()  # requests see all, or what they ask for
SHIFT = SinkWindowRules(context_shift=True, n_keep=5)


@pytest.fixture(scope="module", autouse=True)
def short_turns():
    """Angles begin anew soon, so that short sequences see it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_window, "_TURN", 256)
        yield


class ShiftedByHand:
    """A ``StepAttention`` of one whole sequence: each token in turn is put into a cache, from which
    those behind the sinks go where it is full. Positions are places in the cache, and all keys are
    rotated anew for each query."""

    def __init__(self, of: SinkWindow, table: torch.Tensor):
        self._sink_window, self._table = of, table

    def attend(self, layer, q, k, v, *, scale, **_):
        kept: list[int] = []
        rows = []
        groups = q.shape[1] // k.shape[1]
        for row in range(len(q)):
            if len(kept) == self._sink_window.num_tokens:
                del kept[
                    self._sink_window.sinks : self._sink_window.sinks + self._sink_window.stride
                ]
            kept.append(row)
            places = torch.arange(len(kept))
            query, _ = rope(q[row : row + 1], k[row : row + 1], places[-1:], self._table)
            _, keys = rope(q[kept], k[kept], places, self._table)
            keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, v[kept]))
            weights = (torch.einsum("qhd,khd->hk", query, keys) * scale).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, values))
        return torch.stack(rows)


class Context:
    """A ``ForwardContext`` whose ops rotate nothing: the attention does it."""

    def __init__(self, of: SinkWindow, model, num_positions: int):
        ops = create_ops()
        self.ops = replace(ops, rope=lambda q, k, *_: (q, k))
        self.positions = torch.arange(num_positions)
        table = model.model.rotary_emb.table(of.num_tokens)
        self.attention = ShiftedByHand(of, torch.from_numpy(table))

    def rope_table(self, table, rotary_dim):
        return None


def expected_logprobs(bench, of: SinkWindow, token_ids: list[int]) -> torch.Tensor:
    """Of each token but the first."""
    model = with_tensors(bench.model)
    context = Context(of, model, len(token_ids))
    with torch.inference_mode():
        hidden = model(torch.tensor(token_ids), context)
        logits = model.compute_logits(hidden, context)
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(token_ids)[1:, None])[:, 0]


def prompt_of(bench, length: int = LENGTH) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(2, bench.config.vocab_size) for _ in range(length)]


def engine_of(bench, kernels: str, rules: SinkWindowRules = FREE, **settings):
    settings = {"kv_cache_dtype": "f32", "num_blocks": 32, **settings}
    settings = {"max_model_len": CONTEXT, "max_num_batched_tokens": 100, **settings}
    return bench.engine(kernels=kernels, sink_windows=rules, **settings)


def asked(sinks: int, window: int, **params) -> SamplingParams:
    return SamplingParams(
        attention_sinks=sinks, window=window, ignore_eos=True, **{"max_tokens": 1, **params}
    )


def logprobs_of(bench, run_all, kernels, params, prompt, rules=FREE, **settings):
    engine = engine_of(bench, kernels, rules, **settings)
    params = params.with_changes(prompt_logprobs=0)
    answers, _ = run_all(engine, [Request("r", prompt, params, 0.0)])
    return [entry.logprob for entry in answers["r"][1]]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("sinks", "window"), [(4, 60), (0, 33), (1, 16), (17, 79)])
def test_a_prompt_is_what_a_shifted_cache_says(bench, run_all, kernels, sinks, window):
    prompt = prompt_of(bench)
    wanted = expected_logprobs(bench, SinkWindow(sinks, window), prompt)
    got = logprobs_of(bench, run_all, kernels, asked(sinks, window), prompt)
    assert torch.allclose(torch.tensor(got[: len(wanted)]), wanted, atol=2e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_context_shift_is_what_a_shifted_cache_says(bench, run_all, kernels):
    prompt = prompt_of(bench)
    wanted = expected_logprobs(bench, SinkWindow(5, CONTEXT - 5, (CONTEXT - 5) // 2), prompt)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    got = logprobs_of(bench, run_all, kernels, params, prompt, SHIFT)
    assert torch.allclose(torch.tensor(got[: len(wanted)]), wanted, atol=2e-4)


def make_requests(bench) -> list[Request]:
    """Streams beside each other and beside others, with shared prefixes and a fork."""
    shared = prompt_of(bench, 80)
    requests = []
    for index, (sinks, window) in enumerate([(4, 30), (0, 20), (4, 90), (20, 21), (4, 30)]):
        params = asked(sinks, window, max_tokens=220 - 20 * index, temperature=0.7 * (index % 2))
        requests.append(Request(f"r{index}", [*shared, index + 2], params, 0.0, seed=index))
    plain = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0)
    requests += [Request(f"plain{i}", shared[: 30 + i], plain, 0.0) for i in range(3)]
    leader = requests[1]
    fork = Request("fork", leader.prompt_token_ids, leader.params, 0.0, sample_index=1)
    fork.fork_of = leader
    return [*requests, fork]


VARIANTS = {
    "as it comes": {},
    "blocks of 32": {"block_size": 32},
    "blocks of 48": {"block_size": 48},
    "budget 5": {"max_num_batched_tokens": 5},
    "no prefix cache": {"prefix_caching": False, "max_num_batched_tokens": 24},
    "tiny pool": {"max_num_batched_tokens": 24, "num_blocks": 16},
    "multi-step": {"max_multi_steps": 8},
}


@pytest.fixture(scope="module", params=KERNELS)
def alone(request, bench, run_all):
    engine = engine_of(bench, request.param, prefix_caching=False, num_blocks=64)
    return request.param, run_all(engine, make_requests(bench), together=False)[0]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_the_same_to_the_last_bit(bench, run_all, alone, name):
    kernels, answers = alone
    engine = engine_of(bench, kernels, **{"num_blocks": 64, **VARIANTS[name]})
    if name == "budget 5":
        engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(500))
    again, _ = run_all(engine, make_requests(bench))
    assert again == answers
    if name == "tiny pool":
        assert engine.scheduler.num_preemptions > 0
    if name == "as it comes":
        assert engine.scheduler.prefix_tokens_hit > 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_was_generated_is_what_a_prompt_of_it_says(bench, run_all, kernels):
    length = 600 if kernels == "native" else 300
    params = asked(4, 40, max_tokens=length, logprobs=0, temperature=0)
    engine = engine_of(bench, kernels)
    answers, steps = run_all(engine, [Request("r", prompt_of(bench, 20), params, 0.0)])
    tokens, entries = answers["r"]
    assert len(tokens) == length
    assert max(step.stats.num_used_blocks for step in steps) <= SinkWindow(4, 40).most_blocks(
        16, 20
    )
    whole = [*prompt_of(bench, 20), *tokens]
    again = logprobs_of(bench, run_all, kernels, asked(4, 40), whole)
    assert again[19 : len(whole) - 1] == [entry.logprob for entry in entries]
    assert not any(map(math.isnan, again))
