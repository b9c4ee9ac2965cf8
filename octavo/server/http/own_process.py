"""Work done by a process of its own, for answers that take seconds of a processor, or that read
files of which nobody knows whether they stay as they are: nothing that is served waits for it, or
ends with it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from octavo.errors import DeadlineError, EngineError, QueueFullError
from octavo.server.http.errors import HttpError


class OwnProcess:
    """Runs ``python -m MODULE`` for one question after the other.

    The module reads JSON from its input and writes JSON: the answer, or ``{error, status}``.

    Args:
        module: what is run.
        subject: what that is called in messages.
        max_seconds: for one question.
        max_waiting: questions beside the one that is worked on.
    """

    def __init__(self, module: str, subject: str, max_seconds: float, max_waiting: int = 4):
        self._module = module
        self._subject = subject
        self._max_seconds = max_seconds
        self._max_waiting = max_waiting
        self._num_asked = 0
        self._turn = asyncio.Lock()

    async def answer(self, question: dict[str, Any]) -> bytes:
        """What the module answers, as JSON. If nobody waits any more (CancelledError), it ends.

        Raises:
            HttpError: the question makes no sense: what its error says.
            QueueFullError: too many are waiting already.
            DeadlineError: it takes longer than it should.
            EngineError: it has failed.
        """
        if self._num_asked > self._max_waiting:
            raise QueueFullError(f"too many others wait for {self._subject} already", 5.0)
        self._num_asked += 1
        try:
            async with self._turn:
                text = await self._run(json.dumps(question).encode())
        finally:
            self._num_asked -= 1
        if text.startswith(b'{"error"'):
            error = json.loads(text)
            raise HttpError(error["status"], error["error"])
        return text

    async def _run(self, question: bytes) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(self._max_seconds):
                text, _ = await process.communicate(question)
        except TimeoutError:
            message = f"{self._subject} takes more than {self._max_seconds:g} s"
            raise DeadlineError(message) from None
        finally:
            if process.returncode is None:  # nobody waits any more, or too long
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise EngineError(f"{self._subject} failed: the server's log says why")
        return text
