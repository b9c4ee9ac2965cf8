"""The process in which constraints are tried, each in a child of its own that has bounds.

    python -m octavo.grammars.trial_process

It reads the vocabulary first, which its children share, and then one question after the other,
until its input ends. It does nothing with a question but pass it to a child, so that none can harm
it.

Each message comes after its length in four bytes, and is JSON, but for the second and the third:
``{special_ids, stop_token_ids}``, the lengths of all tokens as 32-bit integers, and their bytes.
Then there are ``{number, asked}``, answered in any order by ``{number, source}`` with the fields of
a `GrammarSource`, by ``{number, error, field, reason}``, or by ``{number, late}`` where the machine
was too busy to tell.
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
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from octavo.base.errors import ConstraintError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.compiler import compile_source
from octavo.grammars.sources import source_of
from octavo.grammars.vocabulary import GrammarVocabulary

LENGTH = struct.Struct(">I")

# Of a child: of a processor, by the clock (unless others have the processors), and of memory that
# it may write to beside what it shares. Its stack is smaller than that of the thread which compiles
# afterwards.
CPU_SECONDS = 0.7
SECONDS = 1.8
MAX_BYTES = 256 << 20
_STACK_BYTES = 4 << 20
# One that has had less of a processor when its time is over may have it again, so many times.
_LEAST_CPU_SECONDS = 0.15
_MOST_EXTENSIONS = 2
_NICENESS = 2  # the engine goes first, but it must not starve


@dataclass(slots=True)
class _Child:
    number: int
    pid: int
    deadline: float
    num_extensions: int = 0
    answer: bytes = b""


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    questions, answers = sys.stdin.fileno(), sys.stdout.buffer
    vocabulary = _vocabulary(*(_message(questions) for _ in range(3)))
    gc.collect()
    gc.freeze()  # children share the pages of what is not touched
    _serve(questions, answers, vocabulary)
    return 0


def _vocabulary(ids: bytes, lengths: bytes, texts: bytes) -> GrammarVocabulary:
    """Return the vocabulary of the first three messages, with its trie."""
    ends = [0, *accumulate(array("I", lengths))]
    vocabulary = GrammarVocabulary([texts[i:k] for i, k in pairwise(ends)], **json.loads(ids))
    vocabulary.make_trie()
    return vocabulary


def _message(fd: int) -> bytes:
    (size,) = LENGTH.unpack(_read(fd, LENGTH.size))
    return _read(fd, size)


def _read(fd: int, size: int) -> bytes:
    """Return just so many bytes; ends the process if there are no more."""
    data = bytearray()
    while len(data) < size:
        if not (more := os.read(fd, min(size - len(data), 1 << 20))):
            raise SystemExit
        data += more
    return bytes(data)


def _write(stream: Any, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def _serve(questions: int, answers: Any, vocabulary: GrammarVocabulary) -> None:
    """Answer questions until there are no more."""
    received = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(questions, selectors.EVENT_READ)
        while True:
            children = [key for key in selector.get_map().values() if key.data is not None]
            deadline = min((key.data.deadline for key in children), default=None)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                if key.data is None:
                    if not data:
                        return
                    received += data
                    for question in _cut(received):
                        fd, child = _start(question, vocabulary)
                        selector.register(fd, selectors.EVENT_READ, child)
                elif data:
                    key.data.answer += data
                else:
                    _finish(selector, key, answers, is_late=False)
            for key in children:
                is_here = key.fd in selector.get_map() and selector.get_key(key.fd) is key
                if is_here and time.monotonic() >= key.data.deadline and not _waits(key.data):
                    os.kill(key.data.pid, signal.SIGKILL)
                    _finish(selector, key, answers, is_late=True)


def _cut(received: bytearray) -> list[dict[str, Any]]:
    """Return the whole messages that have come, and remove them."""
    messages = []
    while len(received) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(received)[0]
        if len(received) < end:
            break
        messages.append(json.loads(bytes(received[LENGTH.size : end])))
        del received[:end]
    return messages


def _waits(child: _Child) -> bool:
    """Return whether a child that is late may have more time, as it had little of a processor."""
    if child.num_extensions >= _MOST_EXTENSIONS or _cpu_seconds(child.pid) >= _LEAST_CPU_SECONDS:
        return False
    child.num_extensions += 1
    child.deadline += SECONDS
    return True


def _cpu_seconds(pid: int) -> float:
    """Return how long a process has run."""
    if sys.platform != "linux":
        return math.inf
    return time.clock_gettime(~pid << 3 | 2)  # its clock, as clock_getcpuclockid(3) names it


def _finish(selector: Any, key: Any, answers: Any, *, is_late: bool) -> None:
    child: _Child = key.data
    selector.unregister(key.fd)
    os.close(key.fd)
    _, status, used = os.wait4(child.pid, 0)
    if not is_late and status == 0 and child.answer:
        answer = json.loads(child.answer)
    elif is_late and used.ru_utime + used.ru_stime < _LEAST_CPU_SECONDS:
        answer = {"late": True}
    else:
        answer = {"error": _cause(status, is_late=is_late), "reason": "too_complex", "field": None}
    _write(answers, {"number": child.number, **answer})


def _cause(status: int, *, is_late: bool) -> str:
    if is_late:
        return f"is too complex: compiling it takes more than {SECONDS:g} s"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return f"is too complex: compiling it takes more than {CPU_SECONDS:g} s of a processor"
    return (
        f"is too complex: compiling it takes more than {MAX_BYTES >> 20} MiB, or too deep a stack"
    )


def _start(question: dict[str, Any], vocabulary: GrammarVocabulary) -> tuple[int, _Child]:
    """Start the child that answers a question; returns where its answer can be read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # how it ends is no news
            _bound()
            threading.stack_size(_STACK_BYTES)
            thread = threading.Thread(target=_answer, args=(question, vocabulary, writing))
            thread.start()
            thread.join()
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return reading, _Child(question["number"], pid, time.monotonic() + SECONDS)


def _bound() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        statm = Path("/proc/self/statm").read_text()
        most = int(statm.split()[5]) * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process


def _answer(question: dict[str, Any], vocabulary: GrammarVocabulary, writing: int) -> None:
    try:
        asked = StructuredOutputs.of(question["asked"])
        source = source_of(asked, vocabulary.special_ids, vocabulary.stop_token_ids)
        compile_source(source, asked, vocabulary)
        answer: dict[str, Any] = {"source": asdict(source)}
    except ConstraintError as error:
        answer = {"error": str(error), "field": error.field, "reason": error.reason}
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(writing, data) :]


if __name__ == "__main__":
    sys.exit(main())
