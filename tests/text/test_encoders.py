from __future__ import annotations

import pytest

from octavo.base.errors import InvalidRequestError


class Panic(BaseException):
    """What a library in Rust raises when it panics: no Exception."""


class Library:
    """Gives up on every text."""

    def __init__(self, error):
        self.error = error

    def encode(self, text, *, add_special_tokens):
        raise self.error("as asked")

    def encode_batch_fast(self, texts, *, add_special_tokens):
        raise self.error("as asked")


@pytest.mark.parametrize("text", ["short", "long " * 2000])
def test_a_panic_of_the_library_is_an_error_like_others(byte_tokenizer, monkeypatch, text):
    monkeypatch.setattr(byte_tokenizer.encoder, "_library", Library(Panic))
    with pytest.raises(InvalidRequestError, match="gave up on this text: as asked"):
        byte_tokenizer.encode(text)
    monkeypatch.setattr(byte_tokenizer.encoder, "_library", Library(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        byte_tokenizer.encode(text)


def test_words_at_the_start_and_after_a_space(byte_tokenizer):
    words = byte_tokenizer.encode_words(["no", " no", "never"])
    texts = [byte_tokenizer.decode(ids) for ids in words]
    assert texts == ["no", " no", "never", " never"]
    assert byte_tokenizer.encode_words([]) == ()
