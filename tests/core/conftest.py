from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hash_model import FunctionProposer, HashExecutor

from octavo.core.block_manager import BlockManager
from octavo.core.block_pools import BlockPools
from octavo.core.engine import Engine
from octavo.core.host_kv_cache import HostKVCache
from octavo.core.kv_tables import ONE_TABLE, Windows
from octavo.core.prefix_cache import NoPrefixCache, RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.core.state_slots import StateSlots


def make_request(request_id: str, prompt: list[int], max_tokens: int = 4, **fields) -> Request:
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id, prompt, params, arrival_time=0.0, **fields)


def make_engine(
    num_blocks: int = 32,
    block_size: int = 4,
    *,
    prefix_caching: bool = True,
    admission=None,
    depth: int = 1,
    propose=None,
    passes: int = 0,
    feeds=lambda request: True,
    windows: Windows = ONE_TABLE,
    num_places: int = 0,
    make_storage=None,
    rule=None,
    state_slots: int = 0,
    snapshot_tokens: int = 8,
    around=None,
    clock=None,
    meter=None,
    share=None,
    num_pools: int = 1,
    **config,
) -> Engine:
    """An engine over the hash model; with a host KV cache of so many places, and a storage behind
    it; with recurrent layers, if there are slots for states; ``around`` makes another executor of
    it; with several pools of ``num_blocks`` each."""
    config = {"max_model_len": 64, "runs_ahead": depth > 1, **config}
    cache = NoPrefixCache()
    if prefix_caching:
        cache = RadixPrefixCache(block_size, windows, needs_states=state_slots > 0)
    states = None
    if state_slots:
        states = StateSlots(state_slots, block_size, cache, depth, snapshot_tokens)
    executor = HashExecutor(
        num_pools * num_blocks,
        block_size,
        depth=depth,
        feeds=feeds,
        windows=windows,
        num_host_blocks=num_places,
        num_state_slots=state_slots,
    )
    host_cache = None
    if num_places:
        storage = make_storage(executor.host_blocks) if make_storage is not None else None
        host_cache = HostKVCache(num_blocks, num_places, block_size, 100, storage, rule, windows)
    if num_pools > 1:
        make_cache = partial(RadixPrefixCache, block_size) if prefix_caching else NoPrefixCache
        blocks = BlockPools(num_pools, num_pools * num_blocks, block_size, make_cache)
    else:
        blocks = BlockManager(
            num_blocks, block_size, cache, windows, store=host_cache, states=states
        )
    proposer = FunctionProposer(propose, passes) if propose is not None else None
    scheduler = Scheduler(SchedulerConfig(**config), blocks, admission, proposer, share)
    return Engine(scheduler, executor if around is None else around(executor), clock, meter)


def run(engine: Engine, limit: int = 10_000) -> list[Request]:
    """Step to the end; the requests in the order in which they finished."""
    finished = []
    for _ in range(limit):
        step = engine.step()
        if step is None:
            return finished
        finished += [update.request for update in step.updates if update.request.is_finished]
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


@pytest.fixture(name="make_request")
def _make_request() -> Callable[..., Request]:
    return make_request


@pytest.fixture(name="make_engine")
def _make_engine() -> Callable[..., Engine]:
    return make_engine


@pytest.fixture(name="run")
def _run() -> Callable[..., list[Request]]:
    return run
