"""The flags of ``SamplingParams``. Their defaults are its own, the model's, or the command's."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.base.errors import InvalidRequestError
from octavo.cli import UsageError
from octavo.cli.flags import read_text
from octavo.cli.parser import rarely
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.cli.remote_model import RemoteModel

_DEST = "sampling_"
_CONSTRAINT_DEST = "constraint_"


class Flag(NamedTuple):
    """``repeat`` flags collect a list: field ``plural`` of SamplingParams where it differs."""

    name: str
    kind: type | None
    metavar: str | None
    help: str
    field: str | None = None
    repeat: bool = False


FLAGS = (
    Flag("max-tokens", int, "N", "tokens to generate at most"),
    Flag("min-tokens", int, "N", "no stop before this many tokens"),
    Flag("temperature", float, "T", "0 is greedy"),
    Flag("top-p", float, "P", "sample from the smallest set of tokens with this probability"),
    Flag("top-k", int, "K", "sample from the K most likely tokens; 0 is off"),
    Flag("min-p", float, "P", "drop tokens below P times the most likely one's probability"),
    Flag("typical-p", float, "P", "locally typical sampling; 1 is off"),
    Flag("top-n-sigma", float, "X", "drop logits X standard deviations below the top; 0 is off"),
    Flag("xtc-probability", float, "P", "chance to drop all top choices but the last; 0 is off"),
    Flag("xtc-threshold", float, "P", "the probability from which a token is a top choice"),
    Flag("dry-multiplier", float, "X", "lower tokens that would repeat a sequence; 0 is off"),
    Flag("dry-base", float, "X", "the growth of that with each token of the sequence"),
    Flag("dry-allowed-length", int, "N", "sequences of fewer tokens may be repeated"),
    Flag("dry-penalty-last-n", int, "N", "look at the last N tokens; -1 is all"),
    Flag(
        *("dry-sequence-breaker", str, "TEXT", "no sequence reaches across it (may be repeated)"),
        *("dry_sequence_breakers", True),
    ),
    Flag("seed", int, "S", "the same seed gives the same tokens (on a GPU: --batch-invariant)"),
    Flag("n", int, "N", "answers to each prompt"),
    Flag("best-of", int, "N", "generate N answers, return the n most likely"),
    Flag("stop", str, "TEXT", "end at this text (may be repeated)", repeat=True),
    Flag("stop-token-id", int, "ID", "end at this token (may be repeated)", "stop_token_ids", True),
    Flag("include-stop", None, None, "keep the stop text", "include_stop_str_in_output"),
    Flag("ignore-eos", None, None, "go on after the end-of-text token"),
    Flag("presence-penalty", float, "X", "lower tokens that occurred; in [-2, 2]"),
    Flag("frequency-penalty", float, "X", "lower tokens by how often they occurred; in [-2, 2]"),
    Flag("repetition-penalty", float, "X", "divide the score of tokens that occurred; 1 is off"),
    Flag("bad-word", str, "TEXT", "never generate this (may be repeated)", "bad_words", True),
    Flag("logit-bias", str, "ID=X", "add X to a token's logit (may be repeated)", repeat=True),
    Flag(
        *("allowed-token-id", int, "ID", "generate only these (may be repeated)"),
        *("allowed_token_ids", True),
    ),
    Flag("logprobs", int, "N", "report the N most likely tokens at each position"),
    Flag("prompt-logprobs", int, "N", "the same for the prompt's tokens"),
)


class ConstraintFlag(NamedTuple):
    """``field`` is that of StructuredOutputs, ``marks`` texts by which a value is not a file's
    name."""

    name: str
    metavar: str
    help: str
    field: str
    marks: tuple[str, ...] = ()


# One of them may be given.
CONSTRAINT_FLAGS = (
    ConstraintFlag(
        *("json-schema", "FILE|TEXT", "the answer is JSON that this schema describes"),
        *("json", ("{",)),
    ),
    ConstraintFlag("regex", "PATTERN", "this regular expression matches the answer", "regex"),
    ConstraintFlag("choice", "A,B", "the answer is one of these texts", "choice"),
    ConstraintFlag(
        *("grammar", "FILE|TEXT", "this grammar, in GBNF or Lark, has the answer"),
        *("grammar", ("::=", "start:")),
    ),
)

# Those in the short help of commands.
_OFTEN = {"max-tokens", "temperature", "top-p", "top-k", "seed", "n", "stop"}
# Where neither the user nor the model's files say how to sample.
FALLBACK: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}


def add_sampling_flags(
    parser: argparse.ArgumentParser, *, skip: Collection[str] = (), **defaults: Any
) -> None:
    """Add the flags; ``defaults`` are the values by which a command differs, for the help.

    ``skip`` names fields of SamplingParams that the command has no use for.
    """
    group = parser.add_argument_group("sampling")
    own = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for flag in FLAGS:
        field = flag.field or flag.name.replace("-", "_")
        if field in skip:
            continue
        default = {**own, **FALLBACK, **defaults}[field]
        shown = flag.help if default in (None, (), False) else f"{flag.help} (default: {default})"
        settings: dict[str, Any] = {"dest": _DEST + field, "default": argparse.SUPPRESS}
        if flag.kind is None:
            settings["action"] = "store_true"
        else:
            settings |= {"type": flag.kind, "metavar": flag.metavar}
            settings["action"] = "append" if flag.repeat else "store"
        group.add_argument(f"--{flag.name}", help=shown, **settings)
        if flag.name not in _OFTEN:
            rarely(group, f"--{flag.name}")
    one = group.add_mutually_exclusive_group()
    for constraint in CONSTRAINT_FLAGS:
        one.add_argument(
            f"--{constraint.name}",
            dest=_CONSTRAINT_DEST + constraint.field,
            default=argparse.SUPPRESS,
            metavar=constraint.metavar,
            help=constraint.help,
        )
        rarely(group, f"--{constraint.name}")


def base_params(llm: LLM | RemoteModel, **defaults: Any) -> SamplingParams:
    """Return the sampling parameters of a command, before the user's.

    They are those that the model's authors recommend, or else ``FALLBACK``: small models lose the
    thread at the edge of their own distribution.
    """
    params = llm.default_sampling_params()
    if params == SamplingParams():
        params = params.with_changes(**FALLBACK)
    return params.with_changes(**defaults)


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that the user gave. Raises UsageError for a bad value.

    The caller decides the others: the model's authors may recommend something.
    """
    given = {
        name.removeprefix(_DEST): value
        for name, value in vars(args).items()
        if name.startswith(_DEST)
    }
    if "logit_bias" in given:
        given["logit_bias"] = dict(map(_parse_bias, given["logit_bias"]))
    for flag in CONSTRAINT_FLAGS:
        if (value := getattr(args, _CONSTRAINT_DEST + flag.field, None)) is not None:
            given["structured_outputs"] = _constraint(flag, value)
    try:
        SamplingParams(**{"max_tokens": None} | given)
    except InvalidRequestError as error:
        raise UsageError(str(error)) from error
    return given


def _constraint(flag: ConstraintFlag, value: str) -> StructuredOutputs:
    asked: Any = value
    if flag.field == "choice":
        asked = [each.strip() for each in value.split(",")]
    elif flag.marks and not any(mark in value for mark in flag.marks):
        if value == "-":
            raise UsageError(f"--{flag.name} takes a file or a text, not stdin")
        asked = read_text(value, f"--{flag.name}")
    try:
        return StructuredOutputs(**{flag.field: asked})
    except InvalidRequestError as error:
        raise UsageError(f"--{flag.name}: {error.message}") from error


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, equals, amount = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return int(token_id), float(amount)
    except ValueError:
        raise UsageError(f"--logit-bias takes ID=X, such as 42=-1.5, not {text!r}") from None
