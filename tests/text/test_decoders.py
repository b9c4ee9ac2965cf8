from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from octavo.text.decoders import (
    ByteDecoder,
    WindowDecoder,
    byte_level_bytes,
    byte_level_table,
    sentencepiece_bytes,
)


def test_byte_level_table_is_the_librarys():
    table = byte_level_table()
    assert sorted(table.values()) == list(range(256))
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("aé中😀\n\t \x00\x7f\u0080ÿ", "\u00ad\u00a0"):
        written = "".join(piece for piece, _ in bytewise.pre_tokenize_str(text))
        assert byte_level_bytes(written) == text.encode()


def test_bytes_of_tokens():
    assert byte_level_bytes("Ġthe") == b" the"
    assert byte_level_bytes("<｜x▁y｜>") == "<｜x▁y｜>".encode()
    assert sentencepiece_bytes("▁the") == b" the"
    assert sentencepiece_bytes("<0x0A>") == b"\n"
    assert sentencepiece_bytes("<0xff>") == b"\xff"
    assert sentencepiece_bytes("<0xZZ>") == b"<0xZZ>"


def bytewise(tokens: list[bytes], **options) -> ByteDecoder:
    names = [token.decode("latin-1") for token in tokens]
    return ByteDecoder(
        lambda i: names[i] if 0 <= i < len(names) else None,
        lambda name: name.encode("latin-1"),
        **options,
    )


TOKENS = [bytes([i]) for i in range(256)] + [b" a", b" ", "é".encode(), "中".encode(), b"  "]


@given(
    st.lists(st.integers(0, len(TOKENS) + 1), max_size=40),
    st.booleans(),
)
def test_a_byte_stream_gives_what_decode_gives(ids, strip_space):
    decoder = bytewise(TOKENS, strip_space=strip_space)
    stream = decoder.stream()
    text = "".join(map(stream.push, ids)) + stream.finish()
    whole = decoder.decode(ids)
    assert text == whole or text + "\ufffd" == whole  # a character that the end cuts off


@given(st.text(max_size=30), st.text(max_size=30))
def test_a_stream_goes_on_where_others_ended(before, after):
    decoder = bytewise(TOKENS, strip_space=True)
    whole = (before + after).encode()
    for cut in range(len(before.encode()), len(whole) + 1):
        stream = decoder.stream(list(whole[:cut]))
        text = "".join(map(stream.push, whole[cut:])) + stream.finish()
        # A character that the cut splits is given whole.
        assert (before + after).endswith(text.removeprefix(" ")) or cut == 0
        assert whole[cut:].decode(errors="ignore") in text or cut == 0


def test_half_characters_wait():
    stream = bytewise(TOKENS).stream()
    data = "a😀b".encode()
    assert [stream.push(byte) for byte in data] == ["a", "", "", "", "😀", "b"]
    assert stream.push(0xF0) == "" and stream.finish() == ""


def test_only_the_first_space_is_stripped():
    decoder = bytewise(TOKENS, strip_space=True)
    assert decoder.decode([256, 256]) == "a a"
    assert decoder.decode([260, 256]) == "  a"
    assert decoder.decode([257]) == ""
    stream = decoder.stream([256])
    assert stream.push(256) == " a"


class Words:
    """A decoder that looks at neighbours: words with spaces between, ``#`` joins."""

    texts = ("one", "two", "#s", "#ing", "three", "�", ".")

    def decode(self, ids):
        text = " ".join(self.texts[i] for i in ids if i < len(self.texts))
        return text.replace(" #", "").replace(" .", ".")


def test_a_window_stream_gives_what_decode_gives():
    words = Words()
    decoder = WindowDecoder(lambda i: words.texts[i], words.decode)
    generator = random.Random(2)
    for _ in range(200):
        ids = generator.choices(range(7), k=generator.randrange(60))
        split = generator.randrange(len(ids) + 1)
        if ids[split:] and ids[split] in (2, 3) and split == 0:
            continue
        stream = decoder.stream(ids[:split])
        text = "".join(map(stream.push, ids[split:])) + stream.finish()
        assert words.decode(ids[:split]) + text == words.decode(ids)


def test_a_window_stream_shows_no_half_characters():
    stream = WindowDecoder(chr, lambda ids: bytes(ids).decode(errors="replace")).stream()
    shown = [stream.push(byte) for byte in "a\u00e9\U0001f600b".encode()]
    assert shown == ["a", "", "\u00e9", "", "", "", "\U0001f600", "b"]
    assert stream.push(0xF0) == "" and stream.finish() == ""


def test_a_window_stream_looks_at_few_tokens():
    looked = []

    def decode(ids):
        looked.append(len(ids))
        return " ".join("x" for _ in ids)

    stream = WindowDecoder(lambda i: "x", decode).stream()
    for _ in range(500):
        stream.push(0)
    assert max(looked) < 20
