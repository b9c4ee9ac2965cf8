"""The press: random workloads on the hash model, audited at every step.

A seed fixes everything: the geometry of the pool, the limits, arrivals, aborts, priorities, forks,
faults, drafts, and how many steps are in flight at once.
First a safety phase (everything happens at once), then a liveness phase (arrivals stop, all must
end within a bound, and the pool must be empty).
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from functools import partial

import pytest
from faults import FaultyScheduler, UnreliableExecutor, sometimes
from hash_model import HashDrafts, expected_tokens
from kv_storages import SlowStorage

from octavo.base.errors import RequestError
from octavo.core.admission import StaticAdmission
from octavo.core.batch import DAMAGED
from octavo.core.kv_tables import GONE, ONE_TABLE, most_blocks
from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.core.step_share import PipelineShare

VOCAB = 97

# Of groups of layers: one that sees only the last positions, or some beside others that see all.
WINDOWS = [(2,), (9,), (None, 4), (None, 3, 20), (None, None, 8, 8)]


@pytest.fixture(autouse=True)
def _silence():
    """Thousands of faults would be written down with their frames, and with them all engines."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def needs_host(share: int):
    """What an executor says that feeds all requests but for one in so many."""
    return lambda request: not share or int(request.request_id[1:]) % share != 0


def store_of(rng: random.Random, num_groups: int) -> dict[str, object]:
    """A host KV cache, small or large, mostly with a storage behind it, that is good or bad."""
    how = {name: rng.choice([0.0, 0.1]) for name in ("fails", "forgets", "refuses")}
    storage = partial(SlowStorage, rng=rng, delay=rng.choice([0, 3, 30]), **how)
    num_places = rng.choice([2, 12, 60]) * num_groups
    return {"num_places": num_places, "make_storage": storage if rng.random() < 0.8 else None}


