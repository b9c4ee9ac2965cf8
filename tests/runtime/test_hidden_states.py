"""Hidden states of steps: every position once, in both forwards; of drafts what was right."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hash_model import FunctionProposer
from loading import load_model
from tiny_heads import TARGET, VOCAB, true_states

from octavo.assembly.engine import build_engine
from octavo.core.batch import Draft
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import SchedulerConfig
from octavo.kernels import fused_ops
from octavo.kernels.cpu import library
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.op_program import plan_step
from octavo.runtime.rank import Rank
from octavo.settings.engine import CacheConfig, EngineConfig
from tests.conftest import write_tiny_model

needs_native = pytest.mark.skipif(not library.runnable(), reason="no native library was built")
KERNELS = ["reference", "fused", pytest.param("native", marks=needs_native)]
DEPTHS = [0, 2, 3, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("hidden") / "tiny", **TARGET)


class Recorder:
    """Keeps every state that it is shown, by request and position, with the token that follows."""

    def __init__(self):
        self.seen: dict[str, dict[int, tuple[int, list[np.ndarray]]]] = {}
        self.again = 0

    def follow(self, batch, computed, states):
        for each in computed:
            mine = self.seen.setdefault(each.request.request_id, {})
            assert len(each.rows) == len(each.next_token_ids)
            for place, (row, token_id) in enumerate(
                zip(each.rows, each.next_token_ids, strict=True)
            ):
                self.again += each.start + place in mine
                shown = [states(depth)[row].copy() for depth in DEPTHS]
                mine[each.start + place] = token_id, shown


def engine_with(rank: Rank, follower, propose=None, budget: int = 64, max_multi_steps: int = 1):
    limits = RankLimits(32, 4, 96, budget)
    rank.keep_hidden_states(DEPTHS)
    rank.start(limits)
    rank.follow(follower)
    scheduler = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        max_model_len=96,
        max_multi_steps=max_multi_steps,
    )
    config = EngineConfig(
        "tiny", "cpu", "float32", 0, "continuous", CacheConfig(16, 32, "float32", False), scheduler
    )
    proposer = FunctionProposer(propose) if propose else None
    return build_engine(config, rank, proposer=proposer)


def drain(engine, count: int = 3):
    rng = random.Random(3)
    made = []
    for index in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 40))]
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        made.append(Request(f"r{index}", prompt, params, 0.0))
        engine.add(made[-1])
    while engine.step() is not None:
        pass
    return made


@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize(
    "kernels", ["reference", "fused", pytest.param("native", marks=needs_native)]
)
def test_every_position_is_seen_with_its_states(model, kernels, budget):
    recorder = Recorder()
    rank = Rank.load(RankSpec(model, kernels=kernels, kv_cache_dtype="f32", threads=1))
    for request in drain(engine_with(rank, recorder, budget=budget)):
        check(model, request, recorder)
    assert recorder.again == 0


def check(model, request, recorder):
    """All states but that of the last token, which nobody has computed, are the true ones."""
    seen = recorder.seen[request.request_id]
    token_ids = request.token_ids
    assert sorted(seen) == list(range(len(token_ids) - 1))
    assert [seen[i][0] for i in sorted(seen)] == token_ids[1:]
    for place, true in enumerate(true_states(model, token_ids[:-1], DEPTHS)):
        shown = np.stack([seen[i][1][place] for i in sorted(seen)])
        assert np.abs(shown - true).max() < 2e-3 * np.abs(true).max()


@pytest.mark.parametrize(
    "kernels", ["reference", "fused", pytest.param("native", marks=needs_native)]
)
def test_of_a_draft_only_what_was_right_is_seen(model, kernels):
    plain = drain(engine_with(load(model, kernels), Recorder()))
    truth = {tuple(r.prompt_token_ids): r.token_ids for r in plain}
    rng = random.Random(1)

    def propose(prompt, position):
        right = truth[tuple(prompt)][position : position + 4]
        return Draft.chain([t if rng.random() < 0.7 else 5 for t in right]) if right else None

    recorder = Recorder()
    for request in drain(engine_with(load(model, kernels), recorder, propose)):
        assert request.token_ids == truth[tuple(request.prompt_token_ids)]
        check(model, request, recorder)


def load(model, kernels):
    return Rank.load(RankSpec(model, kernels=kernels, kv_cache_dtype="f32", threads=1))


@needs_native
def test_of_several_steps_the_last_is_seen(model):
    recorder = Recorder()
    engine = engine_with(load(model, "native"), recorder, max_multi_steps=4)
    (request,) = drain(engine, count=1)
    seen = recorder.seen["r0"]
    assert len(seen) < len(request.token_ids) - 1
    assert all(seen[i][0] == request.token_ids[i + 1] for i in seen)
    true = true_states(model, request.token_ids[:-1], [4])[0]
    for position, (_, states) in seen.items():
        assert np.abs(states[-1] - true[position]).max() < 2e-3 * np.abs(true).max()


def test_no_state_costs_memory_unless_it_is_asked_for(model):
    """Values have the places that they had; one that is kept has a place of its own."""
    plan, _ = plan_step(load_model(model).model)

    def places_of(kept):
        made = []

        def allocate(value):
            made.append(value)
            return len(made) - 1

        places = fused_ops.place(plan.ops, allocate, lambda place: None, kept)
        return places, made

    _, before = places_of(())
    stream = plan.streams([2])[2]
    places, after = places_of([stream])
    assert len(after) == len(before) + 1
    assert [value for value, place in places.items() if place == places[stream]][-1] is stream


def test_a_depth_that_there_is_not_is_refused():
    with pytest.raises(fused_ops.CannotFuse, match="no norm reads what 7 layers make"):
        fused_ops.residual_stream([fused_ops.FusedHead(None, None)], 7)  # type: ignore[arg-type]
