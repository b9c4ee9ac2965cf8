"""Loads a model and makes its engine, from finding the files to sizing the KV pool."""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo import __version__, hub
from octavo.assembly.engine import build_engine
from octavo.base.errors import ConfigError, MissingPackageError
from octavo.base.gc_pause import no_collections
from octavo.base.optional_deps import need_torch
from octavo.runtime.capacity import Capacity, RankLimits, RankSpec
from octavo.runtime.layout import AUTO
from octavo.serving.one_rank import OneRank
from octavo.serving.stage_seconds import stage_seconds
from octavo.serving.text_engine import TextEngine
from octavo.settings.engine import (
    EngineArgs,
    EngineConfig,
    default_num_seqs,
    default_step_tokens,
    is_gpu,
    resolve,
)
from octavo.sources.open import notes_folder, open_source
from octavo.speculation.drafter import TargetModel
from octavo.speculation.drafters import acceptance_of, check_pipelined, open_drafter
from octavo.system.machine import cpu, has_gpu_driver, keep_openmp_patient

if TYPE_CHECKING:
    from octavo.core.block_store import BlockStore
    from octavo.core.executor import Executor
    from octavo.core.host_kv_cache import RestoreRule
    from octavo.core.step_meter import StepMeter
    from octavo.links.facts import Facts
    from octavo.models.config import ModelConfig
    from octavo.offload.open_peers import Transfer
    from octavo.offload.peer_storage import PeerStorage
    from octavo.runtime.rank import Rank
    from octavo.sources.source import ModelSource

_log = logging.getLogger("octavo")


class LoadedEngine:
    """A model, its tokenizer and its engine, ready to serve. Made by ``load_engine``."""

    def __init__(
        self,
        config: EngineConfig,
        text_engine: TextEngine,
        model_config: ModelConfig,
        info: dict[str, Any],
        load_seconds: dict[str, float],
        ranks: OneRank,
        peers: PeerStorage | None = None,
    ):
        self.ranks = ranks
        self.peers = peers  # the KV of other replicas
        self.config = config
        self.text_engine = text_engine
        self.model_config = model_config
        self.load_seconds = load_seconds  # by phase, in their order
        self._info = info

    @property
    def info(self) -> dict[str, Any]:
        """The "engine" object of the JSON outputs."""
        return dict(self._info)


def load_engine(
    args: EngineArgs,
    progress: Callable[[int, int], None] | None = None,
    *,
    is_served: bool = False,
    is_replica: bool = False,
    around_executor: Callable[[Executor], Executor] | None = None,
    meter: StepMeter | None = None,
    transfer: Transfer | None = None,
) -> LoadedEngine:
    """Find and load a model, and make its engine.

    Args:
        progress: called with (bytes loaded, bytes in all) while weights are read.
        is_served: its answers are read while they are made; see ``EngineArgs.serving``.
        is_replica: it may be one of ``data_parallel_size``, which share the machine.
        around_executor: returns what the engine runs in place of the executor that it is given.
        meter: measures the engine's steps.
        transfer: where replicas pass KV on to each other, if prompts are computed apart.

    Raises:
        ModelError: the model cannot be found or read.
        ConfigError: it does not fit the settings.
    """
    if not is_replica:
        args.refuse_replicas()
    keep_openmp_patient()
    with no_collections(), ExitStack() as on_error:
        loaded = _load_engine(args, progress, is_served, around_executor, meter, transfer, on_error)
        on_error.pop_all()
        return loaded


