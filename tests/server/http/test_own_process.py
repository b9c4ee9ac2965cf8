"""Questions to another process: one at a time, in time, and no more than there is time for."""

from __future__ import annotations

import asyncio
import json

import pytest

from octavo.errors import DeadlineError, EngineError, QueueFullError
from octavo.server.http.errors import HttpError
from octavo.server.http.own_process import OwnProcess

# Says what it was asked, after as long as it was asked for, and whether it was alone.
MODULE = """
import json, os, sys, time
question = json.load(sys.stdin)
flag = os.path.join(os.path.dirname(__file__), "at-work")
alone = not os.path.exists(flag)
open(flag, "w").close()
time.sleep(question.get("seconds", 0))
if question.get("fails"):
    sys.exit(3)
os.remove(flag)
error = {"error": "no such thing", "status": 404} if question.get("is_wrong") else None
json.dump(error or {**question, "alone": alone}, sys.stdout)
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    (tmp_path / "child_that_answers.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda **bounds: OwnProcess("child_that_answers", "it", **{"max_seconds": 20, **bounds})


def test_one_question_after_the_other_is_answered(process):
    async def ask():
        asked = process()
        return await asyncio.gather(*(asked.answer({"number": number}) for number in (1, 2)))

    answers = [json.loads(text) for text in asyncio.run(ask())]
    assert answers == [{"number": number, "alone": True} for number in (1, 2)]


def test_what_is_wrong_is_the_answer(process):
    with pytest.raises(HttpError, match="no such thing") as raised:
        asyncio.run(process().answer({"is_wrong": True}))
    assert raised.value.status == 404
    with pytest.raises(EngineError, match="it failed"):
        asyncio.run(process().answer({"fails": True}))


def test_it_takes_no_longer_than_it_may_and_ends_with_who_asked(process, tmp_path):
    with pytest.raises(DeadlineError):
        asyncio.run(process(max_seconds=0.01).answer({"seconds": 60}))

    async def leave():
        asked = process()
        first = asyncio.create_task(asked.answer({"seconds": 60}))
        while not (tmp_path / "at-work").exists():
            await asyncio.sleep(0.01)
        (tmp_path / "at-work").unlink()
        first.cancel()
        return json.loads(await asked.answer({}))  # whose turn has come at once

    assert asyncio.run(leave()) == {"alone": True}


def test_no_more_wait_than_there_is_time_for(process):
    async def ask():
        asked = process(max_waiting=0)
        first = asyncio.create_task(asked.answer({}))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await asked.answer({})
        await first

    asyncio.run(ask())
