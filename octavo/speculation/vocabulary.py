"""Compares the vocabularies of target and draft model, and translates token ids between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, draft_name: str) -> None:
    """Raise a ConfigError that names the first difference, unless shared ids mean the same tokens.

    One model may have more ids: checkpoints pad their embedding tables differently.
    """
    sizes = f"{target.vocab_size} tokens of the target, {draft.vocab_size} of the draft"
    advice = "take a draft model of the same family, or set use_heterogeneous_vocab"
    for token_id in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = (_meaning(tokenizer, token_id) for tokenizer in (target, draft))
        if ours != theirs and not (_is_unused(ours) or _is_unused(theirs)):
            raise ConfigError(
                f"speculative_config: the vocabulary of {draft_name} differs: id {token_id} "
                f"is {_show(ours)} in the target and {_show(theirs)} in the draft ({sizes}); "
                f"{advice}"
            )
    for name in ("bos_token_id", "eos_token_id"):
        ours_id, theirs_id = getattr(target, name), getattr(draft, name)
        if ours_id != theirs_id and None not in (ours_id, theirs_id):
            raise ConfigError(
                f"speculative_config: {name} of {draft_name} is {theirs_id} ("
                f"{draft.token_text(theirs_id)!r}), and {ours_id} ({target.token_text(ours_id)!r}) "
                f"in the target ({sizes}); {advice}"
            )


@dataclass(frozen=True, slots=True)
class Translation:
    """A translation between two vocabularies, token for token, so that positions stay the same.

    The draft model reads the target's tokens. A token that it does not have is replaced by the
    longest suffix of its text that it has, after which drafts are a little worse. A token that the
    target does not have ends a draft.

    Args:
        to_draft: [V of the target], the draft model's ids.
        to_target: [V of the draft model], the target's ids, -1 where it has none.
    """

    to_draft: Sequence[int]
    to_target: Sequence[int]

    @classmethod
    def between(cls, target: Tokenizer, draft: Tokenizer) -> Translation:
        theirs = {_meaning(draft, i): i for i in range(draft.vocab_size - 1, -1, -1)}
        ours = {_meaning(target, i): i for i in range(target.vocab_size - 1, -1, -1)}
        to_draft = [_nearest(theirs, _meaning(target, i)) for i in range(target.vocab_size)]
        to_target = [ours.get(_meaning(draft, i), -1) for i in range(draft.vocab_size)]
        for name in ("bos_token_id", "eos_token_id"):  # whatever their text is
            our_id, their_id = getattr(target, name), getattr(draft, name)
            if our_id is not None and their_id is not None:
                to_draft[our_id], to_target[their_id] = their_id, our_id
        return cls(to_draft, to_target)

    def drafted(self, token_id: int) -> int:
        """The target's id of a token of the draft model; -1 if it has none."""
        return self.to_target[token_id] if token_id < len(self.to_target) else -1


def _nearest(vocabulary: dict[tuple[bytes, bool], int], meaning: tuple[bytes, bool]) -> int:
    """The id of a token, or of the longest suffix of its text that is a token; 0 if none is."""
    if meaning in vocabulary:
        return vocabulary[meaning]
    text, _ = meaning
    ends = ((text[start:], False) for start in range(1, len(text)))
    return next((vocabulary[end] for end in ends if end in vocabulary), 0)


def _meaning(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, bool]:
    return tokenizer.token_bytes(token_id), tokenizer.is_special(token_id)


def _is_unused(meaning: tuple[bytes, bool]) -> bool:
    return not meaning[0]


def _show(meaning: tuple[bytes, bool]) -> str:
    text, is_special = meaning
    return f"{'the special token ' if is_special else ''}{text.decode(errors='replace')!r}"
