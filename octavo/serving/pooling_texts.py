"""Texts as the token ids of pooling requests: with prompts before them, in pairs, truncated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.base.errors import InvalidRequestError
from octavo.core.limits import checked_token_ids
from octavo.models.pooling import Pooling

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

# A text, or its token ids.
Text = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    """The token ids of a pooling request, and of which of two texts each is."""

    token_ids: list[int]
    token_types: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolingTexts:
    """Makes token ids of the texts for one model. Any threads may share it.

    Args:
        vocab_size: of the model.
        max_length: the most tokens of a text.
        num_types: the types of tokens that the model knows.
    """

    tokenizer: Tokenizer
    pooling: Pooling
    vocab_size: int
    max_length: int
    num_types: int = 0

    def single(
        self,
        text: Any,
        *,
        prompt: str | None = None,
        truncate: int | None = None,
        add_special_tokens: bool = True,
        field: str = "input",
    ) -> PoolingPrompt:
        """Return the tokens of one text.

        Args:
            text: a text, or token ids, which are taken as they are.
            prompt: the name of the text of the model's files that goes before it; None: as these
                say.
            truncate: the most tokens, -1: those that the model takes; a longer text loses its end.
                None: it is an error, later on.
            field: the name of the text, for errors.

        Raises:
            InvalidRequestError: it is neither, or there is no prompt of that name.
        """
        if not isinstance(text, str):
            if isinstance(text, (bytes, dict)) or not isinstance(text, Sequence):
                raise InvalidRequestError("must be a text, or token ids", field)
            ids = checked_token_ids(text, self.vocab_size, field)
            return PoolingPrompt(ids[: self._most(truncate)])
        before = self.prompt(prompt)
        ids = self.tokenizer.encode(before + text, add_special_tokens=add_special_tokens)
        most = self._most(truncate)
        if most is None or len(ids) <= most:
            return PoolingPrompt(ids)
        if not add_special_tokens:
            return PoolingPrompt(ids[:most])
        first, last = list(self.tokenizer.prefix_ids), list(self.tokenizer.suffix_ids)
        inner = ids[len(first) : len(ids) - len(last)]
        return PoolingPrompt([*first, *inner[: max(0, most - len(first) - len(last))], *last])

    def pair(self, query: Any, document: Any, *, truncate: int | None = None) -> PoolingPrompt:
        """Return the tokens of two texts for a model that scores them together. Where they are too
        long, the longer one loses its end first."""
        for text in (query, document):
            if not isinstance(text, str):
                raise InvalidRequestError("must be texts, to be scored together", "documents")
        template = self.tokenizer.pair
        first, second = (
            self.tokenizer.encode(text, add_special_tokens=False) for text in (query, document)
        )
        most = self._most(truncate)
        if most is not None:
            room = max(2, most - template.num_added)
            first, second = _shortened(first, second, room)
        ids, types = template.joined(first, second)
        return PoolingPrompt(ids, types if max(types, default=0) < self.num_types else ())

    def prompt(self, name: str | None) -> str:
        """Return the text that goes before others, by its name or by default."""
        prompts = self.pooling.prompts
        name = self.pooling.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise InvalidRequestError(
                f"{name!r:.60} is no prompt of this model: {known}", "prompt_name"
            )
        return prompts[name]

    def _most(self, truncate: int | None) -> int | None:
        if truncate is None:
            return None
        if isinstance(truncate, bool) or not isinstance(truncate, int) or truncate < -1:
            raise InvalidRequestError(
                f"must be a number of tokens, or -1: {truncate!r}", "truncate_prompt_tokens"
            )
        if truncate > self.max_length:
            raise InvalidRequestError(
                f"is {truncate}, and the model takes {self.max_length} tokens",
                "truncate_prompt_tokens",
            )
        return self.max_length if truncate == -1 else max(1, truncate)


def _shortened(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Cut two lists to ``room`` entries together, from the end of the longer one."""
    excess = len(first) + len(second) - room
    if excess <= 0:
        return first, second
    longer, shorter = max(len(first), len(second)), min(len(first), len(second))
    from_longer = min(excess, longer - shorter)
    rest = excess - from_longer
    cut_longer, cut_shorter = from_longer + (rest + 1) // 2, rest // 2
    if len(first) >= len(second):
        return first[: len(first) - cut_longer], second[: len(second) - cut_shorter]
    return first[: len(first) - cut_shorter], second[: len(second) - cut_longer]
