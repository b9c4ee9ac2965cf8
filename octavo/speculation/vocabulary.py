"""Whether two models mean the same by a token id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, draft_name: str) -> None:
    """ConfigError, with the first difference, unless the ids that both have are the same tokens.

    One may have more of them: checkpoints pad their tables, each as it likes.
    """
    sizes = f"{target.vocab_size} tokens of the target, {draft.vocab_size} of the draft"
    advice = "take a draft model of the same family, or set use_heterogeneous_vocab"
    for token_id in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = (_meaning(tokenizer, token_id) for tokenizer in (target, draft))
        if ours != theirs and not (_is_unused(ours) or _is_unused(theirs)):
            raise ConfigError(
                f"speculative_config: the vocabulary of {draft_name} is another one: id {token_id} "
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


def _meaning(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, bool]:
    return tokenizer.token_bytes(token_id), tokenizer.is_special(token_id)


def _is_unused(meaning: tuple[bytes, bool]) -> bool:
    return not meaning[0]


def _show(meaning: tuple[bytes, bool]) -> str:
    text, is_special = meaning
    return f"{'the special token ' if is_special else ''}{text.decode(errors='replace')!r}"
