"""The processes of the followers of an engine, seen from the home rank.

    followers = Followers(module, memory, settings)  starts them: rank_process.py is what they run
    capacities = followers.receive()                 a message of each, or how one of them ended
    followers.send(limits)
    ...                                              steps, by messages in the memory
    followers.close()

A thread watches them. When one ends, it aborts all waiting at once, so that no rank waits for it,
and ends the others. They all end with the home rank, whatever ends that (`end_with_parent`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from octavo.base.errors import ConfigError, EngineError, PeerEndedError
from octavo.runtime.rank_memory import Ticket, descriptors
from octavo.runtime.rank_process import JsonConnection, Message
from octavo.system.child_process import environment_without_keys, work_of

# What a follower last wrote to its standard error is kept, for the message that names it.
_LAST_LINES = 20
_LINE_BYTES = 1 << 16  # what is longer is cut into several lines
# Seconds that a process may take to end: after its connection has, and after it was killed.
_SECONDS_TO_END = 1.0
_SECONDS_TO_DIE = 10.0


class SharedMemory(Protocol):
    """The memory of ranks on this machine: ``RankMemory``, or ``StageMemory``.

    ``num_ranks`` counts those of other machines, too; ``followers`` are those that have processes
    of their own here.
    """

    @property
    def num_ranks(self) -> int: ...
    @property
    def followers(self) -> range: ...
    def ticket(self, rank: int) -> Ticket: ...
    def abort(self) -> None: ...


class Followers:
    """Processes of the followers on this machine, each of which runs ``serve`` of a module.

    Args:
        module: its name, for import; see `rank_process`.
        memory: of all ranks. It stays open until the followers are closed.
        settings: for all of them; objects of JSON.
        patience_s: seconds for which one whose message is awaited may do no work, before it is
            ended; 0: any time.

    Raises:
        ConfigError: the system refuses to start a process.
    """

    def __init__(
        self, module: str, memory: SharedMemory, settings: Message, *, patience_s: float = 0.0
    ):
        self._patience_s = patience_s
        self._watch = _Watch(module, memory, settings)
        self._close = weakref.finalize(self, self._watch.close)

    @property
    def pids(self) -> list[int]:
        """The processes of the followers, in the order of ranks."""
        return [follower.process.pid for follower in self._watch.followers]

    @property
    def failure(self) -> EngineError | None:
        """The end of a follower, in words; None as long as all run."""
        return self._watch.failure.result() if self._watch.failure.done() else None

    def wait_for_failure(self) -> EngineError | None:
        """Return the end of a follower, of which the waiting of others has ended already; None if
        it does not come to be known."""
        try:
            return self._watch.failure.result(2 * _SECONDS_TO_END)
        except TimeoutError:
            return None

    def when_one_ends(self, callback: Callable[[PeerEndedError], object]) -> None:
        """Have ``callback`` called, in a thread of its own, when a follower ends by itself."""

        def call(failure: Future[EngineError]) -> None:
            if isinstance(error := failure.result(), PeerEndedError):
                callback(error)

        self._watch.failure.add_done_callback(call)

    def send(self, message: Message) -> None:
        """Send a message to all followers."""
        for follower in self._watch.followers:
            follower.connection.send(message)

    def receive(self) -> list[Message]:
        """Wait for a message of each follower, and return them in the order of ranks.

        Raises:
            PeerEndedError: one of them has ended instead; says how, with its last words.
        """
        messages = []
        for follower in self._watch.followers:
            if self._patience_s:
                follower.wait_for_message(self._patience_s)
            message = follower.connection.receive()
            if message is None:
                raise self._watch.failure.result()
            messages.append(message)
        return messages

    def close(self) -> None:
        """End the followers, and all waiting of ranks. May be repeated."""
        self._close()


class _Follower:
    """The process of one rank."""

    def __init__(self, module: str, memory: SharedMemory, rank: int, settings: Message):
        self.rank = rank
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._line = b""  # the beginning of one
        self._why = ""  # it was ended, if it was
        self._num_ranks = memory.num_ranks
        ticket = memory.ticket(rank)
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_error:
            on_error.enter_context(ours)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "octavo.runtime.rank_process", module]
                + [str(theirs.fileno()), str(os.getpid())],
                pass_fds=[*descriptors(ticket), theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment_without_keys(),
            )
            on_error.pop_all()
        assert self.process.stderr is not None
        self.errors = self.process.stderr.fileno()
        os.set_blocking(self.errors, False)
        self.connection = JsonConnection(ours)
        self.connection.send({"settings": settings, "ticket": ticket})

    def read_errors(self) -> bool:
        """Pass on what it wrote to its standard error; returns whether more can come."""
        try:
            data = os.read(self.errors, _LINE_BYTES)
        except BlockingIOError:
            return True
        *lines, self._line = (self._line + data).split(b"\n")
        if self._line and (not data or len(self._line) >= _LINE_BYTES):
            lines.append(self._line)
            self._line = b""
        for line in lines:
            self.lines.append(line.decode(errors="replace"))
            with contextlib.suppress(OSError):
                os.write(2, line + b"\n")
        return bool(data)

    def wait_for_message(self, patience_s: float) -> None:
        """Wait until a message of the process has come, or its end; end it if it does no work for
        so long: it is stopped, or waits for something that does not come."""
        work, since = work_of(self.process.pid), time.monotonic()
        while not self.connection.has_come(min(1.0, patience_s / 4)):
            now = work_of(self.process.pid)
            if now != work or not now:  # where the system does not tell, it may be at work
                work, since = now, time.monotonic()
            elif time.monotonic() - since > patience_s:
                self._why = f"was ended, as it had done nothing for {patience_s:g} s"
                self.kill()
                return

    def describe_end(self) -> EngineError:
        """Wait for the process, whose connection has ended, and return how it ended."""
        try:
            status = self.process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        while self.read_errors() and select.select([self.errors], [], [], 0)[0]:
            pass
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        words = "\n".join(self.lines)
        return PeerEndedError(
            f"rank {self.rank} of {self._num_ranks} {self._why or f'ended with {how}'}"
            + (f"; its last words:\n{words}" if words else ", without a word")
        )

    def kill(self) -> None:
        self.process.kill()
        self.connection.shut_down()

    def close(self) -> None:
        """Wait for the end of the process, which was killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            self.process.wait(_SECONDS_TO_DIE)
        self.connection.close()
        assert self.process.stderr is not None
        self.process.stderr.close()


