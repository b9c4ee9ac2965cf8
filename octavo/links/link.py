"""Links: connections between two processes that have shown each other who they are.

    link.start({WORDS: 4096, MESSAGE: 65536})    from now on frames of these kinds may come
    link.send(WORDS, words)                      from any thread
    frame = link.receive()                       waits; LinkError once the link has ended
    link.close()

One thread of each link receives, and another says that this end is alive while nothing else is
sent. A link ends when nothing is heard from the other end: so a cable that is cut, or a machine
that is switched off, is noticed within `Patience.silence_s`, also where neither end has a reason to
send.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from octavo.base.errors import LinkError
from octavo.links.connection import TlsConnection
from octavo.links.frames import (
    BEAT,
    END,
    HEADER_BYTES,
    MESSAGE,
    Header,
    IncomingFrames,
    OutgoingFrames,
)

# Frames that wait for `receive`; then no more are read, and the other end has to wait.
MOST_WAITING = 64
# Shorter frames are sent as one piece of TLS, with their header: a record has 16 KB at most.
_ONE_PIECE_BYTES = 16384 - HEADER_BYTES
_PAUSE_S = 0.001
# Bytes a second that are waited for, beside `Patience.silence_s`, before a send is given up.
_SLOWEST = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that one end waits for the other.

    Args:
        handshake_s: until it has shown who it is.
        beat_s: after which an end that has nothing to send says that it is alive.
        silence_s: after which it is taken to be gone.
    """

    handshake_s: float = 10.0
    beat_s: float = 1.0
    silence_s: float = 10.0


class Frame(NamedTuple):
    """A frame that has come: its kind, and its bytes."""

    kind: int
    data: memoryview


