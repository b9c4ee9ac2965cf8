"""Puts an engine together from resolved settings, over any executor, real or simulated."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.adapters import Adapters
from octavo.core.admission import AdmissionPolicy, ContinuousAdmission, StaticAdmission
from octavo.core.block_manager import BlockManager
from octavo.core.block_pools import BlockPools, Blocks
from octavo.core.block_store import BlockStore
from octavo.core.clock import Clock
from octavo.core.drafting import DraftProposer
from octavo.core.engine import Engine
from octavo.core.executor import Executor
from octavo.core.prefix_cache import NoPrefixCache, PrefixCache, RadixPrefixCache
from octavo.core.prompt_chunks import StageSeconds
from octavo.core.scheduler import Scheduler
from octavo.core.state_slots import StateSlots
from octavo.core.step_meter import StepMeter
from octavo.core.step_share import PipelineShare, StepShare, WholeShare
from octavo.settings.engine import CacheConfig, EngineConfig

_ADMISSION: dict[str, type[AdmissionPolicy]] = {
    "continuous": ContinuousAdmission,
    "static": StaticAdmission,
}


def build_engine(
    config: EngineConfig,
    executor: Executor,
    clock: Clock | None = None,
    proposer: DraftProposer | None = None,
    store: BlockStore | None = None,
    meter: StepMeter | None = None,
    stage_seconds: StageSeconds | None = None,
    adapters: Adapters | None = None,
) -> Engine:
    """Make the scheduler, the block manager and the prefix cache, and an engine of them.

    Args:
        clock: simulated time; None for the wall clock.
        proposer: makes drafts; None for no speculative decoding.
        store: receives evicted blocks.
        meter: measures the engine's steps.
        adapters: those that requests may have; None for none.
        stage_seconds: of chunks of prompts in a stage of a pipeline, by which they are sized.
    """
    block_manager = _blocks(config.cache, executor, store)
    admission = _ADMISSION[config.batching]()
    limits = replace(config.scheduler, runs_ahead=executor.depth > 1)
    share: StepShare = WholeShare()
    if executor.depth > 1 and not executor.feeds_tokens:
        share = PipelineShare(executor.depth, limits.max_num_batched_tokens, stage_seconds)
    scheduler = Scheduler(limits, block_manager, admission, proposer, share, adapters)
    return Engine(scheduler, executor, clock, meter)


def _blocks(config: CacheConfig, executor: Executor, store: BlockStore | None) -> Blocks:
    """Return the owner of the blocks of an executor's pool, or pools."""
    size, num_blocks, windows = config.block_size, executor.kv_capacity(), config.windows

    def make_cache() -> PrefixCache:
        if not config.enable_prefix_caching:
            return NoPrefixCache()
        return RadixPrefixCache(size, windows, needs_states=config.num_state_slots > 0)

    if config.num_pools > 1:
        return BlockPools(config.num_pools, num_blocks, size, make_cache)
    cache, states = make_cache(), None
    if config.num_state_slots:
        states = StateSlots(config.num_state_slots, size, cache, executor.depth)
    return BlockManager(num_blocks, size, cache, windows, store=store, states=states)
