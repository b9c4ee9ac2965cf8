"""The offline API `LLM`, which runs a model in this process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.base.errors import InvalidRequestError, QueueFullError, RequestError
from octavo.base.plain_numbers import plain, plain_list
from octavo.core.engine import EngineStep
from octavo.core.sampling_params import SamplingParams
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
from octavo.serving.output_queue import AnswerStream, OutputQueue
from octavo.serving.outputs import CompletionOutput, Delta, RequestOutput
from octavo.serving.progress import Bar, UseTqdm, open_bar
from octavo.serving.shared_loop import SharedEngineLoop
from octavo.serving.text_engine import PreparedMask, Prompt, SampleGroup, cache_salt_of
from octavo.settings.engine import EngineArgs, EngineConfig

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

Prompts = Prompt | Sequence[Prompt]

# Number of prompts that are tokenized, and then added at once between two steps of other threads.
_PROMPTS_AT_ONCE = 64


class LLM:
    """A model that answers, in this process.

        llm = LLM("smollm2-135m")
        llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))
        llm.chat([{"role": "user", "content": "Hello!"}])
        for chunk in llm.stream("Once upon"): print(chunk.text, end="")

    Any number of threads may use one object, and share its batches: each gets its own outputs,
    which are those that it would get alone. One of the waiting threads steps the engine, for all;
    nothing runs while no thread waits. A thread that leaves a stream, or that is interrupted, ends
    its own requests and no others.

    Args:
        model: alias, folder, ``.gguf`` file or hub id.
        progress: called with (bytes loaded, bytes in all) while weights are read.
        engine_args: see `EngineArgs`; names are vLLM's.

    Raises:
        ModelError: the model cannot be found or read.
        ConfigError: a setting is wrong, unknown, or does not fit the machine.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **engine_args: Any,
    ):
        self.args = EngineArgs.from_kwargs(model, **engine_args)
        self._loaded = load_engine(self.args, progress)
        self._text_engine = self._loaded.text_engine
        self._engine_loop = EngineLoop(self._text_engine, self._deliver)
        self._shared_loop = SharedEngineLoop(self._engine_loop)
        self._ids = itertools.count()
        # Queues of deltas by request id. The thread that steps the engine fills all of them; only
        # that thread adds an entry.
        self._inboxes: dict[str, OutputQueue] = {}

    # -- properties --------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        """The resolved settings, with the choices that octavo made."""
        return self._loaded.config

    @property
    def has_chat_template(self) -> bool:
        return self.get_tokenizer().chat_template is not None

    def engine_info(self) -> dict[str, Any]:
        """Return device, dtype, kernels and memory, as ``octavo generate --json`` prints them."""
        return self._loaded.info

    @property
    def load_seconds(self) -> dict[str, float]:
        """Seconds of each phase of loading: header, tokenizer, weights, program."""
        return dict(self._loaded.load_seconds)

    def get_tokenizer(self) -> Tokenizer:
        return self._text_engine.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's files recommend; else the defaults."""
        recommended: dict[str, Any] = dict(self._loaded.model_config.sampling_defaults)
        return SamplingParams(**recommended)

    # -- generation --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = False,
        priority: Sequence[int] | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        parse_special: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts, batched together; outputs come in the order of the prompts.

        Args:
            prompts: a string, token ids, ``{"prompt": …}`` / ``{"prompt_token_ids": …}``, or a
                list of these. Ids may be integers of numpy, or an array.
            sampling_params: one for all prompts, or one for each. Outputs are whole here, whatever
                their ``output_kind``.
            use_tqdm: show progress on standard error; or a function that makes a bar, such as
                ``tqdm``.
            priority: of each prompt; those with a lower one are served first.
            parse_special: the text of special tokens in prompts means these tokens.
            lora_request, tokenization_kwargs, mm_processor_kwargs: for vLLM's callers; octavo has
                no such features, so only None is accepted.

        A prompt that cannot be served gets an output with finish_reason "error" and the reason in
        ``error``, and the others are served.

        Raises:
            RequestError: no prompt could be served at all; the first one's reason.
        """
        refuse_unsupported(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        listed = _as_prompts(prompts)

        def tokenize(index: int) -> _Prompt:
            return self._prompt(listed[index], parse_special)

        params = _as_params(sampling_params, len(listed), self.default_sampling_params)
        return self._run(tokenize, params, use_tqdm, _as_priorities(priority, len(listed)))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = False,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template.

        Args:
            messages: ``[{"role": …, "content": …}, …]``, or a list of such lists.
            sampling_params, use_tqdm: as in ``generate``.
            chat_template: a template, or the name of one of the model's, instead of its default.
            chat_template_content_format: how the template sees the content of messages: as text
                ("string"), as a list of parts ("openai"), or whichever it reads ("auto").
            add_generation_prompt: end with the header of the assistant's next message.
            continue_final_message: end inside the last message, for the model to go on with it;
                then ``add_generation_prompt`` must be False.
            tools: functions that the model may call, as OpenAI's API has them. Calls are in
                ``tool_calls`` of a completion, thoughts in ``reasoning``, the rest in ``content``;
                its ``text`` is what the model wrote, with the tags of these.
            tool_choice: "auto" (the default with tools), "required", "none", or a function:
                ``{"type": "function", "function": {"name": …}}``.
            parallel_tool_calls: whether an answer may have several calls (yes).
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.
            lora_request, tokenization_kwargs, mm_processor_kwargs: as in ``generate``.
        """
        refuse_unsupported(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        if not messages:
            raise InvalidRequestError("is empty", "messages")
        conversations: list[Any] = [messages] if isinstance(messages[0], Mapping) else [*messages]
        template = ChatSettings(
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            tool_choice,
            parallel_tool_calls,
        )

        def tokenize(index: int) -> _Prompt:
            return self._chat_prompt(template, conversations[index])

        params = _as_params(sampling_params, len(conversations), self.default_sampling_params)
        return self._run(tokenize, params, use_tqdm, [0] * len(conversations))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        parse_special: bool = False,
    ) -> AnswerStream:
        """Complete one prompt, and yield its answer piece by piece.

        A chunk has the new text, and as its ``output`` the whole answer so far. With an
        ``output_kind`` of DELTA its output has only the new part as well; with FINAL_ONLY there is
        one chunk, the whole answer. The request ends early when the iterator is closed or
        garbage-collected.
        """
        return self._stream(self._prompt(prompt, parse_special), sampling_params)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
    ) -> AnswerStream:
        """Answer one conversation, and yield the answer piece by piece; see ``chat`` and
        ``stream``."""
        template = ChatSettings(
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            tool_choice,
            parallel_tool_calls,
        )
        return self._stream(self._chat_prompt(template, messages), sampling_params)

    def close(self) -> None:
        """Abort all requests, of other threads too, and release the model. May be repeated.

        The object cannot be used afterwards; threads that wait for something get an EngineError.
        """
        self._shared_loop.close()
        self._text_engine.grammars.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- internals ---------------------------------------------------------------------------

    def _run(
        self,
        tokenize: Callable[[int], _Prompt],
        params: Sequence[SamplingParams],
        use_tqdm: UseTqdm,
        priorities: Sequence[int],
    ) -> list[RequestOutput]:
        call = _Call(self.get_tokenizer(), open_bar(use_tqdm, len(params)))
        ids = [str(next(self._ids)) for _ in params]
        try:
            for begin in range(0, len(params), _PROMPTS_AT_ONCE):
                waiting: deque[_PendingPrompt] = deque()
                for index in range(begin, min(begin + _PROMPTS_AT_ONCE, len(params))):
                    try:
                        pending = self._pending_prompt(ids[index], tokenize(index), params[index])
                    except RequestError as error:
                        call.refused[index] = error
                    else:
                        waiting.append(pending._replace(place=index, priority=priorities[index]))
                self._add_all(waiting, call.inbox, call.open, call.refuse)
            if call.refused and not call.builders:
                raise call.refused[min(call.refused)]
            self._shared_loop.wait_for(call.inbox.wait)
        finally:
            call.close()
            if call.inbox.num_running or len(call.builders) + len(call.refused) < len(ids):
                self._shared_loop.ask(partial(self._forget, *ids))
            else:
                for request_id in ids:
                    self._inboxes.pop(request_id, None)
        return call.outputs(len(params))

    # Work with the tokenizer is done here, not in the thread that steps the engine.

    def _prompt(self, prompt: Prompt, parse_special: bool) -> _Prompt:
        salt = cache_salt_of(prompt)
        return _Prompt(*self._text_engine.tokenize(prompt, parse_special=parse_special), salt)

    def _chat_prompt(self, template: ChatSettings, messages: Conversation) -> _Prompt:
        prompt = template.prompt(self._text_engine.chat_templates, messages)
        return _Prompt(prompt.text, prompt.token_ids, reader=prompt.reader)

    def _pending_prompt(
        self, request_id: str, prompt: _Prompt, params: SamplingParams
    ) -> _PendingPrompt:
        if prompt.reader is not None:
            reader, params = prompt.reader.prepare(params)
            prompt = prompt._replace(reader=reader)
        mask = self._text_engine.prepare_mask(params, prompt_token_ids=prompt.token_ids)
        return _PendingPrompt(request_id, prompt, params, mask)

    def _add_all(
        self,
        waiting: deque[_PendingPrompt],
        inbox: OutputQueue,
        opened: Callable[[_PendingPrompt, SampleGroup], object],
        refused: Callable[[_PendingPrompt, RequestError], object],
    ) -> None:
        """Queue prompts; while the queue is full, run the engine."""

        def add_some() -> None:
            while waiting:
                pending = waiting[0]
                try:
                    group = self._add(pending, inbox)
                except QueueFullError as error:
                    if self._text_engine.has_unfinished_requests:
                        return
                    refused(pending, error)
                except RequestError as error:
                    refused(pending, error)
                else:
                    opened(pending, group)
                waiting.popleft()

        self._shared_loop.do(add_some)
        while waiting:
            self._shared_loop.wait_for_step()
            self._shared_loop.do(add_some)

    def _add(self, pending: _PendingPrompt, inbox: OutputQueue) -> SampleGroup:
        group = self._text_engine.add(
            pending.request_id,
            pending.prompt.text,
            pending.prompt.token_ids,
            pending.params,
            cache_salt=pending.prompt.cache_salt,
            priority=pending.priority,
            prepared_mask=pending.mask,
        )
        inbox.expect(group)
        self._inboxes[pending.request_id] = inbox
        return group

    def _deliver(self, deltas: list[Delta], step: EngineStep) -> None:
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is not None:
                inbox.put(delta)

    def _forget(self, *request_ids: str) -> None:
        """End requests whose deltas no caller takes any more. Called by the thread that steps
        the engine."""
        for request_id in request_ids:
            self._inboxes.pop(request_id, None)
            self._text_engine.abort(request_id)

    def _stream(self, prompt: _Prompt, sampling_params: SamplingParams | None) -> AnswerStream:
        params = sampling_params or self.default_sampling_params()
        check_streamable(params)
        request_id = str(next(self._ids))
        inbox = AnswerStream.inbox()
        groups: list[SampleGroup] = []

        def refuse(pending: _PendingPrompt, error: RequestError) -> None:
            raise error

        try:
            # Queued now and not at the first next(), so that a refusal is raised by this call.
            pending = self._pending_prompt(request_id, prompt, params)
            self._add_all(deque([pending]), inbox, lambda _, group: groups.append(group), refuse)
            return AnswerStream(
                self._shared_loop,
                inbox,
                OutputBuilder(groups[0], self.get_tokenizer(), pending.prompt.reader),
                partial(self._shared_loop.ask, partial(self._forget, request_id)),
                partial(self._engine_loop.tell, partial(self._forget, request_id)),
            )
        except BaseException:
            self._shared_loop.ask(partial(self._forget, request_id))
            raise


