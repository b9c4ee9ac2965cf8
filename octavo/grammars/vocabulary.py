"""`GrammarVocabulary`: a tokenizer as grammars see it, a trie of the bytes of all tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class GrammarVocabulary:
    """The tokens of one model. Making it takes about a second for 150,000 tokens.

    Args:
        vocab_size: columns of the logits, which may be more than the tokenizer has tokens.
        stop_token_ids: tokens that end an answer. They are allowed where a grammar can end, and
            nowhere else; without any, an answer ends where nothing can follow.

    ``special_ids`` has the special tokens by their text: a grammar names them ``<|like_this|>``.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Collection[int]):
        from llguidance import LLTokenizer  # 40 ms, for those who ask for it

        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(sorted(stop_token_ids))
        specials = sorted(i for i in tokenizer.specials.ids if i < vocab_size)
        self.special_ids = {tokenizer.token_text(i): i for i in specials}
        self.tokens: LLTokenizer = LLTokenizer(
            _TokenTexts(tokenizer, vocab_size, self.stop_token_ids, specials),  # type: ignore[arg-type]
            n_vocab=vocab_size,
            eos_token=list(self.stop_token_ids) or None,
        )


class _TokenTexts:
    """The attributes that `LLTokenizer` asks a tokenizer for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_token_ids: Collection[int],
        special_ids: list[int],
    ):
        self._tokenizer = tokenizer
        known = min(vocab_size, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)]
        self.tokens += [b""] * (vocab_size - known)  # no text leads to them
        self.special_token_ids = special_ids
        self.eos_token_id = min(stop_token_ids, default=vocab_size - 1)

    def __call__(self, text: Any) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False)
