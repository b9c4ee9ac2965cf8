"""``octavo chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.agents.tool_loop import LoopEnd, run_tool_loop
from octavo.agents.toolbox import Toolbox, ToolResult
from octavo.base.errors import ChatTemplateError, OctavoError
from octavo.chat_formats.messages import MessageDelta, ParsedMessage, ToolCall
from octavo.cli import UsageError, chat_input, chat_tools, results, terminal
from octavo.cli.engine_flags import (
    add_engine_flags,
    add_model_argument,
    answering_adapter,
    engine_kwargs,
)
from octavo.cli.flags import add_value
from octavo.cli.generate import OFTEN, load
from octavo.cli.parser import did_you_mean, near
from octavo.cli.remote_model import RemoteAnswer, RemoteModel
from octavo.cli.sampling_flags import add_sampling_flags, base_params, sampling_fields
from octavo.cli.server_client import ServerClient
from octavo.core.sampling_params import SamplingParams
from octavo.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from octavo import LLM, RequestOutput

DEFAULTS: dict[str, Any] = {"max_tokens": None}

EXAMPLES = """\
examples:
  octavo chat
  octavo chat smollm2-135m --system "You are a pirate." --temperature 0.9
  octavo chat --url http://127.0.0.1:8000 smollm2-135m
  printf 'Hello\\nAnd in French?\\n' | octavo chat
  octavo chat qwen2.5-coder-1.5b --tools my_tools.py --tools "mcp:my-mcp-server --read-only"