class Press:
    """One simulated engine with its clients.

    Args:
        depth: steps in flight, of requests that mostly run ahead; None draws it.
        offloads: what is evicted is stored, where it can be damaged, lost, or late.
        has_sink_windows: many requests have one, and may become longer than the context.
        has_states: the model has recurrent layers; then nobody drafts.
        num_pools: of ranks with requests of their own.
    """

    def __init__(
        self,
        seed: int,
        make_engine,
        make_request,
        windows=ONE_TABLE,
        depth: int | None = None,
        *,
        offloads: bool = False,
        has_sink_windows: bool = False,
        has_states: bool = False,
        num_pools: int = 1,
    ):
        rng = self.rng = random.Random(seed)
        self.make_request = make_request
        block_size = rng.choice([1, 2, 3, 4, 8, 16])
        chunked = rng.random() < 0.8
        self.max_model_len = rng.choice([16, 40, 80])
        # From pools that barely hold one request to pools that never preempt.
        least = -(-self.max_model_len // block_size)
        self.num_blocks = rng.randint(max(2, least // 2), least * rng.choice([1, 2, 6]) + 2)
        depth = depth or rng.choice([1, 1, 1, 2, 3])
        self.windows = windows
        self.has_sink_windows = has_sink_windows
        self.has_states = has_states
        drafts = HashDrafts(rng, windows=windows) if rng.random() < 0.3 else None
        max_num_batched_tokens = rng.choice([1, 2, 5, 16, 64]) if chunked else self.max_model_len
        is_pipeline = depth > 1 and random.Random(-seed - 1).random() < 0.4
        self.engine = make_engine(
            self.num_blocks,
            block_size,
            depth=depth,
            propose=None if has_states else drafts,
            passes=rng.choice([0, 2, 5]),
            # Without it, no request is in two steps at once.
            runs_ahead=depth > 1 and rng.random() < 0.8,
            # One request in so many needs the host between its tokens; 0: none does. In a pipeline
            # all do, and only chunks of a prompt follow each other.
            feeds=needs_host(1 if is_pipeline else rng.choice([0, 0, 3])),
            share=PipelineShare(depth, max_num_batched_tokens) if is_pipeline else None,
            prefix_caching=rng.random() < 0.8 or offloads,
            admission=StaticAdmission() if rng.random() < 0.1 else None,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=rng.choice([1, 2, 4, 8, 16]),
            max_model_len=self.max_model_len,
            enable_chunked_prefill=chunked,
            ageing_steps=rng.choice([1, 10, 100]),
            max_queued_requests=rng.choice([None, 4, 50]),
            max_multi_steps=rng.choice([1, 1, 4]),
            windows=windows,
            **(store_of(random.Random(seed), len(windows)) if offloads else {}),
            # From as many as one request needs to more than there are requests.
            state_slots=depth + rng.choice([2, 3, 6, 40]) if has_states else 0,
            snapshot_tokens=rng.choice([1, 8, 64]),
            num_pools=num_pools,
        )
        self.num_blocks *= num_pools
        self.prefixes = [
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, self.max_model_len // 2))]
            for _ in range(3)
        ]
        # Many engines meet faults: preemptions for no reason, steps that break, damaged rows.
        self.has_faults = True
        preempts, raises, damages = (
            sometimes(rng.choice([0.0, rate]), seed + index)
            for index, rate in enumerate((0.3, 0.02, 0.01))
        )
        engine = self.engine
        engine.executor._audit_every = 8
        engine.scheduler = FaultyScheduler.in_place_of(
            engine.scheduler, preempts=lambda: self.has_faults and preempts()
        )
        engine.executor = UnreliableExecutor(
            engine.executor,
            raises=lambda: self.has_faults and raises(),
            damages=lambda: self.has_faults and damages(),
        )
        self.live: dict[str, object] = {}
        self.num_added = 0
        self.num_steps = 0
        self.num_overlapping = 0  # that were over while a later one of the same request was not

    def arrive(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.prefixes) + [
            rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))
        ]
        params = SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=True)
        if self.has_sink_windows and rng.random() < 0.7:
            params = params.with_changes(**self.sink_window())
        priority = rng.choice([0, 0, 0, -2, 3])
        salt = rng.choice(["", "", "tenant"])
        leader = None
        isolated = rng.random() < 0.05
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            request = self.make_request(
                f"r{self.num_added}",
                prompt,
                params=params,
                priority=priority,
                cache_salt=salt,
                fork_of=leader,
                isolated=isolated,
            )
            try:
                self.engine.add(request)
            except RequestError:
                return
            self.num_added += 1
            self.live[request.request_id] = request
            leader = leader or request

    def sink_window(self) -> dict[str, int]:
        """What a request asks to see."""
        rng = self.rng
        sinks = rng.choice([0, 1, 4, 9])
        most = max(2, self.max_model_len - sinks)
        window = rng.randint(2, rng.choice([most, min(most, 8)]))
        return {
            "attention_sinks": sinks,
            "window": window,
            "max_tokens": rng.choice([rng.randint(1, 24), rng.randint(1, 150)]),
        }

    def abort(self) -> None:
        request_id = self.rng.choice([*self.live, "unknown"])
        self.engine.abort(request_id)
        self.live.pop(request_id, None)

    def step(self) -> None:
        step = self.engine.step()
        if step is None:
            return
        self.num_steps += 1
        self.num_overlapping += any(item.request.num_tokens_in_flight for item in step.batch.items)
        stats = step.stats
        assert (
            stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks
            == self.num_blocks
        )
        assert 0.0 <= stats.kv_waste <= 1.0
        if self.num_steps % 16 == 0:
            self.engine.check_integrity()
            self.check_what_is_held()
        for update in step.updates:
            request = update.request
            if request.finish_reason is FinishReason.ERROR:  # it was alone in a step that raised
                assert "as was asked for" in request.error or request.error == DAMAGED
                del self.live[request.request_id]
            elif request.is_finished:
                assert request.finish_reason is FinishReason.LENGTH
                # Ended exactly once, with the text that follows from its own prompt alone.
                del self.live[request.request_id]
                assert request.output_token_ids == expected_tokens(
                    request.prompt_token_ids,
                    request.params.max_tokens,
                    VOCAB,
                    self.windows,
                    request.sink_window,
                    has_states=self.has_states,
                )

    def check_what_is_held(self) -> None:
        """Nobody holds more than it is counted on for, however long it has become."""
        scheduler = self.engine.scheduler
        blocks, config = scheduler.block_manager, scheduler.config
        step_tokens = config.max_num_batched_tokens * self.engine.executor.depth
        for request in scheduler.running:
            held = sum(block != GONE for table in request.block_tables for block in table)
            num_tokens = max(len(request.token_ids), request.max_total_tokens)
            if (sink_window := request.sink_window) is not None:
                most = step_tokens + config.max_multi_steps
                assert held <= blocks.num_tables * sink_window.most_blocks(blocks.block_size, most)
            assert held <= most_blocks(
                blocks.windows, num_tokens, blocks.block_size, step_tokens + config.max_multi_steps
            )

    def run(self) -> int:
        """Both phases; the number of steps."""
        rng = self.rng
        arrival, abort = rng.choice([0.02, 0.1, 0.4]), rng.choice([0.0, 0.01, 0.05])
        for _ in range(300):
            if not self.live and rng.random() < 0.5:
                self.engine.save()
            if rng.random() < arrival and len(self.live) < 60:
                self.arrive()
            if rng.random() < abort:
                self.abort()
            self.step()
        self.has_faults = False
        # Every step computes something, and nobody is preempted without a new token, so the
        # tokens that are left, recomputed once for each new one at worst, bound what remains.
        bound = (
            self.num_steps
            + sum(
                request.max_total_tokens * (request.params.max_tokens + 1)
                for request in self.live.values()
            )
            + self.engine.executor.depth
        )
        # Where steps overlap, one may be under way for a request that the one before has ended.
        while self.live or self.engine.has_unfinished_requests:
            self.step()
            assert self.num_steps <= bound, "starvation"
        blocks = self.engine.scheduler.block_manager
        assert not self.engine.has_unfinished_requests
        assert self.engine.num_invariant_violations == 0
        assert blocks.num_used_blocks == 0
        blocks.check_integrity([])
        return self.num_steps


