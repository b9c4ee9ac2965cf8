"""Messages of the user in ``octavo chat``.

On a terminal they are edited with prompt_toolkit: a pasted text is one message, Alt-Enter begins a
line within a message, the arrow keys go through earlier ones, and Tab completes commands. If stdin
is no terminal, or one that cannot move a cursor, each line is a message.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli import terminal
from octavo.hub import home

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.output import Output

PROMPT = "> "
_MOST_KEPT = 1 << 20  # bytes of history


def messages(complete: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Messages until the input ends, by Ctrl-D on a terminal.

    Args:
        complete: from the beginning of a message to what it may be completed to, as a whole.
    """
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    ask = _editor(complete) or _plain
    while True:
        try:
            yield ask()
        except EOFError:
            return
        except KeyboardInterrupt:  # at the prompt: a fresh one, as in a shell
            continue


def _plain() -> str:
    try:
        return input(PROMPT)
    except (EOFError, KeyboardInterrupt):
        sys.stdout.write("\n")
        raise


def _editor(complete: Callable[[str], Iterable[str]]) -> Callable[[], str] | None:
    """Asks with prompt_toolkit; None where the terminal, or this platform, is not up to it."""
    screen = next((each for each in (sys.stdout, sys.stderr) if each.isatty()), None)
    if screen is None or not terminal.can_move_cursor():
        return None
    try:
        session = _session(complete, screen)
    except (ImportError, OSError):
        return None
    return lambda: session.prompt(PROMPT)


def _session(complete: Callable[[str], Iterable[str]], screen: Any) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.shortcuts import CompleteStyle

    class Commands(Completer):
        def get_completions(self, document: Any, event: Any) -> Iterator[Completion]:
            said = document.text_before_cursor
            for whole in complete(said):
                yield Completion(whole, -len(said), display=whole)

    keys = KeyBindings()

    @keys.add("enter")
    @keys.add("c-j")  # what Enter becomes that was typed while an answer was written
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("escape", "c-j")
    def _(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    return PromptSession(
        history=_history(),
        multiline=True,  # Enter ends a message anyhow, but what is pasted may have lines
        prompt_continuation=" " * len(PROMPT),
        key_bindings=keys,
        completer=Commands(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        enable_history_search=False,
        output=_output(screen),
    )


def _output(screen: Any) -> Output | None:
    """The terminal, without asking it where its cursor is: some never answer, and it is at the
    beginning of a line."""
    if os.name == "nt":
        return None
    from prompt_toolkit.output.color_depth import ColorDepth
    from prompt_toolkit.output.vt100 import Vt100_Output

    output = Vt100_Output.from_pty(
        screen,
        term=os.environ.get("TERM"),
        default_color_depth=ColorDepth.DEPTH_1_BIT if terminal.is_plain() else None,
    )
    output.enable_cpr = False
    return output


def _history() -> FileHistory:
    """Return the earlier messages, kept for this user alone; a disk that is full is no error."""
    from prompt_toolkit.history import FileHistory

    class Kept(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            try:
                return list(super().load_history_strings())
            except OSError:
                return []

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    path = home() / "chat-history"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        _shorten(path)
    return Kept(str(path))


def _shorten(path: Path) -> None:
    """Leave the younger half of a long history; its entries begin with a line that has a time."""
    if path.stat().st_size <= _MOST_KEPT:
        return
    from octavo.base.files import replace_file

    younger = path.read_bytes()[-_MOST_KEPT // 2 :]
    replace_file(path, younger[younger.find(b"\n# ") + 1 :])
    path.chmod(0o600)
