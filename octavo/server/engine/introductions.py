"""`Introductions` has replicas that answer connect to those that compute prompts for them.

Replicas on several machines know of each other by the server alone, over the links that they have
to it: a ticket goes from one to the other, and is good for one connection::

    prefill replica   <-  invite           both are ready, or their link has ended
                      invited, ticket  ->  server  ->  connect, ticket   decode replica
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.core.disaggregation import Role
from octavo.server.engine.generation import EngineState
from octavo.server.engine.wire import Message


class _Replica(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def role(self) -> Role | None: ...
    @property
    def state(self) -> EngineState: ...
    def send(self, message: Message) -> None: ...


class Introductions:
    """The tickets between replicas of a server.

    Args:
        replicas: returns those that are introduced to each other.
    """

    def __init__(self, replicas: Callable[[], Sequence[_Replica]]):
        self._replicas = replicas

    def begin(self, replica: _Replica) -> None:
        """Introduce a replica that has just become ready to all others that it works with."""
        for other in self._replicas():
            if (replica.role, other.role) == (Role.PREFILL, Role.DECODE):
                self._introduce(replica, other)
            elif (replica.role, other.role) == (Role.DECODE, Role.PREFILL):
                self._introduce(other, replica)

    def go_on(self, replica: _Replica, message: Message) -> None:
        """Do what a message of a replica asks for: pass its ticket on, or get it another one."""
        other = next((each for each in self._replicas() if each.number == message["replica"]), None)
        if other is None:
            return
        match message["ev"], replica.role, other.role:
            case "invited", Role.PREFILL, Role.DECODE:
                if other.state is EngineState.READY:
                    ticket = message["ticket"]
                    other.send({"op": "connect", "replica": replica.number, "ticket": ticket})
            case "unlinked", Role.DECODE, Role.PREFILL:
                self._introduce(other, replica)

    def _introduce(self, prefill: _Replica, decode: _Replica) -> None:
        if prefill.state is decode.state is EngineState.READY:
            prefill.send({"op": "invite", "replica": decode.number})
