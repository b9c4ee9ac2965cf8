"""Progress of a download that somebody else does: look at how much there is on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.hub.store import tree_bytes


@contextmanager
def watch(
    folder: Path,
    start: int,
    stop: int,
    total: int,
    progress: Callable[[int, int | None], None] | None,
    interval: float = 0.1,
) -> Iterator[None]:
    """Call ``progress(start + bytes below folder, total)`` every ``interval`` seconds.

    The count is held within ``start`` … ``stop`` and never goes back, for the files may be
    compressed, copied or deleted while they are watched.
    """
    if progress is None:
        yield
        return
    done = threading.Event()

    def loop() -> None:
        seen = start
        while not done.wait(interval):
            now = min(stop, start + tree_bytes(folder))
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
