from __future__ import annotations

import json
import random

import pytest
from byte_tokens import EOS, VOCAB, byte_tokenizer
from grammar_walks import WORDS, allowed, mask, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import ConstraintError, InvalidRequestError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars import grammar_mask
from octavo.grammars.compiler import GrammarCompiler

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [1, "ab", True]}, "maxItems": 3}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_is_valid(seed):
    text = walk(mask(json=SCHEMA, disable_any_whitespace=True), random.Random(seed))
    ((name, items),) = json.loads(text).items()
    assert name == "a" and len(items) <= 3 and all(item in (1, "ab", True) for item in items)


@pytest.mark.parametrize(
    "asked",
    [
        {"choice": ["yes", "no", "no way"]},
        {"regex": "yes|no( way)?"},
        {"grammar": 'root ::= "yes" | "no" " way"?'},
        {"grammar": 'start: "yes" | "no" " way"?'},
    ],
)
def test_kinds_that_mean_the_same_allow_the_same(asked):
    found = {walk(mask(**asked), random.Random(seed)) for seed in range(40)}
    assert found == {b"yes", b"no", b"no way"}


def test_the_end_is_allowed_where_the_grammar_can_end_and_nowhere_else():
    followed = mask(choice=["no", "no way"])
    assert allowed(followed) == {ord("n")} and not followed.is_accepting
    followed.advance(b"no")
    assert allowed(followed) == {EOS, ord(" ")} and followed.is_accepting
    followed.advance(b" way")
    assert allowed(followed) == {EOS}


def test_tokens_beyond_the_vocabulary_are_never_allowed():
    assert max(allowed(mask(regex=r"(?s:.*)"))) < VOCAB + len(WORDS)


tokens = st.lists(
    st.sampled_from([*b'{}[]",:a b1', EOS, *range(VOCAB, VOCAB + len(WORDS))]), max_size=6
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(tokens, st.integers(0, 8)), max_size=8))
def test_a_mask_is_where_its_tokens_lead_whatever_came_between(moves):
    """Lists are followed, allowed or not; numbers are taken back."""
    followed, known = mask(json=SCHEMA), []
    for move in moves:
        if isinstance(move, list):
            followed.advance(move)
            known += move
        else:
            followed.rollback(min(move, len(known)))
            del known[len(known) - min(move, len(known)) :]
        fresh = mask(json=SCHEMA)
        fresh.advance(known)
        assert followed.num_tokens == len(known)
        assert followed.bitmask() == fresh.bitmask()
        assert followed.is_accepting == fresh.is_accepting


def test_a_wrong_draft_is_forgotten():
    followed = mask(regex="abc")
    followed.advance(b"axyz")
    assert followed.bitmask() is None and followed.num_tokens == 4
    followed.rollback(3)
    assert allowed(followed) == {ord("b")}


def test_a_copy_goes_its_own_way():
    first = mask(regex="xy|cd")
    other = first.fork()
    first.advance(b"x")
    assert allowed(first) == {ord("y")} and allowed(other) == {ord("x"), ord("c")}


def test_masks_that_are_made_together_are_those_of_each_alone():
    """Also where one has its bits already, follows a wrong draft, or is too complex by now."""
    beginnings = [b"", b"{", b'{"a"', b'{"a":[', b"{}", b'{"a":[x', b"}"]

    def masks():
        found = [mask(json=SCHEMA) for _ in beginnings] + [mask(json={"type": "integer"})]
        for each, beginning in zip(found, [*beginnings, b"1" * 40], strict=True):
            each.advance(beginning)
        found.append(found[1].fork())
        found[1].bitmask()
        return found

    alone, together = masks(), masks()
    together[0].make_together([part for each in together for part in each.parts()])
    assert not any(each.parts() for each in together)
    assert [each.bitmask() for each in together] == [each.bitmask() for each in alone]
    assert [each.problem for each in together] == [each.problem for each in alone]


def test_bits_are_not_changed_by_what_follows():
    followed = mask(regex="abc")
    before = followed.bitmask()
    kept = before[:]
    followed.advance(b"a")
    assert followed.bitmask() is not before and before == kept
    assert followed.bitmask() is followed.bitmask()


def test_text_that_must_come_is_known_beforehand():
    followed = mask(json=SCHEMA, disable_any_whitespace=True)
    assert bytes(followed.forced_tokens(16)) == b'{"a":['
    assert bytes(followed.forced_tokens(2)) == b'{"'
    followed.advance(b'{"')
    assert bytes(followed.forced_tokens(16)) == b'a":['
    followed.advance(b'a":[')
    assert followed.forced_tokens(16) == []


