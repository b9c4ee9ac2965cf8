"""The asyncio API, `AsyncLLM`. One thread steps the engine, coroutines wait for their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any

from octavo.base.errors import ENDINGS, EngineError, InvalidRequestError, OctavoError
from octavo.base.plain_numbers import plain
from octavo.core.engine import EngineStep
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.serving.answer_reader import AnswerReader
from octavo.serving.call_arguments import (
    ChatSettings,
    Conversation,
    check_streamable,
    refuse_unsupported,
)
from octavo.serving.load import load_engine
from octavo.serving.loop import EngineLoop
from octavo.serving.output_builder import OutputBuilder
from octavo.serving.outputs import Delta, RequestOutput
from octavo.serving.text_engine import PreparedMask, Prompt, SampleGroup, cache_salt_of
from octavo.settings.engine import EngineArgs

_log = logging.getLogger("octavo")

_Prompt = tuple[str | None, list[int], AnswerReader | None]


def AsyncEngineArgs(model: str | None = None, **settings: Any) -> EngineArgs:  # noqa: N802
    """Return `EngineArgs` of octavo's settings and vLLM's, under vLLM's name."""
    return EngineArgs.from_kwargs(model, **settings)


class _AsyncOutputQueue:
    """The new deltas of one request, handed from the engine's thread to a coroutine.

    However slow the coroutine is, each delta waits here once, and it is woken once for all of them.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_aborted = False  # set when `AsyncLLM.abort` was called
        self.group: SampleGroup | None = None  # set by the engine's thread when it is added
        self.loop = asyncio.get_running_loop()
        self._news: deque[Delta] = deque()
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()
        self._is_wake_due = False

    # -- the engine's thread -----------------------------------------------------------------

    def put(self, delta: Delta) -> bool:
        """Append a delta; returns whether the coroutine has to be woken, by ``wake``."""
        self._news.append(delta)
        return self._must_wake()

    def fail(self, error: BaseException) -> None:
        """Raise an error in the coroutine, after it has read the deltas that are there."""
        self._error = error
        if self._must_wake():
            wake(self.loop, [self])

    def _must_wake(self) -> bool:
        # Only this thread sets it, after it appended; only the other thread resets it, before it
        # reads: no delta is overlooked.
        if self._is_wake_due:
            return False
        self._is_wake_due = True
        return True

    # -- the event loop's thread -------------------------------------------------------------

    def wake_now(self) -> None:
        self._is_wake_due = False
        self._has_news.set()

    async def read(self) -> list[Delta]:
        """Return all new deltas; waits until there is one. Raises the error given to ``fail``."""
        while not self._news:
            if self._error is not None:
                raise self._error
            self._has_news.clear()
            await self._has_news.wait()
        return [self._news.popleft() for _ in range(len(self._news))]


def wake(loop: asyncio.AbstractEventLoop, mailboxes: Iterable[_AsyncOutputQueue]) -> None:
    """Wake the coroutines of one event loop, all at once."""

    def wake_all() -> None:
        for mailbox in mailboxes:
            mailbox.wake_now()

    with contextlib.suppress(RuntimeError):  # it has been closed
        loop.call_soon_threadsafe(wake_all)


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
        self._loaded = load_engine(args, is_served=True)
        self.config = self._loaded.config
        self._mailboxes: dict[str, _AsyncOutputQueue] = {}
        self._text_engine = self._loaded.text_engine
        self._engine_loop = EngineLoop(self._text_engine, self._deliver)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def engine_info(self) -> dict[str, Any]:
        """Return device, dtype, kernels and memory."""
        return self._loaded.info

    def get_tokenizer(self) -> Any:
        return self._text_engine.tokenizer

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; yields an output whenever there is something new.

        ``sampling_params.output_kind`` chooses its content: the whole output so far, the part that
        is new since the last one (which costs the same at each, however long the answer is), or,
        with FINAL_ONLY, all of it at the end. A caller that asks for the next output late gets all
        that is new by then in one. Arguments of vLLM's whose features octavo lacks
        (``lora_request``, ``tokenization_kwargs``, ``trace_headers``, …) accept only None.

        Raises:
            RequestError: the prompt or the parameters cannot be served.
            EngineError: the engine was shut down.

        A request that fails inside the engine ends with the finish_reason "error".
        """
        refuse_unsupported(
            prompt_text=prompt_text,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            data_parallel_rank=data_parallel_rank,
            reasoning_ended=reasoning_ended,
        )
        salt = cache_salt or cache_salt_of(prompt)

        def tokenize() -> _Prompt:
            return (*self._text_engine.tokenize(prompt), None)

        return self._answer(tokenize, sampling_params.clone(), request_id, plain(priority), salt)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, through the model's chat template: the arguments are those of
        ``LLM.chat``, the outputs those of ``generate``."""
        settings = ChatSettings(
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            tool_choice,
            parallel_tool_calls,
        )

        def tokenize() -> _Prompt:
            return settings.prompt(self._text_engine.chat_templates, messages)

        params = sampling_params.clone()
        return self._answer(tokenize, params, request_id, plain(priority), cache_salt)

    async def _answer(
        self,
        tokenize: Callable[[], _Prompt],
        params: SamplingParams,
        request_id: str,
        priority: int,
        cache_salt: str,
    ) -> AsyncGenerator[RequestOutput, None]:
        if params.output_kind is RequestOutputKind.DELTA:
            check_streamable(params)
        mailbox = _AsyncOutputQueue(request_id)
        if self._mailboxes.setdefault(request_id, mailbox) is not mailbox:
            raise InvalidRequestError(f"{request_id!r} is in use", "request_id")
        try:
            if self._closed:  # checked only now: closing it fails the mailboxes that are registered
                raise EngineError("the engine was shut down")
            # Tokenizing a long prompt takes its time: not on the event loop, nor between steps.
            (text, ids, reader), params, mask = await asyncio.to_thread(
                self._encode, tokenize, params
            )
            self._engine_loop.tell(
                lambda: self._add(mailbox, text, ids, mask, params, priority, cache_salt)
            )
            deltas = await mailbox.read()
            assert mailbox.group is not None  # it was added before its first delta came
            builder = OutputBuilder(mailbox.group, self._text_engine.tokenizer, reader)
            while True:
                for delta in deltas:
                    builder.take(delta)
                if (output := _output(builder, params.output_kind)) is not None:
                    yield output
                if builder.is_finished:
                    return
                deltas = await mailbox.read()
        finally:
            self._engine_loop.tell(lambda: self._text_engine.abort(request_id))
            del self._mailboxes[request_id]

    async def abort(self, request_id: str) -> None:
        """End a request at any moment; its ``generate`` yields a last output with "abort"."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            mailbox.is_aborted = True
            self._engine_loop.tell(lambda: self._abort(mailbox))

    def shutdown(self) -> None:
        """Abort everything and end the engine's thread. May be repeated."""
        self._closed = True
        self._engine_loop.stop()
        self._thread.join()
        self._text_engine.grammars.close()

    def _encode(
        self, tokenize: Callable[[], _Prompt], params: SamplingParams
    ) -> tuple[_Prompt, SamplingParams, PreparedMask]:
        """Tokenize the prompt, and make the mask; in a thread of its own."""
        try:
            text, token_ids, reader = tokenize()
            if reader is not None:
                reader, params = reader.prepare(params)
            mask = self._text_engine.prepare_mask(params, prompt_token_ids=token_ids)
            return (text, token_ids, reader), params, mask
        except (OctavoError, *ENDINGS):
            raise
        except BaseException as error:
            raise InvalidRequestError(f"cannot be tokenized: {error!r}", "prompt") from error

    # -- the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            self._engine_loop.run()
        except BaseException as error:  # a bug: no caller may wait for ever because of it
            _log.exception("the engine's thread failed")
            reason = f"the engine failed: {type(error).__name__}: {error}"
        self._closed = True
        for mailbox in list(self._mailboxes.values()):
            mailbox.fail(EngineError(reason))

    def _add(
        self,
        mailbox: _AsyncOutputQueue,
        text: str | None,
        ids: list[int],
        mask: PreparedMask,
        params: SamplingParams,
        priority: int,
        cache_salt: str,
    ) -> None:
        try:
            mailbox.group = self._text_engine.add(
                mailbox.request_id,
                text,
                ids,
                params,
                priority=priority,
                cache_salt=cache_salt,
                prepared_mask=mask,
            )
        except BaseException as error:
            mailbox.fail(error)
            return
        if mailbox.is_aborted:  # before it was added
            self._abort(mailbox)

    def _abort(self, mailbox: _AsyncOutputQueue) -> None:
        for delta in self._text_engine.abort(mailbox.request_id):
            if mailbox.put(delta):
                wake(mailbox.loop, [mailbox])

    def _deliver(self, deltas: list[Delta], step: EngineStep) -> None:
        to_wake: dict[asyncio.AbstractEventLoop, list[_AsyncOutputQueue]] = {}
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is None:
                continue
            if mailbox.loop.is_closed():  # no coroutine is left that could wait
                self._text_engine.abort(mailbox.request_id)
            elif mailbox.put(delta):
                to_wake.setdefault(mailbox.loop, []).append(mailbox)
        for loop, mailboxes in to_wake.items():
            wake(loop, mailboxes)


def _output(builder: OutputBuilder, kind: RequestOutputKind) -> RequestOutput | None:
    """Return the output to show now; None for none yet."""
    if kind is RequestOutputKind.DELTA:
        return builder.take_output()
    if kind is RequestOutputKind.FINAL_ONLY and not builder.is_finished:
        return None
    return builder.output()


AsyncLLMEngine = AsyncLLM