"""

HELP = """\
/clear            forget the conversation (the system message stays)
/system [TEXT]    show, or set, the system message; begins a new conversation
/set [NAME VALUE] show, or change, how to sample: /set temperature 0.2
/save FILE        write the conversation as JSON messages
/stats            figures of the last answer
/exit             end (so does Ctrl-D); Ctrl-C stops an answer
Enter sends a message, Alt-Enter begins another line of it, and what is pasted is one message.
"""

_ENDS = ("/exit", "/quit")
# Fields that a single streamed answer has no use for.
_FIXED = {"n", "best_of", "logprobs", "prompt_logprobs", "detokenize", "output_kind"}


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser, default=argparse.SUPPRESS)
    add_value(parser, "--url URL", "chat with a model of the server there; MODEL is its name")
    add_value(parser, "--system TEXT", "system message")
    chat_tools.add_tool_flags(parser)
    add_sampling_flags(parser, skip=_FIXED, **DEFAULTS)
    add_engine_flags(parser, skip={"seed"}, often=OFTEN)


def run(args: argparse.Namespace) -> int:
    sampling = sampling_fields(args)
    with chat_tools.open_toolbox(args) as toolbox, _open(args) as (name, llm, lora):
        if not llm.has_chat_template:
            raise ChatTemplateError(
                f"{name} has no chat template: use `octavo generate --raw`, or a model that "
                f"was trained to chat, such as {DEFAULT_MODEL}"
            )
        params = base_params(llm, **DEFAULTS | sampling)
        calls = chat_tools.Calls(asks=not args.yes)
        conversation = Conversation(
            *(llm, params, args.system, toolbox, calls),
            max_turns=args.max_tool_turns,
            lora=lora,
        )
        if sys.stdin.isatty():
            terminal.say(f"{name}. /help lists the commands, Ctrl-D ends.")
        for message in chat_input.messages(conversation.completions):
            if not conversation.take(message):
                break
    return 0


@contextmanager
def _open(args: argparse.Namespace) -> Iterator[tuple[str, LLM | RemoteModel, dict[str, Any]]]:
    """Load the model, or find it at a server; its name comes with it, and the adapter that answers
    as an argument of `LLM.stream_chat`."""
    settings = engine_kwargs(args)
    if args.url is None:
        name = getattr(args, "model", DEFAULT_MODEL)
        lora = answering_adapter(settings)
        with load(name, settings) as llm:
            yield name, llm, lora
        return
    if settings:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in settings)
        raise UsageError(f"{flags}: with --url the server has an engine already")
    client = ServerClient(args.url)
    model = RemoteModel(client, getattr(args, "model", None))
    yield f"{model.name} at {client.url}", model, {}


class Conversation:
    """The messages so far, and what to do with what a person says."""

    def __init__(
        self,
        llm: LLM | RemoteModel,
        params: SamplingParams,
        system: str | None,
        toolbox: Toolbox,
        calls: chat_tools.Calls,
        *,
        max_turns: int,
        lora: dict[str, Any] | None = None,
    ):
        self.llm = llm
        self.params = params
        self.system = system
        self.toolbox = toolbox
        declared = [tool.to_dict() for tool in toolbox.tools]
        self._tools: dict[str, Any] = {"tools": declared} if declared else {}
        self._lora = lora or {}
        self.calls = calls
        self.max_turns = max_turns
        self.last: RequestOutput | RemoteAnswer | None = None
        self.messages: list[dict[str, Any]] = []
        self.clear("")

    def take(self, message: str) -> bool:
        """Answer, or obey a command. False ends the conversation."""
        message = message.strip()
        if message in _ENDS:
            return False
        name, *rest = message.removeprefix("/").split(maxsplit=1) or [""]
        command = self.COMMANDS.get(name) if message.startswith("/") else None
        if command is not None:
            command(self, "".join(rest))
        elif message.startswith("/") and "\n" not in message:  # else a path in pasted text
            hint = did_you_mean([f"/{each}" for each in near(name, [*self.COMMANDS, "exit"])])
            terminal.say(f"no command /{name}{hint or '; /help lists them'}")
        elif message:
            self.say(message)
        return True

    def completions(self, said: str) -> list[str]:
        """Return the commands that begin so."""
        commands = [*(f"/{name}" for name in self.COMMANDS), *_ENDS]
        settings = [f"/set {name}" for name in self._settable()]
        known = settings if " " in said else commands
        return [each for each in known if said.startswith("/") and each.startswith(said)]

    def say(self, text: str) -> None:
        """Have a message answered, with calls of tools on the way. What an interrupt leaves of the
        answer stays in the conversation."""
        self.messages.append({"role": "user", "content": text})
        end = run_tool_loop(self.messages, self, self.toolbox, max_turns=self.max_turns)
        if end is LoopEnd.TOO_MANY_TURNS:
            terminal.say(f"octavo: {end.value}, {self.max_turns} in all: say how to go on")
        if self.messages[-1]["role"] == "user":
            self.messages.pop()

    # -- what run_tool_loop asks for --------------------------------------------------------------

    def answer(self, messages: list[dict[str, Any]]) -> ParsedMessage | None:
        """Stream one answer."""
        self.last = None
        answer = ParsedMessage()
        writer = _MessageWriter()
        end: str | None = None
        try:
            with _interrupt_flag() as interrupted:
                stream = self.llm.stream_chat(
                    self.messages, self.params, **self._tools, **self._lora
                )
                for chunk in stream:
                    delta = MessageDelta(chunk.reasoning, chunk.content, list(chunk.tool_calls))
                    answer.add(delta)
                    writer.write(delta)
                    self.last, end = chunk.output, chunk.finish_reason
                    if interrupted():
                        end = "abort"
                        stream.close()
                        break
                if self.last is not None and self.last.error is not None:
                    terminal.say(f"octavo: error: {self.last.error}")
        except OctavoError as error:  # of this turn alone: the next one may do better
            terminal.say(f"octavo: error: {error}")
        writer.end(is_answer=not answer.tool_calls)
        if answer.tool_calls and end != "stop":
            answer.tool_calls.clear()  # the last one may be half a call, which no template takes
            terminal.say("octavo: the answer was cut off in calls of tools, which are not made")
        return answer if answer.content or answer.tool_calls else None

    def allows(self, call: ToolCall) -> bool:
        return self.calls.allows(call)

    def show(self, call: ToolCall, result: ToolResult) -> None:
        self.calls.show(call, result)

    def help(self, _: str) -> None:
        sys.stdout.write(HELP)

    def clear(self, _: str) -> None:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.messages = list(system)

    def set_system(self, text: str) -> None:
        if not text:
            print(self.system or "no system message")
            return
        self.system = text
        self.clear("")

    def set_param(self, text: str) -> None:
        settable = self._settable()
        name, _, value = text.partition(" ")
        if not name:
            for field in settable:
                print(f"{field} = {getattr(self.params, field)!r}")
            return
        if name not in settable:
            terminal.say(f"no setting {name!r}; /set lists them")
            return
        try:
            self.params = self.params.with_changes(**{name: _parse_value(value)})
            print(f"{name} = {getattr(self.params, name)!r}")
        except (OctavoError, TypeError, ValueError) as error:
            terminal.say(f"octavo: error: {error}")

    @staticmethod
    def _settable() -> list[str]:
        return sorted({f.name for f in dataclasses.fields(SamplingParams)} - _FIXED)

    def save(self, text: str) -> None:
        if not text:
            terminal.say("/save needs a file name")
            return
        path = Path(text).expanduser()
        try:
            path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n", "utf-8")
            print(f"saved {len(self.messages)} messages to {path}")
        except OSError as error:
            terminal.say(f"octavo: error: cannot write {path}: {error.strerror}")

    def stats(self, _: str) -> None:
        if self.last is None:
            print("no answer yet")
        elif isinstance(self.last, RemoteAnswer):
            print(self.last.summary())
        else:
            print(results.summary(self.last))

    COMMANDS = {
        "help": help,
        "clear": clear,
        "system": set_system,
        "set": set_param,
        "save": save,
        "stats": stats,
    }


class _MessageWriter:
    """Writes the thought of a message to stderr and its content to stdout, as they come."""

    def __init__(self) -> None:
        self._thought: terminal.AnswerWriter | None = None
        self._content: terminal.AnswerWriter | None = None

    def write(self, delta: MessageDelta) -> None:
        if delta.reasoning:
            if self._thought is None:
                self._thought = terminal.AnswerWriter(sys.stderr)
                self._thought.write("thinking: ")
            self._thought.write(delta.reasoning)
        if delta.content:
            self._end_thought()
            self._content = self._content or terminal.AnswerWriter()
            self._content.write(delta.content)

    def end(self, *, is_answer: bool) -> None:
        """End the lines.

        Args:
            is_answer: whether this is the answer, and a line even if it is empty.
        """
        self._end_thought()
        if is_answer:
            self._content = self._content or terminal.AnswerWriter()
        if self._content is not None:
            self._content.end()

    def _end_thought(self) -> None:
        if self._thought is not None:
            self._thought.end()
            self._thought = None


def _parse_value(text: str) -> Any:
    """Numbers, lists, true, false and null as JSON; anything else is text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@contextmanager
def _interrupt_flag() -> Iterator[Any]:
    """Ctrl-C sets a flag for the loop to see between tokens; a second one interrupts at once.

    A KeyboardInterrupt out of the middle of a step would leave the engine half way through it.
    """
    hit = False

    def note(signum: int, frame: Any) -> None:
        nonlocal hit
        if hit:
            raise KeyboardInterrupt
        hit = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: hit
    finally:
        signal.signal(signal.SIGINT, before)