class _Prompt(NamedTuple):
    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    reader: AnswerReader | None = None  # of a chat


class _PendingPrompt(NamedTuple):
    """A prompt that is about to be added to the engine."""

    request_id: str
    prompt: _Prompt
    params: SamplingParams
    mask: PreparedMask
    place: int = 0  # among the prompts of a call
    priority: int = 0


class _Call:
    """One call of ``generate`` or ``chat``, with the outputs and refusals of its prompts."""

    def __init__(self, tokenizer: Tokenizer, bar: Bar | None):
        self.inbox = OutputQueue(self._is_done)
        self.builders: dict[int, OutputBuilder] = {}
        self.refused: dict[int, RequestError] = {}
        self._by_id: dict[str, OutputBuilder] = {}
        self._tokenizer = tokenizer
        self._bar = bar

    def open(self, pending: _PendingPrompt, group: SampleGroup) -> None:
        builder = OutputBuilder(group, self._tokenizer, pending.prompt.reader)
        self.builders[pending.place] = self._by_id[group.request_id] = builder

    def refuse(self, pending: _PendingPrompt, error: RequestError) -> None:
        self.refused[pending.place] = error

    def _is_done(self) -> bool:
        """Take in new deltas; returns whether all samples have ended. Called by the thread that
        waits."""
        inbox = self.inbox
        is_over = not inbox.num_running  # asked first: nothing comes after the last delta
        while inbox.news:
            delta = inbox.news.popleft()
            builder = self._by_id[delta.request_id]
            builder.take(delta)
            if self._bar is not None and delta.finish_reason is not None and builder.is_finished:
                self._bar.update(1)
        return is_over

    def outputs(self, count: int) -> list[RequestOutput]:
        return [
            self.builders[index].output()
            if index in self.builders
            else _refused_output(index, self.refused[index])
            for index in range(count)
        ]

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _as_prompts(prompts: Prompts) -> list[Prompt]:
    """Return prompts of any accepted form as a list. A list of integers is one prompt."""
    if isinstance(prompts, str) or hasattr(prompts, "keys"):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError(f"must be a prompt, or several, not {prompts!r}", "prompts")
    listed = list(plain_list(prompts))
    if listed and all(isinstance(plain(entry), int) for entry in listed):
        return [listed]
    return listed


def _as_priorities(given: Sequence[int] | None, count: int) -> Sequence[int]:
    if given is None:
        return [0] * count
    priorities = [plain(priority) for priority in plain_list(given)]
    if len(priorities) != count:
        raise InvalidRequestError(
            f"{len(priorities)} priorities for {count} prompts: give one for each", "priority"
        )
    for priority in priorities:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"must hold integers, not {priority!r}", "priority")
    return priorities


def _as_params(
    given: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: Callable[[], SamplingParams],
) -> Sequence[SamplingParams]:
    if given is None:
        given = default()
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(
            f"{len(given)} sampling params for {count} prompts: give one, or one for each",
            "sampling_params",
        )
    return given


def _refused_output(index: int, error: RequestError) -> RequestOutput:
    completion = CompletionOutput(0, "", [], finish_reason="error")
    return RequestOutput(f"refused-{index}", None, [], [completion], True, error=str(error))
