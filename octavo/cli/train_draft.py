"""``octavo train-draft``: trains draft heads for a model on the model's own answers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.base.optional_deps import need_torch
from octavo.cli import UsageError, terminal
from octavo.cli.flags import add_json_flag, add_value, from_flags, whole_number
from octavo.cli.quantize import progress_bar
from octavo.system.machine import keep_openmp_patient

if TYPE_CHECKING:
    from octavo.draft_training.model_answers import AnswerPrompts, TrainingPrompt
    from octavo.draft_training.training_job import TrainRequest

# The keys of octavo.draft_training.head_kinds.KINDS, which takes a second to import.
KINDS = ("recurrent", "medusa", "eagle")

EXAMPLES = """\
The model answers prompts, and draft heads are trained to predict its answers; the model stays as it
is. OUT is a folder of heads for --speculative-config, and is not overwritten. An interrupted run
goes on when it is started again with the same settings.

Without --data the prompts are built in. Heads draft best for text like that of their training: give
texts, or conversations, like those that the model will see. The messages of users are taken from
conversations, and answered anew.

kinds:
  recurrent    a ReDrafter head: a recurrence from the last hidden state, which learns fastest
  medusa       a head for each position ahead, and a static tree of their tokens
  eagle        a decoder layer that attends to the whole context, in EAGLE-3's published layout

examples:
  octavo train-draft smollm2-135m ./smollm2-draft
  octavo train-draft ./Qwen3-0.6B ./qwen3-draft --minutes 60 --data chats.jsonl
  octavo train-draft smollm2-135m ./smollm2-medusa --kind medusa --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="alias, folder, .gguf file or hub id")
    parser.add_argument("out", metavar="OUT", help="folder to write the heads to")
    parser.add_argument(
        "--kind",
        type=lambda text: "recurrent" if text == "redrafter" else text,
        choices=KINDS,
        default=KINDS[0],
        help="kind of heads (default: recurrent; redrafter is another name of it)",
    )
    add_value(parser, "--minutes M", "about how long it may take (default: 30)", float)
    add_value(parser, "--data FILE", "prompts: a text, or .jsonl with text or messages")
    add_value(parser, "--tokens N", "the most answer tokens (default: 200,000)", whole_number)
    add_value(parser, "--shortlist N", "tokens that are drafted (default: 8,192)", whole_number)
    add_value(parser, "--steps N", "training steps (default: as time allows)", whole_number)
    add_value(parser, "--seed N", "seed of all draws (default: 0)", int)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    keep_openmp_patient()  # before PyTorch is imported
    need_torch("training a draft")
    path = terminal.resolve(args.model)
    with terminal.spinner("starting"):
        from octavo.draft_training.training_job import train_draft
        from octavo.models.checkpoint import open_checkpoint
        from octavo.sources.open import load_tokenizer
    request = _request(args)
    checkpoint, tokenizer = open_checkpoint(path), load_tokenizer(path)

    with progress_bar() as progress:
        made = train_draft(
            checkpoint,
            tokenizer,
            lambda: answering(args.model, request.answer_tokens),
            Path(args.out),
            request,
            progress,
        )
    if args.json:
        terminal.print_json(made.as_json())
    else:
        print_made(made.as_json())
    return 0


def _request(args: argparse.Namespace) -> TrainRequest:
    from octavo.draft_training.training_job import TrainRequest

    try:
        return from_flags(TrainRequest, args, data=args.data and Path(args.data))
    except ConfigError as error:
        raise UsageError(str(error)) from error


@contextmanager
def answering(model: str, answer_tokens: int) -> Iterator[AnswerPrompts]:
    """Load the model, and yield a function that answers prompts."""
    from octavo import LLM, SamplingParams

    with LLM(model) as llm:

        def answer(prompts: Sequence[TrainingPrompt]) -> list[list[int]]:
            params = [
                SamplingParams(
                    temperature=prompt.temperature, seed=prompt.seed, max_tokens=answer_tokens
                )
                for prompt in prompts
            ]
            outputs = llm.generate(
                [{"prompt_token_ids": prompt.prompt_ids} for prompt in prompts], params
            )
            return [list(output.outputs[0].token_ids) for output in outputs]

        yield answer


def print_made(made: Mapping[str, Any]) -> None:
    rates = ", ".join(f"{rate:.2f}" for rate in made["acceptance"])
    print(f"{made['out']}: {made['kind']}, {made['num_parameters'] / 1e6:.1f} million parameters")
    print(
        f"trained for {made['num_steps']:,} steps on {made['num_tokens']:,} tokens of answers in "
        f"{made['elapsed_s']:,.0f} s"
    )
    print(f"acceptance on held-out answers, by position: {rates}")
    expected = made["expected_tokens"]
    print(f"tokens a step with chains of 1 to {len(expected)}: ", end="")
    print(", ".join(f"{tokens:.2f}" for tokens in expected))
