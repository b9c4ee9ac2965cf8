"""The process in which constraints are tried, each in a child of its own that has bounds.

    python -m octavo.grammars.trial_process

It reads the vocabulary first, which its children share, and then questions, until its input ends.
It does nothing with a question but pass it to a child when its turn comes (`TrialTurns`), so that
none can harm it. Where there is no ``fork``, as on Windows, it tries one after the other itself,
and ends with the first that takes too long, or too deep a stack; memory has no bound there.

Each message comes after its length in four bytes, and is JSON, but for the second and the third:
``{special_ids, stop_token_ids, forks}``, the lengths of all tokens as 32-bit integers, and their
bytes. Then come ``{number, asked, tenant}``, answered in any order by ``{number, grammar}`` with
the fields of a `TriedGrammar`, by ``{number, error, field, reason}``, or by ``{number, busy}``
where there was no time to tell.
"""

from __future__ import annotations

import gc
import json
import math
import os
import selectors
import signal
import struct
import sys
import threading
import time
from array import array
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from octavo.grammars.trial_child import MAX_BYTES, STACK_BYTES, answer, bound
from octavo.grammars.trial_turns import (
    LONG_CPU_SECONDS,
    SECONDS,
    Trial,
    TrialTurns,
    has_had_enough,
)
from octavo.grammars.vocabulary import GrammarVocabulary

LENGTH = struct.Struct(">I")

# The engine goes first, but short trials must not starve, since good constraints need no other.
_NICENESS = 5
_NICENESS_OF_LONG = 10
_LOOK_SECONDS = 0.05  # between two looks at who is late


@dataclass(slots=True)
class _Child:
    """A trial that runs."""

    trial: Trial
    pid: int
    answer: bytes = b""


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    questions = sys.stdin.fileno()
    first, lengths, texts = json.loads(_read(questions)), _read(questions), _read(questions)
    ends = [0, *accumulate(array("I", lengths))]
    vocabulary = GrammarVocabulary(
        [texts[i:k] for i, k in pairwise(ends)], first["special_ids"], first["stop_token_ids"]
    )
    vocabulary.make_trie()
    if not first["forks"]:
        _answer_in_turn(questions, vocabulary)
    gc.collect()
    gc.freeze()  # children share the pages of what is not touched
    _Service(questions, vocabulary).run()
    return 0


def _read(fd: int) -> bytes:
    """Return the next message; ends the process if there is none."""
    data = bytearray()
    size = LENGTH.size
    while len(data) < size:
        if not (more := os.read(fd, min(size - len(data), 1 << 20))):
            raise SystemExit
        data += more
        if len(data) == LENGTH.size:
            size += LENGTH.unpack(data)[0]
    return bytes(data[LENGTH.size :])


def _write(message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    sys.stdout.buffer.write(LENGTH.pack(len(body)) + body)
    sys.stdout.buffer.flush()


# -- without fork --------------------------------------------------------------------------------


def _answer_in_turn(questions: int, vocabulary: GrammarVocabulary) -> None:
    """Answer questions here, until there are no more or one of them ends the process."""
    threading.stack_size(STACK_BYTES)
    while True:
        question = json.loads(_read(questions))
        end = threading.Timer(SECONDS, os._exit, [1])
        end.daemon = True
        end.start()
        thread = threading.Thread(target=_write_answer, args=(question, vocabulary))
        thread.start()
        thread.join()
        end.cancel()


def _write_answer(question: dict[str, Any], vocabulary: GrammarVocabulary) -> None:
    _write({"number": question["number"], **answer(question["asked"], vocabulary)})


# -- with children -------------------------------------------------------------------------------


class _Service:
    """Answers questions through children."""

    def __init__(self, questions: int, vocabulary: GrammarVocabulary):
        self._questions, self._vocabulary = questions, vocabulary
        self._received = bytearray()
        self._turns = TrialTurns()
        self._children: dict[int, _Child] = {}  # by where their answers can be read
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Answer questions until there are no more."""
        self._selector.register(self._questions, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(_LOOK_SECONDS if self._children else None):
                data = os.read(key.fd, 1 << 16)
                if key.fd == self._questions:
                    if not data:
                        return
                    self._take(data)
                elif data:
                    self._children[key.fd].answer += data
                else:
                    self._finish(key.fd, is_late=False)
            self._end_late_ones()
            while (trial := self._turns.next()) is not None:
                self._start(trial)

    def _take(self, data: bytes) -> None:
        """Queue the questions that are whole by now."""
        received = self._received
        received += data
        while len(received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(received)[0]
            if len(received) < end:
                break
            message = json.loads(received[LENGTH.size : end])
            self._turns.add(Trial(**message, came_at=time.monotonic()))
            del received[:end]

    def _start(self, trial: Trial) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.close(reading)
                _work(trial, self._vocabulary, writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        self._children[reading] = _Child(trial, pid)
        self._selector.register(reading, selectors.EVENT_READ)

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for trial in self._turns.overdue(now):
            _write({"number": trial.number, "busy": True})
        for fd, child in list(self._children.items()):
            if self._turns.is_over(child.trial, _cpu_seconds(child.pid), now):
                os.kill(child.pid, signal.SIGKILL)
                self._finish(fd, is_late=True)

    def _finish(self, fd: int, *, is_late: bool) -> None:
        child = self._children.pop(fd)
        number = child.trial.number
        self._selector.unregister(fd)
        os.close(fd)
        _, status, used = os.wait4(child.pid, 0)
        self._turns.end(child.trial)
        is_out_of_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        if not is_late and status == 0 and child.answer:
            _write({"number": number, **json.loads(child.answer)})
        elif is_late and not has_had_enough(used.ru_utime + used.ru_stime):
            _write({"number": number, "busy": True})
        elif not (is_out_of_time and self._turns.is_to_go_on(child.trial)):
            why = _cause(is_late=is_late, is_out_of_time=is_out_of_time)
            _write({"number": number, "error": why, "reason": "too_complex", "field": None})


def _cpu_seconds(pid: int) -> float:
    """Return how long a process has run."""
    if sys.platform != "linux":
        return math.inf
    return time.clock_gettime(~pid << 3 | 2)  # its clock, as clock_getcpuclockid(3) names it


def _cause(*, is_late: bool, is_out_of_time: bool) -> str:
    if is_late:
        what = f"{SECONDS:g} s"
    elif is_out_of_time:
        what = f"{LONG_CPU_SECONDS:g} s of a processor"
    else:
        what = f"{MAX_BYTES >> 20} MiB, or too deep a stack"
    return f"is too complex: compiling it takes more than {what}"


def _work(trial: Trial, vocabulary: GrammarVocabulary, writing: int) -> None:
    """Answer a question in this process, within its bounds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # how it ends is no news
    bound(trial.cpu_seconds)
    if trial.is_long:
        os.nice(_NICENESS_OF_LONG - _NICENESS)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_send_answer, args=(trial, vocabulary, writing))
    thread.start()
    thread.join()


def _send_answer(trial: Trial, vocabulary: GrammarVocabulary, writing: int) -> None:
    data = json.dumps(answer(trial.asked, vocabulary)).encode()
    while data:
        data = data[os.write(writing, data) :]


if __name__ == "__main__":
    sys.exit(main())
