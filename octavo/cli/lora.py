"""``octavo lora``: adapters of low rank, merged into their model."""

from __future__ import annotations

import argparse

from octavo.cli import Command, terminal
from octavo.cli.flags import add_json_flag

EXAMPLES = """\
examples:
  octavo lora merge smollm2-135m adapters/sql merged
  octavo serve smollm2-135m --lora sql=adapters/sql    # without merging, for some requests
"""

MERGE_EXAMPLES = """\
The folder holds the whole model, with the adapter's changes in its weights: any program that reads
Hugging Face's folders runs it, and octavo quantize makes it smaller.

examples:
  octavo lora merge smollm2-135m adapters/sql merged
  octavo lora merge smollm2-135m adapters/sql merged-float32 --dtype float32 --json
"""

COMMANDS = {
    "merge": Command("lora", "configure_merge", "write a model with an adapter in its weights"),
}

_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def configure_merge(parser: argparse.ArgumentParser) -> None:
    parser.epilog = MERGE_EXAMPLES
    parser.add_argument("model", metavar="MODEL", help="alias, folder, .gguf file or hub id")
    parser.add_argument("adapter", metavar="ADAPTER", help="a folder that PEFT has written")
    parser.add_argument("output", metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--dtype",
        choices=("auto", *_TYPES),
        default="auto",
        help="type of the weights (default: auto, the model's own, or bfloat16)",
    )
    add_json_flag(parser)
    parser.set_defaults(run=merge)


def merge(args: argparse.Namespace) -> int:
    from octavo import hub
    from octavo.lora.merge import merge_adapter
    from octavo.lora.peft_folder import PeftFolder
    from octavo.models.checkpoint import open_checkpoint
    from octavo.quantization.ggml_types import GGMLType

    adapter = PeftFolder(args.adapter)
    asked = None if args.dtype == "auto" else GGMLType[_TYPES[args.dtype]]
    used = merge_adapter(open_checkpoint(hub.resolve(args.model)), adapter, args.output, asked)
    if args.json:
        terminal.print_json(
            {"output": args.output, "dtype": used.name, "num_modules": len(adapter.modules)}
        )
        return 0
    print(f"{args.output}: {len(adapter.modules)} modules merged, weights of {used.name}")
    return 0
