from __future__ import annotations

import random

import pytest
from byte_tokens import STOP
from grammar_walks import accepts, mask, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import ConstraintError
from octavo.grammars.beginnings import after
from octavo.grammars.compiler import GrammarCompiler
from octavo.grammars.lark import LarkGrammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("", True),
        ("a thought", True),
        ("a thought</think>", False),
        ('a thought</think>{"a":1}', True),
        ('a thought</think>\n\n{"a":1}', True),
        ('</thi</think>{"a":1}', True),
        ('a thought</think>{"a":1} and more', False),
        ("a thought</think>more", False),
        ('{"a":', True),
    ],
)
def test_what_comes_before_the_text_is_free_and_what_comes_after_it_is_not(text, is_whole):
    assert accepts(mask(json=SCHEMA, begins_after="</think>"), text) == is_whole


@pytest.mark.parametrize(
    "asked", [{"regex": "ab+"}, {"choice": ["ab"]}, {"grammar": 'start: "ab"'}]
)
def test_any_kind_may_begin_later(asked):
    for text, is_whole in (("xy", True), ("xy#ab", True), ("xy#", False), ("xy#abc", False)):
        assert accepts(mask(**asked, begins_after="#"), text) == is_whole


def test_a_token_of_several_letters_may_end_the_free_part():
    from byte_tokens import VOCAB
    from grammar_walks import WORDS, allowed

    followed = mask(regex="ab|cd", begins_after="</think>")
    followed.advance([*b"hm", VOCAB + WORDS.index(b"</think>")])
    assert allowed(followed) == {ord("a"), ord("c"), VOCAB + WORDS.index(b"ab")}


def test_it_may_begin_after_a_special_token():
    asked = {"json": SCHEMA, "begins_after": "<stop>"}
    assert accepts(mask(**asked), [*b"some text", STOP, *b'{"a":1}'])
    assert accepts(mask(**asked), [*b"some <stop> text"])  # the letters are not the token
    assert not accepts(mask(**asked), [*b"some text", STOP, *b"x"])
    assert not accepts(mask(**asked), [*b"some text", STOP])


def test_the_text_that_ends_the_free_part_is_not_split_by_special_tokens():
    """Other special tokens may come in it."""
    followed = mask(regex="x", begins_after="##")
    assert accepts(followed, [*b"#", STOP, *b"#", *b"yz##x"])


def test_a_tag_with_text_around_special_tokens_is_refused():
    with pytest.raises(ConstraintError, match="begins_after.*after its last special token"):
        mask(regex="x", begins_after="<stop>text")


SPECIALS = {"<a>": 258, "<b>": 259, "<c>": 260}
pieces = st.lists(st.sampled_from(["<a>", "<b>", "<c>", "x", "y", "xy"]), max_size=12)


class _Tokens:
    """A vocabulary of bytes and some special tokens."""

    def __init__(self):
        from octavo.grammars.vocabulary import GrammarVocabulary

        texts = [*(bytes([i]) for i in range(256)), b"<end>", b"<no>", *map(str.encode, SPECIALS)]
        self.of = GrammarVocabulary(
            texts, {"<end>": 256, **SPECIALS}, (256,), lambda text: list(text.encode())
        )


TOKENS = _Tokens().of


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["<a>x<b>", "<a><b><a><c>", "<a>x<a>y<b>", "<a>x<a>x<c>"]), pieces)
def test_several_special_tokens_are_found_as_a_search_finds_them(tag, before):
    """Knuth, Morris and Pratt against a search in the list of parts."""
    from llguidance import LLMatcher

    grammar = LarkGrammar(TOKENS.special_ids)
    source = grammar.source(after(grammar, tag, '"!"', (256,)))
    matcher = LLMatcher(TOKENS.tokens, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()

    def tokens_of(text):
        parts = grammar.parts(text)
        return [t for p in parts for t in ([p] if isinstance(p, int) else p.encode())]

    text = "".join(before)
    parts, wanted = grammar.parts(text), grammar.parts(tag)
    places = [i for i in range(len(parts)) if parts[i : i + len(wanted)] == wanted]
    if not places:
        assert matcher.consume_tokens(tokens_of(text)) and matcher.is_accepting()
        assert matcher.deep_copy().consume_tokens([258]), "free text goes on"
    else:
        begun = [t for p in parts[: places[0] + len(wanted)]
                 for t in ([p] if isinstance(p, int) else p.encode())]  # fmt: skip
        assert matcher.consume_tokens(begun) and not matcher.is_accepting()
        assert not matcher.deep_copy().consume_tokens([ord("x")])
        assert matcher.consume_tokens([ord("!")]) and matcher.is_accepting()


def test_random_answers_are_valid_after_the_text():
    import json

    for seed in range(20):
        followed = mask(json=SCHEMA, begins_after="#")
        followed.advance(b"thinking#")
        text = walk(followed, random.Random(seed))
        assert set(json.loads(text)) == {"a"}


def test_a_model_that_has_no_end_of_text_is_told_so():
    from byte_tokens import VOCAB, byte_tokenizer

    from octavo.core.structured_outputs import StructuredOutputs

    compiler = GrammarCompiler(byte_tokenizer(), VOCAB, [])
    with pytest.raises(ConstraintError, match="no token that ends") as error:
        compiler.mask(StructuredOutputs(regex="a"))
    assert error.value.reason == "unwritable"
