"""Work that would hold up the event loop, done beside it.

A few threads only: each one more that runs Python makes the loop wait longer for its turn.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

NUM_THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="octavo-background")


async def in_background(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a call that may take long. It is not interrupted if nobody waits any more.

    The call should not spend more than some milliseconds in one C function that keeps the
    interpreter's lock.
    """
    call = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads(), call)
