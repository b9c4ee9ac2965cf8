from __future__ import annotations

from typing import Any

import pytest

from octavo.measure.request_record import RequestRecord


@pytest.fixture
def record():
    """A record by hand: times in seconds; the events are the tokens, unless said otherwise."""

    def create(
        sent: float, *events: float, scheduled: float | None = None, **fields: Any
    ) -> RequestRecord:
        fields = {"ended": events[-1] if events else sent, **fields}
        if events:
            fields = {
                "first_token": events[0],
                "last_token": events[-1],
                "event_times": list(events),
                "event_tokens": [None] * len(events),
                "output_tokens": len(events),
                **fields,
            }
        else:
            fields = {"error": "refused", "status": 429, **fields}
        begin = sent if scheduled is None else scheduled
        return RequestRecord(fields.pop("id", "x"), begin, sent, **fields)

    return create