class _Watch:
    """The thread that starts the processes, watches them, and ends them.

    It is their parent in the sense of `end_with_parent`, which means a thread.
    """

    def __init__(self, module: str, memory: SharedMemory, settings: Message):
        self._memory = memory
        self.followers: list[_Follower] = []
        self.failure: Future[EngineError] = Future()
        self._woken_fd, self._wake_fd = os.pipe()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(module, settings, started),
            name="octavo-followers",
            daemon=True,
        )
        self._thread.start()
        try:
            started.result()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the system starts no process for rank {len(self.followers) + 1} of "
                f"{memory.num_ranks}: {error}"
            ) from error

    def close(self) -> None:
        os.close(self._wake_fd)
        if threading.current_thread() is not self._thread:  # which may collect garbage, too
            self._thread.join()

    def _run(self, module: str, settings: Message, started: Future[None]) -> None:
        try:
            for rank in self._memory.followers:
                self.followers.append(_Follower(module, self._memory, rank, settings))
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)
            self._watch()
        finally:
            self._end()

    def _watch(self) -> None:
        """Watch the followers until one ends, or `close` is called."""
        ends = {follower.connection.fileno(): follower for follower in self.followers}
        errors = {follower.errors: follower for follower in self.followers}
        poll = select.poll()
        poll.register(self._woken_fd, select.POLLIN)
        for fd in ends:
            poll.register(fd, select.POLLRDHUP)
        for fd in errors:
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            for fd in ready & ends.keys():
                self._memory.abort()
                self.failure.set_result(ends[fd].describe_end())
                return
            if self._woken_fd in ready:
                return
            for fd in ready & errors.keys():
                if not errors[fd].read_errors():
                    poll.unregister(fd)

    def _end(self) -> None:
        self._memory.abort()
        if not self.failure.done():
            self.failure.set_result(EngineError("the followers of the engine have been ended"))
        for follower in self.followers:
            follower.kill()
        for follower in self.followers:
            follower.close()
        os.close(self._woken_fd)
