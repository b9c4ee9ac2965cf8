"""Engines that do as a script says, in place of processes."""

from __future__ import annotations

import dataclasses
import signal
import socket

from socket_engine import SocketEngine, SocketLauncher

from octavo.server.engine.generation import EngineFacts
from octavo.server.engine.wire import encode_message

INFO = {"device": "none", "kernels": "no"}
FACTS = EngineFacts(64, 8, 260, 64, 4, info=INFO, choices=("a", "b"))

# What an engine may say when it is launched, and keep silent ever after.
READY = {"ev": "ready", "facts": dataclasses.asdict(FACTS)}
SILENCE = None
DEATH = {"ev": "dead"}


class ScriptedEngine(SocketEngine):
    """Says its line; ends when it is told to."""

    def __init__(self, line):
        self.connection, self._theirs = socket.socketpair()
        self.connection.setblocking(False)
        self.is_over = False
        if line is DEATH:
            self.kill()
        elif line is not SILENCE:
            self._theirs.send(encode_message(line))

    def kill(self, signum=signal.SIGKILL):
        self.is_over = True
        self._theirs.close()

    def wait(self):
        assert self.is_over
        return "as asked"

    def at_work(self):
        return ["r1", "r2"]


class ScriptedLauncher(SocketLauncher):
    """Launches an engine for each line, or raises it; the last one for ever."""

    def __init__(self, *script):
        self.script = list(script)
        self.engines = []
        self.num_launches = 0

    def launch(self):
        self.num_launches += 1
        line = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(line, OSError):
            raise line
        self.engines.append(ScriptedEngine(line))
        return self.engines[-1]
