"""The automaton says what ``re`` says, and takes linear time where ``re`` takes forever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.linear_regex import (
    MAX_LENGTH,
    MAX_PATTERNS,
    MAX_STATES,
    MAX_TEXT,
    Pattern,
    PatternCompiler,
    PatternError,
)

ATOMS = [
    *("a", "b", "c", ".", r"\.", r"\d", r"\w", r"\S", r"\b", r"\B", "^", "$", "_"),
    *("[ab]", "[^a]", "[a-c1]", "[]a]", "[a-]", r"[\d_]", "1"),
]
QUANTIFIERS = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?", "{0}"]


@st.composite
def atoms_with_quantifiers(draw, inner):
    atom = draw(inner)
    # What matches no character is not to be repeated: versions of ``re`` differ there.
    is_place = atom in ("^", "$", r"\b", r"\B") or atom.startswith(("(?=", "(?!"))
    return atom if is_place else atom + draw(st.sampled_from(QUANTIFIERS))


def groups(inner):
    sequence = st.lists(atoms_with_quantifiers(inner), max_size=4).map("".join)
    alternatives = st.lists(sequence, min_size=1, max_size=3).map("|".join)
    kind = st.sampled_from(["({})", "(?:{})", "(?P<n>{})", "(?={})", "(?!{})"])
    return st.tuples(kind, alternatives).map(_grouped)


def _grouped(kind_and_inside):
    """A lookahead within another is refused."""
    kind, inside = kind_and_inside
    looks_ahead = kind in ("(?={})", "(?!{})")
    is_nested = looks_ahead and ("(?=" in inside or "(?!" in inside)
    return ("(?:{})" if is_nested else kind).format(inside)


NESTED = st.recursive(st.sampled_from(ATOMS), groups, max_leaves=12)
PATTERNS = st.lists(atoms_with_quantifiers(NESTED), max_size=5).map("".join)
TEXTS = st.text("abc1._ ", min_size=1, max_size=12)  # of \B in "" Pythons think differently


@settings(max_examples=300)
@given(PATTERNS, st.lists(TEXTS, min_size=1, max_size=4), st.booleans())
def test_it_finds_what_re_finds(source, texts, ignores_case):
    if source.count("?P<n>") > 1:
        source = source.replace("?P<n>", "")
    if ignores_case:
        source, texts = "(?i)" + source, [text.upper() for text in texts]
    expected, found = re.compile(source), Pattern(source)
    for text in texts:
        assert found.match(text) == (expected.match(text) is not None), (source, text)
        assert found.search(text) == (expected.search(text) is not None), (source, text)
        assert found.fullmatch(text) == (expected.fullmatch(text) is not None), (source, text)


@settings(max_examples=300)
@given(st.text("ab()[]{}|*+?\\.^$-,12dwi:=!P<>", max_size=10))
def test_whatever_is_written_is_a_pattern_or_an_error(source):
    """And what both take, they understand alike: ``re`` would not have ``^`` repeated."""
    try:
        found = Pattern(source)
        expected = re.compile(source)
    except (PatternError, re.error) as error:
        assert str(error)
        return
    for text in ("", "ab", "a.b-1", "{1}"):
        assert found.search(text) == (expected.search(text) is not None), (source, text)


REAL = [
    (r".*lm_head", "model.lm_head", True),
    (r".*self_attn\.(q|k|v)_proj$", "model.layers.11.self_attn.q_proj", True),
    (r".*self_attn\.(q|k|v)_proj$", "model.layers.11.self_attn.o_proj", False),
    (r"^model\.layers\.[0-9]+\.mlp\.gate$", "model.layers.3.mlp.gate", True),
    (r".*\.18\..*(gate|up).*", "model.layers.18.mlp.gate_proj", True),
    (r"model\.layers\.(?!0\.)\d+\.mlp.*", "model.layers.0.mlp.up_proj", False),
    (r"model\.layers\.(?!0\.)\d+\.mlp.*", "model.layers.10.mlp.up_proj", True),
]


@pytest.mark.parametrize(("source", "name", "matches"), REAL)
def test_patterns_of_real_configs(source, name, matches):
    assert Pattern(source).match(name) is matches


EVIL = [
    "(a+)+$",
    "(a|a)*b",
    "(a|aa)+$",
    "(.*)*x",
    "(a*)*b",
    "((a+)+)+$",
    "(?=(a+)+b)a",
    "(a?){50}b",
]


@pytest.mark.parametrize("source", EVIL)
def test_what_takes_re_forever_is_told_at_once(source):
    """In a number of steps that grows with the text alone: of ``re`` each further character would
    double it, so that nobody would see the end of this test."""
    assert not Pattern(source).match("a" * 300 + "!")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("(", "something to match|no \\)"),
        ("a)", "closes no group"),
        ("[a", "] of a class"),
        ("*a", "nothing to repeat"),
        ("a**", "behind another"),
        ("a{3,1}", "m above n"),
        ("(a)\\1", "references to groups"),
        ("(?<=a)b", "only groups"),
        ("(?=.*(?!a))b", "lookahead within another"),
        ("(?s)a", "only groups"),
        ("a++", "possessive"),
        ("\\q", "not supported"),
        ("[z-a]", "before it begins"),
        ("\\x4", "hexadecimal"),
        ("a\\", "is missing"),
        ("a" * (MAX_LENGTH + 1), "characters"),
        ("(a{100}){100}", f"more than {MAX_STATES} states"),
        ("a{100000}", "repetitions"),
        ("(" * 200 + ")" * 200, "deep at most"),
    ],
)
def test_what_is_wrong_is_said(source, told):
    with pytest.raises(PatternError, match=told):
        Pattern(source)


def test_texts_are_bounded_too():
    with pytest.raises(PatternError, match="characters"):
        Pattern("a").match("a" * (MAX_TEXT + 1))


def test_the_patterns_of_one_file_are_bounded_together():
    many, large = PatternCompiler(), PatternCompiler()
    for _ in range(MAX_PATTERNS):
        assert many.compile("a").match("a")
    with pytest.raises(PatternError, match=f"more than {MAX_PATTERNS} patterns"):
        many.compile("a")
    with pytest.raises(PatternError, match="all patterns of the file"):
        for _ in range(MAX_PATTERNS):
            large.compile("a{400}")
