"""``octavo build``: a model made ready, as a folder that every command takes as a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli import terminal
from octavo.cli.engine_flags import LORA_SETTINGS, add_engine_flags, engine_kwargs
from octavo.cli.flags import add_json_flag
from octavo.settings.engine import EngineArgs

if TYPE_CHECKING:
    from octavo.sources.engine_folder.writer import BuiltFolder

EXAMPLES = """\
OUT gets the weights as the native CPU kernels read them, whatever the processor, the recorded
program of a step, and the tokenizer: nothing is left to do at a start but to map them. The flags
are its defaults; who starts it may set others, but raise no limit, and change no --activations.

OUT is not overwritten. An octavo that reads another format says so, and how to build it again.

examples:
  octavo build smollm2-135m ./smollm2
  octavo generate ./smollm2 --prompt "Why is the sky blue?"
  octavo build ./Qwen3-0.6B ./qwen3 --max-model-len 4096 --kv-cache-dtype int8
  octavo serve ./qwen3 --max-num-seqs 8
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="alias, folder, .gguf file or hub id")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    add_json_flag(parser)
    add_engine_flags(parser, skip=LORA_SETTINGS)


def run(args: argparse.Namespace) -> int:
    settings = EngineArgs.from_kwargs(args.model, **engine_kwargs(args))
    terminal.resolve(args.model)
    with terminal.spinner("starting"):
        from octavo.sources.engine_folder.writer import build_engine_folder
        from octavo.sources.open import notes_folder
    with terminal.progress_bar("packing", args.model) as progress:
        built = build_engine_folder(settings, Path(args.out), notes_folder(), progress)
    if args.json:
        terminal.print_json(_as_json(built))
    else:
        _print(built)
    return 0


def _as_json(built: BuiltFolder) -> dict[str, object]:
    return {
        "out": str(built.out),
        "bytes": built.num_bytes,
        "elapsed_s": built.elapsed_s,
        "sources": built.sources,
    }


def _print(built: BuiltFolder) -> None:
    size = terminal.format_bytes(built.num_bytes)
    print(f"{built.out}: {size}, built in {built.elapsed_s:.1f} s from")
    for name, sha256 in built.sources.items():
        print(f"  {name}  sha256 {sha256}")
    print(f"octavo generate {built.out} --prompt ...")
