"""The ``octavo`` command.

A command is a module with ``EXAMPLES``, ``configure(parser)``, which declares its flags, and
``run(args)``, or a group of such commands. Only the module of the command that was asked for is
imported, and torch not before its work begins, so that ``--help`` answers at once.

Exit status: 0 done, 1 failed (one line on stderr says what to do), 2 wrong usage, 130 Ctrl-C, 141
where the reader of the output has gone (`octavo plan … | head`).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from octavo.base.errors import OctavoError
from octavo.cli.parser import CommandParser


class Command(NamedTuple):
    """``configure``: what the module (below ``octavo.cli``) has: a function that declares flags, or
    the commands of a group by name. One that is not called ``configure``, as its module has several
    commands, sets the parser's epilog and ``run`` itself."""

    module: str
    configure: str
    help: str


COMMANDS = {
    "generate": Command("generate", "configure", "answer one or more prompts"),
    "chat": Command("chat", "configure", "a conversation in the terminal"),
    "embed": Command("embed", "configure", "make vectors of texts"),
    "serve": Command("serve", "configure", "an OpenAI-compatible server, and a chat page"),
    "run-batch": Command("run_batch", "configure", "answer a file of requests"),
    "cluster": Command("cluster", "COMMANDS", "the machines on which a server has its replicas"),
    "bench": Command("bench", "COMMANDS", "measure how fast a model, or a server, is"),
    "simulate": Command("simulate", "configure", "a server and its load, in virtual time"),
    "spec": Command("spec", "configure", "what speculative decoding is worth, by formula"),
    "calibrate": Command("calibrate", "configure", "measure what a model's steps take here"),
    "validate": Command("validate", "configure", "compare what is predicted with what is measured"),
    "tune": Command("tune", "configure", "find the settings that serve a load best"),
    "perplexity": Command("perplexity", "configure", "measure how well a model predicts a text"),
    "trace": Command("trace", "COMMANDS", "convert and describe traces of requests"),
    "quantize": Command("quantize", "configure", "make a smaller model, and judge it"),
    "lora": Command("lora", "COMMANDS", "adapters of a model: merge one into it"),
    "train-draft": Command("train_draft", "configure", "train heads that draft a model's tokens"),
    "place-experts": Command("place_experts", "configure", "which ranks have which experts"),
    "build": Command("build", "configure", "make a model ready, as a folder that starts at once"),
    "hardware": Command("hardware", "COMMANDS", "devices that octavo knows, and what they can do"),
    "plan": Command("plan", "configure", "does a model fit, how fast, for how many, at what cost"),
    "advise": Command("advise", "configure", "what would make a model faster or cheaper here"),
    "page": Command("page", "configure", "the pictures that explain inference, as a folder"),
    "pull": Command("models", "configure_pull", "fetch a model"),
    "models": Command("models", "configure_list", "list the models that are here"),
    "rm": Command("models", "configure_remove", "delete a fetched model"),
    "show": Command("show", "configure", "what is in a model: shape, weights, template, licence"),
    "ps": Command("ps", "configure", "the servers that run here, and their models"),
    "doctor": Command("doctor", "configure", "what this machine has, and what octavo makes of it"),
    "completion": Command("completion", "configure", "what a shell needs to complete commands"),
}

PREFIX = "OCTAVO_"
# Variables that are no flags; what keys of clients are is never put among the arguments.
RESERVED = frozenset(
    {
        *("OCTAVO_HOME", "OCTAVO_API_KEY", "OCTAVO_ADMIN_KEY", "OCTAVO_DEBUG", "OCTAVO_ISA"),
        *("OCTAVO_PACKED_DIR", "OCTAVO_LIBRARY_DIR", "OCTAVO_NATIVE", "OCTAVO_BUILD_ISA"),
        *("OCTAVO_FAULTS", "OCTAVO_LINK_TICKET", "OCTAVO_SPREAD", "OCTAVO_AXE"),
    }
)

EPILOG = """\
examples:
  octavo generate --prompt "Why is the sky blue?"
  octavo chat
  octavo serve --port 8000
  octavo bench latency
  octavo COMMAND --help        # the flags most used; --help-all shows every one
  octavo completion bash       # so that Tab completes commands, flags and models
"""


