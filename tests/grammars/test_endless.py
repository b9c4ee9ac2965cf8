from __future__ import annotations

import pytest
from grammar_walks import accepts, allowed, mask

from octavo.grammars.endless import may_be_endless


@pytest.mark.parametrize(
    ("lark", "is_endless"),
    [
        ('start: A "x"\nA: "x"*', True),
        ("start: /x+y/", True),
        ("start: /(ab){3,}/", True),
        ("start: /[x]*/", True),
        ("start: A\nA: B*\nB: /x/", True),
        ('start: ("a" | "b")*', True),  # a rule, but that is not looked at
        ('start: item* "x"\nitem: "x"', False),
        ("start: /[a-z]+(?s:.*)/", False),
        (r"start: /\d+[^\"]*/", False),
        ('start: "*+" /a{2,3}/ // x*', False),
    ],
)
def test_it_is_seen_where_a_text_may_be_repeated(lark, is_endless):
    assert may_be_endless(lark) == is_endless


def test_a_text_without_end_does_not_keep_the_engine():
    """After the second x nothing but another can come, for ever."""
    followed = mask(grammar='root ::= a "x"\na ::= "x"*')
    for _ in range(5):
        assert ord("x") in allowed(followed)
        assert followed.forced_tokens(16) == []
        followed.advance(b"x")


def test_others_know_what_must_come():
    followed = mask(grammar='root ::= "abc" [0-9]+')
    assert bytes(followed.forced_tokens(16)) == b"abc"
    assert accepts(followed, "abc12")