def test_forced_text_is_that_of_the_state_as_it_is():
    followed = mask(regex="(ab|cb)(xyz|uvw)(12345)")
    followed.advance(b"ab")
    followed.advance(b"x")
    assert bytes(followed.forced_tokens(16)) == b"yz12345"
    followed.rollback(2)
    followed.advance(b"bu")
    assert bytes(followed.forced_tokens(16)) == b"vw12345"
    followed.advance(b"q")  # forbidden
    assert followed.forced_tokens(16) == []
    assert bytes(followed.fork().forced_tokens(3)) == b""
    followed.rollback(1)
    assert bytes(followed.fork().forced_tokens(3)) == b"vw1"


def test_a_long_forced_text_comes_in_parts():
    text = b"lorem ipsum " * 100
    followed, found = mask(regex=text.decode()), b""
    while forced := followed.forced_tokens(1000):
        assert len(forced) <= 256
        followed.advance(forced)
        found += bytes(forced)
    assert found == text


def test_the_tokens_that_may_come_are_counted():
    followed = mask(json=SCHEMA, disable_any_whitespace=True)
    assert followed.num_allowed(list(b'{"a":[1,3]}')) == 8
    assert followed.num_allowed([EOS]) == 0 and followed.num_tokens == 0


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": "{"}, "json"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, ""),
        ({"regex": "(a"}, "regex"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"grammar": "start: missing"}, "missing"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(asked, part):
    with pytest.raises(InvalidRequestError) as error:
        mask(**asked)
    assert error.value.field == f"structured_outputs.{next(iter(asked))}"
    assert part in str(error.value)


def test_what_others_have_written_does_not_end_an_answer():
    """Masks of a grammar share the states of its lexer, which are bounded."""
    compiler = GrammarCompiler(byte_tokenizer(WORDS), VOCAB + len(WORDS) + 3, [EOS])
    asked = StructuredOutputs(regex=r"(\p{L}|\d){500,1000}!")
    texts = compiler.vocabulary().texts
    for seed in range(30):
        followed, rng = compiler.mask(asked), random.Random(seed)
        for _ in range(60):
            choices = sorted(allowed(followed))
            assert choices, followed.problem
            followed.advance([rng.choice([i for i in choices if len(texts[i]) < 3])])
        known = followed.fork()
        known.rollback(30)
        assert known.num_tokens == 30 and known.bitmask() is not None


def test_a_limit_of_its_own_ends_an_answer():
    followed = mask(regex="(a{1,1000}){1,1000}")
    for _ in range(200):
        if not any(followed.bitmask()):
            break
        followed.advance(b"a")
    assert "too complex" in followed.problem
    count = followed.num_tokens
    followed.advance(b"aa")
    followed.rollback(count)
    assert followed.num_tokens == 2
    assert ord("a") in allowed(followed) or "too complex" in followed.problem


def test_a_mask_that_takes_too_long_ends_its_answer_and_the_grammar(monkeypatch):
    """Others go on: theirs were made before. Time is what the thread says."""
    compiler = GrammarCompiler(byte_tokenizer(WORDS), VOCAB + len(WORDS) + 3, [EOS])
    asked = StructuredOutputs(regex="[ab]{9}")
    slow, other = compiler.mask(asked), compiler.mask(asked)
    copied = other.fork()
    assert any(other.bitmask())
    with monkeypatch.context() as patch:
        patch.setattr(grammar_mask, "thread_time", iter([0.0, 0.049, 0.0, 0.051]).__next__)
        assert any(slow.bitmask())
        slow.advance(b"a")
    assert not any(slow.bitmask())
    assert "too complex for this answer" in slow.problem and "50 ms" in slow.problem
    slow.advance(b"aa")
    slow.rollback(3)
    assert slow.num_tokens == 0 and not any(slow.bitmask()) and not any(slow.fork().bitmask())
    assert slow.num_allowed(b"a") == 0 and slow.forced_tokens(5) == []
    for each in (other, copied):
        each.advance(b"a")
        assert any(each.bitmask()) and each.problem is None
    with pytest.raises(ConstraintError, match="too complex") as error:
        compiler.mask(asked)
    assert error.value.reason == "too_complex"
