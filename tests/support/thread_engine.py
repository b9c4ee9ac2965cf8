"""Engines on the hash model, in threads that can be killed, in place of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import threading
import time

from hash_model import HashExecutor
from socket_engine import SocketEngine, SocketLauncher

from octavo.assembly.engine import build_engine
from octavo.base.errors import EngineError
from octavo.core.scheduler import SchedulerConfig
from octavo.core.step_meter import SwitchableMeter
from octavo.server.engine.generation import EngineFacts
from octavo.server.engine.in_flight_record import InFlightRecord, RecordedExecutor
from octavo.server.engine.wire import MessageDecoder, encode_message
from octavo.server.engine.worker import EngineWorker
from octavo.serving.text_engine import TextEngine
from octavo.settings.engine import CacheConfig, EngineConfig

VOCAB = 97
POISON, LATE_POISON, RAISE = 96, 95, 94  # prompt tokens that the engine cannot stand
NUM_BLOCKS = 64


class Death(BaseException):
    """What ends a thread as a signal ends a process."""


class Moody(HashExecutor):
    """Dies of POISON at once, and of LATE_POISON when it has produced three tokens."""

    def __init__(self, running):
        super().__init__(NUM_BLOCKS, 4, VOCAB)
        self.running = running
        self.delay = 0.001

    def submit(self, batch):
        time.sleep(self.delay)
        while self.running.is_hanging:
            time.sleep(0.005)
        if self.running.is_killed:
            raise Death
        for item in batch.items:
            prompt = item.request.prompt_token_ids
            if POISON in prompt or (LATE_POISON in prompt and item.request.num_output_tokens >= 3):
                raise Death
            if RAISE in prompt:
                raise RuntimeError("as asked")
        return super().submit(batch)


class ThreadEngine(SocketEngine):
    """An EngineProcess in this process."""

    def __init__(self, tokenizer, failure=None):
        self.is_killed = self.is_hanging = False
        self.failure = failure
        self.connection, self.theirs = socket.socketpair()
        self.connection.setblocking(False)
        scheduler = SchedulerConfig(max_num_seqs=8, max_model_len=64, max_num_batched_tokens=64)
        cache = CacheConfig(4, NUM_BLOCKS, "hash", True)
        config = EngineConfig("hash", "cpu", "hash", 0, "continuous", cache, scheduler)
        self.executor = Moody(self)
        self.record, meter = InFlightRecord(), SwitchableMeter()
        engine = build_engine(config, RecordedExecutor(self.executor, self.record), meter=meter)
        self.text_engine = TextEngine(engine, tokenizer, VOCAB, ())
        self.loop = EngineWorker(self.text_engine, self.record, meter, self._send)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        threading.Thread(target=self._fill, daemon=True).start()

    def _fill(self):
        decoder = MessageDecoder()
        with contextlib.suppress(OSError):
            while data := self.theirs.recv(4096):
                for message in decoder.feed(data):
                    self.loop.receive(message)

    def _send(self, message):
        self.theirs.sendall(encode_message(message))

    def _run(self):
        with contextlib.suppress(Death, OSError, EngineError):
            if self.failure is not None:
                self._send({"ev": "failed", **self.failure})
                raise Death
            facts = EngineFacts(64, 8, VOCAB, NUM_BLOCKS, 4, max_num_batched_tokens=64)
            self._send({"ev": "ready", "facts": dataclasses.asdict(facts)})
            self.loop.run()
        with contextlib.suppress(OSError):
            self.theirs.shutdown(socket.SHUT_RDWR)

    def kill(self, signum=signal.SIGKILL):
        self.is_killed, self.is_hanging = True, False
        self.loop.receive({"op": "stop"})

    def wait(self):
        self.thread.join()
        self.theirs.close()
        return "thread"

    def at_work(self):
        return self.record.read()


class ThreadLauncher(SocketLauncher):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.engines = []
        self.failure = None

    def launch(self):
        self.engines.append(ThreadEngine(self.tokenizer, self.failure))
        return self.engines[-1]

    @property
    def current(self):
        return self.engines[-1]
