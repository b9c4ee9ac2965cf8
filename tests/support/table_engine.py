"""Engines that are a table of what each request does and when, on the event loop of the server.

They have what the real one has for crashes: a record of what they are at work on, and steps in
which some requests are alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket

from socket_engine import SocketEngine, SocketLauncher

from octavo.core.stats import StepStats
from octavo.server.engine.generation import EngineFacts
from octavo.server.engine.wire import MessageDecoder, encode_message, record_to_list

INNOCENT, DEADLY, DEADLY_TO_ADD = 0, 1, 2  # the first token of a prompt
NUM_SEATS = 6
FACTS = EngineFacts(1000, NUM_SEATS, 10**9, 100, 16)


@dataclasses.dataclass
class Job:
    """A request as the engine has it: its tokens are 1, 2, ... A deadly one kills at its limit."""

    kind: int
    limit: int
    is_alone: bool
    is_waiting: bool = True
    num_tokens: int = 0


class TableEngine(SocketEngine):
    """An EngineProcess on the event loop that gives it its messages."""

    def __init__(self, launcher):
        self.connection, self._theirs = socket.socketpair()
        for end in (self.connection, self._theirs):
            end.setblocking(False)
        self.launcher = launcher
        self.record = []
        self.jobs = {}
        self.is_ordered_to_die = False
        self._decoder = MessageDecoder()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self):
        self._say({"ev": "ready", "facts": dataclasses.asdict(FACTS)})
        with contextlib.suppress(OSError):
            while True:
                with contextlib.suppress(BlockingIOError):
                    data = self._theirs.recv(1 << 20)
                    if not data:
                        break
                    for message in self._decoder.feed(data):
                        if not self._obey(message):
                            return self.die()
                if not self._step():
                    return self.die()
                await asyncio.sleep(0)
        self.die()

    def _obey(self, message):
        match message["op"]:
            case "add":
                self.record = [message["id"]]
                kind, limit = message["ids"][:2]
                job = self.jobs[message["id"]] = Job(kind, limit, message["isolated"])
                for _, ids, _ in message.get("resumed", ()):
                    job.num_tokens = len(ids)
                self.launcher.seen[message["id"]].append(message["isolated"])
                return kind != DEADLY_TO_ADD
            case "release":
                if message["id"] in self.jobs:
                    self.jobs[message["id"]].is_alone = False
            case "abort":
                self.jobs.pop(message["id"], None)
            case "stop":
                return False
        return True

    def _step(self):
        """The requests with a slot: each isolated one by itself, and then the rest."""
        begun = list(self.jobs)[:NUM_SEATS]
        isolated = [[name] for name in begun if self.jobs[name].is_alone]
        for names in [*isolated, [name for name in begun if not self.jobs[name].is_alone]]:
            if not names:
                continue
            self.record = [f"{name}#{i}" for name in names for i in range(2)]
            self.launcher.num_steps += 1
            if self.is_ordered_to_die or any(self._kills(self.jobs[name]) for name in names):
                return False
            self._report(names)
        return True

    def _kills(self, job):
        return job.kind == DEADLY and job.num_tokens >= job.limit

    def _report(self, names):
        begun, deltas = [], []
        for name in names:
            job = self.jobs[name]
            if job.is_waiting:
                begun.append(name)
            job.is_waiting = False
            job.num_tokens += 1
            ends = job.num_tokens > job.limit
            deltas.append([name, 0, "x", [job.num_tokens], [], *["stop", None, None, None] * ends])
            if ends:
                del self.jobs[name]
        record = record_to_list(StepStats.idle())
        step = {"time": 0.0, "record": record, "begun": begun, "deltas": deltas, "stats": {}}
        self._say({"ev": "step", **step})

    def _say(self, message):
        self._theirs.send(encode_message(message))

    def die(self):
        self.launcher.num_deaths += 1
        self._theirs.close()

    def kill(self, signum=signal.SIGKILL):
        self._task.cancel()
        self._theirs.close()

    def wait(self):
        return "as planned"

    def at_work(self):
        return self.record


class TableLauncher(SocketLauncher):
    def __init__(self):
        self.engines = []
        self.seen = _Lists()
        self.num_steps = self.num_deaths = 0

    def launch(self):
        self.engines.append(TableEngine(self))
        return self.engines[-1]


class _Lists(dict):
    def __missing__(self, key):
        return self.setdefault(key, [])
