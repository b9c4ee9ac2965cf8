"""The simulator and the model, given the same work, take the same steps: one policy, two worlds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hash_model import FunctionProposer, HashDrafts, HashExecutor, expected_tokens
from loading import load_model
from rank_threads import start_ranks

from octavo.core.block_manager import BlockManager
from octavo.core.clock import VirtualClock
from octavo.core.engine import Engine
from octavo.core.lookahead import MAX_MULTI_STEPS
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.core.step_share import PipelineShare
from octavo.executor.simulated import SimulatedExecutor
from octavo.kernels.cpu import library
from octavo.runtime.acceptance import SyntheticAcceptance
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.rank import Rank
from octavo.speculation.synthetic import SyntheticProposer

NUM_BLOCKS, BLOCK_SIZE = 28, 2
CONFIG = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6, max_model_len=64)


def workload(seed: int) -> list[tuple[int, dict]]:
    """(step of arrival, fields of a request), with shared prefixes, forks and priorities."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, 90) for _ in range(20)]
    arrivals = []
    for index in range(25):
        prompt = shared[: rng.choice([0, 9, 20])] + [
            rng.randrange(2, 90) for _ in range(rng.randint(1, 15))
        ]
        fields = {
            "request_id": f"r{index}",
            "prompt_token_ids": prompt,
            "params": SamplingParams(
                max_tokens=rng.randint(1, 20), ignore_eos=True, temperature=rng.choice([0.0, 1.0])
            ),
            "arrival_time": 0.0,
            "priority": rng.choice([0, 0, 1]),
            "seed": index,
        }
        arrivals.append((rng.randint(0, 40), fields))
    return sorted(arrivals, key=lambda arrival: (arrival[0], arrival[1]["request_id"]))


class AllRounds(HashExecutor):
    """Takes every decode step that it may, as a fast model does."""

    def _num_multi_steps(self, work) -> int:
        return work.num_sampled


