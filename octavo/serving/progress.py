"""Progress bars of finished prompts, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

# True to show a bar, or a function that makes one: called like ``tqdm``, with ``total`` and
# ``desc``.
UseTqdm = bool | Callable[..., Any]


class Bar(Protocol):
    """A progress bar, as ``tqdm`` is called."""

    def update(self, n: int) -> Any: ...

    def close(self) -> Any: ...


def open_bar(use_tqdm: UseTqdm, total: int) -> Bar | None:
    """Return a bar for ``total`` prompts, if one is to be shown."""
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
