"""The load generator, which sends requests when they are due, and records their answers.

In an *open loop* requests are sent by a schedule, whatever has become of those before: real users
behave so, who do not know of each other. In a *closed loop* there are as many users as places, and
each sends the next request when the answer is there; the load can never exceed what the server
serves. A schedule with a concurrency limit has both: due requests wait for a place, as in a client
with a connection pool, and that wait is told apart from the server's own latency.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.bench.serving.endpoint import Endpoint
from octavo.bench.serving.http_stream import INTERRUPTED, StreamResult
from octavo.measure.request_record import RequestRecord
from octavo.system import machine
from octavo.workload.plan import LoadPlan
from octavo.workload.requests import WorkloadRequest

T = TypeVar("T")

_MOST_CONNECTIONS = 1 << 16  # each is an open file, of which 1024 are soon used up


@dataclass(frozen=True)
class LoadResult:
    """``records`` in the order of sending. ``is_interrupted``: the user stopped the run."""

    records: list[RequestRecord]
    is_interrupted: bool = False


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a load test on an event loop that takes little of the machine."""
    machine.allow_open_files(_MOST_CONNECTIONS)
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def send_load(
    endpoint: Endpoint,
    requests: Sequence[WorkloadRequest],
    plan: LoadPlan,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> LoadResult:
    """Send all requests and wait for all answers.

    When the task is cancelled, as Ctrl-C does, the requests in flight are cancelled, and the result
    has the records so far.

    Args:
        on_end: called with each request that has ended.
    """
    run = _LoadRun(endpoint, plan, on_end)
    gc.collect()
    gc.freeze()  # or the collector would go through all prompts again and again
    try:
        await run.send(requests)
    except asyncio.CancelledError:
        await run.give_up()
        return LoadResult(run.records(), is_interrupted=True)
    finally:
        gc.unfreeze()
    return LoadResult(run.records())


class _LoadRun:
    def __init__(self, endpoint: Endpoint, plan: LoadPlan, on_end: Callable[[RequestRecord], None]):
        self._endpoint = endpoint
        self._plan = plan
        self._on_end = on_end
        self._places = asyncio.Semaphore(plan.max_concurrency) if plan.max_concurrency else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._records: list[RequestRecord] = []
        self._start = 0.0

    async def send(self, requests: Sequence[WorkloadRequest]) -> None:
        body = self._endpoint.body(requests[0]) if requests else b""
        self._start = time.perf_counter()
        for index, request in enumerate(requests):
            scheduled = await self._wait_for_turn(index)
            if scheduled is None:
                break
            task = asyncio.create_task(self._ask(request, body, scheduled))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if index + 1 < len(requests):  # made beforehand, while there is time
                await asyncio.sleep(0)
                body = self._endpoint.body(requests[index + 1])
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def give_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def records(self) -> list[RequestRecord]:
        return sorted(self._records, key=lambda record: record.sent)

    async def _wait_for_turn(self, index: int) -> float | None:
        """Wait until the request is due; return when that was, in seconds after the start. None if
        it is too late."""
        end = self._plan.duration_s
        if self._plan.times is None:
            assert self._places is not None
            try:
                async with asyncio.timeout(None if end is None else end - self._now()):
                    await self._places.acquire()
            except TimeoutError:
                return None
            return self._now()
        scheduled = self._plan.times[index]
        if end is not None and scheduled >= end:
            await self._sleep_until(end)
            return None
        await self._sleep_until(scheduled)
        return scheduled

    async def _sleep_until(self, due: float) -> None:
        while (left := due - self._now()) > 0:
            await asyncio.sleep(left)

    async def _ask(self, request: WorkloadRequest, body: bytes, scheduled: float) -> None:
        queue_time = 0.0
        if self._plan.is_open_loop and self._places is not None:
            arrived = self._now()
            await self._places.acquire()
            queue_time = self._now() - arrived
        result = StreamResult(time.perf_counter())
        try:
            await self._endpoint.ask(body, result)
        finally:
            if self._places is not None:
                self._places.release()
            record = to_record(request, result, scheduled, queue_time, self._start)
            self._records.append(record)
            self._on_end(record)

    def _now(self) -> float:
        return time.perf_counter() - self._start


def to_record(
    request: WorkloadRequest,
    result: StreamResult,
    scheduled: float,
    queue_time: float = 0.0,
    start: float = 0.0,
) -> RequestRecord:
    """Return the record of a request. ``start``: the beginning of the run on the clock of
    ``result``."""

    def since_start(moment: float | None) -> float | None:
        return None if moment is None else moment - start

    usage = result.usage or {}
    has_count = usage.get("completion_tokens") is not None
    assert result.ended is not None
    return RequestRecord(
        request_id=request.request_id,
        scheduled=scheduled,
        sent=result.sent - start,
        ended=result.ended - start,
        queue_time=queue_time,
        connected=since_start(result.connected),
        first_byte=since_start(result.first_byte),
        first_token=since_start(result.first),
        last_token=since_start(result.last),
        event_times=[moment - start for moment in result.event_times],
        event_tokens=result.event_tokens,
        prompt_tokens=usage.get("prompt_tokens", request.input_len),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        output_tokens=result.num_output_tokens,
        output_tokens_from="usage" if has_count else "events",
        finish_reason=result.finish_reason,
        status=result.status,
        error=result.error,
        unfinished=result.error == INTERRUPTED,
        text=result.text,
    )