def _load_engine(
    args: EngineArgs,
    progress: Callable[[int, int], None] | None,
    is_served: bool,
    around_executor: Callable[[Executor], Executor] | None,
    meter: StepMeter | None,
    transfer: Transfer | None,
    on_error: ExitStack,
) -> LoadedEngine:
    import octavo.runtime.rank  # noqa: F401  (and numpy: all models need them)

    phases = _Phases()
    source = open_source(hub.resolve(args.model), args.model_impl)
    args = source.settings(args)  # an engine folder has settings: before defaults are filled in
    args = args.serving() if is_served else args
    model_config = source.config()
    phases.end("header")
    tokenizer = source.tokenizer()
    model_config.check_tokenizer(tokenizer.vocab_size, source.path)
    if note := model_config.for_length(args.asked_model_len).length_note:
        _log.warning("%s: %s", source.path, note)
    phases.end("tokenizer")
    spec = _rank_spec(args, model_config, source.path, notes_folder())
    ranks = _open_ranks(args, spec, model_config, source)
    on_error.callback(ranks.close)
    spec = ranks.spec
    with ranks.loading():
        rank = source.load_rank(spec, progress)
    ranks.load(rank)
    speculation = args.speculation()
    if speculation is not None:
        _check_speculation(model_config)
    drafter = None
    if not model_config.state_layers:
        drafter = open_drafter(speculation, TargetModel(rank, spec, model_config, tokenizer))
    phases.end("weights")
    capacity = ranks.capacity(rank, 0 if drafter is None else drafter.kv_bytes_per_token)
    config = resolve(args, capacity)
    limits = _rank_limits(config)
    ranks.start(rank, limits)
    rank.start(limits, acceptance_of(args.speculation()))
    ranks.wait_until_started(rank)
    if args.save_expert_loads is not None:
        from octavo.serving.expert_files import save_at_the_end

        save_at_the_end(args.save_expert_loads, model_config, rank)
    # A drafter's own KV is of the requests of all ranks.
    of_all = replace(limits, num_blocks=config.cache.num_blocks)
    proposer = drafter.start(of_all) if drafter is not None else None
    store, peers = _open_store(config, ranks, rank, model_config, source.path, transfer)
    executor: Executor = rank
    if around_executor is not None:
        executor = around_executor(executor)
    chunks = stage_seconds(rank, model_config, spec.device)
    engine = build_engine(
        config, executor, proposer=proposer, store=store, meter=meter, stage_seconds=chunks
    )
    phases.end("program")
    eos_token_ids = {*tokenizer.stop_token_ids, *model_config.eos_token_ids}
    info = {
        "device": spec.device,
        "dtype": spec.dtype,
        "kernels": rank.kernels,
        "isa": rank.isa,
        "weights_bytes": rank.weights_bytes,
        "kv_blocks": config.cache.num_blocks,
        "block_size": config.cache.block_size,
        **_memory_info(capacity, config),
        **({} if spec.part.is_whole else {"tensor_parallel_size": spec.part.size}),
        **({} if spec.stage.is_whole else {"pipeline_parallel_size": spec.stage.count}),
        **({} if spec.experts is None else {"enable_expert_parallel": True}),
        **({"enable_dp_attention": True} if spec.by_sequences else {}),
        **ranks.info,
    }
    text_engine = TextEngine(engine, tokenizer, model_config.vocab_size, eos_token_ids, config.seed)
    return LoadedEngine(config, text_engine, model_config, info, phases.seconds, ranks, peers)


def _check_speculation(model: ModelConfig) -> None:
    """Raise ConfigError if no tokens can be drafted for a model: KV of rejected draft tokens is
    overwritten, but a recurrent state cannot be taken back."""
    if model.state_layers:
        raise ConfigError(
            f"speculation: {model.name} has recurrent layers, whose states cannot go back to "
            "before a rejected draft: leave it off"
        )


