"""What the server writes: lines for requests and for the engine, and nothing that is secret."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import replace

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import StepStats
from octavo.server.engine.generation import (
    EngineObserver,
    EngineState,
    Generation,
    GenerationRequest,
)
from octavo.server.settings import ServerSettings
from octavo.server.watch import logs
from octavo.server.watch.logs import RequestLog, configure_logging, request_fields
from octavo.server.watch.observer_group import ObserverGroup
from octavo.server.watch.status import StatusLine
from octavo.serving.outputs import Delta

LOGGERS = ("octavo", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "asyncio")


@pytest.fixture(autouse=True)
def loggers_as_they_were():
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(one.handlers[:], one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


class Stderr:
    def __init__(self, capsys):
        self._capsys, self._text = capsys, ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def stderr(capsys) -> Stderr:
    return Stderr(capsys)


def new_generation(request_id="cmpl-1", n=1, prompt=tuple(b"secret prompt"), **more) -> Generation:
    params = SamplingParams(n=n, max_tokens=16)
    request = GenerationRequest(request_id, list(prompt), params, 0.0, **more)
    return Generation(request, abort=lambda generation: None)


def finished_generation(**more) -> Generation:
    generation = new_generation(
        external_id="client-7", route="/v1/completions", tenant="key-1", **more
    )
    stats = generation.stats
    stats.num_cached_tokens, stats.num_output_tokens = 8, 5
    stats.miss_reason = "evicted"
    stats.queue_time, stats.ttft, stats.tpot, stats.e2e = 0.003, 0.0234, 0.02, 0.1034
    stats.prefill_time, stats.decode_time = 0.0204, 0.08
    return generation


# -- one line a request ----------------------------------------------------------------------


def test_a_request_is_one_readable_line(stderr):
    configure_logging(ServerSettings())
    RequestLog().on_finished(finished_generation(), "stop")
    line = re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO     (.*)\n", stderr.getvalue())
    assert line is not None
    assert line[1] == (
        "cmpl-1 (client-7) /v1/completions key-1: prompt 13 (8 cached, then evicted), output 5, "
        "TTFT 23.4 ms, TPOT 20.0 ms, E2E 103 ms, queue 3.0 ms, 50.0 tokens/s, stop"
    )


def test_json_has_the_same_as_fields(stderr):
    configure_logging(ServerSettings(log_format="json"))
    RequestLog().on_finished(finished_generation(), "stop")
    line = json.loads(stderr.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "logger": "octavo.server",
        "message": "request finished",
        "external_id": "client-7",
        "request_id": "cmpl-1",
        "route": "/v1/completions",
        "tenant": "key-1",
        "prompt_tokens": 13,
        "cached_tokens": 8,
        "miss_reason": "evicted",
        "output_tokens": 5,
        "n": 1,
        "ttft_ms": 23.4,
        "tpot_ms": 20.0,
        "e2e_ms": 103.4,
        "queue_ms": 3.0,
        "decode_tps": 50.0,
        "preemptions": 0,
        "from_cache": False,
        "reason": "stop",
    }


def test_documented_fields_are_those_there_are(pytestconfig):
    documentation = (pytestconfig.rootpath / "docs/metrics.md").read_text("utf-8")
    section = documentation.partition("### The log")[2].partition("\n\n## ")[0]
    for name in request_fields(finished_generation(), "stop"):
        assert f"`{name}`" in section


def test_a_request_that_never_ran_has_no_times(stderr):
    configure_logging(ServerSettings())
    RequestLog().on_finished(new_generation(external_id="cmpl-1"), "timeout")
    assert stderr.getvalue().endswith("WARNING  cmpl-1: prompt 13 (0 cached), output 0, timeout\n")


def test_what_is_unusual_is_said(stderr):
    configure_logging(ServerSettings())
    generation = finished_generation(n=2)
    generation.stats.num_preemptions, generation.is_from_cache = 3, True
    RequestLog().on_finished(generation, "length")
    assert ", n 2, " in stderr.getvalue()
    assert ", preempted 3x, from the response cache, length\n" in stderr.getvalue()


@pytest.mark.parametrize(
    "reason, level",
    [("stop", "INFO"), ("abort", "INFO"), ("error", "WARNING"), ("timeout", "WARNING")],
)
def test_levels(caplog, reason, level):
    with caplog.at_level("DEBUG", "octavo.server"):
        RequestLog().on_finished(finished_generation(), reason)
    assert [record.levelname for record in caplog.records] == [level]


# -- prompts ---------------------------------------------------------------------------------


def decode(token_ids: list[int]) -> str:
    return bytes(token_ids).decode()


def play(log: RequestLog, generation: Generation, answers: list[str]) -> None:
    log.on_submitted(generation)
    for index, answer in enumerate(answers):
        half = len(answer) // 2
        generation.push([Delta(index, answer[:half], [1])])
        generation.push([Delta(index, answer[half:], [1], [], "stop")])
    log.on_finished(generation, "stop")


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("log_level", ["debug", "info"])
def test_no_prompt_and_no_answer_unless_asked_for(stderr, log_format, log_level):
    configure_logging(ServerSettings(log_format=log_format, log_level=log_level))
    play(RequestLog(), new_generation(), ["secret answer"])
    assert "cmpl-1" in stderr.getvalue()
    assert "secret" not in stderr.getvalue()


def test_prompts_and_answers_when_asked_for(stderr):
    configure_logging(ServerSettings(log_format="json"))
    play(RequestLog(decode), new_generation(n=2, external_id="x"), ["first one", "second\none"])
    lines = [json.loads(line) for line in stderr.getvalue().splitlines()]
    assert [(line["message"], line.get("text")) for line in lines] == [
        ("prompt", "secret prompt"),
        ("answer 0", "first one"),
        ("answer 1", "second\none"),
        ("request finished", None),
    ]
    assert {(line["request_id"], line["external_id"]) for line in lines} == {("cmpl-1", "x")}


def test_long_prompts_are_cut(stderr):
    configure_logging(ServerSettings())
    prompt = b"x" * (logs.MAX_LOGGED_CHARS * 3)
    RequestLog(lambda ids: 2 * decode(ids)).on_submitted(new_generation(prompt=prompt))
    assert logs.MAX_LOGGED_CHARS < len(stderr.getvalue()) < logs.MAX_LOGGED_CHARS + 100


# -- configuration ---------------------------------------------------------------------------


def test_configuring_twice_writes_once(stderr):
    configure_logging(ServerSettings(log_format="json"))
    configure_logging(ServerSettings())
    logging.getLogger("octavo.anything").info("once")
    assert len(stderr.getvalue().splitlines()) == 1
    assert stderr.getvalue().endswith("INFO     once\n")


@pytest.mark.parametrize(
    "level, expected",
    [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)],
)
def test_levels_can_be_chosen(stderr, level, expected):
    configure_logging(ServerSettings(log_level=level))
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("octavo"), name)("x")
    assert len(stderr.getvalue().splitlines()) == expected


def test_of_uvicorn_and_asyncio_only_what_matters_is_heard(stderr):
    configure_logging(ServerSettings())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(name).info("chatter")
        logging.getLogger(name).warning("from %s", name)
    said = [line.partition("from ")[2] for line in stderr.getvalue().splitlines()]
    assert said == ["uvicorn", "uvicorn.error", "asyncio"]


# -- the status line -------------------------------------------------------------------------


@pytest.fixture
def status(caplog):
    caplog.set_level("INFO", "octavo.server")
    status = StatusLine(10.0)
    status.write(0.0)
    return status


def messages(caplog) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_status_line(status, caplog):
    first, second = new_generation("r1", n=2), new_generation("r2")
    for generation in (first, second):
        status.on_submitted(generation)
    for _ in range(2):
        status.on_tokens(first, 1, None)  # both samples; the prompt counts once
    for _ in range(98):
        status.on_tokens(first, 2, 0.02)
    stats = replace(
        StepStats.idle(7),
        num_running=2,
        num_waiting=1,
        num_used_blocks=1,
        prefix_tokens_queried=26,
        prefix_tokens_hit=13,
        num_preemptions=4,
    )
    status.on_step(stats)
    status.on_finished(first, "stop")
    status.on_rejected("queue_requests")
    status.write(2.0)
    assert messages(caplog) == [
        "status: 6.5 prompt tokens/s, 99.0 output tokens/s, 2 running, 1 waiting, "
        "KV cache 12.5%, prefix hit rate 50.0%, 1 finished, 4 preemptions, 1 rejected"
    ]
    # Nothing since, but one is still there.
    status.write(12.0)
    assert messages(caplog) == [
        "status: 0.0 prompt tokens/s, 0.0 output tokens/s, 2 running, 1 waiting, "
        "KV cache 12.5%, prefix hit rate 50.0%, 0 finished"
    ]


def test_drafts_are_told_of_since_the_last_line(status, caplog):
    status.on_submitted(new_generation())
    drafted = replace(StepStats.idle(1), num_drafts=10, draft_tokens=40, draft_tokens_accepted=8)
    status.on_step(drafted)
    status.write(1.0)
    status.on_step(replace(drafted, num_drafts=20, draft_tokens=80, draft_tokens_accepted=28))
    status.write(2.0)
    status.write(3.0)
    first, second, third = messages(caplog)
    assert "drafts: mean accepted length 1.80, 20.0% of draft tokens accepted" in first
    assert "drafts: mean accepted length 3.00, 50.0% of draft tokens accepted" in second
    assert "drafts" not in third


def test_what_bounded_the_steps_since_the_last_line(status, caplog):
    status.on_submitted(new_generation())
    bound = {"num_memory_bound": 8, "num_compute_bound": 1, "num_overhead_bound": 0}
    first = replace(StepStats.idle(1), step_seconds=1.0, floor_seconds=0.63, **bound)
    status.on_step(first)
    status.write(1.0)
    more = {"step_seconds": 3.0, "floor_seconds": 0.73, "num_overhead_bound": 9}
    status.on_step(replace(first, **more))
    status.write(2.0)
    status.write(3.0)
    lines = messages(caplog)
    assert "0 finished, 63% of the memory limit" in lines[0]
    assert "0 finished, bound by overhead (5% of the roofline)" in lines[1]
    assert lines[2].endswith("0 finished")


def test_idle_is_silent(status, caplog):
    status.write(10.0)
    generation = new_generation()
    status.on_submitted(generation)
    status.on_step(replace(StepStats.idle(1), num_running=1, num_used_blocks=1))
    status.on_finished(generation, "abort")  # no step follows that would say so
    status.write(20.0)
    status.write(30.0)
    (line,) = messages(caplog)
    assert "0 running, 0 waiting, KV cache 0.0%, prefix hit rate -, 1 finished" in line


def test_status_fields(stderr):
    configure_logging(ServerSettings(log_format="json"))
    status = StatusLine(10.0)
    status.write(0.0)
    status.on_rejected("draining")
    status.write(10.0)
    line = json.loads(stderr.getvalue())
    assert line["message"] == "status"
    assert (line["rejected"], line["output_tps"], line["prefix_hit_rate"]) == (1, 0.0, None)


def test_run_writes_every_interval(caplog):
    caplog.set_level("INFO", "octavo.server")

    async def busy():
        status = StatusLine(0.01)
        status.on_submitted(new_generation())
        running = asyncio.create_task(status.run())
        while len(caplog.records) < 3:
            await asyncio.sleep(0.005)
        running.cancel()

    asyncio.run(asyncio.wait_for(busy(), 10))


def test_no_interval_no_lines():
    asyncio.run(asyncio.wait_for(StatusLine(0).run(), 1))


@pytest.mark.parametrize(
    "state, level",
    [
        (EngineState.STARTING, "INFO"),
        (EngineState.READY, "INFO"),
        (EngineState.RESTARTING, "WARNING"),
        (EngineState.FAILED, "ERROR"),
    ],
)
def test_engine_states_are_logged(status, caplog, state, level):
    status.on_engine_state(state, "exit status -9")
    (record,) = caplog.records
    assert record.levelname == level
    assert record.getMessage() == f"engine {state.value}: exit status -9"


# -- several observers -----------------------------------------------------------------------


class Noting(EngineObserver):
    def __init__(self, notes: list, name: str):
        self.notes, self.name = notes, name

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda *arguments: self.notes.append((self.name, name, *arguments))
        return super().__getattribute__(name)


EVENTS = {
    "on_submitted": ("generation",),
    "on_rejected": ("draining",),
    "on_ignored_fields": (("x",),),
    "on_tool_calls": ("hermes", 1, ["syntax"]),
    "on_constraint_refused": ("unsupported",),
    "on_tokens": ("generation", 1, 0.5),
    "on_finished": ("generation", "stop"),
    "on_step": (StepStats.idle(),),
    "on_snapshot": (7, {}),
    "on_engine_state": (EngineState.READY, "x"),
    "on_routed": (1,),
    "on_removed": (1,),
    "on_scaled": ("up",),
}


def test_all_observers_are_told_everything_in_order():
    class Everything(Noting):
        on_submitted = on_rejected = on_ignored_fields = on_tokens = on_finished = None
        on_step = on_snapshot = on_engine_state = on_routed = on_removed = None
        on_scaled = on_tool_calls = on_constraint_refused = None

    notes: list = []
    observers = ObserverGroup(Everything(notes, "a"), EngineObserver(), Everything(notes, "b"))
    assert {name for name in vars(EngineObserver) if name.startswith("on_")} == EVENTS.keys()
    for event, arguments in EVENTS.items():
        getattr(observers, event)(*arguments)
    assert notes == [
        (name, event, *arguments) for event, arguments in EVENTS.items() for name in "ab"
    ]


def test_an_ignored_field_has_one_line(caplog, monkeypatch):
    caplog.set_level("INFO", "octavo.server")
    monkeypatch.setattr(logs, "MAX_IGNORED_NAMES", 3)
    log = RequestLog()
    for names in (("user", "store"), ("store", "user"), ("x", "y", "z")):
        log.on_ignored_fields(names)
    assert [record.fields["field"] for record in caplog.records] == ["user", "store", "x"]
    assert "the field user of requests has no effect here" in caplog.text


def test_an_observer_that_fails_hurts_nobody(caplog):
    class Broken(EngineObserver):
        def on_tokens(self, generation, num_tokens, gap):
            raise RuntimeError("asked for")

    status = StatusLine(10.0)
    observers = ObserverGroup(Broken(), status)
    status.write(0.0)
    for _ in range(3):
        observers.on_tokens(new_generation(), 1, 0.1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{Broken.__qualname__}.on_tokens failed; not said again"
    ]
    caplog.clear()
    caplog.set_level("INFO", "octavo.server")
    observers.on_rejected("draining")
    status.write(1.0)
    assert "3.0 output tokens/s" in caplog.text
