"""The engine's side of the socket: one request's misfortune must never be the engine's end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from hash_model import expected_tokens

from octavo.base.errors import ConstraintError, EngineError, QueueFullError
from octavo.core import engine_snapshot
from octavo.core.executor import FailedStep
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import SchedulerConfig
from octavo.core.step_meter import SwitchableMeter
from octavo.executor.faulty import FaultyExecutor
from octavo.server.engine import worker
from octavo.server.engine.in_flight_record import InFlightRecord, RecordedExecutor
from octavo.server.engine.wire import encode_message, error_from_message
from octavo.server.engine.worker import EngineWorker
from octavo.serving.text_engine import PreparedMask
from octavo.settings.engine import EngineArgs

RAISE = 96  # prompts with this token end with an error


class Panic(BaseException):
    """What a library in Rust raises when it panics: no Exception."""


class Server:
    """Gives messages to a loop that runs in this thread, and keeps what it says."""

    def __init__(self, hash_engine, **limits):
        record, meter = InFlightRecord(), SwitchableMeter()
        around = partial(RecordedExecutor, record=record)
        engine = self.engine = hash_engine(around, meter, **limits)
        self.loop = EngineWorker(engine, record, meter, lambda message: self.take(message))
        self.tokens, self.reasons, self.refused, self.pongs = {}, {}, {}, []
        self.awaited = set()
        submit = engine.engine.executor.submit

        def submit_or_raise(batch):
            if any(RAISE in item.request.prompt_token_ids for item in batch.items):
                return FailedStep(RuntimeError("as asked"))
            return submit(batch)

        engine.engine.executor.submit = submit_or_raise

    def add(self, request_id, prompt, max_tokens=3, **fields):
        self.awaited.add(request_id)
        self.loop.receive(
            {
                "op": "add",
                "id": request_id,
                "ids": prompt,
                "params": {"max_tokens": max_tokens, "ignore_eos": True},
                "bad_words": [],
                "priority": 0,
                "salt": "",
                "tenant": "",
                "weight": 1.0,
                "isolated": False,
                "arrival": time.monotonic(),
                **fields,
            }
        )

    def run(self):
        """Until all that was added has ended, or the loop says that it cannot go on."""
        self.loop.run()

    def take(self, message):
        match message["ev"]:
            case "refused":
                self.refused[message["id"]] = message
                self._end(message["id"])
            case "pong":
                self.pongs.append(message["number"])
            case "step":
                for request_id, _, _, ids, *rest in message["deltas"]:
                    self.tokens.setdefault(request_id, []).extend(ids)
                    if rest[1:]:
                        self.reasons[request_id] = rest[1]
                        self._end(request_id)

    def _end(self, request_id):
        self.awaited.discard(request_id)
        if not self.awaited:
            self.loop.receive({"op": "stop"})


@pytest.fixture
def server(hash_engine):
    return Server(hash_engine)


def test_it_answers_and_pongs(server):
    server.loop.receive({"op": "ping", "number": 7, "now": 0.0})
    server.add("a", [1, 2])
    server.add("b", [3], bad_words=[[4, 5]])
    server.run()
    assert server.tokens["a"] == expected_tokens([1, 2], 3, 97)
    assert set(server.reasons.values()) == {"length"} and server.pongs == [7]


def test_who_watches_is_shown_steps_and_in_the_end_how_things_stand(server, monkeypatch):
    monkeypatch.setattr(engine_snapshot, "_INTERVAL", 0.1)
    monkeypatch.setattr(engine_snapshot, "_SHARE", 1.0)
    take, looks, shown = server.take, [], []

    def keep(message):
        if message["ev"] == "snapshot":
            shown.append(message["snapshot"])
            if len(shown) == 2:
                server.loop.receive({"op": "stop"})
        elif message["ev"] == "step":
            looks.append(message.get("snapshot"))
            assert time.monotonic() - begun > 0.1 or "pool" not in looks[-1], "it is not due"
        take(message)

    server.take = keep
    begun = time.monotonic()
    server.loop.receive({"op": "snapshots", "is_enabled": True})
    server.awaited.add("the end, which is shown")
    server.add("a", [1, 2])
    server.run()
    assert shown[0]["pool"]["runs"] == [-1, 512]
    assert looks[0]["rows"][0][1:] == (0, 2, 1, 0, 0)
    assert shown[1]["pool"]["requests"] == [] and -2 in shown[1]["pool"]["runs"][::2]
    assert time.monotonic() - begun >= 0.1


def test_nothing_is_shown_to_nobody(server):
    take, looks = server.take, []

    def keep(message):
        looks.append(message.get("snapshot"))
        take(message)

    server.take = keep
    server.loop.receive({"op": "snapshots", "is_enabled": True})
    server.loop.receive({"op": "snapshots", "is_enabled": False})
    server.add("a", [1, 2])
    server.run()
    assert looks[0] and not any(looks[1:])


def test_what_it_is_at_work_on_is_on_record(server):
    seen, submit = [], server.engine.engine.executor._executor.submit

    def look(batch):
        seen.append(server.loop._flight_record.read())
        return submit(batch)

    server.engine.engine.executor._executor.submit = look
    server.add("a", [1, 2], params={"max_tokens": 2, "n": 2})
    server.add("suspect", [3], max_tokens=1, isolated=True)
    add = server.engine.add

    def look_while_adding(request_id, *args, **fields):
        assert server.loop._flight_record.read() == [request_id]
        return add(request_id, *args, **fields)

    server.engine.add = look_while_adding
    server.run()
    assert [sorted(names) for names in seen if "suspect" in names] == [["suspect"]]
    assert all({"a#0", "a#1"} >= set(names) for names in seen if "suspect" not in names)


def test_a_message_that_makes_no_sense_is_refused_and_no_other(server):
    server.add("unknown parameter", [1], params={"surprise": 1})
    server.add("no ids", None)
    server.add("out of the vocabulary", [1], params={"stop_token_ids": [97]})
    server.loop.receive({"op": "nonsense"})
    server.loop.receive({"no": "op"})
    server.add("good", [1])
    server.run()
    assert list(server.refused) == ["unknown parameter", "no ids", "out of the vocabulary"]
    assert server.tokens["good"] == expected_tokens([1], 3, 97)


def test_bad_words_come_as_tokens(server, monkeypatch):
    """To tokenize them takes long, and here it would be at the cost of all."""
    monkeypatch.setattr(type(server.engine.tokenizer), "encode", lambda *_, **__: 1 / 0)
    prepare, given = server.engine.prepare_mask, []
    server.engine.prepare_mask = lambda params, words, ids: (
        given.append(words),
        prepare(params, words, ids),
    )[1]
    params = {"max_tokens": 3, "ignore_eos": True, "bad_words": ["x"]}
    server.add("a", [1], params=params, bad_words=[[5], [7, 8]])
    server.run()
    assert given == [((5,), (7, 8))] and server.reasons == {"a": "length"}


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_a_text_that_cannot_be_made_ends_its_own_request(server, monkeypatch, error):
    server.add("bad", [1])
    server.add("good", [2])
    make = type(server.engine)._detokenizer

    def fail(*_):
        raise error("as asked")

    def make_one(self, params, prompt_token_ids):
        detokenizer = make(self, params, prompt_token_ids)
        if prompt_token_ids == [1]:
            detokenizer.push = fail
        return detokenizer

    monkeypatch.setattr(type(server.engine), "_detokenizer", make_one)
    server.run()
    assert server.reasons == {"bad": "error", "good": "length"}
    assert server.tokens["good"] == expected_tokens([2], 3, 97)


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_a_request_that_cannot_be_made_is_refused(server, monkeypatch, error):
    make = type(server.engine)._detokenizer

    def make_one(self, params, prompt_token_ids):
        if prompt_token_ids == [1]:
            raise error("as asked")
        return make(self, params, prompt_token_ids)

    monkeypatch.setattr(type(server.engine), "_detokenizer", make_one)
    server.add("bad", [1])
    server.add("good", [2])
    server.run()
    assert list(server.refused) == ["bad"]
    assert server.tokens["good"] == expected_tokens([2], 3, 97)
    assert not server.engine.engine.scheduler.requests


# -- the probe ---------------------------------------------------------------------------------


def test_a_full_queue_is_no_reason_to_end(hash_engine):
    """The engine tries itself after eight errors in a row, and the queue may be full then."""
    server = Server(hash_engine, max_num_seqs=1, max_queued_requests=10)
    add, take, probes = server.engine.add, server.take, []

    def watched_add(request_id, *args, **fields):
        try:
            return add(request_id, *args, **fields)
        except QueueFullError:
            probes.append(request_id)
            raise

    def take_and_fill(message):
        take(message)
        while not probes:
            try:
                add(f"more {time.perf_counter_ns()}", None, [RAISE, 1], SamplingParams())
            except QueueFullError:
                return

    server.engine.add, server.take = watched_add, take_and_fill
    for i in range(9):
        server.add(f"bad {i}", [RAISE, i])
    server.add("good", [5])
    server.run()
    assert probes == [worker._PROBE]
    assert server.tokens["good"] == expected_tokens([5], 3, 97)


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_nor_is_a_probe_that_cannot_be_made(server, error, caplog):
    add = server.engine.add

    def fail_probes(request_id, *args, **fields):
        if request_id == worker._PROBE:
            raise error("as asked")
        return add(request_id, *args, **fields)

    server.engine.add = fail_probes
    for i in range(12):
        server.add(f"bad {i}", [RAISE, i])
    server.add("good", [5])
    server.run()
    assert error.__name__ in caplog.text
    assert server.tokens["good"] == expected_tokens([5], 3, 97)
    assert list(server.reasons.values()).count("error") == 12


def test_the_probe_is_before_all_who_wait(hash_engine):
    """Behind a thousand requests, each of which fails, it would be of little use."""
    server = Server(hash_engine, max_num_seqs=1)
    server.engine.engine.executor.submit = lambda batch: FailedStep(RuntimeError("broken"))
    for i in range(40):
        server.add(str(i), [1, i])
    with pytest.raises(EngineError, match="its own too"):
        server.run()
    assert len(server.reasons) == worker._SUSPICIOUS_ERRORS


# -- the process -------------------------------------------------------------------------------


def test_what_may_wait_is_for_the_server_to_say(hash_engine, monkeypatch):
    given = []

    def load_engine(args, is_served, is_replica, around_executor, meter, transfer):
        assert is_served and is_replica and transfer is None
        given.append(args)
        cache = SimpleNamespace(num_blocks=8, block_size=4, windows=(None,), dtype="hash")
        config = SimpleNamespace(scheduler=SchedulerConfig(), cache=cache, choices=())
        shape = dict.fromkeys(("num_layers", "num_heads", "head_dim", "hidden_size"), 8)
        model_config = SimpleNamespace(**shape, sampling_defaults={}, kv_layers=(), vocab_size=97)
        info = dict.fromkeys(("device", "kernels", "isa", "dtype"), "hash")
        return SimpleNamespace(
            ranks=SimpleNamespace(spec=SimpleNamespace(num_ranks=1)),
            text_engine=hash_engine(around_executor, meter),
            config=config,
            model_config=model_config,
            info=info,
        )

    monkeypatch.setattr(worker, "load_engine", load_engine)
    asked = {"model": "m", "max_queued_requests": 4, "max_queued_tokens": 40}
    monkeypatch.setenv(worker.FAULTS_VARIABLE, '{"raise": 96}')
    loaded = worker._load(asked, InFlightRecord(), SwitchableMeter(), None)
    engine, facts = loaded.text_engine, worker._facts_of(loaded, "auto")
    recorded = engine.engine.executor
    assert isinstance(recorded, RecordedExecutor), "what it is at work on is on record"
    assert isinstance(recorded._executor, FaultyExecutor), "and faults are armed as asked"
    assert given == [EngineArgs("m", max_queued_requests=None, max_queued_tokens=None)]
    assert facts.max_num_batched_tokens == 2048 and facts.target_step_seconds == 0.0
    assert facts.rank_model["num_layers"] == 8 and facts.rank_model["matrices"] == ()
    assert {"device": "hash", "kv_dtype": "hash", "activations": "auto"}.items() <= (
        facts.runs_as.items()
    )


def test_an_engine_ends_with_its_server_even_while_it_loads():
    ours, theirs = socket.socketpair()
    _, record = InFlightRecord.create()
    program = (
        "import sys, time\n"
        "from octavo.server.engine import worker\n"
        "worker._load = lambda *args: (print('loading', flush=True), time.sleep(60))\n"
        "sys.exit(worker.main(int(sys.argv[1]), int(sys.argv[2]), 'text'))\n"
    )
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), str(record)],
            pass_fds=[theirs.fileno(), record],
            stdout=subprocess.PIPE,
        )
        theirs.close()
        os.close(record)
        assert process.stdout is not None
        ours.sendall(encode_message({"op": "start", "args": {}, "cpus": []}))
        assert process.stdout.readline() == b"loading\n"
    with process:
        assert process.wait(30) == 0


class SlowMasks:
    """Masks of constraints that are ready when they are asked to be."""

    def __init__(self, engine):
        self.is_ready = threading.Event()
        self.is_asked = threading.Event()
        self.threads, self.error = set(), None
        self.plainly = engine.prepare_mask
        engine.prepare_mask = self.prepare_mask

    def prepare_mask(self, params, *more):
        if params.structured_outputs is not None:
            self.threads.add(threading.get_ident())
            self.is_asked.set()
            self.is_ready.wait()
            if self.error is not None:
                raise self.error
            return PreparedMask(None)
        return self.plainly(params, *more)


CONSTRAINED = {"max_tokens": 3, "ignore_eos": True, "structured_outputs": {"regex": "a"}}


@pytest.mark.parametrize("structured_outputs", [None, {"regex": "a+"}])
def test_a_vocabulary_is_made_for_a_constraint_alone_and_not_by_the_engine(
    server, monkeypatch, structured_outputs
):
    threads, plainly = [], server.engine.grammars.vocabulary

    def vocabulary():
        threads.append(threading.get_ident())
        return plainly()

    monkeypatch.setattr(server.engine.grammars, "vocabulary", vocabulary)
    server.add("a", [1, 2], params={"max_tokens": 3, "structured_outputs": structured_outputs})
    server.add("b", [3])
    server.run()  # its model has no end, so that the constraint is refused after all
    assert server.tokens["b"]
    assert len(threads) == (structured_outputs is not None)
    assert threading.get_ident() not in threads


def test_a_constraint_is_compiled_beside_the_engine_and_others_go_on(server):
    masks, order, end = SlowMasks(server.engine), [], server._end

    def note(request_id):
        order.append(request_id)
        masks.is_ready.set()
        end(request_id)

    server._end = note
    server.add("a", [1, 2], params=CONSTRAINED)
    server.add("b", [3])
    server.run()
    assert order == ["b", "a"]
    assert server.tokens["a"] == expected_tokens([1, 2], 3, 97)
    assert threading.get_ident() not in masks.threads


def test_a_request_may_be_aborted_while_its_constraint_is_compiled(server):
    masks = SlowMasks(server.engine)
    server.add("a", [1, 2], params=CONSTRAINED)
    server.awaited.discard("a")
    server.loop.receive({"op": "abort", "id": "a"})
    server.add("a", [5], params=CONSTRAINED)  # the same name, and another request
    server.add("b", [3])
    masks.is_ready.set()
    server.run()
    assert server.tokens["a"] == expected_tokens([5], 3, 97)
    assert not server.refused


def test_a_constraint_that_cannot_be_is_refused_as_such(server):
    masks = SlowMasks(server.engine)
    masks.error = ConstraintError("is none", "structured_outputs.json", "unsatisfiable")
    masks.is_ready.set()
    server.add("a", [1, 2], params=CONSTRAINED)
    server.add("b", [3])
    server.run()
    assert set(server.tokens) == {"b"}
    error = error_from_message(server.refused["a"])
    assert isinstance(error, ConstraintError)
    assert str(error) == "structured_outputs.json: is none"
    assert (error.field, error.reason) == ("structured_outputs.json", "unsatisfiable")


def test_the_end_does_not_wait_for_constraints(server):
    masks = SlowMasks(server.engine)
    server.loop.receive({"op": "stop"})
    server.add("a", [1, 2], params=CONSTRAINED)
    server.run()
    masks.is_ready.set()
    assert not server.tokens
