"""Adapters of requests, as the scheduler asks for them: weights that come and go.

A request with an adapter runs once its weights are in memory. While they are loaded it is passed
over, and others go on. A step has a bounded number of adapters: a request that would bring one too
many waits, and so do those with adapters that come after it, so that it is not passed over for
ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from octavo.core.request import Adapter, Request


class AdapterState(Enum):
    """The state of an adapter for which a request waits."""

    READY = "ready"
    LOADING = "loading"
    FULL = "full"  # there is no room for it beside those of the requests that run


class Adapters(Protocol):
    """The owner of adapters' weights; by default one of a model that has none."""

    def ask(self, adapter: Adapter, running: Iterable[Request]) -> AdapterState:
        """Return whether a request with an adapter can run beside others, and begin to load it
        where it is not there. One that is READY stays until the next question."""
        raise AssertionError("a request with an adapter, where there are none")

    def wait(self, seconds: float) -> bool:
        """Wait until something has been loaded, or for a time. Returns False if nothing is being
        loaded."""
        return False


class NoAdapters(Adapters):
    """No adapters: requests have none."""


def salt_of(cache_salt: str, adapter: str | None) -> str:
    """Return the salt of a request whose adapter has this digest, None for the model alone: by it
    caches, stores and routers tell KV of different weights apart."""
    escaped = cache_salt.replace("\1", "\1\1")  # so that no salt of a client begins like the other
    return escaped if adapter is None else f"\1lora {adapter}\0{escaped}"
