from __future__ import annotations

import asyncio
import functools
import math
import statistics
import time

import pytest
from pace import lateness, python_seconds

from octavo.bench.serving import load
from octavo.bench.serving.endpoint import (
    Endpoint,
    Patience,
    ServerError,
    served_model,
    wait_until_listening,
    wait_until_ready,
)
from octavo.bench.serving.http_client import HttpClient
from octavo.bench.serving.load import send_load
from octavo.measure.concurrency import concurrency_curve
from octavo.measure.metrics import summarize
from octavo.measure.slo import RequestSlo, goodput
from octavo.workload.plan import LoadPlan
from octavo.workload.requests import WorkloadRequest


def tolerance() -> float:
    """Seconds of medians: 100,000 rounds of Python, 5 ms, as this machine is now, and what a busy
    one adds until both the server and the client go on."""
    return python_seconds(1e5, time.perf_counter) + 4 * lateness()


def send(server, requests, plan, on_end=lambda record: None, give_up_when=None, **options):
    async def main():
        client = HttpClient(server.url)
        try:
            task = send_load(Endpoint(client, "m", **options), requests, plan, on_end)
            if give_up_when is None:
                return await task
            task = asyncio.create_task(task)
            while not give_up_when():
                await asyncio.sleep(0.01)
            task.cancel()
            return await task
        finally:
            await client.close()

    return load.run(main())


def at_once(count):
    return LoadPlan([0.0] * count)


def every(gap, count, **options):
    return LoadPlan([gap * index for index in range(count)], **options)


