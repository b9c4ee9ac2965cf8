from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.text.special_tokens import Disguise, SpecialTokens, TokenMatcher

ALPHABET = "<>|ab "


def test_the_leftmost_and_of_those_the_longest():
    matcher = TokenMatcher({"<a>": 1, "<a>b": 2, "a>": 3, "<": 4, "bb": 5})
    assert list(matcher.finditer("x<a>bb<a> <")) == [(1, 5, 2), (6, 9, 1), (10, 11, 4)]
    assert list(TokenMatcher({}).finditer("abc")) == []
    assert list(TokenMatcher({"": 1}).finditer("abc")) == []
    # The text ends where a longer token would go on.
    assert list(TokenMatcher({"<a": 1, "<ab": 2}).finditer("<a")) == [(0, 2, 1)]


@given(
    st.sets(st.text(ALPHABET, min_size=1, max_size=4), max_size=6),
    st.text(ALPHABET, max_size=30),
)
def test_matches_are_those_of_the_definition(tokens, text):
    ids = {token: i for i, token in enumerate(sorted(tokens))}
    expected = []
    position = 0
    while position < len(text):
        here = [token for token in tokens if text.startswith(token, position)]
        if here:
            longest = max(here, key=len)
            expected.append((position, position + len(longest), ids[longest]))
            position += len(longest)
        else:
            position += 1
    assert list(TokenMatcher(ids).finditer(text)) == expected


def test_split():
    specials = SpecialTokens({"<l>": 1, "<r>": 2, "<x>": 3}, strip_left=[1], strip_right=[2])
    assert specials.split("a <x> b") == ["a ", 3, " b"]
    assert specials.split("a \n<l> b<r> \n c") == ["a", 1, " b", 2, "c"]
    assert specials.split("<r> <l> <r>") == [2, 1, " ", 2]
    assert specials.split("") == [] and specials.split("plain") == ["plain"]


@given(
    st.sets(st.text("<>|a", min_size=1, max_size=4), max_size=4),
    st.lists(st.text(ALPHABET, max_size=10), max_size=4),
    st.lists(st.text(ALPHABET, max_size=4), max_size=2),
)
def test_no_special_token_begins_in_disguised_text(tokens, texts, literals):
    specials = SpecialTokens({token: i for i, token in enumerate(sorted(tokens))})
    disguise = Disguise(specials, literals, [*texts, *literals])
    hidden = [disguise.hide(text) for text in texts]
    assert [disguise.reveal(text) for text in hidden] == texts
    assert list(map(len, hidden)) == list(map(len, texts))
    for text in hidden:
        assert all(isinstance(piece, str) for piece in specials.split(text))
        for more in ("", "<", "a>", "|a", "><|"):
            found = specials.matcher.finditer(text + more)
            assert all(start >= len(text) for start, _, _ in found)
