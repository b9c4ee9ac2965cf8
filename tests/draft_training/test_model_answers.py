from __future__ import annotations

import json

import pytest

from octavo.base.errors import ConfigError
from octavo.draft_training.model_answers import (
    TrainingPrompt,
    answer_prompts,
    batches,
    training_prompts,
)
from octavo.draft_training.prompts import openings, questions


def test_questions_are_the_same_for_a_seed_and_differ():
    assert questions(200, 1) == questions(200, 1) != questions(200, 2)
    assert len(set(questions(200, 1))) == 200
    assert len(set(openings(50, 0))) == 50


def test_more_questions_than_there_are_come_again():
    assert len(openings(5000, 0)) == 5000


def test_a_model_with_a_chat_template_is_asked_in_it(byte_tokenizer):
    asked = training_prompts(byte_tokenizer, None, 10, 0)
    user, assistant = (byte_tokenizer.encode(t, parse_special=True)[-1]
                       for t in ("<|user|>", "<|assistant|>"))  # fmt: skip
    assert all(ask.prompt_ids[0] == user and ask.prompt_ids[-1] == assistant for ask in asked)
    assert [ask.temperature > 0 for ask in asked] == [False, True, True, True, True] * 2
    assert len({ask.seed for ask in asked}) == 10


def test_of_conversations_the_questions_are_asked(byte_tokenizer, tmp_path):
    rows = [
        {"messages": [{"role": r, "content": c} for r, c in
                      (("user", "a"), ("assistant", "b"), ("user", "c"))]},
        {"text": "x" * 100},
    ]  # fmt: skip
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second, third, fourth, again = training_prompts(byte_tokenizer, path, 5, 0)
    assert byte_tokenizer.decode(first.prompt_ids) == "a"
    assert byte_tokenizer.decode(second.prompt_ids) == "abc"
    assert byte_tokenizer.decode(third.prompt_ids) == "x" * len(third.prompt_ids)
    assert byte_tokenizer.decode([*third.prompt_ids, *fourth.prompt_ids]) == "x" * 100
    assert again.prompt_ids == first.prompt_ids and again.seed != first.seed


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_with_nothing_in_it_is_refused(byte_tokenizer, tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="has no prompts"):
        training_prompts(byte_tokenizer, path, 5, 0)


def test_answers_of_hardly_a_word_are_left_out():
    some = [TrainingPrompt([1], 0.0, 0), TrainingPrompt([2], 0.0, 1)]
    assert [
        s.prompt_ids for s in answer_prompts(lambda training_prompts: [[5, 5], [5, 6, 7]], some)
    ] == [[2]]


def test_batches_keep_the_order():
    some = [TrainingPrompt([n], 0.0, n) for n in range(5)]
    assert [[ask.seed for ask in part] for part in batches(some, 2)] == [[0, 1], [2, 3], [4]]