def at_a_quiet_moment(test):
    """Run a test of absolute times again where other work may have had the processors."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        for _ in range(3):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                time.sleep(0.5)
        return test(*args, **kwargs)

    return run


@pytest.mark.timing
@at_a_quiet_moment
def test_known_delays_are_measured(fake_server, scripted):
    """TTFT, ITL, TPOT and E2EL: against the script, and against what the server really did."""
    scripts = [
        {"first": 0.030 + 0.01 * (i % 3), "gaps": [0.02, 0.04, 0.02], "tokens": [1, 2, 1, 3]}
        for i in range(30)
    ]
    requests = [scripted(i, **script) for i, script in enumerate(scripts)]
    records = send(fake_server, requests, every(0.02, 30)).records
    log = fake_server.log()
    assert len(records) == len(log) == 30 and all(record.completed for record in records)
    assert all(record.output_tokens == 7 for record in records)

    errors = {name: [] for name in ("ttft", "itl", "tpot", "e2el")}
    for record, script, entry in zip(records, scripts, log, strict=True):
        events = entry["events"]
        true_gaps = [b - a for a, b in zip(events, events[1:], strict=False)]
        errors["ttft"].append(record.ttft - (events[0] - entry["received"]))
        errors["itl"] += [a - b for a, b in zip(record.itls, true_gaps, strict=True)]
        errors["e2el"].append(record.e2el - (events[-1] - entry["received"]))
        errors["tpot"].append(record.tpot - (events[-1] - events[0]) / 6)
        assert len(script["gaps"]) == len(record.itls)
    for name, differences in errors.items():
        assert abs(statistics.median(differences)) < tolerance(), name

    latencies = summarize(records).latencies
    assert latencies["ttft"].median == pytest.approx(0.040, abs=tolerance())
    assert latencies["itl"].median == pytest.approx(0.020, abs=tolerance())
    assert latencies["tpot"].median == pytest.approx(0.080 / 6, abs=tolerance())
    assert latencies["e2el"].median == pytest.approx(0.120, abs=tolerance())


def test_goodput_is_counted(fake_server, scripted):
    """12 good, 4 late, 3 with a pause, 2 refused, 1 cut, 1 error."""
    scripts = [{"first": 0.02, "gaps": [0.01]}] * 12
    scripts += [{"first": 0.5, "gaps": [0.01]}] * 4
    scripts += [{"first": 0.02, "gaps": [0.6]}] * 3
    scripts += [{"status": 429}] * 2 + [{"cut": 1, "gaps": [0.01]}, {"error": "boom"}]
    requests = [scripted(i, **script) for i, script in enumerate(scripts)]
    records = send(fake_server, requests, at_once(23)).records
    found = goodput(records, RequestSlo.from_texts(["ttft:250", "tpot:300"]), duration=2.0)
    assert found.attainment.good == 12 and found.attainment.requests == 23
    assert found.request_goodput == 6.0 and found.token_goodput == 12.0
    assert found.attainment_by_limit["ttft"].good == 15
    assert found.attainment_by_limit["tpot"].good == 16

    metrics = summarize(records)
    assert (metrics.completed, metrics.failed) == (19, 4)
    failures = {record.request_id: record for record in records if not record.completed}
    assert failures["19"].status == 429 and failures["19"].error == "too many"
    assert failures["21"].error and len(failures["21"].event_times) == 1
    assert failures["22"].error == "boom"


@pytest.mark.timing
@at_a_quiet_moment
def test_an_open_loop_keeps_to_its_schedule(fake_server, scripted):
    """Whatever becomes of those before: here, no answer comes before the last is sent."""
    times = [0.03 * math.sqrt(index) for index in range(20)]
    requests = [scripted(i, first=0.3) for i in range(20)]
    records = send(fake_server, requests, LoadPlan(times)).records
    assert [record.request_id for record in records] == [str(i) for i in range(20)]
    assert [record.scheduled for record in records] == times
    assert all(record.sent >= record.scheduled for record in records)
    assert statistics.median(record.send_lag for record in records) < tolerance()
    received = [entry["received"] for entry in fake_server.log()]
    late = [got - record.scheduled for got, record in zip(received, records, strict=True)]
    start = min(late)  # the run began then, or a little before
    assert statistics.median(lateness - start for lateness in late) < tolerance()
    assert fake_server.in_flight() == 20


@pytest.mark.timing
@at_a_quiet_moment
def test_a_closed_loop_keeps_its_number_in_flight(fake_server, scripted):
    requests = [scripted(i, first=0.01 + 0.002 * (i % 3), gaps=[0.01]) for i in range(24)]
    result = send(fake_server, requests, LoadPlan(None, max_concurrency=4))
    assert fake_server.in_flight() == 4
    assert max(number for _, number in concurrency_curve(result.records)) == 4
    assert all(record.queue_time == 0 for record in result.records)
    assert statistics.median(record.send_lag for record in result.records) < tolerance()
    duration = max(record.ended for record in result.records)
    # It is always asked for the next.
    assert 24 / 4 * 0.02 < duration < 24 / 4 * 0.022 + 40 * tolerance()


@pytest.mark.timing
@at_a_quiet_moment
def test_what_is_due_waits_for_a_place(fake_server, scripted):
    """The third of three that come together waits for two answers."""
    requests = [scripted(i, first=0.1) for i in range(3)]
    records = send(fake_server, requests, LoadPlan([0.0, 0.0, 0.0], max_concurrency=1)).records
    assert fake_server.in_flight() == 1
    for index, record in enumerate(records):
        assert record.queue_time == pytest.approx(0.1 * index, abs=4 * tolerance())
        assert record.ttft == pytest.approx(0.1, abs=4 * tolerance())
        assert record.ttft + record.delay == pytest.approx(0.1 * (index + 1), abs=6 * tolerance())
        assert abs(record.send_lag) < 2 * tolerance()


@pytest.mark.timing
@pytest.mark.parametrize("is_open", [True, False])
@at_a_quiet_moment
def test_after_the_duration_nothing_more_is_sent(fake_server, scripted, is_open):
    requests = [scripted(i, first=0.05) for i in range(50)]
    times = [0.05 * i for i in range(50)] if is_open else None
    records = send(fake_server, requests, LoadPlan(times, 1, duration_s=0.22)).records
    assert 3 <= len(records) <= 5
    assert all(record.completed and record.sent < 0.3 for record in records)


def test_what_was_measured_until_an_interruption_is_kept(fake_server, scripted):
    requests = [scripted(0, first=0.01), scripted(1, first=30, gaps=[1]), scripted(2)]
    ended = []
    result = send(fake_server, requests, LoadPlan([0, 0, 60.0]), ended.append, lambda: ended)
    assert result.is_interrupted and len(result.records) == len(ended) == 2
    first, second = result.records
    assert first.completed and second.unfinished and not second.completed
    assert first.ended <= second.ended < 30
    metrics = summarize(result.records)
    assert (metrics.completed, metrics.failed, metrics.unfinished) == (1, 0, 1)


def test_who_counted_the_tokens_is_said(fake_server, scripted):
    requests = [scripted(0, gaps=[0, 0]), scripted(1, gaps=[0, 0], usage=False)]
    told, counted = send(fake_server, requests, every(0.02, 2)).records
    assert (told.output_tokens, told.output_tokens_from) == (3, "usage")
    assert (told.prompt_tokens, told.cached_tokens) == (7, 2)
    assert (counted.output_tokens, counted.output_tokens_from) == (3, "events")
    assert (counted.prompt_tokens, counted.cached_tokens) == (None, None)


def test_bodies_say_what_was_asked(fake_server):
    ids = WorkloadRequest("0", prompt_token_ids=(1, 2), output_len=5)
    send(fake_server, [ids], at_once(1), fields={"ignore_eos": True, "temperature": 0.5})
    talk = WorkloadRequest("0", messages=({"role": "user", "content": "x"},), output_len=5)
    text = WorkloadRequest("1", prompt="y")
    chat = {"backend": "openai-chat", "path": "/v1/chat/completions"}
    send(fake_server, [talk, text], every(0.02, 2), **chat)
    first, second, third = (entry["body"] for entry in fake_server.log())
    assert first["prompt"] == [1, 2] and first["max_tokens"] == 5 and first["model"] == "m"
    assert first["ignore_eos"] is True and first["temperature"] == 0.5 and first["stream"] is True
    assert first["stream_options"] == {"include_usage": True}
    assert second["messages"] == [{"role": "user", "content": "x"}]
    assert second["max_completion_tokens"] == 5 and second["temperature"] == 0
    assert third["messages"] == [{"role": "user", "content": "y"}]
    assert "max_completion_tokens" not in third and "ignore_eos" not in third


@pytest.mark.parametrize(
    ("backend", "request_", "advice"),
    [
        ("openai-chat", WorkloadRequest("0", prompt_token_ids=(1,)), "--tokenizer"),
        ("openai", WorkloadRequest("0", messages=({"role": "user"},)), "--backend openai-chat"),
    ],
)
def test_prompts_that_an_api_does_not_take(backend, request_, advice):
    with pytest.raises(ServerError, match=advice):
        Endpoint(HttpClient("http://x"), "m", backend).body(request_)


def test_a_server_is_asked_who_it_is_and_if_it_is_there(fake_server, scripted):
    said = []

    async def main():
        client = HttpClient(fake_server.url + "/prefix")
        assert await served_model(client) == "fake/model"
        endpoint = Endpoint(client, "m")
        await wait_until_ready(endpoint, scripted(0), Patience())
        with pytest.raises(ServerError, match="HTTP 400: too many"):
            await wait_until_ready(endpoint, scripted(0, status=400), Patience())  # no use
        with pytest.raises(ServerError, match="HTTP 503"):
            await wait_until_ready(
                endpoint, scripted(0, status=503), Patience(60, 0.3, said.append)
            )
        await client.close()
        assert len(said) == 1 and "HTTP 503" in said[0]

    load.run(main())
    paths = [entry["path"] for entry in fake_server.log()]
    assert set(paths) == {"/prefix/v1/completions"} and len(paths) >= 4


def test_where_nobody_listens_is_said_once_and_is_an_error_soon(scripted):
    said = []

    async def main():
        client = HttpClient("http://127.0.0.1:9")
        with pytest.raises(ServerError, match="at http://127.0.0.1:9: no connection"):
            await wait_until_listening(client, Patience(0.6, 600, said.append))
        with pytest.raises(ServerError, match="first request"):  # nor is such a one waited for
            await wait_until_ready(Endpoint(client, "m"), scripted(0), Patience(0.6, 600))
        with pytest.raises(ServerError, match="nothing answers"):
            await served_model(client)

    load.run(main())
    assert len(said) == 1 and "trying for 0.6 s" in said[0]


def test_a_server_that_takes_connections_and_says_nothing_is_given_up():
    import socket

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = HttpClient(f"http://127.0.0.1:{silent.getsockname()[1]}")
            with pytest.raises(ServerError, match="no answer in time"):
                await wait_until_listening(client, Patience(0.1))
            await client.close()

    load.run(main())
