"""Output of commands to people: progress on stderr, data on stdout."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from octavo import hub
from octavo.cli.wrapping import WordWrap

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

# A model may write escape sequences, which could rename the window, or worse.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def print_json(value: Any) -> None:
    """Write one JSON object to stdout. NaN and infinity, which JSON lacks, are a bug of ours."""
    json.dump(value, sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


class AnswerWriter:
    """Writes an answer to a file, stdout if none is given, as it comes. On a terminal without
    control characters, and with lines that end between words."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stdout if file is None else file
        self._wrap = WordWrap(_columns) if self._file.isatty() else None

    def write(self, text: str) -> None:
        if self._wrap is not None:
            text = self._wrap.feed(text.translate(_CONTROLS))
        if text:
            self._file.write(text)
            self._file.flush()

    def end(self) -> None:
        """Write the text that was held back, and the end of the line."""
        self._file.write("\n" if self._wrap is None else self._wrap.end() + "\n")
        self._file.flush()


def _columns() -> int:
    return max(shutil.get_terminal_size().columns, 1)


def write_answer(text: str) -> None:
    """Write a whole answer, or several, to stdout."""
    writer = AnswerWriter()
    writer.write(text.removesuffix("\n"))
    writer.end()


def can_move_cursor() -> bool:
    """Whether a terminal takes more than text, by what it says of itself."""
    kind = os.environ.get("TERM") or ("dumb" if os.name == "posix" else "")
    return kind not in ("dumb", "unknown")


def is_plain() -> bool:
    """Whether a terminal is to get no colours and nothing that moves: https://no-color.org, and
    terminals that can do neither."""
    return bool(os.environ.get("NO_COLOR")) or not can_move_cursor()


def can_animate() -> bool:
    """Whether stderr is a terminal on which a line may be drawn again and again."""
    return sys.stderr.isatty() and not is_plain()


def console(*, stderr: bool = False, width: int | None = None, wraps: bool = False) -> Console:
    """Make a console for tables and styled lines; lines keep their length unless ``wraps``.

    It writes no escape sequence if ``is_plain``, and raises BrokenPipeError, as print does, if the
    reader has gone.
    """
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the program with status 1

    return _Console(
        stderr=stderr,
        width=width,
        highlight=False,
        soft_wrap=not wraps,
        color_system=None if is_plain() else "auto",
        force_terminal=False if is_plain() else None,
    )


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
def bar(
    columns: Callable[[Any], tuple[ProgressColumn, ...]],
    *,
    transient: bool = True,
    refresh_per_second: float = 10,
) -> Iterator[Callable[..., None]]:
    """A callback that draws a progress bar on stderr, from its first call on; one that does nothing
    where stderr is no terminal. It takes ``completed``, ``total`` and ``description``.

    Args:
        columns: makes the columns, out of the module ``rich.progress``.
        transient: the bar goes away at the end.
    """
    drawn: Progress | None = None

    def update(**shown: Any) -> None:
        nonlocal drawn
        if not can_animate():
            return
        if drawn is None:
            from rich import progress

            drawn = progress.Progress(
                *columns(progress),
                console=console(stderr=True),
                transient=transient,
                refresh_per_second=refresh_per_second,
            )
            drawn.start()
            drawn.add_task("", total=None)
        drawn.update(drawn.task_ids[0], **shown)

    try:
        yield update
    finally:
        if drawn is not None:
            drawn.stop()


@contextmanager
def progress_bar(doing: str, model: str) -> Iterator[Callable[[int, int | None], None]]:
    """A callback that takes (bytes done, bytes in all).

    Nothing is shown before its first call: most models are here, and need no fetching.
    """
    if not can_animate():
        yield _quiet_progress(doing, model)
        return
    with bar(
        lambda rich: (
            *(rich.TextColumn("{task.description}"), rich.BarColumn()),
            *(rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()),
            rich.TimeRemainingColumn(),
        )
    ) as update:
        shown = f"{doing} {model}"
        yield lambda done, total: update(completed=done, total=total, description=shown)


@contextmanager
def request_progress() -> Iterator[Callable[[int, int], None]]:
    """A callback that takes (requests that have ended, requests in all). Shown on a terminal only,
    from its first call on."""
    with bar(
        lambda rich: (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn()),
        # It is drawn in a thread: seldom, for that thread takes time from what is measured.
        refresh_per_second=2,
    ) as update:
        yield lambda ended, total: update(completed=ended, total=total)


@contextmanager
def progress_over(doing: str, total: int) -> Iterator[Callable[[], None]]:
    """A callback for each of ``total`` parts that is done. Shown on a terminal only."""
    count = itertools.count(1)
    with bar(
        lambda rich: (rich.TextColumn(doing), rich.BarColumn(), rich.MofNCompleteColumn())
    ) as update:
        update(completed=0, total=total)
        yield lambda: update(completed=next(count))


class LineProgress:
    """Progress as lines, for logs: none in the first seconds, and then one now and then."""

    def __init__(self, every: float = 15.0, now: Callable[[], float] = time.monotonic):
        self._every, self._now = every, now
        self._last = now()

    def update(self, what: str, done: int, total: int) -> None:
        now = self._now()
        if now - self._last >= self._every:
            self._last = now
            say(f"{what}: {done:,} of {total:,}")


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
    if not can_animate():
        return nullcontext()
    return console(stderr=True).status(message)
