"""`SequenceBreakers` knows the tokens that end a sequence for DRY, by the texts that they hold."""

from __future__ import annotations

import threading

from octavo.text.tokenizer import Tokenizer

_MOST_KEPT = 16  # different lists of texts


class SequenceBreakers:
    """The tokens of a vocabulary in whose text one of some breakers is, found once for each list.

    Any thread may ask; a large vocabulary takes some tenths of a second.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._found: dict[tuple[str, ...], frozenset[int]] = {}

    def token_ids(self, texts: tuple[str, ...]) -> frozenset[int]:
        """Return the tokens that hold one of ``texts``; of one that no token holds, the last of
        those that write it."""
        with self._lock:
            if texts not in self._found:
                if len(self._found) == _MOST_KEPT:
                    self._found.clear()
                self._found[texts] = self._search([text.encode() for text in texts])
            return self._found[texts]

    def _search(self, texts: list[bytes]) -> frozenset[int]:
        found: set[int] = set()
        pieces = [self._tokenizer.token_bytes(token_id) for token_id in range(self._vocab_size)]
        for text in texts:
            holders = [token_id for token_id, piece in enumerate(pieces) if text in piece]
            found.update(
                holders or self._tokenizer.encode(text.decode(), add_special_tokens=False)[-1:]
            )
        return frozenset(found)
