"""``octavo chat`` on a terminal, from the outside: a pseudo-terminal, keys, and what is on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# A model that says back what it was asked, as JSON, and counts to a million where asked to.
PROGRAM = """
import json, sys, time, types
import octavo
from octavo import cli
from octavo.cli import terminal
from octavo.core.sampling_params import SamplingParams

class Echo:
    has_chat_template = True
    def __init__(self, model, **kwargs): pass
    def __enter__(self): return self
    def __exit__(self, *exc_info): pass
    def default_sampling_params(self): return SamplingParams()
    def stream_chat(self, messages, params, **tools):
        asked = messages[-1]["content"]
        pieces = (f"{i} " for i in range(10**6)) if asked == "count" else [
            f"<{len(messages)}:{json.dumps(asked)}>"]
        for piece in pieces:
            time.sleep(0.002)
            parts = {"reasoning": "", "content": piece, "tool_calls": [], "finish_reason": None}
            yield types.SimpleNamespace(text=piece, output=None, **parts)

vars(octavo)["LLM"] = Echo
terminal.hub.resolve = lambda model, **kwargs: None
sys.exit(cli.main(["chat", "tiny"]))
"""
DEADLINE = 60.0
PROMPT = "(the prompt)"
PASTE = "\x1b[200~{}\x1b[201~"


class Screen:
    """The far end of a pseudo-terminal."""

    def __init__(self, home: Path, **settings: str):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        # The size of this terminal counts, not what another one has said of its own.
        around = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**around, "TERM": "xterm", "OCTAVO_HOME": str(home), **settings},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(theirs)
        self.ours = ours
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def wait_for(self, *words: str) -> None:
        """Until the words have been written, one after the other, since the last call."""
        deadline = time.monotonic() + DEADLINE
        # prompt_toolkit draws the space behind ">" by moving the cursor.
        parts = ["> |>\x08\x1b" if word == PROMPT else re.escape(word) for word in words]
        pattern = re.compile(".*?".join(f"(?:{part})" for part in parts), re.DOTALL)
        while (found := pattern.search(self.text)) is None:
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"{words} did not come: {self.text!r}")
        self.text = self.text[found.end() :]

    def end(self) -> int:
        """What is written to the end is in ``text``; returns the exit status."""
        while self._read(DEADLINE):
            pass
        return self.process.wait(DEADLINE)

    def _read(self, seconds: float) -> bool:
        if seconds <= 0 or not select.select([self.ours], [], [], seconds)[0]:
            return False
        try:
            piece = os.read(self.ours, 1 << 16)
        except OSError:  # nobody has it open any more
            return False
        self.text += piece.decode(errors="replace")
        return bool(piece)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Screen]]:
    screens: list[Screen] = []

    def start(**settings: str) -> Screen:
        screens.append(Screen(tmp_path, **settings))
        screens[-1].wait_for("Ctrl-D ends", PROMPT)
        return screens[-1]

    yield start
    for screen in screens:
        screen.process.kill()
        screen.process.wait()
        os.close(screen.ours)


def test_pasted_lines_are_one_message_and_enter_sends_it(start: Callable[..., Screen]) -> None:
    screen = start()
    screen.type(PASTE.format("one\rtwo\rthree\r") + "\r")
    screen.wait_for('<1:"one\\ntwo\\nthree">', PROMPT)
    screen.type("again\r")
    screen.wait_for('<3:"again">', PROMPT)
    screen.type("\x04")
    assert screen.end() == 0


def test_alt_enter_begins_another_line_and_lines_are_edited(start: Callable[..., Screen]) -> None:
    screen = start()
    screen.type("first\x1b\rsecondd\x7f\r")
    screen.wait_for('<1:"first\\nsecond">', PROMPT)
    screen.type("\x1b[A\x1b[A\r")  # up, and up: the first line of what was said before
    screen.wait_for('<3:"first\\nsecond">', PROMPT)
    screen.type("\x04")
    assert screen.end() == 0


def test_ctrl_c_clears_a_message_and_stops_an_answer(start: Callable[..., Screen]) -> None:
    screen = start()
    screen.type("never sent\x03")
    screen.wait_for(PROMPT)
    screen.type("count\r")
    screen.wait_for("0 1 2 3")
    screen.type("\x03")
    screen.wait_for(PROMPT)
    screen.type("still there\r")
    screen.wait_for('<3:"still there">', PROMPT)
    screen.type("/exit\r")
    assert screen.end() == 0


def test_what_is_typed_during_an_answer_is_sent_after_it(start: Callable[..., Screen]) -> None:
    screen = start()
    screen.type("count\r")
    screen.wait_for("0 1 2 3")
    screen.type("next\r")  # the terminal itself has lines now: a newline comes of it
    screen.process.send_signal(signal.SIGINT)
    screen.wait_for('<3:"next">', PROMPT)


def test_tab_completes_commands_and_settings(start: Callable[..., Screen]) -> None:
    screen = start()
    screen.type("/sa\t")
    screen.wait_for("/save")
    screen.type("\x03")
    screen.wait_for(PROMPT)
    screen.type("/set temper\t 0.5\r")
    screen.wait_for("temperature = 0.5", PROMPT)
    screen.type("/sytsem\r")
    screen.wait_for("no command /sytsem; did you mean /system?")


def test_history_is_kept_for_this_user_alone(start: Callable[..., Screen], tmp_path: Path) -> None:
    screen = start()
    screen.type("remember\r")
    screen.wait_for('<1:"remember">', PROMPT)
    screen.type("\x04")
    assert screen.end() == 0
    assert (tmp_path / "chat-history").stat().st_mode & 0o777 == 0o600
    screen = start()
    screen.type("\x1b[A\r")
    screen.wait_for('<1:"remember">')


def test_a_home_that_cannot_be_written_is_no_trouble(
    start: Callable[..., Screen], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    screen = start(OCTAVO_HOME=str(tmp_path / "file"))
    screen.type("hello\r")
    screen.wait_for('<1:"hello">', PROMPT)


@pytest.mark.parametrize("term", ["dumb", "unknown", ""])
def test_a_terminal_that_only_takes_text(start: Callable[..., Screen], term: str) -> None:
    screen = start(TERM=term)
    screen.type("hello\n")
    screen.wait_for('<1:"hello">', PROMPT)
    screen.type("count\n")
    screen.wait_for("0 1 2 3")
    screen.type("\x03")
    screen.wait_for(PROMPT)
    screen.type("/exit\n")
    assert screen.end() == 0 and "\x1b" not in screen.text


def test_without_prompt_toolkit_lines_are_read_as_they_are(
    start: Callable[..., Screen], tmp_path: Path
) -> None:
    (tmp_path / "prompt_toolkit.py").write_text("raise ImportError")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    screen = start(PYTHONPATH=path)
    screen.type("hello\n")
    screen.wait_for('<1:"hello">', PROMPT)


def test_answers_end_their_lines_between_words(start: Callable[..., Screen]) -> None:
    screen = start()
    words = " ".join(f"word{i}" for i in range(30))
    screen.type(words + "\r")
    screen.wait_for('<1:"word0 ')
    screen.wait_for(PROMPT)
    screen.type("count\r")
    screen.wait_for("0 1 2 3")
    screen.wait_for("191\r\n192 ")  # at 60 columns
    screen.type("\x03")
