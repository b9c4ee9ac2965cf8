"""`TrialProcess`, which tries constraints in another process before they are compiled here.

What compiling may take is bounded by llguidance's own limits as far as these go. There are grammars
that overflow its stack, and some on which it spends minutes or gigabytes: they end a child of that
process, and the request that has one is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

from octavo.base.errors import ConstraintError, EngineError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.sources import GrammarSource
from octavo.grammars.trial_process import LENGTH, SECONDS
from octavo.grammars.vocabulary import GrammarVocabulary
from octavo.system.child_process import environment_without_keys

_log = logging.getLogger("octavo")

# Its start takes seconds for a large vocabulary, and a process that serves may be very busy.
_START_SECONDS = 60.0


class TrialProcess:
    """A process that is started for the first constraint and kept. Any threads may share it.

    Should it end, the next constraint starts another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the process, its number of questions, and its input
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._count = 0
        self._ready: Future[dict[str, Any]] = Future()

    def try_out(self, asked: StructuredOutputs, vocabulary: GrammarVocabulary) -> GrammarSource:
        """Return the grammar of what is asked for, which can be compiled within bounds.

        Raises:
            ConstraintError: it cannot.
            EngineError: the process has ended meanwhile.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start(vocabulary)
            ready = self._ready
        ready.result(_START_SECONDS)
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            self._count += 1
            number = self._count
            self._asked[number] = answer
            self._send({"number": number, "asked": asked.to_dict()})
        found = answer.result(_START_SECONDS + SECONDS)
        if "error" in found:
            message, field = found["error"], found["field"]
            if field is None:
                raise ConstraintError(
                    message, f"structured_outputs.{asked.constraint.kind}", found["reason"]
                )
            error = ConstraintError(message, None, found["reason"])
            error.field = field
            raise error
        return GrammarSource(found["text"], tuple(found["openings"]))

    def close(self) -> None:
        """End the process. May be repeated."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None

    def _start(self, vocabulary: GrammarVocabulary) -> None:
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "octavo.grammars.trial_process"],
            env=environment_without_keys(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        ready: Future[dict[str, Any]] = Future()
        asked: dict[int, Future[dict[str, Any]]] = {}
        self._ready, self._asked = ready, asked
        threading.Thread(
            target=self._take_answers, args=(process, ready, asked), daemon=True
        ).start()
        self._send(
            {
                "tokens": [text.decode("latin-1") for text in vocabulary.texts],
                "special_ids": dict(vocabulary.special_ids),
                "stop_token_ids": vocabulary.stop_token_ids,
            }
        )

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        body = json.dumps(message).encode()
        with contextlib.suppress(OSError):  # it has ended, and who reads its answers says so
            self._process.stdin.write(LENGTH.pack(len(body)) + body)
            self._process.stdin.flush()

    def _take_answers(
        self,
        process: subprocess.Popen[bytes],
        ready: Future[dict[str, Any]],
        asked: dict[int, Future[dict[str, Any]]],
    ) -> None:
        assert process.stdout is not None
        try:
            while head := process.stdout.read(LENGTH.size):
                message = json.loads(process.stdout.read(*LENGTH.unpack(head)))
                waiting = ready if not ready.done() else asked.pop(message.pop("number"))
                waiting.set_result(message)
        except (ValueError, OSError):
            _log.exception("the process that tries constraints sent what is no answer")
        finally:
            process.kill()
            error = EngineError("the process that tries constraints has ended")
            with self._lock:
                left = [ready, *asked.values()]
                asked.clear()
            for waiting in left:
                if not waiting.done():
                    waiting.set_exception(error)
