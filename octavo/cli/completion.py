"""``octavo completion``: the script by which a shell completes commands, flags and their values.

The script asks ``octavo completion --words``, which reads the answer off the parsers themselves:
what they take is what a shell offers, in this version and with the models that are here now.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo import cli, hub
from octavo.cli import UsageError
from octavo.cli.parser import CommandParser, values_of

EXAMPLES = """\
examples:
  source <(octavo completion bash)     # in ~/.bashrc
  source <(octavo completion zsh)      # in ~/.zshrc, after compinit
  octavo completion fish | source      # in ~/.config/fish/config.fish
"""

# The line that has a shell complete names of files, too.
FILES = ":files"
# Flags and arguments of these names take files.
_OF_FILES = {"FILE", "DIR", "PATH", "IN", "OUT", "MODEL"}

_BASH = """\
_octavo() {
    local line word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == :files ]]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "${word#=}")
        else
            COMPREPLY+=("${line%%$'\\t'*}")
        fi
    done < <("${COMP_WORDS[0]}" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _octavo octavo
"""

_ZSH = """\
#compdef octavo
_octavo() {
    local line files=0
    local -a described
    for line in "${(@f)$("${words[1]}" completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}"
    do
        if [[ $line == :files ]]; then
            files=1
        elif [[ -n $line ]]; then
            described+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
        fi
    done
    (( ${#described} )) && _describe -V octavo described
    if (( files )); then
        [[ $PREFIX == --*=* ]] && compset -P '*='
        _files
    fi
}
if [[ $funcstack[1] == _octavo ]]; then _octavo "$@"; else compdef _octavo octavo; fi
"""

_FISH = """\
function __octavo_complete
    set -l words (commandline -opc)
    set -l last (commandline -ct)
    for line in ($words[1] completion --words $words[2..] "$last" 2>/dev/null)
        if test "$line" = :files
            __fish_complete_path "$last"
        else
            echo $line
        end
    end
end
complete -c octavo -f -a '(__octavo_complete)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=list(SCRIPTS), help="whose script to print")
    parser.add_argument(
        "--words",
        nargs=argparse.REMAINDER,
        metavar="WORD",
        help="what the script asks: the words after `octavo` so far, the one to complete last; "
        "prints one candidate a line, with a tab and what it means",
    )


def run(args: argparse.Namespace) -> int:
    if args.words is None:
        if args.shell is None:
            raise UsageError(f"which shell? {', '.join(SCRIPTS)}")
        sys.stdout.write(SCRIPTS[args.shell])
        return 0
    for candidate in candidates(args.words):
        sys.stdout.write(candidate.line + "\n")
    return 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A word that may stand in place of the last one."""

    text: str
    help: str = ""

    @property
    def line(self) -> str:
        return f"{self.text}\t{self.help}" if self.help else self.text


def candidates(words: Sequence[str]) -> list[Candidate]:
    """Complete the last of ``words``. Bash gives ``--flag=x`` as three words."""
    *before, last = [word for word in words[:-1] if word != "="] + list(words[-1:] or [""])
    last = "" if last == "=" else last
    place = _place(before)
    may_end = place.flag is None or place.flag.nargs in ("+", "*")
    if may_end and last.startswith("-"):
        name, equals, _ = last.partition("=")
        action = place.parser._option_string_actions.get(name)
        if not equals:
            found: Iterator[Candidate] = _flags(place.parser)
        elif action is None:
            return []
        else:
            found = _values(action, prefix=f"{name}=")
    elif (action := place.flag or place.argument) is not None:
        found = _values(action)
    else:
        return []
    return [each for each in found if each.text == FILES or each.text.startswith(last)]


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a word: its command, and the flag before it that takes a value, or else the
    positional argument that it is."""

    parser: CommandParser
    flag: argparse.Action | None
    argument: argparse.Action | None


def _place(before: Sequence[str]) -> _Place:
    parser = cli.build_parser(before)
    flag: argparse.Action | None = None
    arguments = _arguments(parser)
    for word in before:
        if word.startswith("-") and word != "-":
            action = parser._option_string_actions.get(word)
            flag = action if action is not None and action.nargs != 0 else None
        elif flag is not None:
            flag = flag if flag.nargs in ("+", "*") else None
        elif arguments and isinstance(arguments[0].choices, dict):
            if word not in arguments[0].choices:
                return _Place(parser, None, None)
            parser = arguments[0].choices[word]
            arguments = _arguments(parser)
        elif arguments and arguments[0].nargs not in ("+", "*"):
            arguments = arguments[1:]
    return _Place(parser, flag, arguments[0] if arguments else None)


def _arguments(parser: CommandParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _flags(parser: CommandParser) -> Iterator[Candidate]:
    for action in parser._actions:
        for name in action.option_strings:
            if name.startswith("--"):
                yield Candidate(name, _brief(action.help))


def _values(action: argparse.Action, prefix: str = "") -> Iterator[Candidate]:
    """Choices and names that are known; files where the flag takes any."""
    if isinstance(action.choices, dict):
        for choice in action._get_subactions():  # type: ignore[attr-defined]
            yield Candidate(choice.dest, _brief(choice.help))
        return
    known = values_of(action)
    if not known and action.metavar == "MODEL":
        known = list(dict.fromkeys([*hub.CATALOG, *(model.name for model in hub.installed())]))
    yield from (Candidate(prefix + value) for value in known)
    if action.metavar in _OF_FILES:
        yield Candidate(FILES)


def _brief(text: str | None) -> str:
    clause = (text or "").partition(";")[0].partition(" (default:")[0]
    return " ".join(clause.replace("%%", "%").split())
