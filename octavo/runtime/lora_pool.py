"""Adapters in memory, under a bound: loaded when a request needs one, dropped when others do.

    files ── read, checked, packed for kernels (by a thread of its own) ── in memory ── dropped

The least recently used goes first, and none of a request that runs. One that was dropped is read
from its folder again; by then its files must be what they were.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.core.adapters import Adapters, AdapterState
from octavo.core.request import Adapter, Request
from octavo.lora.limits import LoraLimits, check_rank
from octavo.runtime.forward import Loras, LoraWeights

if TYPE_CHECKING:
    from octavo.lora.targets import AdaptableModel

_log = logging.getLogger("octavo")


class PooledLora:
    """An adapter that a pool has met: ``digest`` says its content, ``path`` where it lies.

    Its weights are None while it is not in memory, and its size until it was once. ``error`` is why
    it could not be loaded: a step that needs it raises that.
    """

    def __init__(self, path: str, digest: str):
        self.path, self.digest = path, digest
        self.weights: LoraWeights | None = None
        self.num_bytes: int | None = None
        self.error: Exception | None = None
        self.loading: Future[None] | None = None

    def needed(self) -> Any:
        """Return the weights for a step that begins."""
        if self.error is not None:
            raise self.error
        assert self.weights is not None, "the adapter of a running request was dropped"
        return self.weights


class LoraPool(Adapters):
    """The adapters of one model.

    ``ask`` and ``wait`` are for the thread of the engine, all else for any.

    Args:
        model: that adapters are for.
        loras: packs them for its forward pass.
    """

    def __init__(self, model: AdaptableModel, loras: Loras, limits: LoraLimits):
        self.limits = limits
        self.model, self._loras = model, loras
        self._lock = threading.Lock()
        self._known: dict[str, PooledLora] = {}  # by digest
        self._resident: OrderedDict[str, PooledLora] = OrderedDict()  # least recently used first
        self._in_use: set[str] = set()  # by requests that run, or are about to
        self._loader = ThreadPoolExecutor(1, "octavo-lora")
        self._has_news = False  # something was loaded since the engine asked last
        self.num_loads = self.num_dropped = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in memory."""
        with self._lock:
            return self._bytes_of(self._resident)

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    def adapter(self, path: str, digest: str) -> PooledLora:
        """Return the adapter with this content. It is not loaded here."""
        with self._lock:
            adapter = self._known.get(digest)
            if adapter is None:
                adapter = self._known[digest] = PooledLora(path, digest)
            elif adapter.error is not None:  # its folder may be whole by now
                adapter.path, adapter.error = path, None
            return adapter

    def load(self, adapter: PooledLora) -> None:
        """Load an adapter now, in this thread, and keep it if there is room.

        Raises:
            ModelError: it cannot be read, is of another model, or exceeds a limit.
        """
        if adapter.weights is None:
            weights = self._read(adapter)
            with self._lock:
                self._keep(adapter, weights)

    def ask(self, adapter: Adapter, running: Iterable[Request]) -> AdapterState:
        assert isinstance(adapter, PooledLora)
        with self._lock:
            self._has_news = False
            self._in_use = {each.adapter.digest for each in running if each.adapter is not None}
            others = self._in_use - {adapter.digest}
            if len(others) >= self.limits.max_loras:
                return AdapterState.FULL
            if adapter.weights is not None or adapter.error is not None:
                if adapter.digest in self._resident:
                    self._resident.move_to_end(adapter.digest)
                self._in_use.add(adapter.digest)
                return AdapterState.READY
            if adapter.loading is not None:
                return AdapterState.LOADING
            size = adapter.num_bytes or 0
            if others and self._bytes_of(others) + size > self.limits.max_bytes:
                return AdapterState.FULL
            adapter.loading = self._loader.submit(self._load, adapter)
            return AdapterState.LOADING

    def wait(self, seconds: float) -> bool:
        with self._lock:
            if self._has_news:
                return True
            loading = [each.loading for each in self._known.values() if each.loading is not None]
        wait(loading, timeout=seconds, return_when=FIRST_COMPLETED)
        return bool(loading)

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _load(self, adapter: PooledLora) -> None:
        weights, error = None, None
        try:
            weights = self._read(adapter)
        except Exception as problem:  # of this adapter alone, whatever it is
            _log.error("adapter %s: %s", adapter.path, problem)
            error = problem
        with self._lock:
            if weights is not None:
                self._keep(adapter, weights)
            adapter.error = error
            adapter.loading = None
            self._has_news = True

    def _read(self, adapter: PooledLora) -> LoraWeights:
        # Imported here: engines without adapters do without the files of models.
        from octavo.lora.peft_folder import PeftFolder, digest_of
        from octavo.lora.targets import changes_of

        if digest_of(adapter.path) != adapter.digest:
            raise ModelFileError(
                adapter.path, "the adapter's files were changed since it was loaded: load it anew"
            )
        changes = changes_of(PeftFolder(adapter.path), self.model)
        for name, change in changes.items():
            check_rank(adapter.path, name, change.rank, self.limits.max_rank)
        weights = self._loras.pack(changes)
        adapter.num_bytes = weights.num_bytes
        if weights.num_bytes > self.limits.max_bytes:
            raise UnsupportedModelError(
                f"{adapter.path}: the adapter takes {weights.num_bytes:,} bytes, and "
                f"lora_memory has {self.limits.max_bytes:,}: raise it"
            )
        return weights

    # -- with the lock -----------------------------------------------------------------------

    def _keep(self, adapter: PooledLora, weights: LoraWeights) -> None:
        """Take weights in, in place of those that were used least; not if all are in use."""
        if adapter.weights is not None:
            return
        while self._bytes_of(self._resident) + weights.num_bytes > self.limits.max_bytes:
            idle = next((digest for digest in self._resident if digest not in self._in_use), None)
            if idle is None:
                return
            self._drop(idle)
        adapter.weights = weights
        self._resident[adapter.digest] = adapter
        self.num_loads += 1

    def _drop(self, digest: str) -> None:
        adapter = self._resident.pop(digest, None)
        if adapter is not None:
            adapter.weights = None
            self.num_dropped += 1

    def _bytes_of(self, digests: Iterable[str]) -> int:
        sizes = (self._resident[each].num_bytes for each in digests if each in self._resident)
        return sum(size or 0 for size in sizes)
