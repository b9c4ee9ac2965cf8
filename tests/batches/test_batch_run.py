"""A batch is answered, whatever interrupts it, and what is answered stays."""

from __future__ import annotations

import asyncio
import json

import pytest

from octavo.batches import batch_run
from octavo.batches.batch_input import BatchFileError
from octavo.batches.batch_run import Answer, run_batch


@pytest.fixture
def files(tmp_path):
    """The input, of 20 requests, and the output."""
    source = tmp_path / "in.jsonl"
    lines = [
        {"custom_id": f"r{i}", "url": "/v1/completions", "body": {"prompt": f"prompt {i}"}}
        for i in range(20)
    ]
    source.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return source, tmp_path / "out.jsonl"


class Server:
    """Answers with the prompt, and counts; ``script`` has other answers for a prompt, in turn."""

    def __init__(self, **script):
        self.script = script
        self.asked: list[str] = []
        self.most = self._now = 0

    async def __call__(self, path: str, body: bytes) -> Answer:
        prompt = json.loads(body)["prompt"]
        self.asked.append(prompt)
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0)
        self._now -= 1
        others = self.script.get(prompt.replace(" ", "_"), [])
        if others:
            answer = others.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        return Answer(200, {"x-request-id": "q"}, json.dumps({"text": prompt}).encode())


def run(files, server, concurrency=4):
    seen = []
    summary = asyncio.run(
        run_batch(*files, server, concurrency=concurrency, progress=lambda *n: seen.append(n))
    )
    assert seen[-1][1] == 20
    return summary


def answers(files) -> dict[str, dict]:
    return {each["custom_id"]: each for each in map(json.loads, files[1].read_text().splitlines())}


def test_all_are_answered_a_few_at_a_time(files):
    server = Server()
    assert run(files, server) == (batch_run.BatchSummary(20, 0, 0))
    assert sorted(server.asked) == sorted(f"prompt {i}" for i in range(20))
    assert server.most == 4
    found = answers(files)
    assert len(found) == 20 and len({each["id"] for each in found.values()}) == 20
    assert found["r3"]["error"] is None
    assert found["r3"]["response"] == {
        "status_code": 200,
        "request_id": "q",
        "body": {"text": "prompt 3"},
    }


def test_a_full_server_is_asked_again_when_it_says(files, monkeypatch):
    waited = []
    real_sleep = asyncio.sleep

    async def sleep(seconds):
        if seconds:
            waited.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    full = [Answer(429, {"retry-after": "7"}, b""), Answer(503, {"retry-after": "9999"}, b"")]
    server = Server(prompt_3=[*full, Answer(503, {}, b"")])
    assert run(files, server).num_failed == 0
    assert waited == [7.0, 30.0, 1.0] and server.asked.count("prompt 3") == 4


def test_an_answer_of_any_status_is_one_and_no_answer_is_none(files):
    refusal = Answer(400, {}, b'{"error": {"message": "no"}}')
    server = Server(
        prompt_1=[refusal], prompt_2=[OSError("gone")], prompt_5=[Answer(500, {}, b"<")]
    )
    assert run(files, server).num_failed == 3
    found = answers(files)
    assert found["r1"]["response"]["body"] == {"error": {"message": "no"}}
    assert found["r2"]["response"] is None and "gone" in found["r2"]["error"]["message"]
    assert found["r5"]["response"]["body"] == "<"
    again = Server()
    assert run(files, again) == batch_run.BatchSummary(20, 19, 2)
    assert again.asked == ["prompt 2"]
    assert len(files[1].read_text().splitlines()) == 20


def test_an_interrupted_run_goes_on(files):
    with pytest.raises(BaseExceptionGroup):
        run(files, Server(prompt_9=[RuntimeError("killed")]))
    with open(files[1], "ab") as file:
        file.write(b'{"custom_id": "r11", "respo')  # as a kill leaves it
    before = {name for name, each in answers_before_torn(files).items()}
    assert 0 < len(before) < 20
    server = Server()
    assert run(files, server).num_before == len(before)
    assert len(server.asked) == 20 - len(before) and len(answers(files)) == 20


def answers_before_torn(files) -> dict[str, dict]:
    lines = files[1].read_text().splitlines()[:-1]
    return {each["custom_id"]: each for each in map(json.loads, lines)}


@pytest.mark.parametrize("text", ["{}\n", "hello\n", '{"custom_id": "other", "response": null}\n'])
def test_a_file_with_something_else_is_left_alone(files, text):
    files[1].write_text(text)
    with pytest.raises(BatchFileError, match="choose another output"):
        run(files, Server())
    assert files[1].read_text() == text
