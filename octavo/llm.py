"""The offline API: `LLM`."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.build import load_engine
from octavo.config import EngineArgs, EngineConfig
from octavo.core.engine import EngineStep
from octavo.core.sampling_params import SamplingParams
from octavo.driver import EngineDriver
from octavo.errors import InvalidRequestError, QueueFullError, RequestError
from octavo.output_builder import OutputBuilder
from octavo.outputs import CompletionOutput, RequestOutput, StreamChunk
from octavo.text_engine import Prompt, SampleGroup, TextDelta

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


class LLM:
    """A model that answers, in this process.

        llm = LLM("smollm2-135m")
        llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))
        llm.chat([{"role": "user", "content": "Hello!"}])
        for chunk in llm.stream("Once upon"): print(chunk.text, end="")

    Args:
        model: alias, folder, ``.gguf`` file or hub id.
        engine_args: see `octavo.config.EngineArgs`; names are vLLM's.

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
        self._driver = EngineDriver(self._text_engine, self._deliver)
        self._ids = itertools.count()
        # Who takes the deltas of a request. Whoever drives the engine brings those of all.
        self._takers: dict[str, Callable[[TextDelta], None]] = {}

    # -- what it is --------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        """The resolved settings, with the choices that were made."""
        return self._loaded.config

    @property
    def has_chat_template(self) -> bool:
        return self.get_tokenizer().chat_template is not None

    def engine_info(self) -> dict[str, Any]:
        """Device, dtype, kernels and memory, as ``octavo generate --json`` prints them."""
        return self._loaded.info

    @property
    def load_seconds(self) -> dict[str, float]:
        """Where the time of loading went: header, tokenizer, weights, program."""
        return dict(self._loaded.load_seconds)

    def get_tokenizer(self) -> Tokenizer:
        return self._text_engine.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, where its files say; else the defaults."""
        recommended: dict[str, Any] = dict(self._loaded.model_config.sampling_defaults)
        return SamplingParams(**recommended)

    # -- what it does ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        parse_special: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts, batched together; outputs come in the order of the prompts.

        Args:
            prompts: a string, token ids, ``{"prompt": …}`` / ``{"prompt_token_ids": …}``, or a
                list of these.
            sampling_params: one for all, or one for each.
            use_tqdm: show progress on standard error.
            parse_special: the text of special tokens in prompts means these tokens.

        A prompt that cannot be served gets an output with finish_reason "error" and the reason
        in ``error``, and the others are served.

        Raises:
            RequestError: no prompt could be served at all; the first one's reason.
        """
        listed = _as_prompts(prompts)
        params = _as_params(sampling_params, len(listed), self.default_sampling_params)

        def tokenize(index: int) -> tuple[str | None, list[int]]:
            return self._text_engine.tokenize(listed[index], parse_special=parse_special)

        return self._run(len(listed), tokenize, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template.

        Args:
            messages: ``[{"role": …, "content": …}, …]``, or a list of such lists.
            template_options: ``tools``, ``add_generation_prompt``, ``continue_final_message``,
                ``chat_template``, and variables of the template.
        """
        if not messages:
            raise InvalidRequestError("is empty", "messages")
        conversations: list[Any] = [messages] if isinstance(messages[0], dict) else list(messages)
        params = _as_params(sampling_params, len(conversations), self.default_sampling_params)

        def tokenize(index: int) -> tuple[str | None, list[int]]:
            return self._tokenize_chat(conversations[index], template_options)

        return self._run(len(conversations), tokenize, params, use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        parse_special: bool = False,
    ) -> Iterator[StreamChunk]:
        """Complete one prompt, piece by piece.

        It ends before its time when the iterator is closed, or forgotten.
        """
        text, ids = self._text_engine.tokenize(prompt, parse_special=parse_special)
        return self._stream(text, ids, sampling_params)

    def stream_chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Iterator[StreamChunk]:
        """Answer one conversation, piece by piece."""
        text, ids = self._tokenize_chat(messages, template_options)
        return self._stream(text, ids, sampling_params)

    def close(self) -> None:
        """Abort what runs and release the model. The object cannot be used afterwards."""
        self._driver.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- how ---------------------------------------------------------------------------------

    def _tokenize_chat(
        self, messages: Sequence[dict[str, Any]], options: dict[str, Any]
    ) -> tuple[str, list[int]]:
        prompt = self.get_tokenizer().chat_prompt(messages, **options)
        return prompt.text, prompt.token_ids

    def _run(
        self,
        count: int,
        tokenize: Callable[[int], tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        builders: dict[int, OutputBuilder] = {}
        refused: dict[int, RequestError] = {}
        progress = _Progress(count) if use_tqdm else None
        try:
            for index in range(count):
                try:
                    group = self._add_when_possible(*tokenize(index), params[index])
                except RequestError as error:
                    refused[index] = error
                else:
                    builders[index] = OutputBuilder(group, self.get_tokenizer())
                    self._takers[group.request_id] = builders[index].take
            if not builders and refused:
                raise refused[min(refused)]
            while not all(builder.group.is_finished for builder in builders.values()):
                self._driver.step()
                if progress is not None:
                    done = sum(builder.group.is_finished for builder in builders.values())
                    progress.update(done + len(refused))
        finally:
            for builder in builders.values():
                self._forget(builder.group.request_id)
            if progress is not None:
                progress.close()
        return [
            builders[index].output()
            if index in builders
            else _refused_output(index, refused[index])
            for index in range(count)
        ]

    def _add_when_possible(
        self, text: str | None, ids: list[int], params: SamplingParams
    ) -> SampleGroup:
        """Queue a prompt; while the queue is full, run the engine."""
        while True:
            try:
                return self._text_engine.add(str(next(self._ids)), text, ids, params)
            except QueueFullError:
                if not self._text_engine.has_unfinished_requests:
                    raise
                self._driver.step()

    def _deliver(self, deltas: list[TextDelta], step: EngineStep) -> None:
        for delta in deltas:
            take = self._takers.get(delta.group.request_id)
            if take is not None:
                take(delta)

    def _forget(self, request_id: str) -> None:
        """Nobody takes its deltas any more: if it still runs, it ends."""
        self._takers.pop(request_id, None)
        self._text_engine.abort(request_id)

    def _stream(
        self, text: str | None, ids: list[int], sampling_params: SamplingParams | None
    ) -> Iterator[StreamChunk]:
        params = sampling_params or self.default_sampling_params()
        if params.num_samples > params.n:
            raise InvalidRequestError("cannot be streamed: the best is known at the end", "best_of")
        # Queued now and not at the first next(), so that a refusal is raised where it is caused.
        group = self._add_when_possible(text, ids, params)
        pending: deque[TextDelta] = deque()
        self._takers[group.request_id] = pending.append
        builder = OutputBuilder(group, self.get_tokenizer())
        return _Stream(self._driver, pending, builder, partial(self._forget, group.request_id))


class _Stream(Iterator[StreamChunk]):
    """The chunks of one answer, of which ``pending`` is filled by whoever drives the engine.

    Calls ``forget`` at its end, whichever that is: the last chunk, ``close``, an exception, or
    that nobody holds it any more.
    """

    def __init__(
        self,
        driver: EngineDriver,
        pending: deque[TextDelta],
        builder: OutputBuilder,
        forget: Callable[[], None],
    ):
        self._driver = driver
        self._pending = pending
        self._builder = builder
        self._forget = forget
        # A garbage collection may come in the middle of a step: the driver does it after that.
        self._finalizer = weakref.finalize(self, driver.tell, forget)
        self._finalizer.atexit = False

    def __next__(self) -> StreamChunk:
        try:
            while not self._pending:
                if not self._finalizer.alive or self._builder.group.is_finished:
                    raise StopIteration
                self._driver.step()
        except BaseException:
            self.close()
            raise
        delta = self._pending.popleft()
        self._builder.take(delta)
        return StreamChunk(
            delta.sample.index,
            delta.text,
            delta.token_ids,
            delta.finish_reason.value if delta.finish_reason else None,
            partial(self._builder.output, self._builder.extents),
        )

    def close(self) -> None:
        """End the answer here. May be repeated."""
        if self._finalizer.detach() is not None:
            self._pending.clear()
            self._forget()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from whatever was given. A list of integers is one prompt."""
    if isinstance(prompts, str) or hasattr(prompts, "keys"):
        return [prompts]  # type: ignore[list-item]
    listed = list(prompts)
    if listed and all(isinstance(entry, int) for entry in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


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


class _Progress:
    """A bar of finished prompts on standard error."""

    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("prompts", total=total)
        self._progress.start()
        self._last_refresh = 0.0

    def update(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last_refresh > 0.1:
            self._progress.update(self._task, completed=done)
            self._last_refresh = now

    def close(self) -> None:
        self._progress.stop()
