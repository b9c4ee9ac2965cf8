from __future__ import annotations

import json

import pytest

from octavo.base.errors import BenchmarkError
from octavo.measure.request_log import read_request_log, to_aiperf, write_request_log


def test_a_log_is_read_as_it_was_written(tmp_path, record):
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
    assert read_request_log(tmp_path / "log.jsonl") == records


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[]", "line 2: no JSON object"),
        ('{"request_id": "x"}', "line 2: no field 'scheduled'"),
        ('{"wrong": 1}', "line 2: unknown field 'wrong'"),
        ('{"request_id": 1, "scheduled": 0, "sent": 0, "ended": 0}', "'request_id' is not of type"),
        ('{"request_id": "", "scheduled": 0, "sent": "", "ended": 0}', "'sent' is not of type"),
        (
            '{"request_id": "", "scheduled": 0, "sent": 0, "ended": 0, "event_times": ["x"]}',
            "'event_times' is not of type list",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, record, line, message):
    write_request_log(tmp_path / "log", [record(0.0, 1.0)])
    with open(tmp_path / "log", "a") as file:
        file.write(line + "\n")
    with pytest.raises(BenchmarkError, match=message) as raised:
        read_request_log(tmp_path / "log")
    assert str(tmp_path / "log") in str(raised.value)


def test_a_log_that_is_not_there(tmp_path):
    with pytest.raises(BenchmarkError, match="cannot be read"):
        read_request_log(tmp_path / "log")


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
