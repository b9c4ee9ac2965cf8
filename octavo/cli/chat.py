"""``octavo chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli import results, terminal
from octavo.cli.engine_flags import add_engine_flags, add_model_argument, engine_kwargs
from octavo.cli.generate import load
from octavo.cli.sampling_flags import add_sampling_flags, base_params, sampling_fields
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ChatTemplateError, OctavoError
from octavo.hub import DEFAULT_MODEL, home

if TYPE_CHECKING:
    from octavo import LLM, RequestOutput

DEFAULTS: dict[str, Any] = {"max_tokens": None}

EXAMPLES = """\
examples:
  octavo chat
  octavo chat smollm2-135m --system "You are a pirate." --temperature 0.9
  printf 'Hello\\nAnd in French?\\n' | octavo chat
"""

HELP = """\
/clear            forget the conversation (the system message stays)
/system [TEXT]    show, or set, the system message; begins a new conversation
/set [NAME VALUE] show, or change, how to sample: /set temperature 0.2
/save FILE        write the conversation as JSON messages
/stats            figures of the last answer
/exit             end (so does Ctrl-D); Ctrl-C stops an answer
"""

# Fields that a single streamed answer has no use for.
_FIXED = {"n", "best_of", "logprobs", "prompt_logprobs", "detokenize", "output_kind"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(parser, skip=_FIXED, **DEFAULTS)
    add_engine_flags(parser, skip={"seed"})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sampling = sampling_fields(args)
    with load(args.model, engine_kwargs(args)) as llm:
        if not llm.has_chat_template:
            raise ChatTemplateError(
                f"{args.model} has no chat template: use `octavo generate --raw`, or a model that "
                f"was trained to chat, such as {DEFAULT_MODEL}"
            )
        params = base_params(llm, **DEFAULTS | sampling)
        conversation = Conversation(llm, params, args.system)
        if sys.stdin.isatty():
            terminal.say(f"{args.model}. /help lists the commands, Ctrl-D ends.")
        for line in _read_lines():
            if not conversation.take(line):
                break
    return 0


class Conversation:
    """The messages so far, and what to do with a line of input."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None):
        self.llm = llm
        self.params = params
        self.system = system
        self.last: RequestOutput | None = None
        self.messages: list[dict[str, str]] = []
        self.clear("")

    def take(self, line: str) -> bool:
        """Answer, or obey a command. False ends the conversation."""
        line = line.strip()
        if line in ("/exit", "/quit"):
            return False
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            command = self.COMMANDS.get(name)
            if command is None:
                terminal.say(f"no command /{name}; /help lists them")
            else:
                command(self, rest.strip())
        elif line:
            self.answer(line)
        return True

    def answer(self, text: str) -> None:
        """Stream one answer. What an interrupt leaves of it stays in the conversation."""
        self.messages.append({"role": "user", "content": text})
        self.last = None
        pieces: list[str] = []
        try:
            with _interrupt_flag() as interrupted:
                stream = self.llm.stream_chat(self.messages, self.params)
                for chunk in stream:
                    pieces.append(chunk.text)
                    terminal.write_answer(chunk.text)
                    self.last = chunk.output
                    if interrupted():
                        stream.close()
                        break
                if self.last is not None and self.last.error is not None:
                    terminal.say(f"octavo: error: {self.last.error}")
        except OctavoError as error:  # of this turn alone: the next one may do better
            terminal.say(f"octavo: error: {error}")
        if pieces:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self.messages.pop()
        terminal.write_answer("\n")

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
        settable = {f.name for f in dataclasses.fields(SamplingParams)} - _FIXED
        name, _, value = text.partition(" ")
        if not name:
            for field in sorted(settable):
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
        print(results.summary(self.last) if self.last is not None else "no answer yet")

    COMMANDS = {
        "help": help,
        "clear": clear,
        "system": set_system,
        "set": set_param,
        "save": save,
        "stats": stats,
    }


def _parse_value(text: str) -> Any:
    """Numbers, lists, true, false and null as JSON; anything else is text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _read_lines() -> Iterator[str]:
    """Lines of stdin; on a terminal with a prompt, editing and a history."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with _line_editing():
        while True:
            try:
                yield input("> ")
            except EOFError:
                sys.stdout.write("\n")
                return
            except KeyboardInterrupt:  # at the prompt: a fresh line, as in a shell
                sys.stdout.write("\n")


@contextmanager
def _line_editing() -> Iterator[None]:
    try:
        import readline
    except ImportError:  # some builds of Python come without it
        yield
        return
    history = home() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


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
