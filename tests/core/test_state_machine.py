"""Hypothesis looks for a short sequence of events that breaks the engine, and shrinks it."""

from __future__ import annotations

import random
from functools import partial

from hash_model import FunctionProposer, HashDrafts, HashExecutor, expected_tokens
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.base.errors import RequestError
from octavo.core.block_manager import BlockManager
from octavo.core.block_pools import BlockPools
from octavo.core.engine import Engine
from octavo.core.host_kv_cache import HostKVCache
from octavo.core.prefix_cache import NoPrefixCache, RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.core.state_slots import StateSlots


class EngineMachine(RuleBasedStateMachine):
    """Adds, forks, aborts and steps in any order, with results that may come late."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 8),
        max_num_seqs=st.integers(1, 4),
        caching=st.booleans(),
        max_multi_steps=st.sampled_from([1, 3]),
        depth=st.sampled_from([1, 1, 2, 3]),
        drafts=st.one_of(st.none(), st.integers(0, 1000)),
        windows=st.sampled_from([(None,), (None,), (3,), (None, 2), (None, None, 5, 5)]),
        spare_slots=st.one_of(st.none(), st.integers(0, 6)),
        num_places=st.sampled_from([0, 1, 8]),
        num_pools=st.sampled_from([1, 1, 2, 3]),
    )
    def start(
        self,
        num_blocks,
        block_size,
        budget,
        max_num_seqs,
        caching,
        max_multi_steps,
        depth,
        drafts,
        windows,
        spare_slots,
        num_places,
        num_pools,
    ):
        if num_pools > 1:  # of latent vectors, which are all kept, and are not stored
            windows, spare_slots, num_places = (None,), None, 0
        cache = NoPrefixCache()
        self.has_states = spare_slots is not None
        if caching:
            cache = RadixPrefixCache(block_size, windows, needs_states=self.has_states)
        states, num_slots = None, 0
        if self.has_states:
            num_slots, drafts = depth + 2 + spare_slots, None
            states = StateSlots(num_slots, block_size, cache, depth, snapshot_tokens=4)
        if self.has_states:
            num_places = 0  # they are not stored
        store = (
            HostKVCache(num_blocks, num_places, block_size, windows=windows) if num_places else None
        )
        blocks = BlockManager(num_blocks, block_size, cache, windows, store=store, states=states)
        if num_pools > 1:
            make_cache = partial(RadixPrefixCache, block_size) if caching else NoPrefixCache
            blocks = BlockPools(num_pools, num_pools * num_blocks, block_size, make_cache)
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=24,
            max_queued_requests=6,
            max_multi_steps=max_multi_steps,
            runs_ahead=depth > 1,
            ageing_steps=3,
        )
        self.blocks = blocks
        proposer = None
        if drafts is not None:
            propose = HashDrafts(random.Random(drafts), windows=windows)
            proposer = FunctionProposer(propose, passes=drafts % 5)
        executor = HashExecutor(
            num_pools * num_blocks,
            block_size,
            depth=depth,
            windows=windows,
            num_host_blocks=num_places,
            num_state_slots=num_slots,
        )
        self.engine = Engine(Scheduler(config, blocks, proposer=proposer), executor)
        self.requests: list[Request] = []
        self.ended: set[str] = set()

    # Few distinct tokens: prefixes are shared often.
    @rule(
        prompt=st.lists(st.integers(0, 1), max_size=9),
        max_tokens=st.integers(1, 6),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "k"]),
        fork=st.booleans(),
    )
    def add(self, prompt, max_tokens, priority, salt, fork):
        source = self.requests[-1] if fork and self.requests else None
        if source is not None:
            prompt, salt = list(source.prompt_token_ids), source.cache_salt
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            0.0,
            priority=priority,
            cache_salt=salt,
            fork_of=source,
        )
        try:
            self.engine.add(request)
        except RequestError:
            return
        self.requests.append(request)

    @rule(index=st.integers(0, 30))
    def abort(self, index):
        if self.requests:
            request = self.requests[index % len(self.requests)]
            self.engine.abort(request.request_id)
            self.ended.add(request.request_id)

    @rule()
    def begin(self):
        if len(self.engine._submitted) < self.engine.executor.depth:
            self.engine.begin_step()

    @rule()
    def finish(self):
        if self.engine._submitted:
            self.take(self.engine.finish_step())

    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            step = self.engine.step()
            if step is not None:
                self.take(step)

    def take(self, step):
        for update in step.updates:
            request = update.request
            assert request.request_id not in self.ended, "news of a request that had ended"
            if request.is_finished:
                self.ended.add(request.request_id)
                assert request.output_token_ids == expected_tokens(
                    request.prompt_token_ids,
                    request.params.max_tokens,
                    97,
                    self.blocks.windows,
                    has_states=self.has_states,
                )

    @invariant()
    def blocks_add_up(self):
        if hasattr(self, "blocks"):
            self.blocks.check_integrity(request for request in self.requests if request.block_ids)

    @invariant()
    def what_is_in_flight_adds_up(self):
        if hasattr(self, "engine"):
            counts = dict.fromkeys(self.requests, 0)
            for submitted in self.engine._submitted:
                for item in submitted.batch.items:
                    counts[item.request] += item.num_tokens
            assert counts == {request: request.num_tokens_in_flight for request in self.requests}

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            step = self.engine.step()
            if step is None:
                break
            self.take(step)
        assert not self.engine.has_unfinished_requests, "starvation"
        assert self.ended >= {request.request_id for request in self.requests}
        assert self.blocks.num_used_blocks == 0


EngineMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestEngineMachine = EngineMachine.TestCase
