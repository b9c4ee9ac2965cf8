"""``octavo train-draft``: heads that guess what a model says next, trained on what it says."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.base.optional_deps import need_torch
from octavo.cli import UsageError, terminal
from octavo.cli.flags import whole_number
from octavo.cli.quantize import progress_bar
from octavo.system.machine import keep_openmp_patient

if TYPE_CHECKING:
    from octavo.draft_training.model_answers import Talk, TrainingPrompt
    from octavo.draft_training.training_job import TrainRequest

# As octavo.draft_training.kinds has them, which takes a second to import.
KINDS = ("recurrent", "medusa", "eagle")

EXAMPLES = """\
The model answers questions, and heads are trained to guess what it says: it stays as it is. OUT is
the folder of a draft for --speculative-config; it is not overwritten. A run that is ended goes on
where it was when it is started again with the same settings.

Without --data the questions are octavo's own. Heads guess best at what they were trained on: give
texts, or conversations, like those that the model will see. Of conversations the questions are
taken, and answered anew.

kinds:
  recurrent    goes on from the last hidden state, one guess after the other: learns fastest
  medusa       a head for each position ahead, and a tree of their guesses
  eagle        a decoder layer that sees the whole context; a folder in EAGLE-3's published layout

examples:
  octavo train-draft smollm2-135m ./smollm2-draft
  octavo train-draft ./Qwen3-0.6B ./qwen3-draft --minutes 60 --data chats.jsonl
  octavo train-draft smollm2-135m ./smollm2-medusa --kind medusa --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("model", metavar="MODEL", help="alias, folder, .gguf file or hub id")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="default: recurrent")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="that it may take, about (default: 30)"
    )
    parser.add_argument(
        "--data", metavar="FILE", help="what to ask: a text, or .jsonl with text or messages"
    )
    parser.add_argument(
        "--tokens", type=whole_number, metavar="N", help="of answers, at most (default: 200,000)"
    )
    parser.add_argument(
        "--shortlist", type=whole_number, metavar="N", help="tokens to guess among (default: 8,192)"
    )
    parser.add_argument(
        "--steps",
        type=whole_number,
        metavar="N",
        help="of training (default: what the time allows)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of all random numbers (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    keep_openmp_patient()  # before PyTorch is imported
    need_torch("training a draft")
    path = terminal.resolve(args.model)
    with terminal.spinner("starting"):
        from octavo.draft_training.training_job import train_draft
        from octavo.models.checkpoint import open_checkpoint
        from octavo.sources.open import load_tokenizer
    wanted = _wanted(args)
    checkpoint, tokenizer = open_checkpoint(path), load_tokenizer(path)

    with progress_bar() as progress:
        made = train_draft(
            checkpoint,
            tokenizer,
            lambda: talking(args.model, wanted.answer_tokens),
            Path(args.out),
            wanted,
            progress,
        )
    if args.json:
        terminal.print_json(made.as_json())
    else:
        print_made(made.as_json())
    return 0


def _wanted(args: argparse.Namespace) -> TrainRequest:
    from octavo.draft_training.training_job import TrainRequest

    names = ("kind", "minutes", "tokens", "shortlist", "steps", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    try:
        return TrainRequest(data=args.data and Path(args.data), **given)
    except ConfigError as error:
        raise UsageError(str(error)) from error


@contextmanager
def talking(model: str, answer_tokens: int) -> Iterator[Talk]:
    """The model, loaded to answer."""
    from octavo import LLM, SamplingParams

    with LLM(model) as llm:

        def talk(asks: Sequence[TrainingPrompt]) -> list[list[int]]:
            params = [
                SamplingParams(temperature=ask.temperature, seed=ask.seed, max_tokens=answer_tokens)
                for ask in asks
            ]
            outputs = llm.generate([{"prompt_token_ids": ask.prompt_ids} for ask in asks], params)
            return [list(output.outputs[0].token_ids) for output in outputs]

        yield talk


def print_made(made: Mapping[str, Any]) -> None:
    rates = ", ".join(f"{rate:.2f}" for rate in made["acceptance"])
    print(f"{made['out']}: {made['kind']}, {made['num_parameters'] / 1e6:.1f} million parameters")
    print(
        f"trained for {made['num_steps']:,} steps on {made['num_tokens']:,} tokens of answers in "
        f"{made['elapsed_s']:,.0f} s"
    )
    print(f"of held-out answers it guesses right, one after the other: {rates}")
    expected = made["expected_tokens"]
    print(f"tokens a step with chains of 1 to {len(expected)}: ", end="")
    print(", ".join(f"{tokens:.2f}" for tokens in expected))
