from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.decoders import ByteDecoder
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.special_tokens import SpecialTokens
from octavo.text.tokenizer import Tokenizer

SPECIAL = 256


def byte_tokenizer(**options) -> Tokenizer:
    """Every byte is a token; 256 is special, and written ``<S>``; 257 is all of "ab"."""
    tokens = [chr(byte) for byte in range(256)] + ["<S>", "ab"]

    class Encoder:
        def encode(self, pieces):
            return [i for p in pieces for i in (p.encode() if isinstance(p, str) else [p])]

    decoder = ByteDecoder(
        lambda i: tokens[i] if i < len(tokens) else None,
        lambda token: token.encode("latin-1"),
        **options,
    )
    return Tokenizer(
        encoder=Encoder(),
        decoder=decoder,
        specials=SpecialTokens({"<S>": SPECIAL}),
        vocab_size=258,
        bos_token_id=None,
        eos_token_id=SPECIAL,
        stop_token_ids=frozenset({SPECIAL}),
    )


BYTES = byte_tokenizer()


def run(text, *, chunk: int = 1, tokenizer: Tokenizer = BYTES, **options):
    """(the pieces shown, the detokenizer) after all tokens of a text."""
    ids = tokenizer.encode(text) if isinstance(text, str) else list(text)
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces = [detokenizer.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return pieces, detokenizer


def expected(text: str, stop, include: bool, min_characters: int = 0):
    """By definition: the first character at which a stop string is complete ends the text."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if s and text[:end].endswith(s)]
        if found and end >= min_characters:
            reason = max(found, key=len)
            return text[: end if include else end - len(reason)], reason
    return text, None


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 20),
)
def test_stop_strings(text, stop, chunk, include, min_tokens):
    pieces, detokenizer = run(
        text,
        chunk=chunk,
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
    )
    shown, reason = expected(text, stop, include, min_tokens)
    assert (detokenizer.text, detokenizer.stop_reason) == (shown, reason)
    if reason is not None:
        assert detokenizer.num_tokens == len(shown) + (0 if include else len(reason))


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_is_shown_as_soon_as_it_is_certain(text, stop):
    detokenizer = IncrementalDetokenizer(BYTES, stop=stop)
    for end, byte in enumerate(text.encode(), 1):
        detokenizer.push([byte])
        if detokenizer.stop_reason is not None:
            break
        so_far = text[:end]
        longest = max((n for s in stop for n in range(len(s)) if so_far.endswith(s[:n])), default=0)
        assert detokenizer.text == so_far[: end - longest]


def without_half(data: bytes) -> bytes:
    """``data`` up to the beginning of a character that the end of ``data`` cuts off."""
    for length in (1, 2, 3):
        try:
            data[-length:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return data[:-length]
    return data


@given(
    st.one_of(st.binary(max_size=60), st.text(max_size=20).map(lambda t: t.encode()[:-1])),
    st.integers(1, 7),
)
def test_any_bytes_give_what_decode_gives(data, chunk):
    pieces, detokenizer = run(data, chunk=chunk)
    assert BYTES.decode(list(data)) == data.decode(errors="replace")
    assert detokenizer.text == BYTES.decode(list(without_half(data)))


@given(st.text(max_size=20), st.integers(1, 4))
def test_never_half_a_character(text, chunk):
    text = text.encode(errors="ignore").decode()
    pieces, _ = run(text, chunk=chunk)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_that_the_end_cuts_off_is_not_shown():
    whole = "x😀".encode()
    for length in range(1, len(whole)):
        assert run(whole[:length])[1].text == "x"
    # One that breaks off in the middle is not merely cut off.
    assert run(b"x\xf0\x9f\x98y\xf0\x9f")[1].text == "x\ufffdy"
    assert run(b"x\xff")[1].text == "x\ufffd"
    # What was held back for a stop string is text all the same.
    assert run(b"x STO\xc3", stop=["STOP"])[1].text == "x STO"


def test_the_rest_of_a_push_is_ignored_after_a_stop():
    detokenizer = IncrementalDetokenizer(BYTES, stop=["b"])
    assert detokenizer.push(b"abcdef") == "a"
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("b", 2)
    assert detokenizer.push(b"xyz") == "" and detokenizer.finish() == ""
    assert detokenizer.text == "a"


def test_a_stop_string_inside_one_token():
    detokenizer = IncrementalDetokenizer(BYTES, stop=["b", "a"])
    assert detokenizer.push([257]) == "" and detokenizer.stop_reason == "a"


def test_the_first_complete_stop_wins_and_of_those_the_longer():
    for chunk in (1, 2, 10):
        _, detokenizer = run("xabcd", chunk=chunk, stop=["abcd", "bc", "c"])
        assert (detokenizer.text, detokenizer.stop_reason) == ("xa", "bc")


def test_held_text_comes_with_the_end():
    pieces, _ = run("say STO", stop=["STOP"])
    assert pieces == ["s", "a", "y", " ", "", "", "", "STO"]


def test_nothing_is_held_when_the_stop_string_is_shown_anyway():
    pieces, _ = run("xSTOPy", stop=["STOP"], include_stop_str_in_output=True)
    assert pieces == ["x", "S", "T", "O", "P", "", ""]


def test_min_tokens():
    _, detokenizer = run("..a..a..", stop=["a"], min_tokens=3)
    assert detokenizer.text == ".."
    _, detokenizer = run("..a..a..", stop=["a"], min_tokens=4)
    assert detokenizer.text == "..a.."
    # One that begins early and ends late enough counts.
    _, detokenizer = run("abcd", stop=["abc"], min_tokens=3)
    assert detokenizer.text == ""
    _, detokenizer = run("aaa", stop=["aa"], min_tokens=3)
    assert detokenizer.text == "a"
    # One that is complete too early leaves the search for a longer one going.
    _, detokenizer = run("abab", stop=["ab", "abab"], min_tokens=4)
    assert (detokenizer.text, detokenizer.stop_reason) == ("", "abab")


def test_special_tokens():
    ids = [97, SPECIAL, 98]
    assert run(ids)[1].text == "ab"
    assert run(ids, skip_special_tokens=False)[1].text == "a<S>b"
    _, detokenizer = run(ids, stop=["ab"])
    assert detokenizer.stop_reason == "ab" and detokenizer.num_tokens == 3
    # Inside a character, one that is not shown is not there.
    data = "é".encode()
    assert run([data[0], SPECIAL, data[1]])[1].text == "é"


def test_the_leading_space():
    tokenizer = byte_tokenizer(strip_space=True)

    def text(ids, prompt=(), **options):
        return run(ids, tokenizer=tokenizer, prompt_token_ids=prompt, **options)[1].text

    assert text(b" a b") == tokenizer.decode(b" a b") == "a b"
    assert text(b" a b", prompt=b"x") == " a b"
    assert text(b" a b", prompt=[SPECIAL]) == "a b"
    assert text(b" a b", prompt=[SPECIAL], skip_special_tokens=False) == " a b"


def test_a_prompt_that_ends_inside_a_character():
    data = "é!".encode()
    detokenizer = IncrementalDetokenizer(BYTES, prompt_token_ids=data[:1])
    assert detokenizer.push(data[1:]) == "é!"


def test_empty_stop_strings_never_match():
    assert run("abc", stop=[""])[1].text == "abc"


def test_time_per_token_does_not_grow():
    detokenizer = IncrementalDetokenizer(BYTES, stop=["never this", "x" * 1000])
    ids = b"some words of an answer xxx " * 40

    def seconds() -> float:
        start = time.thread_time()
        for i in ids:
            detokenizer.push([i])
        return time.thread_time() - start

    first = seconds()
    for _ in range(50):
        last = seconds()
    assert last < 10 * first


@pytest.fixture(params=["smollm2", "gemma3", "chatml"])
def real(request):
    return request.getfixturevalue(request.param)


def test_real_tokenizers(real, corpus, random_texts):
    for text in corpus + random_texts(300):
        ids = real.encode(text, parse_special=True)
        pieces, detokenizer = run(ids, tokenizer=real)
        assert detokenizer.text == real.decode(ids)
        _, detokenizer = run(ids, tokenizer=real, skip_special_tokens=False, chunk=3)
        assert detokenizer.text == real.decode(ids, skip_special_tokens=False)


def test_output_that_ends_at_any_token(real):
    """At ``max_tokens``, that is: the text is what was complete, and nothing else."""
    text = "a 😀🇩🇪 文字 नमस्ते 𝔘𝔫𝔦 \U0002f800"
    ids = real.encode(text, add_special_tokens=False)
    whole = real.decode(ids)
    for length in range(len(ids) + 1):
        shown = run(ids[:length], tokenizer=real)[1].text
        assert "\ufffd" not in shown and whole.startswith(shown)
        assert real.decode(ids[:length]).rstrip("\ufffd") == shown


def test_every_stop_position_of_a_real_text(real):
    text = "Überall 😀 gibt es, nicht wahr?, Grenzen\n\nund Zeichen."
    ids = real.encode(text, add_special_tokens=False)
    for start in range(len(text)):
        for length in (1, 3, 8):
            stop = text[start : start + length]
            _, detokenizer = run(ids, tokenizer=real, stop=[stop])
            assert detokenizer.text == text[: text.index(stop)]