class UsageError(Exception):
    """The command line is wrong in a way that argparse does not see. Exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        status = _main(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter must not meet that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130


def _main(argv: Sequence[str]) -> int:
    try:
        parser = build_parser(argv)
        args = parser.parse_args(_with_variables(parser, argv))
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        return _run(args)
    except SystemExit as stop:  # argparse: --help is 0, wrong usage is 2
        return stop.code if isinstance(stop.code, int) else 1


def _with_variables(parser: CommandParser, argv: Sequence[str]) -> Sequence[str]:
    """Return the arguments with those of the environment."""
    if list(argv[:1]) == ["completion"] or not any(
        name.startswith(PREFIX) and name not in RESERVED for name in os.environ
    ):
        return argv
    from octavo.cli.environment import flags_of, with_variables

    def all_flags() -> Iterator[str]:
        for name in COMMANDS:
            yield from flags_of(build_parser([name]))
            for subcommand in _commands_of(name):
                yield from flags_of(build_parser([name, subcommand]))

    return with_variables(parser, argv, all_flags=all_flags)


def _commands_of(group: str) -> Sequence[str]:
    """Return the commands of a group; none of what is no group."""
    command = COMMANDS[group]
    if command.configure != "COMMANDS":
        return ()
    return list(importlib.import_module(f"octavo.cli.{command.module}").COMMANDS)


def build_parser(argv: Sequence[str]) -> CommandParser:
    """The whole parser, with the flags of the one command that ``argv`` names."""
    parser = CommandParser(
        prog="octavo",
        description="Run open-weight language models fast and cheaply on the machine you have.",
        epilog=EPILOG,
    )
    parser.other_names = _other_names
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    _add_commands(parser, COMMANDS, argv)
    return parser


def _add_commands(
    parser: CommandParser, commands: Mapping[str, Command], argv: Sequence[str]
) -> None:
    """One subparser for each command; the one that ``argv`` names first gets its flags."""
    is_top = commands is COMMANDS
    subparsers = parser.add_subparsers(
        dest="command" if is_top else "subcommand",
        required=not is_top,
        metavar="COMMAND",
        title="commands",
    )
    place = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    for name, command in commands.items():
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
        )
        subparser.set_defaults(prog=subparser.prog)
        if [name] != list(argv[place : place + 1]):
            continue
        module = importlib.import_module(f"octavo.cli.{command.module}")
        declared = getattr(module, command.configure)
        if command.configure in ("configure", "COMMANDS"):
            subparser.epilog = module.EXAMPLES
        if command.configure == "configure":
            subparser.set_defaults(run=module.run)
        if callable(declared):
            declared(subparser)
        else:
            _add_commands(subparser, declared, argv[place + 1 :])


# What a command is called elsewhere.
_ALSO_CALLED = {
    "help": "octavo --help",
    "version": "octavo --version",
    "run": "octavo chat",
    "complete": "octavo generate",
    "list": "octavo models",
    "ls": "octavo models",
    "download": "octavo pull",
    "remove": "octavo rm",
    "delete": "octavo rm",
    "convert": "octavo quantize",
}


def _other_names() -> dict[str, str]:
    """Words that are no command by themselves, and what to write for them: the commands of groups,
    and names that other programs have for ours."""
    names = dict(_ALSO_CALLED)
    for group, command in COMMANDS.items():
        if command.configure == "COMMANDS":
            module = importlib.import_module(f"octavo.cli.{command.module}")
            for name in module.COMMANDS.keys() - COMMANDS.keys() - _ALSO_CALLED.keys():
                names[name] = f"octavo {group} {name}"
    return names


def _run(args: argparse.Namespace) -> int:
    try:
        if getattr(args, "plot", None):
            from octavo.plots.style import check_can_plot

            check_can_plot(args.plot)  # before minutes of work
        status: int = args.run(args)
        return status
    except UsageError as error:
        print(f"{args.prog}: error: {error}", file=sys.stderr)
        return 2
    except OctavoError as error:
        if os.environ.get("OCTAVO_DEBUG") == "1":
            raise
        print(f"octavo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


class _Version(argparse.Action):
    """The version is looked up only when it is asked for."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        from octavo import __version__

        print(f"octavo {__version__}")
        raise SystemExit(0)
