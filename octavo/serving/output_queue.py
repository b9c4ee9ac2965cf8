"""Hands deltas from the thread that steps the engine to the caller that reads them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from octavo.core.sampling_params import RequestOutputKind
from octavo.serving.output_builder import OutputBuilder
from octavo.serving.outputs import Delta, RequestOutput, StreamChunk
from octavo.serving.shared_loop import SharedEngineLoop, Wait
from octavo.serving.text_engine import SampleGroup


class OutputQueue:
    """The deltas of one caller's prompts, in their order.

    The thread that steps the engine puts them here, which costs next to nothing; building outputs
    from them, with the tokenizer and its errors, is done by the thread that reads.

    Args:
        is_done: the condition that the reader waits for.
        rings_always: it may become true with any delta, and else only with the last one of a
            sample.
    """

    def __init__(self, is_done: Callable[[], bool], *, rings_always: bool = False):
        self.wait = Wait(is_done)
        self.news: deque[Delta] = deque()
        self.num_running = 0  # samples whose last delta is not here yet
        self._rings_always = rings_always
        self._is_closed = False

    # -- the thread that steps the engine --------------------------------------------------------

    def expect(self, group: SampleGroup) -> None:
        self.num_running += len(group.samples)

    def put(self, delta: Delta) -> None:
        if self._is_closed:
            return
        self.news.append(delta)
        if delta.finish_reason is not None:
            self.num_running -= 1
        if self._rings_always or delta.finish_reason is not None:
            self.wait.ring()

    # -- any thread ----------------------------------------------------------------------------

    def close(self) -> None:
        """Expect nothing more: a thread that waits is woken."""
        self._is_closed = True
        self.num_running = 0
        self.news.clear()
        self.wait.ring()


class AnswerStream(Iterator[StreamChunk]):
    """The chunks of one answer.

    Calls ``forget`` at its end, whatever ends it: the last chunk, ``close``, an exception, or
    garbage collection. Several threads may read it; each chunk goes to one of them.

    Args:
        forget: ends the request in the engine.
        forget_later: does the same before the next step. For finalizers: it takes no lock.
    """

    def __init__(
        self,
        loop: SharedEngineLoop,
        inbox: OutputQueue,
        builder: OutputBuilder,
        forget: Callable[[], object],
        forget_later: Callable[[], object],
    ):
        self._loop = loop
        self._inbox = inbox
        self._builder = builder
        self._forget = forget
        self._reading = threading.Lock()
        # A garbage collection may come in the middle of a step: the loop does it after that.
        self._finalizer = weakref.finalize(self, forget_later)
        self._finalizer.atexit = False

    @staticmethod
    def inbox() -> OutputQueue:
        """Return a queue for a stream: it waits for any delta, or for the end."""
        inbox: OutputQueue = OutputQueue(
            lambda: bool(inbox.news) or not inbox.num_running, rings_always=True
        )
        return inbox

    def __next__(self) -> StreamChunk:
        with self._reading:
            try:
                while True:
                    self._loop.wait_for(self._inbox.wait)
                    delta = self._next_delta()
                    chunk = self._chunk(delta)
                    if chunk is not None:
                        return chunk
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the answer here. May be repeated, and from any thread."""
        if self._finalizer.detach() is not None:
            self._inbox.close()
            self._forget()

    def _next_delta(self) -> Delta:
        try:
            return self._inbox.news.popleft()
        except IndexError:  # it has ended, or another thread has closed it
            raise StopIteration from None

    def _chunk(self, delta: Delta) -> StreamChunk | None:
        """Return the chunk of a delta; None if nothing is shown for it."""
        builder, index = self._builder, delta.index
        new = builder.take(delta)
        kind = self._builder.group.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and delta.finish_reason is None:
            return None
        text, token_ids = delta.text, delta.token_ids
        if kind is RequestOutputKind.FINAL_ONLY:
            text, token_ids = builder.text(index), builder.token_ids(index)
            new = builder.message(index)
        build: Callable[[], RequestOutput] = partial(builder.output, builder.extents)
        if kind is RequestOutputKind.DELTA:
            build = partial(_itself, builder.take_output())
        return StreamChunk(
            index,
            text,
            token_ids,
            delta.finish_reason,
            build,
            new.reasoning,
            new.content,
            tuple(new.tool_calls),
        )


def _itself(output: RequestOutput) -> RequestOutput:
    return output