@pytest.mark.thinned(1, most=20)
@pytest.mark.parametrize("seed", range(40))
def test_seeds(seed, make_engine, make_request):
    Press(seed, make_engine, make_request).run()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("num_pools", [2, 3, 8])
@pytest.mark.parametrize("seed", range(400, 410))
def test_seeds_with_pools(seed, num_pools, make_engine, make_request):
    Press(seed, make_engine, make_request, num_pools=num_pools).run()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(100, 112))
def test_seeds_with_windows(seed, windows, make_engine, make_request):
    Press(seed, make_engine, make_request, windows).run()


@pytest.mark.thinned(1, most=20)
@pytest.mark.parametrize("seed", range(200, 240))
def test_seeds_with_a_store(seed, make_engine, make_request):
    Press(seed, make_engine, make_request, offloads=True).run()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(300, 308))
def test_seeds_with_windows_and_a_store(seed, windows, make_engine, make_request):
    Press(seed, make_engine, make_request, windows, offloads=True).run()


# What a model may have, beside all that a workload draws for itself. Layers with windows leave no
# request a sink window of its own; recurrent ones leave no store, and have no drafts.
MODELS = [
    {"offloads": True, "has_sink_windows": True},
    *({"windows": windows, "offloads": True} for windows in WINDOWS),
    *({"windows": windows, "has_states": True} for windows in (ONE_TABLE, (None, 4), (9,))),
    {"num_pools": 3},
]


