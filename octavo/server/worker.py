"""The engine process: one thread steps the engine, a second one only receives messages.

    python -m octavo.server.worker FD LOG_FORMAT

``FD`` is one end of a socket pair, inherited from the server. When the other end closes, the
process ends at once, whatever it is doing: there is nobody left to compute for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from octavo.build import LoadedEngine, load_engine
from octavo.config import EngineArgs
from octavo.core.engine import EngineStep
from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.errors import EngineError, OctavoError, PromptTooLongError
from octavo.server.generation import Delta, EngineFacts
from octavo.server.logs import create_formatter
from octavo.server.wire import Decoder, Message, delta_to_list, encode
from octavo.text_engine import Generation, TextDelta, TextEngine, metrics_of

_log = logging.getLogger("octavo")

# Environment: misbehaviour for tests, as JSON; see octavo/executor/faulty.py.
FAULTS_VARIABLE = "OCTAVO_FAULTS"

# After so many requests in a row that failed, the engine checks itself with one of its own.
_SUSPICIOUS_ERRORS = 8
_PROBE = "octavo-probe"


class EngineLoop:
    """Steps an engine, obeys the messages of ``inbox`` between two steps, and reports by ``send``.

    Raises EngineError from ``run`` when the engine can serve nothing any more.
    """

    def __init__(
        self, engine: TextEngine, inbox: queue.SimpleQueue[Message], send: Callable[[Message], None]
    ):
        self._engine = engine
        self._inbox = inbox
        self._send = send
        # First samples that no step has computed anything of, and whose they are.
        self._waiting: dict[str, str] = {}
        self._num_errors_in_a_row = 0

    def run(self) -> None:
        """Until a ``stop`` message."""
        while self._obey():
            deltas, step = self._engine.step()
            if step is not None:
                self._report(deltas, step)
                self._look_for_decay(deltas)
        self._engine.engine.close()

    # -- in ----------------------------------------------------------------------------------

    def _obey(self) -> bool:
        """Carry out all messages that are there; wait for one if there is no other work."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.has_unfinished_requests)
            except queue.Empty:
                return True
            match message["op"]:
                case "add":
                    self._add(message)
                case "abort":
                    self._abort(message["id"])
                case "ping":
                    self._send({"ev": "pong", "number": message["number"]})
                case "stop":
                    return False

    def _add(self, message: Message) -> None:
        request_id: str = message["id"]
        try:
            generation = self._engine.add(
                request_id,
                None,
                message["ids"],
                SamplingParams(**message["params"]),
                priority=message["priority"],
                cache_salt=message["salt"],
                arrival_time=message["arrival"],
            )
        except Exception as error:
            if not isinstance(error, OctavoError):
                _log.exception("request %s could not be added", request_id)
            self._send({"ev": "refused", "id": request_id, **error_to_message(error)})
            return
        self._waiting[generation.samples[0].request.request_id] = request_id

    def _abort(self, request_id: str) -> None:
        generation = self._engine.abort(request_id)
        if generation is not None:
            self._waiting.pop(generation.samples[0].request.request_id, None)
            if not self._engine.has_unfinished_requests:  # no step will tell that it has gone
                self._send({"ev": "load", "load": self._load()})

    # -- out ---------------------------------------------------------------------------------

    def _report(self, deltas: list[TextDelta], step: EngineStep) -> None:
        begun: list[str] = []
        if self._waiting:
            for item in step.batch.items:
                request_id = self._waiting.pop(item.request.request_id, None)
                if request_id is not None:
                    begun.append(request_id)
        entries: list[list[Any]] = []
        stats: dict[str, list[Any]] = {}
        prompt_logprobs: dict[str, Any] = {}
        for delta in deltas:
            generation = delta.generation
            name = generation.request_id
            if name == _PROBE:
                continue
            entries.append(delta_to_list(name, _to_wire(delta)))
            if delta.prompt_logprobs:
                prompt_logprobs.setdefault(name, []).extend(delta.prompt_logprobs)
            is_first = delta.sample.request.num_output_tokens <= len(delta.token_ids)
            if is_first or generation.is_finished:
                stats[name] = _stats(generation)
        message = {
            "ev": "step",
            "time": self._engine.engine.clock.now(),
            "tokens": step.stats.num_tokens,
            "seqs": step.stats.num_seqs,
            "load": self._load(),
            "begun": begun,
            "deltas": entries,
            "stats": stats,
        }
        if prompt_logprobs:
            message["prompt_logprobs"] = prompt_logprobs
        self._send(message)

    def _load(self) -> dict[str, Any]:
        scheduler = self._engine.engine.scheduler
        blocks = scheduler.block_manager
        return {
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "num_waiting_tokens": scheduler.num_waiting_tokens,
            "kv_usage": blocks.num_used_blocks / blocks.num_blocks,
            "num_free_blocks": blocks.num_free_blocks,
            "num_cached_blocks": blocks.num_cached_blocks,
            "num_used_blocks": blocks.num_used_blocks,
            "prefix_tokens_queried": scheduler.prefix_tokens_queried,
            "prefix_tokens_hit": scheduler.prefix_tokens_hit,
            "num_preemptions": scheduler.num_preemptions,
        }

    # -- is it still sane? -------------------------------------------------------------------

    def _look_for_decay(self, deltas: list[TextDelta]) -> None:
        """Tell bad requests from a broken engine: when only errors come, try a good request.

        A device that has fallen over makes every request fail, each alone and politely, for ever;
        then it is better to begin anew.
        """
        for delta in deltas:
            reason = delta.sample.request.finish_reason
            if delta.generation.request_id == _PROBE and reason is not None:
                if reason is FinishReason.ERROR:
                    raise EngineError("the engine fails every request, its own too")
                self._num_errors_in_a_row = 0
            elif reason is FinishReason.ERROR:
                self._num_errors_in_a_row += 1
            elif delta.token_ids:
                self._num_errors_in_a_row = 0
        if self._num_errors_in_a_row < _SUSPICIOUS_ERRORS or _PROBE in self._engine.generations:
            return
        token_id = next(iter(self._engine.eos_token_ids), 0)
        params = SamplingParams(temperature=0.0, max_tokens=1)
        self._engine.add(_PROBE, None, [token_id], params)


