"""Runs a plan of requests on the engine of this process in real time.

Clients and sockets are left out: the timed work is that of a simulated engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.bench.offline.session import sampling_params
from octavo.measure.request_record import RequestRecord

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession
    from octavo.serving.text_engine import TextDelta
    from octavo.workload.requests import WorkloadRequest

_NAP = 0.01  # seconds, at most, that an idle engine sleeps at once


def run_live(
    session: OfflineSession,
    requests: Sequence[WorkloadRequest],
    times: Sequence[float],
    *,
    cache_salt: str,
) -> list[RequestRecord]:
    """Send each request at its time (seconds from now, in order), and record when its tokens come.

    Requests that are due while a step runs are sent at its end, as the engine of a server receives
    them. Prefixes are shared with no run of another ``cache_salt``.

    Raises:
        QueueFullError: the engine takes no more.
    """
    engine = session.loaded.text_engine
    prompts = [session.token_ids(request) for request in requests]
    records: dict[str, RequestRecord] = {}
    begin = time.perf_counter()
    num_sent = 0
    while num_sent < len(requests) or engine.has_unfinished_requests:
        now = time.perf_counter() - begin
        while num_sent < len(requests) and times[num_sent] <= now:
            request, request_id = requests[num_sent], f"{cache_salt}-{num_sent}"
            params = sampling_params(request)
            engine.add(request_id, None, prompts[num_sent], params, cache_salt=cache_salt)
            # A client sends it when it is due, whatever the engine is doing.
            due = times[num_sent]
            records[request_id] = RequestRecord(
                request_id, due, due, due, prompt_tokens=len(prompts[num_sent])
            )
            num_sent += 1
        if engine.has_unfinished_requests:
            deltas, _ = engine.step()
            _note(deltas, records, time.perf_counter() - begin)
        else:
            time.sleep(min(_NAP, max(0.0, times[num_sent] - now)))
    return list(records.values())


def _note(deltas: Sequence[TextDelta], records: dict[str, RequestRecord], now: float) -> None:
    for delta in deltas:
        record, count = records[delta.group.request_id], len(delta.token_ids)
        if count:
            record.first_token = now if record.first_token is None else record.first_token
            record.last_token = record.ended = now
            record.event_times.append(now)
            record.event_tokens.append(count)
            record.output_tokens += count
        if delta.finish_reason is not None:
            record.finish_reason = delta.finish_reason.value
            record.cached_tokens = delta.sample.request.stats.num_cached_tokens
