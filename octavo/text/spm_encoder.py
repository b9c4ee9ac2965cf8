"""SentencePiece-style BPE, which merges pieces by score and falls back on bytes.

Building merges for the ``tokenizers`` library out of 262,144 scored pieces takes seconds; this
encoder needs only the vocabulary as a dictionary, and is exact.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence

from octavo.text.special_tokens import TokenMatcher

SPACE = "\u2581"  # stands for a space in pieces

_NEVER = 1 << 62  # the order of a pair that is no piece
_MAX_CACHED_WORD = 64
_MAX_CACHE = 1 << 16
_SHORT_WORD = 48  # below this, list operations beat a heap
_MAX_GLUE = 64


class SpmEncoder:
    """An encoder of plain text by the scores of pieces.

    ``pieces``: text -> id of the pieces that merging may produce (single characters included).
    ``order``: by token id, the rank of its score: 0 merges first, equal scores share a rank.
    ``byte_ids``: 256 ids, one for each byte of text that no piece covers.
    ``user_defined``: text -> id of the pieces that are taken out of the text beforehand.
    """

    def __init__(
        self,
        pieces: Mapping[str, int],
        order: Sequence[int],
        byte_ids: Sequence[int],
        user_defined: Mapping[str, int],
        *,
        add_space_prefix: bool,
        remove_extra_whitespaces: bool = False,
    ):
        self._pieces = pieces
        self._order = order
        self._byte_ids = byte_ids
        self._user_defined = TokenMatcher(
            {piece.replace(" ", SPACE): token_id for piece, token_id in user_defined.items()}
        )
        self._add_space_prefix = add_space_prefix
        self._remove_extra_whitespaces = remove_extra_whitespaces
        self._word = _word_pattern(pieces)
        self._cache: dict[str, list[int]] = {}

    def encode(self, pieces: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        after_special = True
        for piece in pieces:
            if isinstance(piece, str):
                if self._remove_extra_whitespaces:
                    piece = " ".join(filter(None, piece.split(" "))).rstrip(" " + SPACE)
                if piece:
                    prefix = " " if self._add_space_prefix and after_special else ""
                    self._encode_text(prefix + piece, ids)
                    after_special = False
            else:
                ids.append(piece)
                after_special = True
        return ids

    def _encode_text(self, text: str, ids: list[int]) -> None:
        text = text.replace(" ", SPACE)
        done = 0
        for start, end, token_id in self._user_defined.finditer(text):
            self._encode_words(text[done:start], ids)
            ids.append(token_id)
            done = end
        self._encode_words(text[done:], ids)

    def _encode_words(self, text: str, ids: list[int]) -> None:
        cache = self._cache
        for word in self._word.findall(text):
            found = cache.get(word)
            if found is None:
                found = self._encode_word(word)
                if len(word) <= _MAX_CACHED_WORD:
                    if len(cache) >= _MAX_CACHE:
                        cache.clear()
                    cache[word] = found
            ids += found

    def _encode_word(self, word: str) -> list[int]:
        merge = self._merge_short if len(word) <= _SHORT_WORD else self._merge_long
        ids: list[int] = []
        for symbol in merge(word):
            token_id = self._pieces.get(symbol)
            if token_id is None:
                ids += [self._byte_ids[byte] for byte in symbol.encode()]
            else:
                ids.append(token_id)
        return ids

    def _pair_order(self, pair: str) -> int:
        token_id = self._pieces.get(pair)
        return _NEVER if token_id is None else self._order[token_id]

    def _merge_short(self, word: str) -> list[str]:
        """Merge the best pair, of equals the leftmost, until no pair is a piece."""
        symbols = list(word)
        orders = [self._pair_order(word[i : i + 2]) for i in range(len(word) - 1)]
        while orders and (best := min(orders)) < _NEVER:
            i = orders.index(best)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            del orders[i]
            if i > 0:
                orders[i - 1] = self._pair_order(symbols[i - 1] + symbols[i])
            if i < len(orders):
                orders[i] = self._pair_order(symbols[i] + symbols[i + 1])
        return symbols

    def _merge_long(self, word: str) -> list[str]:
        """Merge like `_merge_short`, in O(n log n) with a heap of (order, position), packed into
        integers.

        ``ends[i]`` is where the symbol that begins at i ends, ``starts[j]`` where the symbol that
        ends at j begins; ``current[i]`` is the order of the pair that begins at i. A heap entry
        whose order is not the current one is out of date.
        """
        size = len(word)
        find, order_of = self._pieces.get, self._order
        ends = list(range(1, size + 1))
        starts = list(range(-1, size))
        current = [self._pair_order(word[i : i + 2]) for i in range(size - 1)]
        current.append(_NEVER)
        shift = size.bit_length()
        position = (1 << shift) - 1
        heap = [order << shift | i for i, order in enumerate(current) if order < _NEVER]
        heapq.heapify(heap)
        while heap:
            entry = heapq.heappop(heap)
            left = entry & position
            if current[left] != entry >> shift:
                continue
            right = ends[left]
            end = ends[left] = ends[right]
            starts[end] = left
            current[left] = current[right] = _NEVER
            if end < size:
                piece = find(word[left : ends[end]])
                if piece is not None:
                    order = current[left] = order_of[piece]
                    heapq.heappush(heap, order << shift | left)
            if left > 0:
                before = starts[left]
                piece = find(word[before:end])
                if piece is None:
                    current[before] = _NEVER
                else:
                    order = current[before] = order_of[piece]
                    heapq.heappush(heap, order << shift | before)
        symbols = []
        start = 0
        while start < size:
            symbols.append(word[start : ends[start]])
            start = ends[start]
        return symbols


def _word_pattern(pieces: Mapping[str, int]) -> re.Pattern[str]:
    """Return a pattern that cuts text where no merge can cross: before a space, almost always.

    Pieces hold spaces at their front only, but for a few (Gemma has one, ``>\u2581</``); before a
    space that follows the character such a piece has there, text is not cut.
    """
    joined = "\0".join(piece for piece in pieces if SPACE in piece)
    glue = set(re.findall(f"[^{SPACE}\0](?={SPACE})", joined))
    if len(glue) > _MAX_GLUE:
        return re.compile("(?s).+")
    pattern = f"{SPACE}*[^{SPACE}]+"
    if glue:
        after_glue = f"(?<=[{''.join(map(re.escape, sorted(glue)))}]){SPACE}+"
        pattern += f"(?:{after_glue}[^{SPACE}]+)*(?:{after_glue})?"
    return re.compile(f"{pattern}|{SPACE}+")
