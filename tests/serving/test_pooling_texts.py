"""Texts and pairs as token ids, with prompts and truncation."""

from __future__ import annotations

import pytest
from tiny_encoders import write_pair_tokenizer

from octavo.base.errors import InvalidRequestError
from octavo.models.pooling import Pooling
from octavo.serving.pooling_texts import PoolingTexts
from octavo.text.folder_tokenizer import load_folder_tokenizer

BEGIN, END = 256, 257


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    write_pair_tokenizer(folder)
    pooling = Pooling(prompts={"query": "Q:", "document": ""}, default_prompt="document")
    return PoolingTexts(load_folder_tokenizer(folder), pooling, 260, 12, 2)


def text_of(texts, ids):
    return texts.tokenizer.decode(ids, skip_special_tokens=True)


def test_a_text_has_its_tokens_around_it(texts):
    ids = texts.single("abc").token_ids
    assert (ids[0], ids[-1]) == (BEGIN, END) and text_of(texts, ids) == "abc"
    assert len(texts.single("abc", add_special_tokens=False).token_ids) == 3
    assert text_of(texts, texts.single("abc", prompt="query").token_ids) == "Q:abc"


def test_truncation_keeps_the_tokens_around_a_text(texts):
    ids = texts.single("abcdefgh", truncate=5).token_ids
    assert (ids[0], ids[-1]) == (BEGIN, END) and text_of(texts, ids) == "abc"
    assert len(texts.single("x" * 50, truncate=-1).token_ids) == 12
    assert len(texts.single("x" * 50).token_ids) == 52  # refused later on
    assert texts.single([5, 6, 7], truncate=2).token_ids == [5, 6]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [("ab", "cd", "abcd"), ("ab", "c" * 30, "ab" + "c" * 7), ("a" * 30, "b" * 30, "aaaabbbbb")],
)
def test_of_a_pair_the_longer_text_is_cut(texts, first, second, kept):
    pair = texts.pair(first, second, truncate=-1)
    assert text_of(texts, pair.token_ids) in (kept, "aaaaabbbb")
    assert len(pair.token_ids) <= 12
    middle = pair.token_ids.index(END)
    assert list(pair.token_types) == [0] * (middle + 1) + [1] * (len(pair.token_ids) - middle - 1)


def test_types_that_a_model_does_not_know_are_left_out(texts):
    plain = PoolingTexts(texts.tokenizer, texts.pooling, 260, 12, 1)
    assert plain.pair("ab", "cd").token_types == ()
    assert plain.pair("ab", "cd").token_ids == texts.pair("ab", "cd").token_ids


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda texts: texts.single(5), "input"),
        (lambda texts: texts.single([1, 999]), "input"),
        (lambda texts: texts.single([1, "a"]), "input"),
        (lambda texts: texts.single({"text": "a"}), "input"),
        (lambda texts: texts.single("a", prompt="other"), "prompt_name"),
        (lambda texts: texts.single("a", truncate=13), "truncate_prompt_tokens"),
        (lambda texts: texts.single("a", truncate=True), "truncate_prompt_tokens"),
        (lambda texts: texts.pair("a", [1]), "documents"),
    ],
)
def test_a_wrong_argument_is_named(texts, call, field):
    with pytest.raises(InvalidRequestError) as caught:
        call(texts)
    assert caught.value.field == field
