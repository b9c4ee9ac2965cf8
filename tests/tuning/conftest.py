"""Requests that were answered, as figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.measure.request_record import RequestRecord


@pytest.fixture
def answered() -> Callable[..., RequestRecord]:
    """A request sent at a time, whose first token came so much later, and the others in gaps."""

    def record(
        ttft: float, tpot: float = 0.01, tokens: int = 11, sent: float = 0.0
    ) -> RequestRecord:
        first = sent + ttft
        last = first + tpot * (tokens - 1)
        return RequestRecord(
            f"{sent}",
            sent,
            sent,
            last,
            first_token=first,
            last_token=last,
            prompt_tokens=5,
            output_tokens=tokens,
        )

    return record
