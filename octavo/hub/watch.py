"""Report the progress of a download by another program, by the bytes that are on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def watch(
    measure: Callable[[], int],
    total: int,
    progress: Callable[[int, int | None], None] | None,
    interval: float = 0.1,
) -> Iterator[None]:
    """Call ``progress(measure(), total)`` every ``interval`` seconds, from a thread of its own.

    The count stays below ``total`` and never goes back, for files may be compressed, copied or
    deleted while they are measured.
    """
    if progress is None:
        yield
        return
    done = threading.Event()

    def loop() -> None:
        seen = 0
        while not done.wait(interval):
            now = min(total, measure())
            if now > seen:
                seen = now
                progress(seen, total)

    thread = threading.Thread(target=loop, name="octavo-download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
