"""What commands share in talking to a person: progress on stderr, data on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from octavo import hub

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(value: Any) -> None:
    """One JSON object on stdout. NaN and infinity, which JSON lacks, are a bug of ours."""
    json.dump(value, sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def format_bytes(count: float) -> str:
    for unit in UNITS:
        if count < 1024 or unit == UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def fetch(model: str, *, accept_terms: bool = False, verify: bool = False) -> Path:
    """``hub.pull`` with a progress bar on a terminal, and two quiet lines elsewhere."""
    with progress_bar("fetching", model) as progress:
        return hub.pull(model, accept_terms=accept_terms, verify=verify, progress=progress)


def resolve(model: str) -> Path:
    """``hub.resolve`` with progress; whatever command needs a model fetches it."""
    with progress_bar("fetching", model) as progress:
        return hub.resolve(model, progress=progress)


@contextmanager
def progress_bar(doing: str, model: str) -> Iterator[Callable[[int, int | None], None]]:
    """A callback that takes (bytes done, bytes in all).

    Nothing is shown before its first call: most models are here, and need no fetching.
    """
    if not sys.stderr.isatty():
        yield _quiet_progress(doing, model)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(f"{doing} {model}", total=None)

    def advance(done: int, total: int | None) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        bar.stop()


def _quiet_progress(doing: str, model: str) -> Callable[[int, int | None], None]:
    started = False

    def advance(done: int, total: int | None) -> None:
        nonlocal started
        if not started:
            started = True
            size = "" if total is None else f" ({format_bytes(total)})"
            say(f"{doing} {model}{size}")

    return advance


def spinner(message: str) -> AbstractContextManager[object]:
    """A spinner on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(message)
