"""The target model's own answers, which draft heads are trained on.

A head predicts the model's own tokens, so it learns from these and not from texts of people: the
model answers prompts as it would in use. Some answers are greedy, as many requests are; the others
are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from octavo.base.errors import ConfigError
from octavo.draft_training.prompts import openings, questions
from octavo.quantize.calibration_files import Conversation, read_documents
from octavo.text.tokenizer import Tokenizer

TEMPERATURE = 0.7
# Coprime to the interval of held-out answers, so that these have both kinds.
_GREEDY_EVERY = 5
# A text is cut into prompts of so many tokens, which the model continues.
_PIECE_TOKENS = 64
# The most of a prompt or conversation that is kept: its last tokens.
_PROMPT_TOKENS = 1024


class TrainingPrompt(NamedTuple):
    """A prompt with the temperature and seed of its answer."""

    prompt_ids: list[int]
    temperature: float
    seed: int


class ModelAnswer(NamedTuple):
    """A prompt with its answer."""

    prompt_ids: list[int]
    answer_ids: list[int]


AnswerPrompts = Callable[[Sequence[TrainingPrompt]], Sequence[list[int]]]
"""Answers prompts in one batch: the token ids of each answer."""

OpenAnswering = Callable[[], AbstractContextManager[AnswerPrompts]]
"""Opens a context in which the model is loaded to answer."""


def training_prompts(
    tokenizer: Tokenizer, path: Path | None, count: int, seed: int
) -> list[TrainingPrompt]:
    """Make ``count`` prompts; if a file has fewer, they are repeated with other seeds.

    From conversations, the messages before each answer; from texts, pieces to continue; without a
    file, the built-in questions.

    Raises:
        ConfigError: the file cannot be read, or there is nothing in it.
        ChatTemplateError: conversations, and a model that has no template, or whose template fails.
    """
    prompts = (
        _built_in_prompts(tokenizer, count, seed)
        if path is None
        else _prompts_of_file(tokenizer, path)
    )
    if not prompts:
        raise ConfigError(f"{path}: has no prompts: give a file with texts or conversations")
    return [
        TrainingPrompt(
            prompts[index % len(prompts)][-_PROMPT_TOKENS:],
            TEMPERATURE if index % _GREEDY_EVERY else 0.0,
            seed + index,
        )
        for index in range(count)
    ]


def _built_in_prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    if tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in openings(count, seed)]
    return [
        tokenizer.chat_prompt([{"role": "user", "content": text}]).token_ids
        for text in questions(count, seed)
    ]


def _prompts_of_file(tokenizer: Tokenizer, path: Path) -> list[list[int]]:
    prompts: list[list[int]] = []
    for document in read_documents(path):
        if isinstance(document, str):
            prompts += _pieces(tokenizer.encode(document))
        else:
            prompts += [
                tokenizer.chat_prompt(messages).token_ids for messages in _questions(document)
            ]
    return prompts


def _pieces(token_ids: Sequence[int]) -> Iterator[list[int]]:
    for start in range(0, len(token_ids), _PIECE_TOKENS):
        yield list(token_ids[start : start + _PIECE_TOKENS])


def _questions(conversation: Conversation) -> Iterator[Conversation]:
    """Yield the conversation up to each message of the user."""
    for index, message in enumerate(conversation):
        if message["role"] == "user":
            yield conversation[: index + 1]


def answer_prompts(answer: AnswerPrompts, prompts: Sequence[TrainingPrompt]) -> list[ModelAnswer]:
    """Answer prompts; answers of one or two tokens are left out."""
    answers = answer(prompts)
    pairs = (
        ModelAnswer(each.prompt_ids, list(ids)) for each, ids in zip(prompts, answers, strict=True)
    )
    return [each for each in pairs if len(each.answer_ids) > 2]


def batches(prompts: Sequence[TrainingPrompt], size: int) -> Iterator[list[TrainingPrompt]]:
    """Yield prompts in their order, ``size`` at a time."""
    rest = iter(prompts)
    while part := list(islice(rest, size)):
        yield part
