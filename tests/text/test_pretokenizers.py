from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pace import python_seconds
from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.text.decoders import byte_level_bytes
from octavo.text.pretokenizers import PRE_TOKENIZERS, in_linear_time


def build(name: str):
    """The normalizer and the pre-tokenizer of a table entry."""
    family = PRE_TOKENIZERS[name]
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in family.patterns]
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    normalizer = normalizers.NFC() if family.nfc else normalizers.Sequence([])
    return normalizer, pre_tokenizers.Sequence([*cuts, bytewise])


def words(name: str, text: str) -> list[str]:
    normalizer, pre_tokenizer = build(name)
    pieces = pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))
    return [byte_level_bytes(piece).decode() for piece, _ in pieces]


# What the models' own tokenizer.json files have, out of the library's own parts.
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
OWN = {
    "gpt-2": GPT2,
    "olmo": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "command-r": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            GPT2,
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
    "deepseek-coder": pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(pattern), "isolated")
                for pattern in ("[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", "[一-龥ࠀ-一가-퟿]+")
            ),
            pre_tokenizers.Digits(individual_digits=True),
            BYTES,
        ]
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_equals_the_librarys_parts(name, corpus, random_texts):
    normalizer, pre_tokenizer = build(name)
    # The library's Punctuation knows another version of Unicode than its regular expressions.
    texts = corpus if name == "falcon" else corpus + random_texts(2000)
    for text in texts:
        text = normalizer.normalize_str(text)
        expected = OWN[name].pre_tokenize_str(text)
        found = pre_tokenizer.pre_tokenize_str(text)
        assert [piece for piece, _ in found] == [piece for piece, _ in expected], text


@pytest.mark.parametrize(("name", "module"), [("qwen2", "qwen2"), ("qwen35", "qwen3_5")])
def test_equals_transformers(name, module, corpus, random_texts):
    import importlib

    found = importlib.import_module(f"transformers.models.{module}.tokenization_{module}")
    own = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(found.PRETOKENIZE_REGEX), "isolated"), BYTES]
    )
    _, pre_tokenizer = build(name)
    for text in corpus + random_texts(2000):
        expected = own.pre_tokenize_str(text)
        assert pre_tokenizer.pre_tokenize_str(text) == expected, text


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_nothing_is_lost(name, corpus, random_texts):
    normalizer, pre_tokenizer = build(name)
    for text in corpus + random_texts(100):
        text = normalizer.normalize_str(text)
        pieces = pre_tokenizer.pre_tokenize_str(text)
        assert b"".join(byte_level_bytes(piece) for piece, _ in pieces) == text.encode()


TEXT = "I'LL say it's 12345 cafés,HelloWorld iPhone\n\n  x=[1];你好世界！"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-bpe", "I|'LL| say| it|'s| |123|45| cafés|,HelloWorld| iPhone|\n\n| | x|=[|1|];"),
        ("qwen2", "I|'LL| say| it|'s| |1|2|3|4|5| cafés|,HelloWorld| iPhone|\n\n| | x|=[|1|];"),
        ("gpt-4o", "I'LL| say| it's| |123|45| cafés|,Hello|World| i|Phone|\n\n| | x|=[|1|];"),
        ("tekken", "I|'LL| say| it|'s| |1|2|3|4|5| cafés|,Hello|World| i|Phone|\n\n| | x|=[|1|];"),
        ("smollm", "I|'|LL| say| it|'s| |1|2|3|4|5| cafés|,|HelloWorld| iPhone|\n\n | x|=[|1|];"),
        ("deepseek-v3", "I|'LL| say| it|'s| |123|45| cafés|,HelloWorld| iPhone|\n\n| | x|=[|1|];"),
        ("deepseek-llm", "I|'|LL| say| it|'|s| |1|2|3|4|5| caf|é|s|,|HelloWorld| iPhone|\n|\n|"),
        ("default", "I|'|LL| say| it|'|s| |123|45| cafés|,|HelloWorld| iPhone|\n\n | x|=[|1|];"),
        ("falcon", "I|'|LL| say| it|'|s| |123|45| cafés|,|HelloWorld| iPhone|\n\n | x|=[|1|];"),
        ("bloom", "I'LL| say| it's| 12345| cafés|,|HelloWorld| iPhone|\n\n | x=[1];你好世界！"),
        ("seed-coder", "I|'LL| say| it|'s| |1|2|3|4|5| cafés|,HelloWorld| iPhone|\n\n| | x|=["),
    ],
)
def test_examples(name, expected):
    found = "|".join(words(name, TEXT))
    assert found.startswith(expected), found


