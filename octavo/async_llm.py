"""The engine behind asyncio: one thread steps it, coroutines wait for their own outputs."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from octavo.build import load_engine
from octavo.config import EngineArgs
from octavo.core.sampling_params import SamplingParams
from octavo.errors import EngineError, InvalidRequestError
from octavo.outputs import RequestOutput
from octavo.text_engine import Prompt, TextDelta, TextEngine

_log = logging.getLogger("octavo")

# The ecosystem's name for the same thing.
AsyncEngineArgs = EngineArgs


class _Mailbox:
    """Outputs of one request, handed from the engine's thread to an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

    def put(self, item: RequestOutput | BaseException) -> None:
        """From any thread. A loop that is closed has nobody left who waits."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self) -> RequestOutput:
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item


class AsyncLLM:
    """A model that answers many callers at once.

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="smollm2-135m"))
        async for output in engine.generate("Hello", SamplingParams(), request_id="1"):
            print(output.outputs[0].text)
        engine.shutdown()

    All calls may be made from any event loop. Leaving an ``async for`` early, or cancelling the
    task, aborts the request.
    """

    def __init__(self, model: str | None = None, **engine_args: Any):
        self._start(EngineArgs.from_kwargs(model, **engine_args))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        self = cls.__new__(cls)
        self._start(engine_args)
        return self

    def _start(self, args: EngineArgs) -> None:
        self._loaded = load_engine(args)
        self.config = self._loaded.config
        self._mailboxes: dict[str, _Mailbox] = {}
        # What the engine's thread is to do between steps; None ends it.
        self._commands: queue.SimpleQueue[Callable[[TextEngine], None] | None]
        self._commands = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def engine_info(self) -> dict[str, Any]:
        """Device, dtype, kernels and memory."""
        return self._loaded.info

    def get_tokenizer(self) -> Any:
        return self._loaded.text_engine.tokenizer

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; yields the whole output so far whenever it has grown.

        Raises:
            RequestError: the prompt or the parameters cannot be served.
            EngineError: the engine was shut down.

        A request that fails inside the engine ends with the finish_reason "error".
        """
        if self._closed:
            raise EngineError("the engine was shut down")
        if request_id in self._mailboxes:
            raise InvalidRequestError(f"{request_id!r} is in use", "request_id")
        mailbox = self._mailboxes[request_id] = _Mailbox()
        try:
            # Tokenizing a long prompt takes its time: not on the event loop, nor between steps.
            text, ids = await asyncio.to_thread(self._loaded.text_engine.tokenize, prompt)

            def add(engine: TextEngine) -> None:
                try:
                    engine.add(
                        request_id,
                        text,
                        ids,
                        sampling_params,
                        priority=priority,
                        cache_salt=cache_salt,
                    )
                except Exception as error:
                    mailbox.put(error)

            self._commands.put(add)
            while True:
                output = await mailbox.get()
                yield output
                if output.finished:
                    return
        finally:
            del self._mailboxes[request_id]
            self._commands.put(lambda engine: _abort(engine, request_id))

    async def abort(self, request_id: str) -> None:
        """End a request at any moment; its ``generate`` yields a last output with "abort"."""
        mailbox = self._mailboxes.get(request_id)

        def abort(engine: TextEngine) -> None:
            generation = engine.abort(request_id)
            if generation is not None and mailbox is not None:
                mailbox.put(engine.output(generation))

        self._commands.put(abort)

    def shutdown(self) -> None:
        """Abort everything and end the engine's thread."""
        if not self._closed:
            self._closed = True
            self._commands.put(None)
            self._thread.join()

    # -- the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        engine = self._loaded.text_engine
        reason = "the engine was shut down"
        try:
            while self._obey(engine):
                deltas, _ = engine.step()
                self._deliver(engine, deltas)
            engine.engine.close()
        except Exception as error:  # a bug of ours; nobody may wait for ever because of it
            _log.exception("the engine's thread failed")
            self._closed = True
            reason = f"the engine failed: {type(error).__name__}: {error}"
        for mailbox in list(self._mailboxes.values()):
            mailbox.put(EngineError(reason))

    def _obey(self, engine: TextEngine) -> bool:
        """Carry out all commands that are there, and wait for one if there is no other work."""
        while True:
            try:
                command = self._commands.get(block=not engine.has_unfinished_requests)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _deliver(self, engine: TextEngine, deltas: list[TextDelta]) -> None:
        grown = {delta.generation.request_id: delta.generation for delta in deltas}
        for request_id, generation in grown.items():
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.put(engine.output(generation))


def _abort(engine: TextEngine, request_id: str) -> None:
    engine.abort(request_id)


AsyncLLMEngine = AsyncLLM
