from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import load_model
from rank_threads import start_ranks

from octavo.core.admission import StaticAdmission
from octavo.core.block_manager import BlockManager
from octavo.core.block_pools import BlockPools
from octavo.core.drafting import DraftProposer
from octavo.core.engine import Engine, EngineStep
from octavo.core.host_kv_cache import HostKVCache
from octavo.core.kv_tables import ONE_TABLE
from octavo.core.prefix_cache import NoPrefixCache, RadixPrefixCache
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.core.state_slots import StateSlots
from octavo.core.step_share import PipelineShare
from octavo.kernels.expert_places import ExpertPlaces
from octavo.lora.limits import LoraLimits
from octavo.models.kv_groups import KVGroups
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.rank import Rank


@dataclass
class Bench:
    """Builds engines over one loaded model, with any geometry.

    Of one thread: several that meet many times a step wait for each other long where other tests
    have the cores. That their number changes no answer is a test of its own.
    """

    model: Any
    config: Any
    device: torch.device

    def engine(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        *,
        prefix_caching: bool = True,
        static: bool = False,
        kernels: str = "reference",
        threads: int | None = 1,
        kv_cache_dtype: str = "auto",
        proposer: DraftProposer | None = None,
        groups: KVGroups | None = None,
        num_places: int = 0,
        state_slots: int = 0,
        tp: int = 1,
        pp: int = 1,
        experts: ExpertPlaces | None = None,
        dp_attention: bool = False,
        activations: str = "auto",
        batch_invariant: bool = False,
        loras: LoraLimits | None = None,
        **limits: Any,
    ) -> Engine:
        limits = {"max_model_len": 128, "max_num_seqs": 16, **limits}
        scheduler_config = SchedulerConfig(**limits)
        spec = RankSpec(
            Path("."),
            str(self.device),
            kernels=kernels,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            threads=threads,
            activations=activations,
            batch_invariant=batch_invariant,
            experts=experts,
            by_sequences=dp_attention,
        )
        sizes = RankLimits(
            num_blocks,
            scheduler_config.max_num_seqs,
            scheduler_config.max_model_len,
            scheduler_config.max_num_batched_tokens,
            groups,
            num_host_blocks=num_places,
            num_state_slots=state_slots,
        )
        if tp == pp == 1:
            rank = Rank.of_model(spec, self.model, self.config)
            rank.start(sizes)
        else:
            rank = start_ranks(tp, spec, self.model, self.config, sizes, pp)
        windows = ONE_TABLE if groups is None else groups.windows
        host_cache = (
            HostKVCache(num_blocks, num_places, block_size, windows=windows) if num_places else None
        )
        cache, states = NoPrefixCache(), None
        if prefix_caching:
            cache = RadixPrefixCache(block_size, windows, needs_states=state_slots > 0)
        if state_slots:
            states = StateSlots(state_slots, block_size, cache, rank.depth, snapshot_tokens=32)
        share = None
        if rank.depth > 1 and not rank.feeds_tokens:
            share = PipelineShare(rank.depth, scheduler_config.max_num_batched_tokens)
        blocks = BlockManager(
            num_blocks, block_size, cache, windows, store=host_cache, states=states
        )
        if dp_attention:
            blocks = BlockPools(
                tp,
                tp * num_blocks,
                block_size,
                partial(RadixPrefixCache, block_size) if prefix_caching else NoPrefixCache,
            )
        scheduler = Scheduler(
            replace(scheduler_config, runs_ahead=rank.depth > 1),
            blocks,
            StaticAdmission() if static else None,
            proposer,
            share,
        )
        if loras is not None:
            scheduler.adapters = rank.open_loras(loras)
        return Engine(scheduler, rank)


def load_bench(path: Path, device: str = "cpu") -> Bench:
    model, config = load_model(path)
    return Bench(model, config, torch.device(device))


def run_all(engine: Engine, requests: list[Request], together: bool = True):
    """(tokens, logprobs) of each request, and all steps; together or one after the other."""
    answers: dict[str, tuple[list[int], list]] = {}
    steps: list[EngineStep] = []

    def drain() -> None:
        while engine.has_unfinished_requests:
            if (step := engine.step()) is None:
                continue  # all wait for adapters
            steps.append(step)
            for update in step.updates:
                tokens, logprobs = answers.setdefault(update.request.request_id, ([], []))
                tokens += update.new_token_ids
                logprobs += [*update.prompt_logprobs, *update.logprobs]

    for request in requests:
        engine.add(request)
        if not together:
            drain()
    drain()
    engine.scheduler.block_manager.check_integrity([])
    return answers, steps


@pytest.fixture(scope="session")
def bench(tiny_model) -> Bench:
    return load_bench(tiny_model)


@pytest.fixture(name="run_all", scope="session")
def _run_all() -> Callable[..., Any]:
    return run_all


@pytest.fixture(name="load_bench", scope="session")
def _load_bench() -> Callable[..., Bench]:
    return load_bench


@pytest.fixture(name="bench_of", scope="session")
def _bench_of() -> Callable[..., Bench]:
    return lambda model, config: Bench(model, config, torch.device("cpu"))
