"""The parser of a command: argparse with a help that fits on a screen, and with hints where a flag
or a command is mistyped.

``--help`` shows the flags that people need, each with the first clause of its text; ``--help-all``
shows all flags with all that is said of them. Which flags are rare is said where they are declared
(``rarely``), as are the values that a shell may complete (``completed_by``).
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

# A help of so many lines is shown whole; of longer ones, rare flags are left out.
SCREEN = 44
# More optional flags than these are not listed in the line that tells the usage.
_MANY_FLAGS = 12
# Lines of examples in a short help.
_EXAMPLES = 4

_RARE = "octavo_rare"
_VALUES = "octavo_values"
# Where the help of a flag may end, for want of room.
_PAUSE = re.compile(r", (?=(?:drawn|such|as|so|which|with|without|where|beside|going)\b)|: | \(")
_DEFAULT = re.compile(r" \(default: .*\)$", re.DOTALL)

# What flags are called by vLLM, llama.cpp and others, where no likeness of letters leads to ours.
_ELSEWHERE = {
    "--ctx-size": "--max-model-len",
    "--n-predict": "--max-tokens",
    "--parallel": "--max-num-seqs",
    "--cache-type-k": "--kv-cache-dtype",
    "--batch-size": "--max-num-batched-tokens",
    "--model-draft": "--spec-model",
    "--speculative-model": "--spec-model",
    "--system-prompt": "--system",
}


def rarely(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *flags: str) -> None:
    """Leave these flags to ``--help-all``, where the whole help does not fit on a screen."""
    for flag in flags:
        setattr(parser._option_string_actions[flag], _RARE, True)


def completed_by(values: Callable[[], Iterable[str]], action: argparse.Action) -> argparse.Action:
    """Say what a shell may complete the values of a flag to. ``values`` is asked when a shell is;
    it must be quick, and import nothing heavy."""
    setattr(action, _VALUES, values)
    return action


def values_of(action: argparse.Action) -> list[str]:
    """The values of a flag that are known beforehand: its choices, or what ``completed_by`` said.
    ``choices`` of a command's parser are its subcommands."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    return list(getattr(action, _VALUES, list)())


def near(word: str, known: Iterable[str]) -> list[str]:
    """Up to two of ``known`` that ``word`` may have meant, the likeliest first."""
    meant = word.lower().replace("_", "-")
    folded = {each.lower().replace("_", "-"): each for each in known}
    if meant in folded:
        return [folded[meant]]
    return [folded[each] for each in difflib.get_close_matches(meant, folded, n=2, cutoff=0.6)]


