"""The executor of one device: a model's weights, its KV pool, and the runner of batches.

rank = Rank.load(spec)          loads weights and chooses kernels
rank.capacity                   the limits that an engine is sized by
rank.start(limits)              allocates the KV pool and memory for steps
rank.submit(batch)              starts a step, as an ``Executor`` of the core does
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from octavo.base.errors import ConfigError
from octavo.core.batch import Batch, StepOutput
from octavo.core.executor import Probe, StepHandle
from octavo.core.request import Request
from octavo.kernels.cpu.library import report_bus_errors
from octavo.models.config import ModelConfig
from octavo.runtime.backends import Backend, choose_backend
from octavo.runtime.capacity import (
    Capacity,
    RankLimits,
    RankSpec,
    capacity_of,
    cpu_kv_bytes,
    cpu_kv_most,
)
from octavo.runtime.forward import Forward
from octavo.runtime.hidden_states import StepFollower
from octavo.runtime.memory_ledger import KV, MemoryLedger, open_ledger
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.pooler import Pooler, create_pooler
from octavo.runtime.pooling_runner import PooledForward, PoolingRunner
from octavo.runtime.verification import Acceptance
from octavo.system import machine

if TYPE_CHECKING:
    import numpy as np

    from octavo.lora.limits import LoraLimits
    from octavo.models.checkpoint import Checkpoint
    from octavo.models.registry import CausalLM
    from octavo.runtime.lora_pool import LoraPool

Progress = Callable[[int, int], None]


class Closable(Protocol):
    """Something that ends with the engine."""

    def close(self) -> None: ...


class Rank:
    """A loaded model on one device; an ``Executor`` (``core/executor.py``) once it is started.

    ``kernels`` and ``isa`` name its backend; ``pool`` is the thread pool of native kernels.
    """

    def __init__(
        self,
        spec: RankSpec,
        model_config: ModelConfig,
        backend: Backend,
        pooler: Pooler | None = None,
    ):
        self.spec = spec
        self._pooler = pooler
        self.model_config = model_config
        self.weights_bytes = backend.weights_bytes
        self.kernels, self.isa, self.pool = backend.name, backend.isa, backend.pool
        self._backend: Backend | None = backend
        self._has_window_tables = backend.has_window_tables
        self._has_sinks, self._most_kv_layers = backend.has_sinks, backend.most_kv_layers
        self.runner: ModelRunner | PoolingRunner | None = None
        self._depths: set[int] = set()
        self._ledger: MemoryLedger | None = None  # of a GPU, once the KV pool exists
        self.followers: Closable | None = None  # processes of the other ranks
        self.lora_dtype = "auto"  # of adapters, as it was asked for

    @classmethod
    def load(
        cls,
        spec: RankSpec,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> Rank:
        """Load a model's weights.

        Args:
            checkpoint: the checkpoint of ``spec.path``, if it is open already.
            progress: called with (bytes loaded, bytes in all).

        Raises:
            ModelError: the model cannot be read. ConfigError: it does not fit the settings.
        """
        from octavo.models.checkpoint import open_checkpoint  # an engine folder has none of that
        from octavo.models.loader import load_checkpoint, load_without_head

        report_bus_errors()  # mapped files may be truncated while they are read
        checkpoint = checkpoint or open_checkpoint(spec.path)
        config = checkpoint.config().for_length(spec.max_model_len)
        if spec.pooling is None:
            model = load_checkpoint(checkpoint, config, progress=progress)
            return cls.of_model(spec, model, config, checkpoint.files, progress)
        model = load_without_head(checkpoint, config, spec.pooling.tensors, progress=progress)
        pooler = create_pooler(spec.pooling, checkpoint, config.hidden_size)
        backend = choose_backend(spec, model, config, checkpoint.files, progress)
        return cls(spec, config, backend, pooler)

    @classmethod
    def of_model(
        cls,
        spec: RankSpec,
        model: CausalLM,
        model_config: ModelConfig,
        files: Sequence[Path] = (),
        progress: Progress | None = None,
    ) -> Rank:
        """Create the rank of a loaded model; packed weights are kept beside its ``files``.
        ConfigError if ``spec`` asks for kernels that cannot run."""
        return cls(spec, model_config, choose_backend(spec, model, model_config, files, progress))

    @property
    def capacity(self) -> Capacity:
        """The capacity beside the loaded weights; on a GPU, valid before the start."""
        ledger = self._open_ledger()
        if ledger is None:
            free = self.free_bytes
            usual, most = cpu_kv_bytes(free), cpu_kv_most(free)
        else:
            usual = most = ledger.kv_bytes
        return capacity_of(
            self.spec,
            self.model_config,
            is_native=self.kernels == "native",
            kv_memory_bytes=usual,
            kv_memory_most=most,
            has_window_tables=self._has_window_tables,
            has_sinks=self._has_sinks,
            ledger=ledger,
            kv_layers=self._most_kv_layers,
        )

    @property
    def pooled_size(self) -> int | None:
        """Values of an embedding, or of scores; None if the model generates."""
        return None if self._pooler is None else self._pooler.size

    @property
    def free_bytes(self) -> int:
        """This rank's share of a CPU's free memory, beside what the start will allocate."""
        free = max(0, machine.memory().available - self._planned_bytes)
        return int(free * self.spec.memory_share)

    @property
    def _planned_bytes(self) -> int:
        """Bytes that the start will allocate beside the KV pool."""
        planned = self._backend.planned_memory() if self._backend is not None else ()
        return sum(line.num_bytes for line in planned)

    def _open_ledger(self) -> MemoryLedger | None:
        """Open the memory ledger of a GPU before the start; return None on a CPU."""
        if self.spec.device == "cpu":
            return None
        from octavo.runtime.device_memory import device_memory

        return open_ledger(
            device_memory(self.spec.device),
            self.spec.memory_utilization,
            self.weights_bytes,
            self.backend.planned_memory(),
        )

    def start(self, limits: RankLimits, acceptance: Acceptance | None = None) -> None:
        """Allocate the KV pool and the memory of steps up to ``limits``. To be called once.

        ``acceptance``: the rule that accepts drafted tokens; by default exact.

        ConfigError if a GPU's memory does not suffice.
        """
        assert self._backend is not None, "a rank is started once"
        with self._within_memory(limits):
            forward = self._backend.create_forward(limits, sorted(self._depths))
        if self._pooler is not None:
            self.runner = PoolingRunner(cast(PooledForward, forward), self._pooler)
        else:
            self.runner = ModelRunner(forward, acceptance)
        self._backend = None  # frees what only the start needs, such as unpacked weights

    @contextmanager
    def _within_memory(self, limits: RankLimits) -> Iterator[None]:
        """Check a GPU's KV pool against the ledger before its allocation, and explain errors."""
        if self.spec.device == "cpu":
            yield
            return
        from octavo.runtime.device_memory import explain_out_of_memory

        capacity = self.capacity
        ledger = capacity.ledger
        assert ledger is not None
        slot_bytes = capacity.kv_bytes_per_token
        if limits.kv_groups is not None:
            slot_bytes = limits.kv_groups.bytes_of_slot(slot_bytes)
        pool_bytes = limits.num_blocks * self.spec.block_size * slot_bytes
        ledger.check_pool(pool_bytes)
        with explain_out_of_memory(KV, lambda: ledger):
            yield
        self._ledger = ledger.with_pool(pool_bytes)

    @property
    def forward(self) -> Forward:
        """The forward pass of the model, once the rank is started."""
        return self._started.forward

    @property
    def backend(self) -> Backend:
        """The backend of the model, which draft heads share before the start."""
        assert self._backend is not None, "the backend is released by the start"
        return self._backend

    def keep_hidden_states(self, depths: Iterable[int]) -> None:
        """Have steps keep the hidden states of ``depths`` for a follower (``hidden_states.py``). To
        be called before the start."""
        assert self._backend is not None, "hidden states must be requested before the start"
        self._depths.update(depths)

    @property
    def kept_depths(self) -> Set[int]:
        """The depths whose hidden states steps keep."""
        return self._depths

    def follow(self, follower: StepFollower) -> None:
        """Show every step to ``follower`` after it has been run."""
        self._started.follower = follower

    def open_loras(self, limits: LoraLimits, dtype: str = "auto") -> LoraPool:
        """Return a pool of adapters that steps apply from then on; to be called once, after the
        start. ConfigError if there can be none here."""
        from octavo.base.model_files import begins_as_gguf, is_engine_folder

        path = self.spec.path
        if is_engine_folder(path):
            raise ConfigError(
                f"adapters: {path} is an engine folder; load the model that it was made from"
            )
        from octavo.lora.targets import AdaptableModel
        from octavo.runtime.lora_pool import LoraPool

        loras = self.forward.open_loras(dtype)
        self.lora_dtype = dtype
        is_gguf = path.is_file() and begins_as_gguf(path)
        return LoraPool(AdaptableModel(self.model_config, loras.shapes, is_gguf), loras, limits)

    def kv_capacity(self) -> int:
        return self.forward.kv_cache.num_blocks

    @property
    def host_blocks(self) -> np.ndarray:
        """The blocks of the host KV cache, once the rank is started; see ``KVBlocks``."""
        return self.forward.kv_cache.host_blocks

    # -- the executor, once it is started; see ``core/executor.py`` -----------------------------

    @property
    def depth(self) -> int:
        return self.forward.depth

    @property
    def feeds_tokens(self) -> bool:
        return self.forward.feeds_tokens

    def feeds(self, request: Request) -> bool:
        return self.forward.feeds(request)

    def run(self, batch: Batch) -> StepOutput:
        return self.submit(batch).result()

    def submit(self, batch: Batch) -> StepHandle:
        """Start a step. ConfigError, here or from the step's ``result``, if a GPU's memory does not
        suffice for it."""
        if self._ledger is None:
            return self._started.submit(batch)
        from octavo.runtime.device_memory import submit_explaining_memory

        return submit_explaining_memory(self._started.submit, batch, self._ledger)

    def probe(self) -> Probe:
        return self.forward.probe(self._started)

    def close(self) -> None:
        """Release the KV pool and, with the last reference to it, the model."""
        self.runner = self.pool = None
        if self.followers is not None:
            self.followers.close()
        if self.spec.device != "cpu":
            gc.collect()  # a forward refers to itself; its memory must be free at once

    @property
    def _started(self) -> ModelRunner | PoolingRunner:
        assert self.runner is not None, "start() comes first"
        return self.runner
