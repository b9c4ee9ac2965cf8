"""Work beside the event loop, and what happens to calls that do not come back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from octavo.base.errors import DeadlineError, QueueFullError
from octavo.server.http.background import Background, in_background


def run(test):
    return asyncio.run(asyncio.wait_for(test(), 20))


@pytest.fixture
def never():
    """A call that does not come back before the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


async def outcomes(*calls):
    return await asyncio.gather(*calls, return_exceptions=True)


def test_results_and_errors_come_back():
    async def test():
        assert await in_background(divmod, 7, 2) == (3, 1)
        assert await in_background(sorted, [2, 1], reverse=True) == [2, 1]
        with pytest.raises(ZeroDivisionError):
            await in_background(divmod, 1, 0)

    run(test)


def test_a_panic_is_an_error_like_others():
    class Panic(BaseException):
        pass

    def panic():
        raise Panic("in native code")

    async def test():
        with pytest.raises(RuntimeError, match="Panic: in native code"):
            await in_background(panic)

    run(test)


def test_the_loop_goes_on_meanwhile():
    async def test():
        working = asyncio.ensure_future(in_background(time.sleep, 0.05))
        num_turns = 0
        while not working.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        assert num_turns > 5

    run(test)


def test_calls_that_do_not_come_back_stop_nobody(never):
    background = Background(num_threads=2, max_seconds=0.1, max_lost=4)

    async def test():
        stuck = [asyncio.ensure_future(background.run(never)) for _ in range(2)]
        assert await background.run(lambda: "done") == "done"  # by a thread in place of theirs
        assert [type(one) for one in await outcomes(*stuck)] == [DeadlineError] * 2

    run(test)


def test_nor_do_they_if_their_clients_are_gone(never):
    background = Background(num_threads=1, max_seconds=0.1, max_lost=4)

    async def test():
        stuck = asyncio.ensure_future(background.run(never))
        await asyncio.sleep(0.02)
        stuck.cancel()
        assert await background.run(lambda: "done") == "done"

    run(test)


def test_beyond_a_number_of_them_nothing_is_begun_until_one_comes_back():
    over = threading.Event()
    background = Background(num_threads=1, max_seconds=0.05, max_lost=2)

    async def test():
        stuck = [background.run(over.wait) for _ in range(2)]
        late = background.run(lambda: "late")
        ends = await outcomes(*stuck, late)
        assert [type(end) for end in ends] == [DeadlineError, DeadlineError, QueueFullError]
        with pytest.raises(QueueFullError) as refusal:
            await background.run(lambda: "refused")
        assert refusal.value.retry_after
        over.set()
        while True:
            with contextlib.suppress(QueueFullError):
                assert await background.run(lambda: "again") == "again"
                return
            await asyncio.sleep(0.01)

    run(test)


def test_a_call_that_nobody_waits_for_is_not_begun(never):
    background = Background(num_threads=1, max_seconds=5.0)
    over, begun = threading.Event(), []

    async def test():
        first = asyncio.ensure_future(background.run(over.wait))
        second = asyncio.ensure_future(background.run(lambda: begun.append(2)))
        third = asyncio.ensure_future(background.run(lambda: begun.append(3)))
        await asyncio.sleep(0.02)
        second.cancel()
        await asyncio.sleep(0.02)
        over.set()
        await asyncio.gather(first, third)
        assert begun == [3]

    run(test)
