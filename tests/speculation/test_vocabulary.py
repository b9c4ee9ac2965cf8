"""What one model calls the tokens of another."""

from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.speculation.vocabulary import Translation, check_same_vocabulary


class Words:
    """A tokenizer, as far as it is asked here: tokens by id, special ones in angle brackets."""

    def __init__(self, *tokens: str, bos: int | None = None, eos: int | None = None):
        self._tokens = tokens
        self.vocab_size = len(tokens)
        self.bos_token_id, self.eos_token_id = bos, eos

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id].encode()

    def token_text(self, token_id: int) -> str:
        return self._tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return self._tokens[token_id].startswith("<")


TARGET = Words("<s>", "a", "b", "the", " the", "</s>", bos=0, eos=5)


@pytest.mark.parametrize("more", [(), ("padding",)])
def test_more_tokens_at_the_end_are_no_difference(more):
    tokens = ["<s>", "a", "b", "the", " the", "</s>", *more]
    check_same_vocabulary(TARGET, Words(*tokens, bos=0, eos=5), "draft")
    check_same_vocabulary(Words(*tokens, bos=0, eos=5), TARGET, "draft")


def test_a_token_without_text_may_be_anything():
    check_same_vocabulary(TARGET, Words("<s>", "a", "", "the", " the", "</s>", bos=0, eos=5), "d")


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (
            Words("<s>", "a", "c", "the", "x", "</s>", bos=0, eos=5),
            r"of small differs: id 2 is 'b' in the target and 'c' in the draft \(6 tokens "
            r"of the target, 6 of the draft\); take a draft model of the same family",
        ),
        (
            Words("s", "a", "b", "the", " the", "</s>", bos=0, eos=5),
            "id 0 is the special token '<s>' in the target and 's' in the draft",
        ),
        (
            Words("<s>", "a", "b", "the", " the", "</s>", bos=0, eos=0),
            r"eos_token_id of small is 0 \('<s>'\), and 5 \('</s>'\) in the target",
        ),
    ],
)
def test_the_first_difference_is_named(draft, said):
    with pytest.raises(ConfigError, match=said):
        check_same_vocabulary(TARGET, draft, "small")


def test_tokens_are_found_by_their_text():
    draft = Words("he", "a", "<end>", "the", "<begin>", "x", bos=4, eos=2)
    translation = Translation.between(TARGET, draft)
    # " the" by its longest end, "b" by nothing, the beginning and the end by what they are for.
    assert list(translation.to_draft) == [4, 1, 0, 3, 3, 2]
    assert list(translation.to_target) == [-1, 1, 5, 3, 0, -1]
    assert [translation.drafted(i) for i in (0, 1, 2, 99)] == [-1, 1, 5, -1]


def test_of_tokens_with_the_same_text_the_first_is_taken():
    translation = Translation.between(Words("a", "a", "b"), Words("b", "a", "a"))
    assert list(translation.to_draft) == [1, 1, 0]
    assert list(translation.to_target) == [2, 0, 0]
