"""What commands share in talking to a person: progress on stderr, data on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import hub

if TYPE_CHECKING:
    from rich.progress import Progress

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

# A model may write escape sequences, which could rename the window, or worse.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def print_json(value: Any) -> None:
    """One JSON object on stdout. NaN and infinity, which JSON lacks, are a bug of ours."""
    json.dump(value, sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def write_answer(text: str) -> None:
    """A piece of an answer to stdout, at once; without control characters on a terminal."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Plain columns on stdout: no box, so that cut and awk can read it too."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")


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
    bar = _Bar(f"{doing} {model}")
    try:
        yield bar.advance
    finally:
        bar.stop()


class _Bar:
    """A progress bar of bytes, made when there is something to show."""

    def __init__(self, description: str):
        self.description = description
        self.progress: Progress | None = None

    def advance(self, done: int, total: int | None) -> None:
        if self.progress is None:
            self.progress = self._start()
            self.task = self.progress.add_task(self.description)
        self.progress.update(self.task, completed=done, total=total)

    def stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()

    def _start(self) -> Progress:
        from rich import progress
        from rich.console import Console

        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        bar.start()
        return bar


@contextmanager
def request_progress() -> Iterator[Callable[[int, int], None]]:
    """A callback that takes (requests that have ended, requests in all). Shown on a terminal only,
    from its first call on."""
    if not sys.stderr.isatty():
        yield lambda ended, total: None
        return
    bar = _RequestBar()
    try:
        yield bar.show
    finally:
        bar.stop()


class _RequestBar:
    def __init__(self) -> None:
        self._progress: Progress | None = None

    def show(self, ended: int, total: int) -> None:
        if self._progress is None:
            self._progress = self._start()
            self._task = self._progress.add_task("", total=total)
        self._progress.update(self._task, completed=ended)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _start(self) -> Progress:
        from rich import progress
        from rich.console import Console

        columns = progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
        # It is drawn in a thread: seldom, for that thread takes time from what is measured.
        bar = progress.Progress(
            *columns, console=Console(stderr=True), transient=True, refresh_per_second=2
        )
        bar.start()
        return bar


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
