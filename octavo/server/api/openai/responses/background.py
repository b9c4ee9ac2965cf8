"""`BackgroundAnswers`, the answers that are being made without a client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class BackgroundAnswers:
    """Runs the making of answers, each until it ends or is cancelled. Their requests count in
    the limits of their tenants, as all do."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, response_id: str, making: Coroutine[None, None, None]) -> None:
        """Begin to make an answer."""
        task = asyncio.get_running_loop().create_task(making)
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(response_id, None))

    async def cancel(self, response_id: str) -> bool:
        """End the making of an answer; return False if it is not being made."""
        task = self._tasks.get(response_id)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait((task,))
        return True
