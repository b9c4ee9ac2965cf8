"""`BoundedSubprocess`, for answers that a process of its own computes.

These are answers that take seconds of a processor, that are made from what clients upload, or that
read files which may change meanwhile: no request waits for them, or fails with them.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
from collections import Counter
from typing import Any

from octavo.base.errors import DeadlineError, EngineError, QueueFullError
from octavo.server.http.errors import HttpError
from octavo.system.child_process import environment_without_keys

MAX_BYTES = 2 << 30
_PATIENCE = 3  # seconds by the clock per second of a processor: the engine goes first


class BoundedSubprocess:
    """Runs ``python -m MODULE``, with bounds (``run_bounded.py``), for one question after the
    other.

    The module reads JSON from its input and writes JSON: the answer, or ``{error, status}``.

    Args:
        module: the module to run.
        subject: its name in error messages.
        max_seconds: of a processor, for one question; by the clock a few times as long, for other
            programs may have the processors.
        max_waiting: questions that may wait beside the one that runs.
        max_waiting_each: questions of one tenant that may wait.
        max_bytes: of memory that the process may write to.
    """

    def __init__(
        self,
        module: str,
        subject: str,
        max_seconds: float,
        max_waiting: int = 4,
        max_waiting_each: int = 2,
        max_bytes: int = MAX_BYTES,
    ):
        self._module = module
        self._subject = subject
        self._max_seconds = max_seconds
        self._max_waiting, self._max_waiting_each = max_waiting, max_waiting_each
        self._max_bytes = max_bytes
        self._asked: Counter[str] = Counter()  # by tenant
        self._turn = asyncio.Lock()

    async def answer(self, question: dict[str, Any], tenant: str = "") -> bytes:
        """Return the module's answer as JSON. If the caller is cancelled, the process is killed.

        Raises:
            HttpError: the module answered with an error.
            QueueFullError: too many questions are waiting already.
            DeadlineError: it takes longer than it may.
            EngineError: the process has failed.
        """
        if self._asked.total() > self._max_waiting:
            raise QueueFullError(f"too many others wait for {self._subject} already", 5.0)
        if self._asked[tenant] > self._max_waiting_each:
            raise QueueFullError(f"too many requests of yours wait for {self._subject}", 5.0)
        self._asked[tenant] += 1
        try:
            async with self._turn:
                text = await self._run(json.dumps(question).encode())
        finally:
            self._asked[tenant] -= 1
            if not self._asked[tenant]:
                del self._asked[tenant]
        if text.startswith(b'{"error"'):
            error = json.loads(text)
            raise HttpError(error["status"], error["error"])
        return text

    def _too_slow(self) -> DeadlineError:
        return DeadlineError(f"{self._subject} takes more than {self._max_seconds:g} s")

    async def _run(self, question: bytes) -> bytes:
        bounds = str(self._max_bytes), str(math.ceil(self._max_seconds) + 1)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "octavo.server.http.run_bounded", self._module, *bounds),
            env=environment_without_keys(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_PATIENCE * self._max_seconds):
                text, _ = await process.communicate(question)
        except TimeoutError:
            raise self._too_slow() from None
        finally:
            if process.returncode is None:  # cancelled, or too slow
                process.kill()
                await process.wait()
        if process.returncode == -getattr(signal, "SIGXCPU", 0):
            raise self._too_slow()
        if process.returncode != 0:
            raise EngineError(f"{self._subject} failed: the server's log says why")
        return text