def did_you_mean(names: Sequence[str]) -> str:
    """``; did you mean A or B?``, or nothing."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


class CommandParser(argparse.ArgumentParser):
    """A parser of the command line, or of one command.

    ``other_names``: words that are no command of this parser, by what to write in their place.
    """

    def __init__(self, *, add_help: bool = True, **settings: Any):
        super().__init__(formatter_class=HelpFormatter, add_help=False, **settings)
        self.other_names: Callable[[], Mapping[str, str]] = dict
        self.from_variables: dict[str, str] = {}  # by flag
        if not add_help:
            return
        self.add_argument("-h", "--help", action="help", help="show the flags most used, and exit")
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all flags, and exit")

    def error(self, message: str) -> NoReturn:
        """Exit with a message; it says which variable a value came from, if from one."""
        named = message.removeprefix("argument ").partition(":")[0].split("/")
        variables = {self.from_variables[flag] for flag in named if flag in self.from_variables}
        said = "".join(f" (from the variable {each})" for each in sorted(variables))
        super().error(message + said)

    # -- what is mistyped -------------------------------------------------------------------------

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Nothing stays unknown: the parser of the command says so, with its own usage, and before
        it misses anything else."""
        if args is not None:
            self._refuse([word for word in self._own_words(args) if not self._is_known(word)])
        found, unknown = super().parse_known_args(args, namespace)
        self._refuse(unknown)
        return found, unknown

    def _own_words(self, args: Sequence[str]) -> Iterator[str]:
        """The long flags that can only be meant for this parser."""
        whole = [a for a in self._actions if a.nargs in (argparse.PARSER, argparse.REMAINDER)]
        for word in args:
            if word == "--" or (whole and not word.startswith("-")):
                return
            if word.startswith("--") and " " not in word.partition("=")[0]:
                yield word
            if self._takes_the_rest(word):
                return

    def _takes_the_rest(self, word: str) -> bool:
        action = self._option_string_actions.get(word)
        return action is not None and action.nargs == argparse.REMAINDER

    def _is_known(self, word: str) -> bool:
        name = word.partition("=")[0]
        return any(flag.startswith(name) for flag in self._option_string_actions)

    def _refuse(self, unknown: Sequence[str]) -> None:
        if not unknown:
            return
        hints: list[str] = []
        for word in unknown:
            if word.startswith("-"):
                hints += self._likely_flags(word.partition("=")[0])
        self.error(
            f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(list(dict.fromkeys(hints)))}"
        )

    def _likely_flags(self, name: str) -> list[str]:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        ours = _ELSEWHERE.get(name.replace("_", "-"))
        if ours in flags:
            return [ours]
        return near("--" + name.lstrip("-"), flags)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        if action.nargs == argparse.PARSER:
            raise argparse.ArgumentError(
                None, f"there is no command {value!r}{self._command_hint(str(value), names)}"
            )
        raise argparse.ArgumentError(
            action,
            f"invalid choice: {value!r} (choose from {', '.join(names)})"
            f"{did_you_mean(near(str(value), names))}",
        )

    def _command_hint(self, word: str, names: Sequence[str]) -> str:
        other = self.other_names()
        written = {**{name: f"{self.prog} {name}" for name in names}, **other}
        likely = [word] if word in other else near(word, written)
        return did_you_mean([f"`{written[each]}`" for each in likely]) or (
            f"; `{self.prog} --help` lists them"
        )

    # -- help -------------------------------------------------------------------------------------

    def format_help(self) -> str:
        """Return the whole help if it fits on a screen, else the flags that people need."""
        whole = self.format_whole_help()
        if whole.count("\n") <= SCREEN:
            return whole
        rare = [action for action in self._actions if getattr(action, _RARE, False)]
        more = f"{len(rare)} more flags, and more on these" if rare else "More on these"
        examples = [
            part for part in (self.epilog or "").split("\n\n") if part.startswith("examples:")
        ]
        epilog = "\n\n".join([f"{more}: {self.prog} --help-all", *map(_first_examples, examples)])
        with _left_out(rare), _replaced(self, epilog=epilog, formatter_class=_BriefFormatter):
            return super().format_help()

    def format_whole_help(self) -> str:
        """Return the help of every flag, in full."""
        return super().format_help()


def _first_examples(text: str) -> str:
    """Return a few examples; those that go on in another line count twice."""
    lines = text.splitlines()[: 1 + _EXAMPLES]
    if lines[-1].endswith("\\"):
        lines.pop()
    return "\n".join(lines)


@contextmanager
def _left_out(actions: Sequence[argparse.Action]) -> Iterator[None]:
    texts = [action.help for action in actions]
    for action in actions:
        action.help = argparse.SUPPRESS
    try:
        yield
    finally:
        for action, text in zip(actions, texts, strict=True):
            action.help = text


@contextmanager
def _replaced(parser: CommandParser, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(parser, name) for name in attributes}
    vars(parser).update(attributes)
    try:
        yield
    finally:
        vars(parser).update(before)


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *args: object, **kwargs: object) -> NoReturn:
        parser._print_message(parser.format_whole_help(), sys.stdout)
        raise SystemExit(0)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the usage, and a command and its help, on one line each.

    The dozens of flags of an engine would bury the message that follows the usage; and argparse
    forgets how far commands are indented.
    """

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        optional = [a for a in actions if a.option_strings and not a.required]
        if len(optional) > _MANY_FLAGS:
            flags = argparse.Action(["flags"], dest="flags", nargs=0)
            actions = [flags, *(a for a in actions if a not in optional)]
            groups = []
        super().add_usage(usage, actions, groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.nargs == argparse.PARSER and action.choices:
            indented = 2 * self._indent_increment + max(map(len, action.choices))
            self._action_max_length = max(self._action_max_length, indented)


class _BriefFormatter(HelpFormatter):
    """A flag on one line or two: the first clause of its help, and its default."""

    def __init__(self, prog: str, **settings: Any):
        super().__init__(prog, **{**settings, "max_help_position": 29})

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        default = _DEFAULT.search(text)
        clause = text[: default.start() if default else None].partition(";")[0]
        end = default[0] if default else ""
        room = self._width - self._max_help_position - len(end)
        shorter = [clause[: cut.start()] for cut in _PAUSE.finditer(clause)]
        fitting = [each for each in (*shorter, clause) if len(each) <= room]
        return (fitting[-1] if fitting else clause) + end

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """``--[no-]flag`` in place of both."""
        if isinstance(action, argparse.BooleanOptionalAction):
            return "--[no-]" + action.option_strings[0].removeprefix("--")
        return super()._format_action_invocation(action)
