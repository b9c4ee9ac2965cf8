"""`GrammarVocabulary`: a tokenizer as grammars see it, a trie of the bytes of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from octavo.grammars.number_runs import DigitBits


class GrammarVocabulary:
    """The tokens of one model. Making it takes about a second for 150,000 tokens.

    Args:
        texts: the bytes of all tokens, of which there are as many as columns of the logits; those
            that no text leads to have none.
        special_ids: the special tokens by their text.
        stop_token_ids: tokens that end an answer. They are allowed where a grammar can end, and
            nowhere else.
        encode: the tokens of a text, as the tokenizer would write it; None takes the longest token
            at each place.
    """

    def __init__(
        self,
        texts: Sequence[bytes],
        special_ids: Mapping[str, int],
        stop_token_ids: Collection[int],
        encode: Callable[[str], list[int]] | None = None,
    ):
        from llguidance import LLTokenizer  # 40 ms, for those who ask for it

        from octavo.grammars.number_runs import DigitBits

        self.texts = texts
        self.vocab_size = len(texts)
        self.special_ids = special_ids
        self.stop_token_ids = tuple(sorted(stop_token_ids))
        self.tokens: LLTokenizer = LLTokenizer(
            _Wrapper(self, encode or self._longest_tokens),  # type: ignore[arg-type]
            n_vocab=self.vocab_size,
            eos_token=list(self.stop_token_ids) or None,
        )
        self.digits: DigitBits = DigitBits(texts.__getitem__, self.vocab_size)

    def _longest_tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokens.greedy_tokenize(text)
        return ids

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Collection[int]
    ) -> GrammarVocabulary:
        """Return the vocabulary of a tokenizer.

        Args:
            vocab_size: columns of the logits, which may be more than the tokenizer has tokens.
        """
        known = min(vocab_size, tokenizer.vocab_size)
        texts = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (vocab_size - known)
        specials = {tokenizer.token_text(i): i for i in sorted(tokenizer.specials.ids) if i < known}
        return cls(
            texts,
            specials,
            stop_token_ids,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
        )


def byte_vocabulary() -> GrammarVocabulary:
    """Return the vocabulary of the bytes and of one token that ends an answer: it can write
    everything."""
    texts = [*(bytes([i]) for i in range(256)), b"<end>"]
    return GrammarVocabulary(texts, {"<end>": 256}, (256,))


class _Wrapper:
    """The attributes that `LLTokenizer` asks a tokenizer for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary, encode: Callable[[str], list[int]]):
        self._encode = encode
        self.tokens = vocabulary.texts
        self.special_token_ids = sorted(vocabulary.special_ids.values())
        self.eos_token_id = min(vocabulary.stop_token_ids, default=vocabulary.vocab_size - 1)

    def __call__(self, text: Any) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._encode(text)
