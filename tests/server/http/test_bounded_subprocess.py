"""Questions to another process: one at a time, in time, and no more than there is time for."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from octavo.base.errors import DeadlineError, EngineError, QueueFullError
from octavo.server.http.bounded_subprocess import BoundedSubprocess
from octavo.server.http.errors import HttpError

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
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    monkeypatch.setenv("OCTAVO_ADMIN_KEY", "secret")
    return lambda **bounds: BoundedSubprocess(
        "child_that_answers", "it", **{"max_seconds": 20, **bounds}
    )


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


def test_it_has_bounds_of_its_own(process, tmp_path):
    """Memory, processor time, and no key of the server."""
    (tmp_path / "child_that_answers.py").write_text(
        "import json, os, resource, sys\n"
        "question = json.load(sys.stdin)\n"
        "held = bytearray(question['bytes'])\n"
        "limits = [resource.getrlimit(l)[0] for l in (resource.RLIMIT_DATA, resource.RLIMIT_CPU)]\n"
        "keys = [name for name in os.environ if name.endswith('_KEY')]\n"
        "json.dump([*limits, os.nice(0), keys], sys.stdout)\n"
    )
    asked = process(max_bytes=200 << 20, max_seconds=7.5)
    text = asyncio.run(asked.answer({"bytes": 1000}))
    data, cpu, niceness, keys = json.loads(text)
    assert (data, cpu) == (200 << 20, 9) and not keys
    assert niceness == min(19, os.nice(0) + 10)
    with pytest.raises(HttpError, match="more than the 200 MiB") as raised:
        asyncio.run(process(max_bytes=200 << 20).answer({"bytes": 300 << 20}))
    assert raised.value.status == 400


def test_one_tenant_does_not_keep_the_others_from_asking(process):
    async def ask():
        asked = process(max_waiting_each=1)
        mine = [asyncio.create_task(asked.answer({"number": n}, "a")) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="of yours"):
            await asked.answer({}, "a")
        theirs = asyncio.create_task(asked.answer({"number": 7}, "b"))
        return await asyncio.gather(*mine, theirs)

    answers = [json.loads(text)["number"] for text in asyncio.run(ask())]
    assert answers == [0, 1, 7]


def test_its_time_on_a_processor_is_bounded(process, tmp_path):
    (tmp_path / "child_that_answers.py").write_text("while True:\n    pass\n")
    with pytest.raises(DeadlineError, match="it takes more than 0.5 s"):
        asyncio.run(process(max_seconds=0.5).answer({}))
