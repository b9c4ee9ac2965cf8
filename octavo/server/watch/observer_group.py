"""`ObserverGroup`, an observer that passes everything on to several others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from octavo.server.engine.generation import EngineObserver

_log = logging.getLogger("octavo.server")

_EVENTS = tuple(name for name in vars(EngineObserver) if name.startswith("on_"))


class ObserverGroup(EngineObserver):
    """Passes everything on to several observers, in their order.

    An observer that raises must not disturb the server: its exception is logged, the first time
    that it fails at an event, and the others and the caller go on.
    """

    def __init__(self, *observers: EngineObserver):
        self._failed: set[Callable[..., None]] = set()
        for event in _EVENTS:
            # Only what is overridden is called: on_tokens comes thousands of times a second.
            listeners = [
                getattr(observer, event)
                for observer in observers
                if getattr(type(observer), event) is not getattr(EngineObserver, event)
            ]
            setattr(self, event, partial(self._tell, listeners))

    def _tell(self, listeners: Iterable[Callable[..., None]], *arguments: Any) -> None:
        for listener in listeners:
            try:
                listener(*arguments)
            except Exception:
                if listener not in self._failed:
                    self._failed.add(listener)
                    _log.exception("%s failed; not said again", listener.__qualname__)