def _to_wire(delta: TextDelta) -> Delta:
    request = delta.sample.request
    return Delta(
        delta.sample.index,
        delta.text,
        delta.token_ids,
        list(delta.logprobs),
        request.finish_reason.value if request.finish_reason is not None else None,
        request.stop_reason,
        delta.sample.cumulative_logprob,
        request.error,
    )


def _stats(generation: Generation) -> list[Any]:
    """What GenerationStats holds beside counts of tokens, in the order of its fields.

    The times of the end are None before it.
    """
    metrics, first = metrics_of(generation), generation.samples[0].request.stats
    prefill = decode = None
    if first.first_token_time is not None and first.first_scheduled_time is not None:
        prefill = first.first_token_time - first.first_scheduled_time
    is_over = generation.is_finished
    if is_over and metrics.e2e is not None and metrics.ttft is not None:
        decode = metrics.e2e - metrics.ttft
    return [
        metrics.num_cached_tokens,
        metrics.num_preemptions,
        metrics.queue_time,
        metrics.ttft,
        metrics.tpot if is_over else None,
        metrics.e2e if is_over else None,
        prefill,
        decode,
    ]


def error_to_message(error: Exception) -> Message:
    """A refusal as a message; `octavo.server.engine_client.error_from_message` is the inverse."""
    message: Message = {
        "kind": type(error).__name__,
        "message": str(error),
        "field": getattr(error, "field", None),
    }
    if isinstance(error, PromptTooLongError):
        message |= {"num_prompt_tokens": error.num_prompt_tokens, "limit": error.limit}
    return message


# -- the process -----------------------------------------------------------------------------


def main(fd: int, log_format: str) -> int:
    """Serve the other end of a socket; returns the exit status."""
    faulthandler.enable()  # SIGABRT, with which the server ends a process that hangs, shows where
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which tells us
    handler = logging.StreamHandler()
    handler.setFormatter(create_formatter(log_format))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    connection = socket.socket(fileno=fd)
    connection.setblocking(True)
    messages = _receive(connection)

    def send(message: Message) -> None:
        connection.sendall(encode(message))

    start = next(messages, None)
    if start is None:  # the server ended before it had said anything
        return 0
    try:
        text_engine, facts = _load(start["args"])
    except OctavoError as error:
        send({"ev": "failed", **error_to_message(error)})
        return 1
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_fill, args=(inbox, messages), name="octavo-inbox", daemon=True).start()
    gc.collect()
    gc.freeze()  # the model is for ever: no collection has to look at it again
    send({"ev": "ready", "facts": dataclasses.asdict(facts)})
    EngineLoop(text_engine, inbox, send).run()
    return 0


def _receive(connection: socket.socket) -> Iterator[Message]:
    """Messages until the other end closes."""
    decoder = Decoder()
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            yield from decoder.feed(data)


def _fill(inbox: queue.SimpleQueue[Message], messages: Iterator[Message]) -> None:
    for message in messages:
        inbox.put(message)
    os._exit(0)  # the server has gone


def _load(args: dict[str, Any]) -> tuple[TextEngine, EngineFacts]:
    loaded = load_engine(EngineArgs(**args))
    text_engine = loaded.text_engine
    _warm_up(text_engine)
    if faults := os.environ.get(FAULTS_VARIABLE):
        from octavo.executor.faulty import FaultyExecutor

        _log.warning("faults are armed: %s", faults)
        engine = text_engine.engine
        engine.executor = FaultyExecutor(engine.executor, json.loads(faults))
    return text_engine, _facts_of(loaded)


def _warm_up(engine: TextEngine) -> None:
    """Answer something, so that the first client does not wait for pages to be read."""
    token_id = next(iter(engine.eos_token_ids), 0)
    engine.add("warm-up", None, [token_id] * 2, SamplingParams(temperature=0.0, max_tokens=2))
    while engine.has_unfinished_requests:
        engine.step()
    engine.engine.scheduler.prefix_tokens_queried = 0  # nobody asked for this


def _facts_of(loaded: LoadedEngine) -> EngineFacts:
    """What the server has to know of a loaded engine."""
    config = loaded.config
    return EngineFacts(
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        vocab_size=loaded.text_engine.vocab_size,
        num_blocks=config.cache.num_blocks,
        block_size=config.cache.block_size,
        eos_token_ids=loaded.text_engine.eos_token_ids,
        sampling_defaults=dict(loaded.model_config.sampling_defaults),
        info=loaded.info,
        choices=config.choices,
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