@pytest.mark.slow
@pytest.mark.parametrize("least", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_everything_at_once(make_engine, make_request, least):
    """At least so many steps, with all features that go together; what was met is printed with
    ``pytest -s``, and is no small part of what there was to meet."""
    met: Counter[str] = Counter()
    started, seed = time.monotonic(), 2_000_000
    while met["steps"] < least:
        press = Press(seed, make_engine, make_request, **MODELS[seed % len(MODELS)])
        met["steps"] += press.run()
        met["steps that overlapped"] += press.num_overlapping
        met.update(what_was_met(press.engine))
        seed += 1
    elapsed = time.monotonic() - started
    print(f"\nseeds 2000000 to {seed - 1} in {elapsed:.1f} s:")
    print(*(f"{count:,} {name}" for name, count in met.items()), sep=", ")
    for name, one_in in {
        "steps that overlapped": 20,
        "preemptions": 100,
        "tokens found": 5,
        "blocks restored": 200,
        "tokens from disk": 500,
        "blocks damaged": 20_000,
        "blocks dropped": 50,
        "drafted tokens right": 100,
    }.items():
        assert met[name] > least / one_in, name


def what_was_met(engine) -> dict[str, int]:
    stats = engine.stats()
    return {
        "preemptions": stats.num_preemptions,
        "tokens found": stats.prefix_tokens_hit,
        "blocks restored": stats.kv_blocks_restored or 0,
        "tokens from disk": stats.prefix_tokens_from_disk or 0,
        "blocks damaged": stats.kv_store_errors or 0,
        "blocks dropped": stats.kv_blocks_dropped or 0,
        "drafted tokens right": stats.draft_tokens_accepted,
    }


@pytest.mark.thinned(1, most=12)
@pytest.mark.parametrize("seed", range(200, 230))
def test_seeds_with_sights(seed, make_engine, make_request):
    Press(seed, make_engine, make_request, has_sink_windows=True).run()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("windows", [ONE_TABLE, (None, 4), (9,)])
@pytest.mark.parametrize("seed", range(200, 210))
def test_seeds_with_states(seed, windows, make_engine, make_request):
    Press(seed, make_engine, make_request, windows, has_states=True).run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("least", "depth"),
    [
        (40_000, None),
        pytest.param(1_000_000, None, marks=pytest.mark.long),
        pytest.param(1_000_000, 2, marks=pytest.mark.long),
    ],
)
def test_many_steps(make_engine, make_request, least, depth):
    """At least so many steps, half of the workloads with windows, and a third with states; the rate
    is printed with ``pytest -s``."""
    num_steps = num_preemptions = num_hits = num_accepted = num_overlapping = seed = 0
    started = time.monotonic()
    while num_steps < least:
        seed += 1
        windows = ONE_TABLE if seed % 2 else WINDOWS[seed // 2 % len(WINDOWS)]
        press = Press(
            1_000_000 + seed,
            make_engine,
            make_request,
            windows,
            depth,
            has_sink_windows=windows is ONE_TABLE and seed % 4 == 1,
            has_states=seed % 3 == 0 and seed % 4 != 1,
        )
        num_steps += press.run()
        num_preemptions += press.engine.scheduler.num_preemptions
        num_hits += press.engine.scheduler.prefix_tokens_hit
        num_accepted += press.engine.scheduler.drafts.num_accepted
        num_overlapping += press.num_overlapping
    elapsed = time.monotonic() - started
    print(
        f"\n{num_steps:,} steps of {seed} workloads in {elapsed:.1f} s "
        f"({num_steps / elapsed:,.0f}/s), {num_preemptions:,} preemptions, {num_hits:,} hits, "
        f"{num_accepted:,} drafted tokens accepted, {num_overlapping:,} steps overlapped"
    )
    assert num_preemptions > least / 1000 and num_hits > least / 10
    assert num_accepted > least / 25 and num_overlapping > least / 20
