"""``octavo embed``: texts, vectors."""

from __future__ import annotations

import argparse
import sys

from octavo.cli import UsageError, terminal
from octavo.cli.engine_flags import add_engine_flags, engine_kwargs
from octavo.cli.flags import add_json_flag, add_number, add_value
from octavo.cli.generate import load
from octavo.core.pooling_params import PoolingParams

DEFAULT_MODEL = "minilm"

EXAMPLES = """\
Without --json, each text is a line: its vector, as JSON.

examples:
  octavo embed minilm "A cat sits on the mat."
  octavo embed minilm --text "one text" "another text" --json
  octavo embed ./my-model --pooling mean --text "What is a cat?" --dimensions 32
  cat lines.txt | octavo embed minilm -
"""
_OFTEN = ("device", "max_model_len", "pooling", "threads")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"alias, folder, .gguf file or hub id (default: {DEFAULT_MODEL})",
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text; - is each line of stdin")
    parser.add_argument(
        "--text", nargs="+", action="extend", default=[], metavar="TEXT", help="the same, as a flag"
    )
    add_number(parser, "--dimensions", "the first so many values of each vector (default: all)")
    add_value(parser, "--prompt-name NAME", "the text of the model's files to go before each")
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale vectors to length 1 (default: as the model's files say)",
    )
    parser.add_argument(
        "--truncate", action="store_true", help="cut the end of texts that are too long"
    )
    add_json_flag(parser)
    add_engine_flags(parser, skip={"seed"}, often=_OFTEN)


def run(args: argparse.Namespace) -> int:
    texts = _texts([*args.texts, *args.text])
    params = PoolingParams(dimensions=args.dimensions, use_activation=args.normalize)
    with load(args.model, {"runner": "pooling", **engine_kwargs(args)}) as llm:
        outputs = llm.embed(
            texts,
            pooling_params=params,
            prompt_name=args.prompt_name,
            truncate_prompt_tokens=-1 if args.truncate else None,
            use_tqdm=terminal.can_animate(),
        )
    failed = [output.error for output in outputs if output.error is not None]
    vectors = [None if each.outputs is None else each.outputs.embedding for each in outputs]
    if args.json:
        terminal.print_json(
            {
                "model": args.model,
                "dimensions": next((len(each) for each in vectors if each is not None), 0),
                "embeddings": vectors,
                "tokens": [len(output.prompt_token_ids) for output in outputs],
            }
        )
    else:
        for vector in vectors:
            terminal.write_answer(f"{vector}\n" if vector is not None else "null\n")
    for error in failed:
        terminal.say(f"octavo: error: {error}")
    return 1 if failed else 0


def _texts(given: list[str]) -> list[str]:
    if given.count("-") > 1:
        raise UsageError("stdin can be read only once")
    texts: list[str] = []
    for text in given:
        texts += sys.stdin.read().splitlines() if text == "-" else [text]
    if not texts:
        raise UsageError("no text: give one behind the model, by --text, or - for lines of stdin")
    return texts
