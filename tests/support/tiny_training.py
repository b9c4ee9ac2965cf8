"""Training of drafts for tiny models, with somebody who answers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from octavo.draft_training.model_answers import TrainingPrompt
from octavo.draft_training.training_job import TrainRequest, TrainResult, train_draft
from octavo.models.checkpoint import open_checkpoint
from octavo.sources.open import load_tokenizer

WANTED = TrainRequest(
    tokens=1500, answer_tokens=40, shortlist=64, steps=5, batch_size=32, minutes=10, seed=3
)


class Talk:
    """Answers with random tokens, the same ones for the same seed, and counts how often it is
    loaded and asked."""

    def __init__(self) -> None:
        self.loaded = self.asked = 0

    @contextmanager
    def open(self) -> Iterator[Callable[[Sequence[TrainingPrompt]], list[list[int]]]]:
        self.loaded += 1
        yield self._answer

    def _answer(self, asks: Sequence[TrainingPrompt]) -> list[list[int]]:
        self.asked += len(asks)
        return [np.random.default_rng(ask.seed).integers(0, 90, 40).tolist() for ask in asks]


def train(
    model: Path,
    out: Path,
    wanted: TrainRequest = WANTED,
    talk: Talk | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> TrainResult:
    talk = talk or Talk()
    checkpoint, tokenizer = open_checkpoint(model), load_tokenizer(model)
    return train_draft(checkpoint, tokenizer, talk.open, out, wanted, progress)