class _Phases:
    """Seconds of loading by phase, each with the imports that it is the first to need."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self._begin = now - self._begin, now


def _rank_spec(args: EngineArgs, model: ModelConfig, path: Path, packed_folder: Path) -> RankSpec:
    """Return the specification of the one rank that loads the model."""
    device, dtype = _choose_device(args.device), args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if is_gpu(device) else "float32"
    if args.enforce_eager and device == "cpu":
        raise ConfigError("enforce_eager: graphs are captured on GPUs alone; leave it off on a CPU")
    return RankSpec(
        path,
        device,
        dtype,
        kernels=args.kernels,
        kv_cache_dtype=args.kv_cache_dtype,
        activations=args.activations,
        block_size=args.block_size,
        threads=args.threads or _threads_of_replica(args.replicas.most),
        memory_share=1 / args.replicas.most,
        packed_folder=packed_folder,
        memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        async_scheduling=args.async_scheduling,
        batch_invariant=args.batch_invariant,
        shared_prefix_decode=args.shared_prefix_decode,
        has_drafts=args.speculation() is not None,
        start_timeout=args.start_timeout,
        max_num_seqs=default_num_seqs(args, device),
        max_model_len=args.asked_model_len,
        max_num_batched_tokens=default_step_tokens(
            args, device, args.asked_model_len or model.max_position
        ),
    )


def _threads_of_replica(num_replicas: int) -> int | None:
    """Return the threads of each of several replicas; None, the default, for one engine."""
    return max(1, cpu().usable_cores // num_replicas) if num_replicas > 1 else None


def _open_ranks(
    args: EngineArgs, spec: RankSpec, model: ModelConfig, source: ModelSource
) -> OneRank:
    """Return the ranks of an engine: one, or those that share its layers, or have some each."""
    asked, num_stages = args.tensor_parallel_size, args.pipeline_parallel_size
    if asked == AUTO and spec.device != "cpu":
        asked = 1
    if args.enable_dp_attention:
        spec = replace(spec, by_sequences=True)
    place_experts = None
    if args.enable_expert_parallel:
        from octavo.serving.expert_files import placement_of

        place_experts = placement_of(args.expert_placement, model)
        if asked == 1:
            raise ConfigError(f"enable_expert_parallel: on {spec.device} a model is on one device")
    if asked == num_stages == 1:
        return OneRank(replace(spec, by_sequences=False))
    if num_stages > 1 and (speculation := args.speculation()) is not None:
        check_pipelined(speculation)
    if args.stage_command:
        from octavo.serving.remote_stages import open_remote_stages

        where = args.stage_command, args.stage_address
        return open_remote_stages(asked, *where, spec, model, args.model_impl, place_experts)
    from octavo.serving.rank_group import open_ranks

    return open_ranks(
        *(asked, num_stages, spec, model, args.model_impl, source.weights_bytes, place_experts)
    )


def _memory_info(capacity: Capacity, config: EngineConfig) -> dict[str, Any]:
    """Return the memory ledger of an engine on a GPU; empty on a CPU."""
    if capacity.ledger is None:
        return {}
    num_tokens = config.cache.num_blocks * config.cache.block_size
    return {"memory": capacity.ledger.as_json(num_tokens * capacity.kv_bytes_per_token)}


def _rank_limits(config: EngineConfig) -> RankLimits:
    scheduler = config.scheduler
    return RankLimits(
        num_blocks=config.cache.blocks_of_pool,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=scheduler.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        kv_groups=config.cache.groups,
        num_host_blocks=0 if config.cache.offload is None else config.cache.offload.num_places,
        num_state_slots=config.cache.num_state_slots,
    )


def _open_store(
    config: EngineConfig,
    ranks: OneRank,
    rank: Rank,
    model: ModelConfig,
    path: Path,
    transfer: Transfer | None,
) -> tuple[BlockStore | None, PeerStorage | None]:
    """Return the store of blocks that are evicted from a rank's pool, and what stands behind it if
    that is other replicas; None for none."""
    cache = config.cache
    if cache.offload is None:
        return None, None
    from octavo.offload.open_store import open_store
    from octavo.offload.restore_rule import predicted_rule

    content = _KVContent(config, ranks.spec, rank, model, path)

    def rule() -> RestoreRule:
        return predicted_rule(model, rank.probe(), config.scheduler, ranks.spec.num_ranks)

    # What stays in host memory is copied there and back by each rank alone.
    leaves = cache.offload.is_transferred or cache.offload.folder is not None
    rows = ranks.whole_rows(rank) if leaves else [memoryview(row) for row in rank.host_blocks]
    if transfer is not None:
        from octavo.core.host_kv_cache import HostKVCache

        peers = transfer.open(rows, content)
        host = HostKVCache(
            *(cache.num_blocks, len(rows), cache.block_size, len(rows[0])),
            *(peers, rule(), cache.windows),
        )
        return host, peers
    sizes = cache.num_blocks, cache.block_size, cache.windows
    return open_store(cache.offload, rows, *sizes, content.identity, rule), None


class _KVContent(NamedTuple):
    """The model and the software that KV depends on; see ``offload/open_peers.py``."""

    config: EngineConfig
    spec: RankSpec
    rank: Rank
    model: ModelConfig
    path: Path

    def identity(self) -> bytes:
        """Return a hash of all that KV on this machine's disk depends on, beside salt and
        tokens. OSError if a file of the model cannot be read."""
        from octavo.models.model_content import change_times, fingerprint

        of_model = fingerprint(self.path), change_times(self.path), self.model
        return hashlib.sha256(
            repr((__version__, self._kernels, self._kept, of_model)).encode()
        ).digest()

    def facts(self) -> Facts:
        from octavo.models.model_content import fingerprint

        # The name of a model is the user's, and so is its folder.
        of_model = replace(self.model, name="")
        return {
            "octavo": __version__,
            "byte order": sys.byteorder,
            "kernels": " ".join(map(str, self._kernels)),
            "KV": f"{self.config.cache.dtype}, {self.config.cache.block_size} tokens a block",
            "layout": f"{self.spec.part.size} ranks, {self.spec.stage.count} stages",
            "layers": _digest(f"{self.config.cache.groups} {of_model}"),
            **fingerprint(self.path),
        }

    @property
    def _kernels(self) -> tuple[object, ...]:
        spec = self.spec
        return self.rank.kernels, self.rank.isa, spec.device, spec.dtype, spec.activations

    @property
    def _kept(self) -> tuple[object, ...]:
        cache, layout = self.config.cache, (self.spec.part.size, self.spec.stage.count)
        return cache.dtype, cache.block_size, cache.groups, *(() if layout == (1, 1) else layout)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _choose_device(asked: str) -> str:
    """Return the device that a setting means. ConfigError if it is a GPU that cannot be used."""
    if asked == "cpu" or (asked == "auto" and not has_gpu_driver()):
        return "cpu"
    try:
        need_torch(f"device {asked}")
    except MissingPackageError as missing:
        if is_gpu(asked):
            raise
        _log.warning("the GPU of this machine is not used: %s", missing)
        return "cpu"
    from octavo.system.gpu_software import why_no_gpu

    reason = why_no_gpu("cuda" if asked == "auto" else asked)
    if reason is None:
        return "cuda" if asked == "auto" else asked
    if is_gpu(asked):
        raise ConfigError(f"device {asked}: {reason}")
    _log.warning("the GPU of this machine is not used: %s", reason)
    return "cpu"