def trace(
    executor, clock, arrivals, config=CONFIG, proposer=None, share=None
) -> tuple[list, dict[str, list[int]]]:
    """Every step as (request, start, tokens), with what was preempted, copied and held."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, RadixPrefixCache(BLOCK_SIZE))
    engine = Engine(Scheduler(config, blocks, None, proposer, share), executor, clock)
    pending = list(arrivals)
    steps, answers = [], {}
    for number in range(2000):
        while pending and pending[0][0] <= number:
            engine.add(Request(**pending.pop(0)[1]))
        if number == 12:
            engine.abort("r3")
        step = engine.step()
        if step is None:
            if not pending:
                break
            continue
        items = [(i.request.request_id, i.start, i.num_tokens) for i in step.batch.items]
        batch, stats = step.batch, step.stats
        steps.append(
            (number, items, batch.preempted_ids, batch.block_copies, stats.num_used_blocks)
        )
        if proposer is not None:
            steps.append((stats.num_drafts, stats.draft_tokens, stats.draft_accepted_by_position))
        for update in step.updates:
            if update.request.is_finished:
                answers[update.request.request_id] = update.request.output_token_ids
    return steps, answers


def simulate(
    arrivals,
    answers: dict[str, list[int]],
    config=CONFIG,
    depth: int = 1,
    proposer=None,
    accept=None,
    share=None,
):
    """The same work in virtual time, with the tokens that the model gave."""

    def replay(request: Request, position: int) -> int:
        known = answers.get(request.request_id)
        return known[position - request.num_prompt_tokens] if known else 0

    clock = VirtualClock()
    executor = SimulatedExecutor(
        lambda batch: 0.001 * batch.num_tokens,
        clock,
        NUM_BLOCKS,
        replay,
        depth,
        feeds_tokens=depth > 1 and share is None,
        accept=accept,
    )
    return trace(executor, clock, arrivals, config, proposer, share)


LIMITS = RankLimits(
    NUM_BLOCKS,
    CONFIG.max_num_seqs,
    CONFIG.max_model_len,
    CONFIG.max_num_batched_tokens,
)


def start_rank(tiny_model, acceptance=None) -> Rank:
    model, config = load_model(tiny_model)
    rank = Rank.of_model(
        RankSpec(tiny_model, kernels="reference", block_size=BLOCK_SIZE), model, config
    )
    rank.start(LIMITS, acceptance)
    return rank


@pytest.mark.parametrize("seed", range(4))
def test_a_model_and_its_simulation_take_the_same_steps(tiny_model, seed):
    arrivals = workload(seed)
    real, answers = trace(start_rank(tiny_model), None, arrivals)
    simulated, replayed = simulate(arrivals, answers)
    assert len(real) > 40 and any(preempted for _, _, preempted, *_ in real)
    assert simulated == real and replayed == answers


@pytest.mark.parametrize("seed", range(20))
def test_so_do_the_hash_model_and_its_simulation(seed):
    arrivals = workload(100 + seed)
    real, answers = trace(HashExecutor(NUM_BLOCKS, BLOCK_SIZE), None, arrivals)
    for _, fields in arrivals:
        if fields["request_id"] in answers:
            assert answers[fields["request_id"]] == expected_tokens(
                fields["prompt_token_ids"], fields["params"].max_tokens, 97
            )
    assert simulate(arrivals, answers)[0] == real


@pytest.mark.parametrize("seed", range(10))
def test_also_in_rounds_which_are_production_s_default(seed):
    config = replace(CONFIG, max_multi_steps=MAX_MULTI_STEPS)
    arrivals = workload(200 + seed)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    last = {"request_id": "last", "prompt_token_ids": [1, 2], "params": params, "arrival_time": 0.0}
    arrivals.append((500, last))  # when nobody else is there
    real, answers = trace(AllRounds(NUM_BLOCKS, BLOCK_SIZE), None, arrivals, config)
    simulated, _ = simulate(arrivals, answers, config)
    assert simulated == real
    assert len(real) < len(trace(AllRounds(NUM_BLOCKS, BLOCK_SIZE), None, arrivals)[0])


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_also_when_steps_overlap(seed, depth):
    config = replace(CONFIG, runs_ahead=True)
    arrivals = workload(300 + seed)
    executor = HashExecutor(NUM_BLOCKS, BLOCK_SIZE, depth=depth)
    real, answers = trace(executor, None, arrivals, config)
    for _, fields in arrivals:
        if fields["request_id"] in answers:
            assert answers[fields["request_id"]] == expected_tokens(
                fields["prompt_token_ids"], fields["params"].max_tokens, 97
            )
    assert simulate(arrivals, answers, config, depth)[0] == real


@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
@pytest.mark.parametrize("seed", range(4))
def test_also_in_a_pipeline(tiny_model, seed, monkeypatch):
    """Two stages, with a batch in each: the batches are those of a simulated pipeline."""
    monkeypatch.setitem(globals(), "BLOCK_SIZE", 16)  # the least of native kernels
    config = replace(CONFIG, runs_ahead=True)
    share = PipelineShare(2, CONFIG.max_num_batched_tokens)
    spec = RankSpec(tiny_model, kernels="native", block_size=16, threads=1)
    pipeline = start_ranks(1, spec, *load_model(tiny_model), LIMITS, stages=2)
    arrivals = workload(500 + seed)
    real, answers = trace(pipeline, None, arrivals, config, share=share)
    simulated, replayed = simulate(arrivals, answers, config, 2, share=share)
    assert simulated == real and replayed == answers
    alone = Rank.of_model(spec, *load_model(tiny_model))
    alone.start(LIMITS)
    _, expected = trace(alone, None, arrivals)
    assert all(answers[name] == tokens for name, tokens in expected.items() if name != "r3")


@pytest.mark.parametrize("seed", range(3))
def test_also_with_drafts_that_are_accepted_at_random(tiny_model, seed):
    """The model is asked, and has no say; the simulation has the same luck."""
    rule = SyntheticAcceptance((0.8, 0.6, 0.9))
    rank = start_rank(tiny_model, rule)
    arrivals = workload(400 + seed)
    real, answers = trace(rank, None, arrivals, CONFIG, SyntheticProposer(3))
    num_drafts, _, accepted = real[-1]
    assert num_drafts > 40 and num_drafts > accepted[0] > accepted[2] > 0
    simulated, replayed = simulate(
        arrivals, answers, proposer=SyntheticProposer(3), accept=rule.path
    )
    assert simulated == real and replayed == answers


@pytest.mark.parametrize("seed", range(10))
def test_also_with_drafts_that_the_hash_model_verifies(seed):
    arrivals = workload(500 + seed)

    def proposer() -> FunctionProposer:
        return FunctionProposer(HashDrafts(random.Random(seed)), passes=4)

    real, _ = trace(HashExecutor(NUM_BLOCKS, BLOCK_SIZE), None, arrivals, CONFIG, proposer())
    answers = {  # also of who is aborted, as a draft may be right until then
        fields["request_id"]: expected_tokens(
            fields["prompt_token_ids"], fields["params"].max_tokens, 97
        )
        for _, fields in arrivals
    }
    assert real[-1][0] > 20 and real[-1][2]
    assert simulate(arrivals, answers, proposer=proposer())[0] == real
