"""Windows of a text, whose tokens are computed together, and the tokens of each that are scored.

The definition is that of llama.cpp's ``llama-perplexity`` (tools/perplexity), so that figures can
be put side by side. A text of n tokens, BOS first if the model wants one, is cut into n // ctx
windows of ctx tokens that do not overlap; what is left at its end is dropped. A model that wants
BOS gets it in place of the first token of every window. With ``score="half"``, the first half of a
window is context only: with h = ctx // 2, the tokens h + 1 ... ctx - 1 are scored, which are
ctx - h - 1 of them. With ``score="all"``, all are but the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.base.errors import BenchmarkError

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

SCORES = ("half", "all")


@dataclass(frozen=True)
class ScoringWindows:
    """Windows of a text, ``token_ids`` int32 [W, ctx].

    Scored tokens are numbered in the order of the text, ``num_scored_each`` a window.
    """

    token_ids: np.ndarray
    score: str = "half"

    @property
    def ctx(self) -> int:
        return self.token_ids.shape[1]

    @property
    def first_judge(self) -> int:
        """The first position of a window whose logits score a token: the one after it."""
        return first_judge(self.ctx, self.score)

    @property
    def num_scored_each(self) -> int:
        return self.ctx - self.first_judge - 1

    @property
    def num_scored(self) -> int:
        return len(self) * self.num_scored_each

    def __len__(self) -> int:
        return len(self.token_ids)


def first_judge(ctx: int, score: str) -> int:
    return ctx // 2 if score == "half" else 0


def check_settings(ctx: int, score: str, max_tokens: int | None) -> None:
    """Raise BenchmarkError if a window of ``ctx`` tokens has none to score."""
    if score not in SCORES:
        raise BenchmarkError(f"score must be half or all, not {score!r}")
    least = first_judge(ctx, score) + 2
    if ctx < least:
        raise BenchmarkError(f"a context of {ctx} tokens has none to score: give at least {least}")
    if max_tokens is not None and max_tokens < ctx:
        raise BenchmarkError(
            f"{max_tokens} tokens are less than one window of {ctx}: raise max_tokens, or lower ctx"
        )


def cut(
    token_ids: Sequence[int] | np.ndarray,
    ctx: int,
    *,
    score: str = "half",
    bos_token_id: int | None = None,
    max_tokens: int | None = None,
) -> ScoringWindows:
    """Cut the tokens of a text into windows.

    Args:
        token_ids: of the whole text, with BOS in front if the model wants one.
        bos_token_id: replaces the first token of every window, if given.
        max_tokens: only so many tokens of the text are taken.

    Raises:
        BenchmarkError: there is not one whole window.
    """
    check_settings(ctx, score, max_tokens)
    tokens = np.asarray(token_ids, dtype=np.int32)[:max_tokens]
    count = len(tokens) // ctx
    if count == 0:
        raise BenchmarkError(
            f"the text has {len(tokens):,} tokens, and one window takes {ctx:,}: "
            "give a longer text, or lower ctx"
        )
    windows = tokens[: count * ctx].reshape(count, ctx).copy()
    if bos_token_id is not None:
        windows[:, 0] = bos_token_id
    return ScoringWindows(windows, score)


def tokenize(text: str, tokenizer: Tokenizer) -> tuple[list[int], int | None]:
    """Return the tokens of a text, and the BOS token that every window has to begin with, if any.

    The text of special tokens is text like any other, and no EOS is put after it.
    """
    bos = tokenizer.leading_bos
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ([] if bos is None else [bos]) + ids, bos
