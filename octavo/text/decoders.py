"""Decoders of token ids to text.

In almost every tokenizer, each token stands for fixed bytes, whatever its neighbours are, and the
text is the bytes read as UTF-8. ``ByteDecoder`` is for these. The others (WordPiece, Metaspace)
decode through the library, with a window of neighbours.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW = 6  # tokens of context; neighbours further away change nothing
_REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """A decoder of one text, token by token.

    The pieces, put together, are the text of ``decode``, but for a character that the last tokens
    only begin: ``finish`` drops it. Output that is cut off by its number of tokens often ends so; a
    character that breaks off in the middle was garbled by the model, and is U+FFFD.
    """

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Decoder(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """Return a stream for the tokens that follow ``before``, whose text is not given again."""
        ...


def byte_level_table() -> dict[str, int]:
    """Return the byte of each printable character by which byte-level BPE writes bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_LEVEL = byte_level_table()


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; of one with other characters, its UTF-8."""
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:
        return token.encode(errors="replace")


def sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes of a SentencePiece token: U+2581 is a space, ``<0x0A>`` is byte 10."""
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode(errors="replace")


class ByteDecoder:
    """A decoder that joins the bytes of tokens. Bytes that are no UTF-8 become U+FFFD.

    ``token``: id -> the token as the vocabulary has it, None for an id that names none.
    ``literal_ids``: tokens whose bytes are their text as it is.
    ``strip_space``: a space at the very beginning is not part of the text.
    """

    def __init__(
        self,
        token: Callable[[int], str | None],
        to_bytes: Callable[[str], bytes],
        literal_ids: Collection[int] = (),
        *,
        strip_space: bool = False,
    ):
        self._token = token
        self._to_bytes = to_bytes
        self._literal_ids = literal_ids
        self._known: dict[int, bytes] = {}
        self.strip_space = strip_space

    def token_bytes(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            token = self._token(token_id) or ""
            literal = token_id in self._literal_ids
            known = token.encode(errors="replace") if literal else self._to_bytes(token)
            self._known[token_id] = known
        return known

    def decode(self, token_ids: Sequence[int]) -> str:
        text = b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")
        return text.removeprefix(" ") if self.strip_space else text

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        return _ByteStream(self, before)


class _ByteStream:
    def __init__(self, decoder: ByteDecoder, before: Sequence[int]):
        self._decoder = decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = decoder.strip_space and not any(map(decoder.token_bytes, before))
        for token_id in before[-_WINDOW:]:  # they may end inside a character
            self._utf8.decode(decoder.token_bytes(token_id))

    def push(self, token_id: int) -> str:
        text = self._utf8.decode(self._decoder.token_bytes(token_id))
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return ""  # all that the codec still holds is the beginning of a character


class WindowDecoder:
    """A decoder through the library, with the tokens around."""

    def __init__(self, token: Callable[[int], str | None], decode: Callable[[Sequence[int]], str]):
        self._token = token
        self.decode = decode

    def token_text(self, token_id: int) -> str:
        """Return the token as the vocabulary has it."""
        return self._token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return about what the token contributes: continuation marks and spaces vary."""
        return sentencepiece_bytes(self.token_text(token_id).removeprefix("##"))

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        return _WindowStream(self, before)


class _WindowStream:
    """Text of each token: the part by which it lengthens the text of the few tokens before it."""

    def __init__(self, decoder: WindowDecoder, before: Sequence[int]):
        self._decoder = decoder
        self._decode = decoder.decode
        self._ids = list(before[-_WINDOW:])
        self._shown = self._decode(self._ids)
        self._pending = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        self._pending += 1
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) and self._pending < _WINDOW:
            return ""  # perhaps half a character
        return self._show(text)

    def finish(self) -> str:
        if not self._pending:
            return ""
        text = self._show(self._decode(self._ids))
        is_character = _REPLACEMENT in self._decoder.token_text(self._ids[-1])
        return text if is_character else text.rstrip(_REPLACEMENT)

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._pending = 0
        if len(self._ids) > 2 * _WINDOW:
            del self._ids[:-_WINDOW]
            text = self._decode(self._ids)
        self._shown = text
        return new
