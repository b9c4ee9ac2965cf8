from __future__ import annotations

import json

from octavo.measure.request_log import to_aiperf, write_request_log
from octavo.measure.request_record import RequestRecord


def test_a_log_has_every_field_of_every_record(tmp_path, record):
    full = record(
        *(1.0, 1.5, 2.0),
        id="é",
        scheduled=0.5,
        queue_time=0.25,
        connected=1.01,
        first_byte=1.4,
        event_tokens=[1, None],
        prompt_tokens=7,
        cached_tokens=2,
        output_tokens_from="usage",
        finish_reason="length",
        text="a\n\u2028b",
    )
    records = [full, record(2.0), record(3.0, unfinished=True, error="interrupted")]
    write_request_log(tmp_path / "log.jsonl", reversed(records))
    lines = (tmp_path / "log.jsonl").read_text("utf-8").split("\n")[:-1]
    assert [RequestRecord(**json.loads(line)) for line in lines] == records


def test_the_format_of_aiperf(tmp_path, record):
    good = record(1.0, 1.5, 2.0, 2.5, prompt_tokens=9)
    write_request_log(tmp_path / "log", [good, record(2.0)], "aiperf")
    first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert first["metrics"]["time_to_first_token"] == {"value": 500.0, "unit": "ms"}
    assert first["metrics"]["inter_token_latency"]["value"] == 500.0
    assert first["metrics"]["output_sequence_length"] == {"value": 3, "unit": "tokens"}
    assert first["metadata"]["request_start_ns"] == 10**9 and first["error"] is None
    assert second["metrics"] == {} and second["error"] == {"code": 429, "message": "refused"}
    assert "inter_token_latency" not in to_aiperf(record(0.0, 1.0))["metrics"]
