"""``octavo pull``, ``octavo models`` and ``octavo rm``."""

from __future__ import annotations

import argparse
from typing import Any

from octavo import hub
from octavo.cli import terminal
from octavo.cli.flags import add_json_flag, add_switch
from octavo.cli.parser import completed_by
from octavo.hub import InstalledModel

PULL_EXAMPLES = """\
NAME is an alias (see `octavo models`) or a hub id: org/name[@revision], with :file.gguf or :Q4_K_M

examples:
  octavo pull smollm2-135m
  octavo pull gemma3-270m --accept-terms
  octavo pull Qwen/Qwen3-0.6B
  octavo pull Qwen/Qwen3-0.6B-GGUF:Q8_0              # or :Qwen3-0.6B-Q8_0.gguf
  octavo pull smollm2-135m --verify       # read the file again, and check its sha256
"""

LIST_EXAMPLES = """\
examples:
  octavo models
  octavo models --json
  OCTAVO_HOME=/mnt/big octavo models      # models are kept below $OCTAVO_HOME or ~/.cache/octavo
"""

REMOVE_EXAMPLES = """\
examples:
  octavo rm gemma3-270m
  octavo rm Qwen/Qwen3-0.6B --json
"""


def configure_pull(parser: argparse.ArgumentParser) -> None:
    parser.epilog = PULL_EXAMPLES
    completed_by(
        lambda: hub.CATALOG,
        parser.add_argument("name", metavar="NAME", help="the model to fetch"),
    )
    add_switch(parser, "--accept-terms", "accept the model's terms of use, if it has any")
    add_switch(
        parser,
        "--verify",
        "check the sha256 of a model that is here; fetch it again if it is wrong",
    )
    add_json_flag(parser)
    parser.set_defaults(run=pull)


def configure_list(parser: argparse.ArgumentParser) -> None:
    parser.epilog = LIST_EXAMPLES
    add_json_flag(parser)
    parser.set_defaults(run=list_models)


def configure_remove(parser: argparse.ArgumentParser) -> None:
    parser.epilog = REMOVE_EXAMPLES
    completed_by(
        lambda: [model.name for model in hub.installed()],
        parser.add_argument("name", metavar="NAME", help="the model to delete"),
    )
    add_json_flag(parser)
    parser.set_defaults(run=remove)


def pull(args: argparse.Namespace) -> int:
    entry = hub.CATALOG.get(args.name)
    here = {model.name for model in hub.installed()}
    # Without the flag, the hub's error says the same and how to go on.
    if entry and entry.terms and args.accept_terms and args.name not in here:
        terminal.say(f"{entry.alias}: {entry.terms.name}, {entry.terms.url}")
        terminal.say(entry.terms.statement)
    path = terminal.fetch(args.name, accept_terms=args.accept_terms, verify=args.verify)
    if args.json:
        model = next(model for model in hub.installed() if model.name == args.name)
        terminal.print_json(_as_json(model))
    else:
        print(path)
    return 0


def list_models(args: argparse.Namespace) -> int:
    models = hub.installed()
    names = {model.name for model in models}
    others = [entry for entry in hub.CATALOG.values() if entry.alias not in names]
    if args.json:
        available = [
            {
                "name": entry.alias,
                "description": entry.description,
                "bytes": entry.num_bytes,
                "license": entry.license,
                "default": entry.alias == hub.DEFAULT_MODEL,
            }
            for entry in others
        ]
        document = {
            "home": str(hub.home()),
            "models": [_as_json(model) for model in models],
            "available": available,
        }
        terminal.print_json(document)
        return 0
    rows = [
        (model.name, terminal.format_bytes(model.num_bytes), model.license or "?", str(model.path))
        for model in models
    ]
    rows += [
        (entry.alias, terminal.format_bytes(entry.num_bytes), entry.license, "not fetched yet")
        for entry in others
    ]
    terminal.print_table(("NAME", "SIZE", "LICENSE", "WHERE"), rows)
    return 0


def remove(args: argparse.Namespace) -> int:
    freed = hub.remove(args.name)
    if args.json:
        terminal.print_json({"name": args.name, "freed_bytes": freed})
    else:
        print(f"removed {args.name}, {terminal.format_bytes(freed)} freed")
    return 0


def _as_json(model: InstalledModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "bytes": model.num_bytes,
        "license": model.license,
        "source": model.source,
        "fetched": model.fetched,
        "sha256": {file.path: file.sha256 for file in model.files},
    }
