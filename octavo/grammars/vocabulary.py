"""`GrammarVocabulary`: a tokenizer as grammars see it, a trie of the bytes of all tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from octavo.grammars.number_runs import DigitBits
from octavo.system import machine
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLTokenizer

# Tokens of letters that may all stand in a string are looked up at once, those of up to so many
# letters apart: where a string has room for fewer, the longer ones are tried one by one.
_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [f"{_STRING}{{1,{length}}}" for length in (5, 10, 30)] + [f"{_STRING}+"]

_MOST_THREADS = 8  # of masks
_TOKENS_AT_ONCE = 1000  # that are read before other threads have their turn, some 2 ms


class GrammarVocabulary:
    """The tokens of one model.

    Making it takes a tenth of a second for 150,000 tokens, in which others may use the interpreter.
    Their trie takes three and four tenths more, in which they may not: so it is made when it is
    first asked for.

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
        self.texts = texts
        self.vocab_size = len(texts)
        self.special_ids = special_ids
        self.stop_token_ids = tuple(sorted(stop_token_ids))
        self.digits = DigitBits(texts.__getitem__, self.vocab_size)
        self._encode = encode or self._longest_tokens
        self._tokens: LLTokenizer | None = None
        self._making = threading.Lock()

    @property
    def tokens(self) -> LLTokenizer:
        """The trie of the tokens. Any threads may ask for it."""
        return self._tokens or self.make_trie()

    def make_trie(self) -> LLTokenizer:
        """Return the trie of the tokens, which is made unless it is there."""
        with self._making:
            if self._tokens is None:
                self.digits.make()  # no step shall wait for that later
                self._tokens = self._trie()
            return self._tokens

    @cached_property
    def executor(self) -> LLExecutor:
        """Threads that make the masks of several answers at once."""
        from llguidance import LLExecutor

        return LLExecutor(min(machine.cpu().usable_cores, _MOST_THREADS))

    def _trie(self) -> LLTokenizer:
        from llguidance import LLTokenizer  # 40 ms, for those who ask for it

        whole = LLTokenizer(
            _Wrapper(self, self._encode),  # type: ignore[arg-type]
            n_vocab=self.vocab_size,
            eos_token=list(self.stop_token_ids) or None,
            slices=[],
        )
        time.sleep(0)  # neither call lets another thread run: one of both would hold them up longer
        return whole.with_slices(_SLICES)

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
        texts = [*_with_pauses(map(tokenizer.token_bytes, range(known)))]
        texts += [b""] * (vocab_size - known)
        specials = {tokenizer.token_text(i): i for i in sorted(tokenizer.specials.ids) if i < known}
        return cls(
            texts,
            specials,
            stop_token_ids,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
        )


@cache
def byte_vocabulary() -> GrammarVocabulary:
    """Return the vocabulary of the bytes and of one token that ends an answer: it can write
    everything."""
    texts = [*(bytes([i]) for i in range(256)), b"<end>"]
    return GrammarVocabulary(texts, {"<end>": 256}, (256,))


def _with_pauses(texts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield texts, and let other threads run meanwhile."""
    while some := list(islice(texts, _TOKENS_AT_ONCE)):
        yield from some
        time.sleep(0)


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