class Link:
    """One end of a link, which `Listener` and `connect` make.

    Args:
        incoming, outgoing: of the frames, some of which have passed already.
    """

    def __init__(
        self,
        connection: TlsConnection,
        incoming: IncomingFrames,
        outgoing: OutgoingFrames,
        patience: Patience,
    ):
        self.peer = connection.peer
        self._connection = connection
        self._incoming, self._outgoing = incoming, outgoing
        self._patience = patience
        self._sending = threading.Lock()
        self._sent_at = self._heard_at = time.monotonic()
        self._frames: SimpleQueue[Frame | None] = SimpleQueue()
        self._deliver: Callable[[Frame], object] | None = None
        self._buffer = memoryview(b"")
        self._end: Future[LinkError] = Future()
        self._first_reason = threading.Lock()
        self._over = threading.Event()  # `_end`, for waits with a time
        self._threads: list[threading.Thread] = []

    @property
    def local_host(self) -> str:
        """The address of this machine that the link has."""
        return self._connection.local_host

    @property
    def failure(self) -> LinkError | None:
        """Why the link has ended; None as long as it has not."""
        return self._end.result() if self._end.done() else None

    def when_it_ends(self, callback: Callable[[LinkError], object]) -> None:
        """Have ``callback`` called once, in any thread, when the link ends, or has ended."""
        self._end.add_done_callback(lambda end: callback(end.result()))

    def start(
        self, limits: Mapping[int, int], deliver: Callable[[Frame], object] | None = None
    ) -> None:
        """Receive frames from now on.

        Args:
            limits: see `allow`.
            deliver: called with each frame in the link's thread, instead of `receive`. The bytes
                are valid until it returns. It may wait, as long as the link has not ended; what it
                raises ends the link.
        """
        self.allow(limits)
        self._deliver = deliver
        self._sent_at = self._heard_at = time.monotonic()
        for run in (self._receive_all, self._beat):
            thread = threading.Thread(target=run, name="octavo-link", daemon=True)
            self._threads.append(thread)
            thread.start()

    def allow(self, limits: Mapping[int, int]) -> None:
        """Take frames of these kinds from now on, with so many bytes at most, and no others."""
        self._incoming.limits = {**limits, BEAT: 0, END: 0}

    def send(self, kind: int, data: Any = b"") -> None:
        """Send one frame, of anything that has bytes. Waits while the other end takes nothing.

        Raises:
            LinkError: the link has ended, or the other end has taken nothing for too long.
        """
        view = memoryview(data).cast("B")
        deadline = time.monotonic() + self._patience.silence_s + len(view) / _SLOWEST
        try:
            with self._sending:
                if self._end.done():
                    raise self._end.result()
                header = self._outgoing.header(kind, len(view))
                if len(view) <= _ONE_PIECE_BYTES:
                    self._connection.send(memoryview(b"".join((header, view))), deadline)
                else:
                    self._connection.send(memoryview(header), deadline)
                    self._connection.send(view, deadline)
                self._sent_at = time.monotonic()
        except (LinkError, TimeoutError) as error:
            raise LinkError(str(self._ended(error))) from None

    def send_message(self, message: Mapping[str, Any]) -> None:
        """Send an object of JSON. Errors are those of `send`."""
        self.send(MESSAGE, json.dumps(message).encode())

    def receive(self) -> Frame:
        """Wait for the next frame, and return it. LinkError once the link has ended."""
        frame = self._frames.get()
        if frame is None:
            self._frames.put(None)  # for the next one who asks
            raise LinkError(str(self._end.result()))
        return frame

    def receive_message(self) -> dict[str, Any]:
        """Wait for an object of JSON, and return it. LinkError if something else comes."""
        frame = self.receive()
        try:
            message = json.loads(bytes(frame.data)) if frame.kind == MESSAGE else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise self._ended(LinkError(f"{self.peer}: an object of JSON was due"))
        return message

    def end(self, why: LinkError) -> None:
        """End the link for a reason. May be called from any thread, and repeated."""
        self._ended(why)

    def close(self) -> None:
        """Say that this is the end, and end the link. May be repeated."""
        if not self._end.done():
            self._send_if_free(END)
        self._ended(LinkError(f"{self.peer}: the link was closed here"))
        if not self._threads:
            self._connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ended(self, error: Exception) -> LinkError:
        """End the link; returns why it has ended, which may be an earlier reason."""
        if self._first_reason.acquire(blocking=False):
            self._end.set_result(error if isinstance(error, LinkError) else LinkError(str(error)))
            self._frames.put(None)
            self._over.set()
        self._connection.shut_down()
        return self._end.result()

    def _receive_all(self) -> None:
        try:
            while True:
                self._take(*self._next_header())
        except LinkError as error:
            self._ended(error)
        except Exception as error:
            self._ended(LinkError(f"{self.peer}: {error}"))
        finally:
            with self._sending:  # which ends soon, after `_ended`
                self._connection.close()

    def _next_header(self) -> Header:
        header = bytearray(HEADER_BYTES)
        self._fill(memoryview(header))
        try:
            return self._incoming.header(header)
        except LinkError as error:
            raise LinkError(f"{self.peer}: {error}") from None

    def _take(self, kind: int, num_bytes: int) -> None:
        if kind == END:
            raise LinkError(f"{self.peer}: the other end has closed the link")
        if kind == BEAT:
            return
        if self._deliver is not None:
            if len(self._buffer) < num_bytes:
                self._buffer = memoryview(bytearray(num_bytes))
            data = self._buffer[:num_bytes]
            self._fill(data)
            self._deliver(Frame(kind, data))
        else:
            data = memoryview(bytearray(num_bytes))
            self._fill(data)
            self._frames.put(Frame(kind, data))
            while self._frames.qsize() >= MOST_WAITING and not self._over.wait(_PAUSE_S):
                pass
        self._heard_at = time.monotonic()

    def _fill(self, buffer: memoryview) -> None:
        at = 0
        while at < len(buffer):
            try:
                deadline = self._heard_at + self._patience.silence_s
                at += self._connection.receive(buffer[at:], deadline)
            except TimeoutError:
                silence = time.monotonic() - self._heard_at
                raise LinkError(
                    f"{self.peer}: nothing was heard from it for {silence:.3g} seconds"
                ) from None
            self._heard_at = time.monotonic()

    def _beat(self) -> None:
        """Say that this end is alive where nothing else was sent, until the link ends."""
        while not self._over.wait(self._patience.beat_s / 2):
            if time.monotonic() - self._sent_at >= self._patience.beat_s / 2:
                self._send_if_free(BEAT)

    def _send_if_free(self, kind: int) -> None:
        """Send a frame without bytes, unless that would have to wait."""
        if not self._sending.acquire(blocking=False):
            return  # something is being sent
        try:
            if self._connection.can_send():
                header = self._outgoing.header(kind, 0)
                deadline = time.monotonic() + self._patience.silence_s
                self._connection.send(memoryview(header), deadline)
                self._sent_at = time.monotonic()
        except (LinkError, TimeoutError) as error:
            self._ended(error)
        finally:
            self._sending.release()
