"""What a model says itself: the answers that its heads learn from.

A head guesses at the model's own words, so it learns from these and not from what others have
written: the model is asked, and answers, as it would be in use. Some answers are greedy, as many
that will be asked for are; the others are sampled.
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
# With no factor in common with those that are held out: there have to be some of both kinds.
_GREEDY_EVERY = 5
# Texts are no questions: the model goes on from their pieces.
_PIECE_TOKENS = 64
# Most that is kept of the beginning of a long conversation or prompt: its end.
_PROMPT_TOKENS = 1024


class TrainingPrompt(NamedTuple):
    """A prompt, and how it is to be answered."""

    prompt_ids: list[int]
    temperature: float
    seed: int


class ModelAnswer(NamedTuple):
    """A prompt with its answer."""

    prompt_ids: list[int]
    answer_ids: list[int]


AnswerPrompts = Callable[[Sequence[TrainingPrompt]], Sequence[list[int]]]
"""Answers prompts, together."""

OpenAnswering = Callable[[], AbstractContextManager[AnswerPrompts]]
"""Loads the model that answers, until the end of the context."""


def training_prompts(
    tokenizer: Tokenizer, path: Path | None, count: int, seed: int
) -> list[TrainingPrompt]:
    """So many prompts; where a file has fewer, each is asked again with other random numbers.

    Of conversations, what was said before each answer; of texts, pieces to go on from; without a
    file, octavo's own questions.

    Raises:
        ConfigError: the file cannot be read, or there is nothing in it.
        ChatTemplateError: conversations, and a model that has no template, or whose template fails.
    """
    prompts = _own(tokenizer, count, seed) if path is None else _of_file(tokenizer, path)
    if not prompts:
        raise ConfigError(f"{path}: there is nothing to ask in it: give texts or conversations")
    return [
        TrainingPrompt(
            prompts[index % len(prompts)][-_PROMPT_TOKENS:],
            TEMPERATURE if index % _GREEDY_EVERY else 0.0,
            seed + index,
        )
        for index in range(count)
    ]


def _own(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    if tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in openings(count, seed)]
    return [
        tokenizer.chat_prompt([{"role": "user", "content": text}]).token_ids
        for text in questions(count, seed)
    ]


def _of_file(tokenizer: Tokenizer, path: Path) -> list[list[int]]:
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
    """The conversation up to each message of the user."""
    for index, message in enumerate(conversation):
        if message["role"] == "user":
            yield conversation[: index + 1]


def answer_prompts(talk: AnswerPrompts, some: Sequence[TrainingPrompt]) -> list[ModelAnswer]:
    """Those of the prompts that got an answer of more than a token or two."""
    answers = talk(some)
    spoken = (
        ModelAnswer(ask.prompt_ids, list(ids)) for ask, ids in zip(some, answers, strict=True)
    )
    return [each for each in spoken if len(each.answer_ids) > 2]


def parts(asked: Sequence[TrainingPrompt], size: int) -> Iterator[list[TrainingPrompt]]:
    """In their order, so many at a time."""
    rest = iter(asked)
    while part := list(islice(rest, size)):
        yield part
