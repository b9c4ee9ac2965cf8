"""``octavo run-batch``: a file of requests, a server for the time, a file of answers."""

from __future__ import annotations

import json

import pytest

from octavo.cli import main


@pytest.fixture
def requests(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "gpt-9", "prompt": f"number {i}", "max_tokens": 4 + i},
        }
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_server_is_started_for_a_batch(requests, tiny_model, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    command = ["run-batch", str(requests), str(out), "--model", str(tiny_model), "--json"]
    assert main([*command, "--max-model-len", "64"]) == 0
    assert json.loads(capsys.readouterr().out)["num_failed"] == 0
    found = {each["custom_id"]: each for each in map(json.loads, out.read_text().splitlines())}
    for i in range(3):
        response = found[f"r{i}"]["response"]
        assert response["status_code"] == 200 and response["request_id"]
        assert response["body"]["usage"]["completion_tokens"] == 4 + i


def test_what_contradicts_itself_is_refused(requests, tmp_path, capsys):
    out, url = str(tmp_path / "out.jsonl"), ["--base-url", "http://127.0.0.1:1"]
    for more in (["--model", "m"], ["--threads", "1"]):
        assert main(["run-batch", str(requests), out, *url, *more]) == 2
        assert more[0] in capsys.readouterr().err
    assert main(["run-batch", str(requests), str(requests), *url]) == 2
    assert "same file" in capsys.readouterr().err


def test_a_server_that_is_not_there_fails_each(requests, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["run-batch", str(requests), str(out), "--base-url", "http://127.0.0.1:1/v1"]) == 1
    assert "3 failed" in capsys.readouterr().out
    assert [json.loads(line)["error"]["code"] for line in out.read_text().splitlines()] == [
        "no_answer"
    ] * 3
