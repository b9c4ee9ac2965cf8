"""Encoders of text, and of special tokens between pieces of it, to token ids."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo.base.errors import ENDINGS, InvalidRequestError, ModelFileError, OctavoError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

    from octavo.text.special_tokens import SpecialTokens

_LARGE = 4096  # characters


class Encoder(Protocol):
    """An encoder of text to ids. A piece is plain text without special tokens, or a special token's
    id.

    Text after a special token is encoded as the model's own tokenizer would there, which need not
    be what it would be at the start of a prompt.
    """

    def encode(self, pieces: Sequence[str | int]) -> list[int]: ...


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Make errors of the ``tokenizers`` library, of the contents of ``path``, ModelFileErrors."""
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        raise ModelFileError(path, f"not a tokenizer: {error!s:.300}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # how the library's own bugs arrive
            raise
        raise ModelFileError(path, f"not a tokenizer: {error!s:.300}") from None


class LibraryEncoder:
    """An encoder with a ``tokenizers.Tokenizer``, which it takes over and changes.

    The library can look for special tokens everywhere or nowhere, by a setting on the object. Here
    the setting stays at nowhere, and special tokens are passed to it as marks: an added token with
    a secret text, which behaves as a special token does to its neighbours. So one object serves
    all threads.
    """

    def __init__(self, library: LibraryTokenizer, specials: SpecialTokens, unknown_id: int | None):
        from tokenizers import AddedToken

        library.encode_special_tokens = True
        self._library = library
        self._specials = specials
        self._forbidden = specials.ids - {unknown_id}
        self._mark = f"\U0010fffd{os.urandom(8).hex()}\U0010fffd"
        library.add_tokens([AddedToken(self._mark, special=False, normalized=False)])
        self._mark_id = library.token_to_id(self._mark)

    def encode(self, pieces: Sequence[str | int]) -> list[int]:
        ids = self._encode_marked(pieces)
        if self._forbidden.isdisjoint(ids):
            return self._put_specials(ids, pieces)
        # A model that looks up whole words may find a special token's text in its vocabulary.
        broken = self._break_specials(pieces)
        return self._put_specials(self._encode_marked(broken), broken)

    def _encode_marked(self, pieces: Sequence[str | int | None]) -> list[int]:
        text = "".join(piece if isinstance(piece, str) else self._mark for piece in pieces)
        try:
            if len(text) > _LARGE:
                # Lets other threads run meanwhile, which `encode` does not always do.
                return self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return self._library.encode(text, add_special_tokens=False).ids
        except (Exception, *ENDINGS):
            raise
        except BaseException as panic:  # a panic in Rust, which is no Exception
            raise InvalidRequestError(f"the tokenizer gave up on this text: {panic}") from panic

    def _put_specials(self, ids: list[int], pieces: Sequence[str | int | None]) -> list[int]:
        marks = [piece for piece in pieces if not isinstance(piece, str)]
        if not marks:
            return ids
        following = iter(marks)
        placed = [next(following) if i == self._mark_id else i for i in ids]
        assert next(following, self) is self, "the library lost a mark"
        return [i for i in placed if i is not None]

    def _break_specials(self, pieces: Sequence[str | int]) -> list[str | int | None]:
        """Put a mark that stands for nothing (None) after the first character of each special
        token's text."""
        broken: list[str | int | None] = []
        for piece in pieces:
            if not isinstance(piece, str):
                broken.append(piece)
                continue
            done = 0
            for start, _, _ in self._specials.matcher.finditer(piece):
                broken += [piece[done : start + 1], None]
                done = start + 1
            broken.append(piece[done:])
        return broken
