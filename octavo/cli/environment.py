"""Environment variables in place of flags: ``OCTAVO_MAX_NUM_SEQS=8`` is ``--max-num-seqs 8``.

A flag on the command line counts more than its variable, and a variable more than a file that
``--config`` names. A switch takes ``1``, ``true``, ``yes`` or ``on``, or ``0``, ``false``, ``no``
or ``off``; a flag that may be repeated takes one value, or several as a list in JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from octavo.cli import PREFIX, RESERVED, terminal
from octavo.cli.parser import CommandParser, did_you_mean, near

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_NO_VARIABLES = {"--help", "--help-all", "--version", "--words"}


def with_variables(
    parser: CommandParser,
    argv: Sequence[str],
    variables: Mapping[str, str] | None = None,
    all_flags: Callable[[], Iterable[str]] = tuple,
) -> list[str]:
    """Return the arguments with those of the environment, which stand before the others.

    Args:
        parser: of the whole command line, with the flags of the command that ``argv`` names.
        variables: by default, the environment.
        all_flags: returns the flags of all commands; called for variables that are none of this
            one.
    """
    variables = os.environ if variables is None else variables
    given = {name: text for name, text in variables.items() if name.startswith(PREFIX)}
    given = {name: text for name, text in given.items() if name not in RESERVED}
    if not given:
        return list(argv)
    command, place = _command(parser, argv)
    own = _by_variable(command)
    _warn_of_unknown([name for name in given if name not in own], all_flags)
    before: list[str] = []
    for name, action in own.items():
        if name in given and not _is_given(command, action, argv[place:]):
            words = _words(action, given[name])
            before += words
            command.from_variables.update(dict.fromkeys(action.option_strings, name))
    return [*argv[:place], *before, *argv[place:]]


def variable_of(flag: str) -> str:
    """Return the variable of a flag."""
    return PREFIX + flag.lstrip("-").replace("-", "_").upper()


def _command(parser: CommandParser, argv: Sequence[str]) -> tuple[CommandParser, int]:
    """Return the parser of the command that the arguments name, and where its own begin."""
    place = 0
    for index, word in enumerate(argv):
        commands = next((a.choices for a in parser._actions if isinstance(a.choices, dict)), None)
        if commands is None or word.startswith("-"):
            break
        if word not in commands:
            break
        parser, place = commands[word], index + 1
    return parser, place


def _by_variable(parser: CommandParser) -> dict[str, argparse.Action]:
    found: dict[str, argparse.Action] = {}
    for action in parser._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        takes_one = action.nargs in (None, 0, "?")
        if flags and takes_one and not _NO_VARIABLES.intersection(flags):
            found[variable_of(flags[0])] = action
    return {name: action for name, action in found.items() if name not in RESERVED}


def _is_given(parser: CommandParser, action: argparse.Action, words: Sequence[str]) -> bool:
    """Return whether a flag is among the words, or another one that excludes it; also shortened,
    as argparse takes it."""
    rivals = [
        flag
        for group in parser._mutually_exclusive_groups
        if action in group._group_actions
        for each in group._group_actions
        for flag in each.option_strings
    ]
    flags = {*action.option_strings, *rivals}
    for word in words:
        if word == "--":
            return False
        name = word.partition("=")[0]
        is_long = len(name) > 2 and name.startswith("--")
        if name in flags or (is_long and any(flag.startswith(name) for flag in flags)):
            return True
    return False


def _words(action: argparse.Action, text: str) -> list[str]:
    flag = next(each for each in action.option_strings if each.startswith("--"))
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        lower = text.strip().lower()
        if lower in _NO:
            has_no = isinstance(action, argparse.BooleanOptionalAction)
            return [f"--no-{flag[2:]}"] if has_no else []
        return [flag] if lower in _YES else [f"{flag}={text}"]  # argparse says what is wrong
    return [f"{flag}={value}" for value in _values(action, text)]


def _values(action: argparse.Action, text: str) -> list[str]:
    if isinstance(action, argparse._AppendAction) and text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except ValueError:
            return [text]
        return [str(each) for each in listed]
    return [text]


def _warn_of_unknown(names: Sequence[str], all_flags: Callable[[], Iterable[str]]) -> None:
    """Warn of variables that are a flag of no command."""
    if not names:
        return
    known = {*RESERVED, *map(variable_of, all_flags())}
    for name in names:
        if name not in known:
            hint = did_you_mean(near(name, known)) or "; see `octavo COMMAND --help-all`"
            terminal.say(f"octavo: warning: {name} in the environment means nothing{hint}")


def flags_of(parser: CommandParser) -> Iterator[str]:
    """Yield the long flags of a parser, and of all commands below it."""
    for action in parser._actions:
        yield from (flag for flag in action.option_strings if flag.startswith("--"))
        if isinstance(action.choices, dict):
            for each in action.choices.values():
                yield from flags_of(each)
