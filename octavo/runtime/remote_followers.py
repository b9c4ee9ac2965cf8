"""The ranks of an engine that run on other machines, seen from the home rank.

    followers = RemoteFollowers(module, hosts, settings)    starts them: remote_rank.py
    followers.place                                         the home rank's place in the pipeline
    capacities = followers.receive()                        as of `Followers`, on one machine
    ...
    followers.close()

Each has one link to the home rank. When one of these ends, all of them are ended at once, so that
no rank waits for one that has gone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from octavo.base.errors import ConfigError, EngineError, LinkError, PeerEndedError
from octavo.kernels.parts import Stage
from octavo.links.link import Link, Patience
from octavo.links.listener import LOOPBACK, Invitation, Listener
from octavo.links.ticket import Address
from octavo.runtime.home_connection import ERROR, MESSAGES
from octavo.runtime.hosts import Host, RemoteProcess
from octavo.runtime.machine_links import MachineLink, SentMessages
from octavo.runtime.rank_facts import software_facts
from octavo.runtime.stage_links import PipelinePlace

_ARGUMENTS = ("-m", "octavo.runtime.remote_rank")
# Until a process has imported what it needs, on a machine that is busy, and connected.
_SECONDS_TO_CONNECT = 120.0
_SECONDS_TO_END = 1.0  # from the end of a link to the end of its process, for the words of both

Message = dict[str, Any]


class RemoteFollowers:
    """Processes on other machines, one for each stage of a pipeline but the last: its first rank.

    Args:
        module: whose ``serve`` they run, see `octavo.runtime.remote_rank`.
        hosts: of the stage before the last one first.
        settings: for all of them; objects of JSON.
        tp: ranks of each stage. The other ones are started by the first.
        address: of this machine, where they connect to.

    Raises:
        ConfigError: one cannot be started, does not connect, or is of another version.
    """

    def __init__(
        self,
        module: str,
        hosts: Sequence[Host],
        settings: Message,
        *,
        tp: int = 1,
        address: Address = LOOPBACK,
        patience: Patience | None = None,
    ):
        self._ranks = _Ranks(tp)
        self._close = weakref.finalize(self, self._ranks.close)
        try:
            with Listener(address, patience=patience) as listener:
                self._ranks.start(listener, hosts)
            self._ranks.join(module, settings)
        except BaseException:
            self.close()
            raise
        links = self._ranks.links
        messages = SentMessages(links)
        last = Stage(len(hosts), len(hosts) + 1)
        self.place = PipelinePlace(last, messages, MachineLink(links[0], MESSAGES))

    @property
    def names(self) -> list[str]:
        """The processes as errors name them, in the order of ranks."""
        return list(self._ranks.names)

    @property
    def failure(self) -> EngineError | None:
        """The end of a follower, in words; None as long as all run."""
        return self._ranks.failure.result() if self._ranks.failure.done() else None

    def when_one_ends(self, callback: Callable[[PeerEndedError], object]) -> None:
        """Have ``callback`` called, in any thread, when a follower ends by itself."""

        def call(failure: Future[EngineError]) -> None:
            if isinstance(error := failure.result(), PeerEndedError):
                callback(error)

        self._ranks.failure.add_done_callback(call)

    def send(self, message: Message) -> None:
        """Send a message to all followers."""
        self._ranks.send(message)

    def receive(self) -> list[Message]:
        """Wait for a message of each follower, and return them in the order of ranks.

        Raises:
            PeerEndedError: one of them has ended instead; says how.
        """
        return [self._ranks.receive(index) for index in range(len(self._ranks.links))]

    def close(self) -> None:
        """End the followers. May be repeated."""
        self._close()


class _Ranks:
    """The links and processes of the first ranks of stages, by their index: the stage before the
    last one is 0."""

    def __init__(self, tp: int) -> None:
        self._tp = tp
        self.links: list[Link] = []
        self.failure: Future[EngineError] = Future()
        self.names: list[str] = []
        self._processes: list[RemoteProcess] = []
        self._ends: list[Future[str]] = []
        self._first = threading.Lock()  # held from the first end on

    def start(self, listener: Listener, hosts: Sequence[Host]) -> None:
        """Start a process on each host, and wait until all have connected."""
        size = self._tp * (len(hosts) + 1)
        invitations: list[Invitation] = []
        for number, host in enumerate(hosts, 1):
            name = f"rank {self._tp * number} of {size} on {host.name}"
            invitation = listener.invite(name, software_facts())
            process = host.start(_ARGUMENTS, invitation.ticket.secret_text())
            self.names.append(name)
            self._processes.append(process)
            end: Future[str] = Future()
            self._ends.append(end)
            invitations.append(invitation)
            process.when_it_ends(_noting(end, invitation, name))
        for index, invitation in enumerate(invitations):
            link = invitation.wait(_SECONDS_TO_CONNECT)
            self.links.append(link)
            link.start(MESSAGES)
            link.when_it_ends(partial(self._ended, index))

    def join(self, module: str, settings: Message) -> None:
        """Tell all what they are, and connect each with the next one."""
        stages = len(self.links) + 1
        for number, link in enumerate(self.links, 1):
            stage = {"stage": [stages - 1 - number, stages], "tp": self._tp}
            self._send(link, {**stage, "module": module, "settings": settings})
        tickets = [self.receive(index)["ticket"] for index in range(len(self.links))]
        for link, behind in zip(self.links, [None, *tickets], strict=False):
            self._send(link, {"ticket": behind})

    def send(self, message: Message) -> None:
        for link in self.links:
            self._send(link, message)

    def receive(self, index: int) -> Message:
        try:
            message = self.links[index].receive_message()
        except LinkError:
            raise self.failure.result() from None
        if ERROR in message:
            raise PeerEndedError(f"{self.names[index]}: {message[ERROR]}")
        return message

    def close(self) -> None:
        if self._first.acquire(blocking=False):
            self.failure.set_result(EngineError("the followers of the engine have been ended"))
        for link in self.links:
            link.close()
        for process, end in zip(self._processes, self._ends, strict=True):
            try:
                end.result(_SECONDS_TO_END)  # it ends with its link
            except TimeoutError:
                process.kill()

    def _send(self, link: Link, message: Message) -> None:
        try:
            link.send_message(message)
        except LinkError:
            return  # which `receive` tells

    def _ended(self, index: int, why: LinkError) -> None:
        """Note the end of a link, in whatever thread, and end all others."""
        is_first = self._first.acquire(blocking=False)
        for link in self.links:
            link.end(why)
        if not is_first:
            return
        try:
            how = f"; it {self._ends[index].result(_SECONDS_TO_END)}"
        except TimeoutError:
            how = ""
        self.failure.set_result(PeerEndedError(f"{why}{how}"))


def _noting(end: Future[str], invitation: Invitation, name: str) -> Callable[[str], None]:
    """Return what notes the end of a process, before or after it has connected."""

    def note(how: str) -> None:
        end.set_result(how)
        invitation.give_up(ConfigError(f"{name}: it {how}"))

    return note
