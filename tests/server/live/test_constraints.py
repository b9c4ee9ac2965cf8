"""Constraints of many clients at once: hostile ones harm nobody else, whatever becomes of them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from itertools import pairwise
from typing import Any

import pytest

GREEDY = {"temperature": 0, "return_token_ids": True}
LONG = "([ab]{9} ){15}end"


@pytest.fixture(scope="module")
def server(live_server, tiny_model):
    flags = ("--resume-streams", "--max-num-seqs", "24")
    with live_server(tiny_model, *flags) as server:
        yield server
        server.stop()


def hostile(number: int) -> dict[str, Any]:
    """A request whose constraint would take 20 s to compile."""
    schema = {"type": "integer", "multipleOf": 1_000_003 + 2 * number}
    return {"prompt": "x", "max_tokens": 5, "guided_json": schema}


def choice(text: str, **more: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 30, **GREEDY, "guided_choice": [text], **more}


PLAIN = {"max_tokens": 20, "ignore_eos": True, "stream": True, **GREEDY}


def check_busy(answer: Any) -> None:
    assert answer.status == 503 and answer.is_whole
    assert answer.error["type"] == "overloaded_error"
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"


def check_refused(answer: Any) -> None:
    assert answer.status == 400, answer.body
    assert answer.error["param"] == "guided_json" and "too complex" in answer.error["message"]


def test_hostile_constraints_end_and_others_do_not_wait_for_them(server):
    num_hostile = 12

    async def main() -> tuple[list[Any], list[Any], int]:
        asking = asyncio.gather(
            *(server.ask("/v1/completions", hostile(number)) for number in range(num_hostile))
        )
        good: list[Any] = []
        num_tokens = 0
        while not asking.done() or len(good) < 4:
            stream = await server.complete({**PLAIN, "prompt": f"plain {len(good)}"})
            num_tokens += 0 if asking.done() else len(stream.token_ids)
            for body in (choice("known"), choice(f"new {len(good)}")):
                good.append(await server.ask("/v1/completions", body))
        return await asking, good, num_tokens

    answers, good, num_tokens = server.run(main())
    for answer in answers:
        check_refused(answer) if answer.status == 400 else check_busy(answer)
    assert {answer.status for answer in good} == {200}
    assert num_tokens  # the engine went on
    num_busy = sum(answer.status == 503 for answer in answers)
    assert server.counter("admission_rejections_total", reason="constraints") == num_busy
    print(
        f"{num_busy} of {num_hostile} were told to try again; the last had its answer after "
        f"{max(answer.seconds for answer in answers):.2f} s; meanwhile there were {len(good)} "
        f"others under constraints, and {num_tokens} tokens of a stream"
    )


def test_who_tries_again_is_refused_in_the_end(server):
    body = hostile(100)
    before = server.counter("structured_output_refusals_total", reason="too_complex")
    answer = server.fetch("/v1/completions", body)
    while answer.status != 400:
        check_busy(answer)
        answer = server.fetch("/v1/completions", body)
    check_refused(answer)
    assert server.fetch("/v1/completions", body).status == 400
    assert server.counter("structured_output_refusals_total", reason="too_complex") == before + 2


def test_what_is_refused_before_it_reaches_the_engine_counts_too(server):
    before = server.counter("structured_output_refusals_total", reason="invalid")
    for body in ({"guided_regex": "a" * (1 << 19)}, {"structured_outputs": {"jason": {}}}):
        assert server.fetch("/v1/completions", {"prompt": "x", **body}).status == 400
    assert server.counter("structured_output_refusals_total", reason="invalid") == before + 2


def test_clients_that_leave_while_constraints_are_compiled_leave_nothing(server):
    async def main() -> None:
        asking = [
            asyncio.create_task(server.ask("/v1/completions", hostile(200 + number)))
            for number in range(8)
        ]
        await asyncio.sleep(0.2)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    server.run(main())
    assert server.fetch("/v1/completions", choice("after that", priority=3)).status == 200
    load = server.wait_until_idle()
    assert (load["num_running"], load["num_waiting"], load["num_used_blocks"]) == (0, 0, 0)


def test_streams_under_constraints_go_on_when_the_engine_is_killed(server):
    """To the token, and to a valid end, with several samples, too."""
    bodies = [
        {"prompt": f"prompt {n}", "max_tokens": 200, "seed": n, "temperature": 1.0, "stream": True,
         "guided_regex": LONG, "return_token_ids": True, "n": n}
        for n in (1, 2)
    ]  # fmt: skip
    expected = [server.run(server.complete(body)) for body in bodies]

    async def main() -> list[Any]:
        streams = [await server.stream(body) for body in bodies]
        for stream in streams:
            while not stream.token_ids:
                assert await stream.next() is not None
        os.kill(server.engine_pid, signal.SIGKILL)
        return [await stream.rest() for stream in streams]

    num_before = server.load()["num_restarts"]
    for stream, whole in zip(server.run(main()), expected, strict=True):
        assert stream.errors == [] and stream.num_done == 1
        assert text_of(stream) == text_of(whole)
        assert set(stream.finish_reasons) == {"stop"}
        assert all(re.fullmatch(LONG, text) for text in text_of(stream).values())
    assert server.load()["num_restarts"] == num_before + 1


def text_of(stream: Any) -> dict[int, str]:
    """The text of each sample."""
    texts: dict[int, str] = {}
    for each in stream.choices:
        texts[each["index"]] = texts.get(each["index"], "") + each["text"]
    return dict(sorted(texts.items()))


@pytest.mark.long
@pytest.mark.timing
def test_streams_of_a_real_model_beside_hostile_constraints(live_server, smollm2_gguf):
    """The gaps between the tokens of 16 streams, in turns without and with hostile constraints."""
    with live_server("smollm2-135m", "--max-num-seqs", "16", "--max-model-len", "2048") as server:
        server.fetch("/v1/completions", choice("known"))
        numbers = iter(range(10_000))
        gaps: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(3):
            for is_attacked in gaps:
                found, answers = server.run(_gaps_of_streams(server, numbers, is_attacked))
                gaps[is_attacked] += found
                for answer in answers:
                    check_refused(answer) if answer.status == 400 else check_busy(answer)
                if answers:
                    seconds = sorted(answer.seconds for answer in answers)
                    num_refused = sum(answer.status == 400 for answer in answers)
                    print(f"{num_refused} of {len(answers)} refused, after {seconds[-1]:.2f} s")
        server.stop()
    for is_attacked, found in gaps.items():
        found.sort()
        shown = ", ".join(f"{1e3 * found[int(s * (len(found) - 1))]:.0f}" for s in (0.5, 0.99, 1))
        print(f"{'with' if is_attacked else 'without'} them: P50, P99, longest {shown} ms")
    medians = {key: found[len(found) // 2] for key, found in gaps.items()}
    assert medians[True] < 5 * medians[False]


async def _gaps_of_streams(
    server: Any, numbers: Any, is_attacked: bool
) -> tuple[list[float], list[Any]]:
    times: list[list[float]] = []

    async def read(number: int) -> None:
        body = {"prompt": f"Story {number}:", "max_tokens": 100, "ignore_eos": True}
        stream = await server.stream({**body, **GREEDY, "stream": True})
        times.append(mine := [])
        while await stream.next() is not None:
            mine.append(time.perf_counter())

    reading = [asyncio.create_task(read(number)) for number in range(16)]
    while len(times) < 16 or min(map(len, times)) < 3:
        await asyncio.sleep(0.01)
    bodies = [hostile(next(numbers)) for _ in range(16 if is_attacked else 0)]
    answers = await asyncio.gather(*(server.ask("/v1/completions", body) for body in bodies))
    await asyncio.gather(*reading)
    return [b - a for mine in times for a, b in pairwise(mine)], answers
