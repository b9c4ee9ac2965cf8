"""The adapters that callers name, and those of the engine that these are."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import InvalidRequestError
from octavo.lora.request import LoRARequest
from octavo.runtime.lora_pool import LoraPool, PooledLora


@dataclass(frozen=True, slots=True)
class ChosenLora:
    """The adapter of a request, as the caller named it and as the engine has it."""

    request: LoRARequest
    adapter: PooledLora


class EngineAdapters:
    """The adapters of one engine, for any thread.

    Args:
        pool: that holds them; None: the engine has none.
        why_none: the reason for that.
    """

    def __init__(self, pool: LoraPool | None, why_none: str = ""):
        self.pool = pool
        self._why_none = why_none
        self._lock = threading.Lock()
        self._digests: dict[LoRARequest, str] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, int]] | None:
        """(outputs, inputs) of what adapters may change, by name; None if there can be none."""
        return None if self.pool is None else dict(self.pool.model.shapes)

    @property
    def max_rank(self) -> int:
        return 0 if self.pool is None else self.pool.limits.max_rank

    @property
    def why_none(self) -> str:
        return self._why_none

    def choose(self, request: LoRARequest) -> ChosenLora:
        """Return the adapter of a caller. The first time its files are read and checked, in this
        thread.

        Raises:
            InvalidRequestError: the engine has no adapters.
            ModelError: it cannot be read, or is of another model.
        """
        if not isinstance(request, LoRARequest):
            raise InvalidRequestError(f"must be a LoRARequest, not {request!r:.80}", "lora_request")
        pool = self._needed_pool()
        with self._lock:
            digest = self._digests.get(request)
        if digest is not None:
            return ChosenLora(request, pool.adapter(request.lora_path, digest))
        from octavo.lora.peft_folder import digest_of  # only of those who have adapters

        digest = digest_of(request.lora_path)
        chosen = ChosenLora(request, pool.adapter(request.lora_path, digest))
        pool.load(chosen.adapter)
        with self._lock:
            self._digests[request] = digest
        return chosen

    def known(self, request: LoRARequest, digest: str) -> ChosenLora:
        """Return an adapter whose digest is known. It is read once a request needs it."""
        return ChosenLora(request, self._needed_pool().adapter(request.lora_path, digest))

    def load_all(self, requests: Iterable[LoRARequest]) -> None:
        """Read and check the adapters of a start. ModelError if one is wrong."""
        for request in requests:
            self.choose(request)

    def _needed_pool(self) -> LoraPool:
        if self.pool is None:
            raise InvalidRequestError(f"cannot be had here: {self._why_none}", "lora_request")
        return self.pool


def lora_requests_of(given: Any, count: int) -> Sequence[LoRARequest | None]:
    """Return the adapter of each of ``count`` prompts: one for all, or a list with one for each."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if not isinstance(given, Sequence) or len(given) != count:
        raise InvalidRequestError(
            f"must be a LoRARequest, or a list with one for each of {count} prompts", "lora_request"
        )
    for each in given:
        if each is not None and not isinstance(each, LoRARequest):
            raise InvalidRequestError(f"must be a LoRARequest, not {each!r:.80}", "lora_request")
    return given
