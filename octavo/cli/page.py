"""``octavo page``: pictures and documents as a folder for a browser, without a server."""

from __future__ import annotations

import argparse

from octavo.cli import terminal
from octavo.cli.flags import add_json_flag

EXAMPLES = """\
OUT gets the pictures and documents that `octavo serve` shows beside the chat. Open OUT/index.html
in a browser, from disk or from any server of files: nothing else is loaded. OUT is not overwritten.

examples:
  octavo page ./pictures
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from octavo.page.static_folder import write_static_folder

    files = write_static_folder(args.out)
    num_bytes = sum(file.stat().st_size for file in files)
    if args.json:
        terminal.print_json({"out": args.out, "files": len(files), "bytes": num_bytes})
    else:
        size = terminal.format_bytes(num_bytes)
        print(f"{args.out}: {len(files)} files, {size}. Open {args.out}/index.html")
    return 0
