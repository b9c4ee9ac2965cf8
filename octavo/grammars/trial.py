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
from array import array
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from octavo.base.errors import ConstraintError, EngineError, EngineUnavailableError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.sources import GrammarSource
from octavo.grammars.trial_process import LENGTH
from octavo.grammars.vocabulary import GrammarVocabulary
from octavo.system.child_process import environment_without_keys

_log = logging.getLogger("octavo")

# Its start takes seconds for a large vocabulary, and more on a machine that is busy.
_PATIENCE = 60.0


class TrialProcess:
    """A process that is started for the first constraint and kept. Any threads may share it.

    Should it end, the next constraint starts another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the process, its number of questions, and its input
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None  # of its answers
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._count = 0

    def try_out(self, asked: StructuredOutputs, vocabulary: GrammarVocabulary) -> GrammarSource:
        """Return the grammar of what is asked for, which can be compiled within bounds.

        Raises:
            ConstraintError: it cannot.
            EngineUnavailableError: the machine is too busy to tell.
            EngineError: the process has ended meanwhile.
        """
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start(vocabulary)
            self._count += 1
            self._asked[self._count] = answer
            self._send({"number": self._count, "asked": asked.to_dict()})
        found = answer.result(_PATIENCE)
        if "late" in found:
            raise EngineUnavailableError(
                "the constraint could not be compiled in time, since other programs have the "
                "processors",
                retry_after=1.0,
            )
        if "error" in found:
            message, field = found["error"], found["field"]
            if field is None:
                raise ConstraintError(
                    message, f"structured_outputs.{asked.constraint.kind}", found["reason"]
                )
            error = ConstraintError(message, None, found["reason"])
            error.field = field
            raise error
        source = GrammarSource(**found["source"])
        return replace(source, openings=tuple(source.openings))

    def close(self) -> None:
        """End the process. May be repeated."""
        with self._lock:
            process, self._process = self._process, None
            reader = self._reader
        if process is not None and reader is not None:
            process.kill()
            reader.join()

    def _start(self, vocabulary: GrammarVocabulary) -> None:
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "octavo.grammars.trial_process"],
            env=environment_without_keys(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        asked: dict[int, Future[dict[str, Any]]] = {}
        self._asked = asked
        self._reader = threading.Thread(
            target=self._take_answers, args=(process, asked), daemon=True
        )
        self._reader.start()
        self._send(
            {
                "special_ids": dict(vocabulary.special_ids),
                "stop_token_ids": vocabulary.stop_token_ids,
            }
        )
        self._send_bytes(array("I", map(len, vocabulary.texts)).tobytes())
        self._send_bytes(b"".join(vocabulary.texts))

    def _send(self, message: dict[str, Any]) -> None:
        self._send_bytes(json.dumps(message).encode())

    def _send_bytes(self, body: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and who reads its answers says so
            self._process.stdin.write(LENGTH.pack(len(body)) + body)
            self._process.stdin.flush()

    def _take_answers(
        self,
        process: subprocess.Popen[bytes],
        asked: dict[int, Future[dict[str, Any]]],
    ) -> None:
        assert process.stdout is not None
        try:
            while head := process.stdout.read(LENGTH.size):
                message = json.loads(process.stdout.read(*LENGTH.unpack(head)))
                asked.pop(message.pop("number")).set_result(message)
        except (ValueError, OSError):
            _log.exception("the process that tries constraints sent what is no answer")
        finally:
            process.kill()
            process.wait()
            with self._lock, contextlib.suppress(OSError):  # what was not sent goes nowhere
                assert process.stdin is not None
                process.stdin.close()
            process.stdout.close()
            error = EngineError("the process that tries constraints has ended")
            with self._lock:
                left = list(asked.values())
            for waiting in left:
                waiting.set_exception(error)