def test_flags():
    assert PRE_TOKENIZERS["llama3"].ignore_merges and PRE_TOKENIZERS["llama3"].add_bos
    assert PRE_TOKENIZERS["tekken"].ignore_merges and PRE_TOKENIZERS["tekken"].add_bos
    assert not PRE_TOKENIZERS["dbrx"].ignore_merges and not PRE_TOKENIZERS["dbrx"].add_bos
    assert PRE_TOKENIZERS["qwen2"].nfc and not PRE_TOKENIZERS["llama-bpe"].nfc
    assert not PRE_TOKENIZERS["glm4"].has_bos


# -- time -----------------------------------------------------------------------------------------

# What text is made of, over and over: spaces of all kinds, scripts, digits, marks, mixtures.
UNITS = [
    *(" ", "\n", "\r", "\r\n", "\t", "\v", "\u00a0", "\u3000", "\u2028"),
    *(" \n", " \n\t", "  \r", "a ", "a  ", "1 ", "! ", "a1", "a!", "!\n"),
    *("a", "A", "aA", "Aa", "aAA", "\u03b1", "\u0416", "\u01c5", "\u02b0"),
    *("\u4e2d", "\u304b", "\ud55c", "\u0639", "\u05d0", "\u0928\u093f", "\u0e01"),
    *("\u4e2dA", "A\u4e2d\u4e2d", "a\u0301", "\u0301", "1", "\u0663", "\u2167"),
    *("!", "$", "'", "'s", "'S", " 's", "/", "\U0001f600", "\u200d", "\0", "\ue000", "\ufeff"),
]
PATTERNS = sorted({pattern for family in PRE_TOKENIZERS.values() for pattern in family.patterns})
MEGABYTE = 1 << 20


def seconds(pattern: str, text: str) -> float:
    """The time to find all matches; they are removed, as making objects of them takes longer."""
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    start = time.thread_time()
    split.pre_tokenize_str(text)
    return time.thread_time() - start


def python(rounds: float) -> float:
    return python_seconds(rounds, time.thread_time)


def run(unit: str, num_bytes: int) -> str:
    """A run that does not go on to the end: that is where patterns look in vain."""
    return unit * (num_bytes // len(unit.encode())) + "x."


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_megabyte_of_everything(pattern):
    """Half a second; with the square of the length of any run it would be more than four."""
    assert seconds(pattern, "".join(run(unit, 24_000) for unit in UNITS)) < python(5e7)


@pytest.mark.long
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_megabyte_of_each(pattern):
    for unit in UNITS:
        assert seconds(pattern, run(unit, MEGABYTE)) < python(1e8), unit


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_long_runs_take_no_long_time(name):
    """As a whole, with what the patterns leave to each other."""
    normalizer, pre_tokenizer = build(name)
    text = "".join(run(unit, 1500) for unit in UNITS)
    start = time.thread_time()
    pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))
    assert time.thread_time() - start < python(6e7)


SLOW = [r"\s+$", r"[ab\n]+$", r"\p{L}+$", r"\s+\z", r"[^a]+$"]


@pytest.mark.parametrize("pattern", SLOW)
@given(st.text("ab \n\t\u00e9", max_size=30))
def test_a_pattern_made_linear_cuts_as_before(pattern, text):
    quick = in_linear_time(pattern)
    assert quick != pattern
    before = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)
    assert pre_tokenizers.Split(Regex(quick), "isolated").pre_tokenize_str(text) == before


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_made_linear_is(pattern):
    for unit in (" ", "a", "\t", "\u00e9"):
        assert seconds(in_linear_time(pattern), unit * 300_000 + "!a!") < python(2e7)


def test_other_patterns_stay_as_they_are():
    for pattern in PATTERNS:
        assert in_linear_time(pattern) == pattern
    for pattern in (r"a|\s+$", r"\s+", r"(\s)+$", r"[a-z&&[^b]]+$"):
        assert in_linear_time(pattern) == pattern
