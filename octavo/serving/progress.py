"""Bars of finished prompts, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

# Whether a bar is shown, or what makes one: called as ``tqdm`` is, with ``total`` and ``desc``.
UseTqdm = bool | Callable[..., Any]


class Bar(Protocol):
    """What is told of progress."""

    def update(self, n: int) -> Any: ...

    def close(self) -> Any: ...


def open_bar(use_tqdm: UseTqdm, total: int) -> Bar | None:
    """The bar of a call with so many prompts, if one is to be shown."""
    if not use_tqdm:
        return None
    if use_tqdm is True:
        return _RichBar(total)
    bar: Bar = use_tqdm(total=total, desc="prompts")
    return bar


class _RichBar:
    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("prompts", total=total)
        self._progress.start()
        self._last_refresh = 0.0
        self._num_done = 0

    def update(self, n: int) -> None:
        self._num_done += n
        now = time.monotonic()
        if now - self._last_refresh > 0.1:
            self._progress.update(self._task, completed=self._num_done)
            self._last_refresh = now

    def close(self) -> None:
        self._progress.stop()
