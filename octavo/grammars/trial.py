"""`TrialProcess`, which tries constraints in another process before they are compiled here.

What compiling may take is bounded by llguidance's own limits as far as these go. There are grammars
that overflow its stack, and some on which it spends minutes or gigabytes: they end a child of that
process, and the request that has one is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from array import array
from concurrent.futures import Future
from typing import Any

from octavo.base.errors import (
    ConstraintError,
    EngineError,
    QueueFullError,
)
from octavo.core.limits import QueueLimits, RequestWork, WorkBudget
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.trial_process import LENGTH
from octavo.grammars.tried_grammar import TriedGrammar
from octavo.grammars.vocabulary import GrammarVocabulary
from octavo.system.child_process import environment_without_keys

_log = logging.getLogger("octavo")

# Constraints that may be tried, or wait for that; one that is large counts several times. With
# several tenants each has its share.
_MAX_WAITING = 256
_CHARS = 16 << 10  # for which one counts once

_RETRY_SECONDS = 1.0


class TrialProcess:
    """A process that is started for the first constraint and kept. Any threads may share it.

    Should it end, the next constraint starts another one.

    Args:
        forks: each constraint has a child of its own, and so bounds of memory, too.
    """

    def __init__(self, *, forks: bool = hasattr(os, "fork")):
        self._forks = forks
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._count = 0
        self._budget = WorkBudget(QueueLimits(_MAX_WAITING))

    def ask(
        self, asked: StructuredOutputs, vocabulary: GrammarVocabulary, tenant: str = ""
    ) -> Future[TriedGrammar]:
        """Have a constraint tried.

        Returns:
            Its grammar; or a ConstraintError if it cannot be compiled within bounds, a
            QueueFullError if others were tried until it was too late, an EngineError if the process
            has ended meanwhile.

        Raises:
            QueueFullError: too many wait already.
        """
        work = RequestWork(1 + len(asked.constraint.text) // _CHARS, 0)
        answer: Future[TriedGrammar] = Future()
        with self._lock:
            try:
                self._budget.check(tenant, work)
            except QueueFullError:
                message = "too many constraints wait for being compiled already"
                raise QueueFullError(message, _RETRY_SECONDS) from None
            if self._running is None or self._running.has_ended:
                self._running = _Running(vocabulary, forks=self._forks)
                weakref.finalize(self, self._running.kill)
            self._budget.take(tenant, work)
            self._count += 1
            question = {"number": self._count, "asked": asked.to_dict(), "tenant": tenant}
            running = self._running
            running.expect(self._count, asked.constraint.kind, answer)
        answer.add_done_callback(lambda _: self._give_back(tenant, work))
        running.send(question)
        return answer

    def _give_back(self, tenant: str, work: RequestWork) -> None:
        with self._lock:
            self._budget.give_back(tenant, work)

    def close(self) -> None:
        """End the process. May be repeated."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.kill()
            running.join()


class _Running:
    """A process that runs, and who waits for its answers."""

    def __init__(self, vocabulary: GrammarVocabulary, *, forks: bool):
        self._forks = forks
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.grammars.trial_process"],
            env=environment_without_keys(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._is_over = False
        self._waiting: dict[int, tuple[str, Future[TriedGrammar]]] = {}  # by number
        self._reader = threading.Thread(target=self._take_answers, daemon=True)
        self._reader.start()
        self.send(
            {
                "special_ids": dict(vocabulary.special_ids),
                "stop_token_ids": vocabulary.stop_token_ids,
                "forks": forks,
            }
        )
        self._send_bytes(array("I", map(len, vocabulary.texts)).tobytes())
        self._send_bytes(b"".join(vocabulary.texts))

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def expect(self, number: int, kind: str, answer: Future[TriedGrammar]) -> None:
        """Set the result of ``answer`` when that of a number comes, or the process has ended."""
        with self._lock:
            self._waiting[number] = kind, answer
            is_over = self._is_over
        if is_over:
            self._fail_all()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. One that has ended does not hear it, and its reader says so."""
        self._send_bytes(json.dumps(message).encode())

    def _send_bytes(self, body: bytes) -> None:
        assert self._process.stdin is not None
        with self._sending, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(LENGTH.pack(len(body)) + body)
            self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> None:
        """Wait until those who wait have been told that it has ended."""
        self._reader.join()

    def _take_answers(self) -> None:
        assert self._process.stdout is not None and self._process.stdin is not None
        try:
            while head := self._process.stdout.read(LENGTH.size):
                message = json.loads(self._process.stdout.read(*LENGTH.unpack(head)))
                _set(*self._who_waits(message["number"]), message)
        except (ValueError, OSError):
            _log.exception("the process that tries constraints sent what is no answer")
        finally:
            self._process.kill()
            self._process.wait()
            with self._sending, contextlib.suppress(OSError):  # what was not sent goes nowhere
                self._process.stdin.close()
            self._process.stdout.close()
            self._fail_all()

    def _who_waits(self, number: int) -> tuple[str, Future[TriedGrammar]]:
        with self._lock:
            return self._waiting.pop(number)

    def _fail_all(self) -> None:
        """Tell those who wait that the process has ended."""
        with self._lock:
            waiting, self._waiting, self._is_over = self._waiting, {}, True
        for number in sorted(waiting):
            kind, answer = waiting[number]
            error: Exception = EngineError("the process that tries constraints has ended")
            if not self._forks and number == min(waiting):  # it was at work on this one
                message = "is too complex: compiling it takes too long, or too deep a stack"
                error = ConstraintError(message, f"structured_outputs.{kind}", "too_complex")
            elif not self._forks:
                error = _busy()
            answer.set_exception(error)


def _busy() -> QueueFullError:
    return QueueFullError(
        "there was no time to compile the constraint, since others came before", _RETRY_SECONDS
    )


def _set(kind: str, answer: Future[TriedGrammar], message: dict[str, Any]) -> None:
    """Set the result of a message."""
    if "busy" in message:
        answer.set_exception(_busy())
    elif "error" not in message:
        answer.set_result(TriedGrammar.of(message["grammar"]))
    elif message["field"] is None:
        field = f"structured_outputs.{kind}"
        answer.set_exception(ConstraintError(message["error"], field, message["reason"]))
    else:
        error = ConstraintError(message["error"], None, message["reason"])
        error.field = message["field"]
        answer.set_exception(error)
