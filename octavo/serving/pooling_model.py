"""A model that pools, as callers use it: its facts, token ids of texts, and scores of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.base.errors import InvalidRequestError
from octavo.core.pooling_params import PoolingParams
from octavo.serving.pooling_facts import PoolingFacts
from octavo.serving.pooling_texts import PoolingPrompt, PoolingTexts
from octavo.serving.refusals import POOLS_NOTHING

if TYPE_CHECKING:
    import numpy as np

    from octavo.text.tokenizer import Tokenizer


class Pooled(NamedTuple):
    """The result of a text, float32, and its number of tokens."""

    data: np.ndarray
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """A model that pools."""

    facts: PoolingFacts
    texts: PoolingTexts

    @classmethod
    def of_facts(
        cls,
        facts: Mapping[str, Any] | None,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_length: int,
    ) -> PoolingModel:
        """Return the model that ``pooling_facts`` tells of; InvalidRequestError if there are none,
        and it generates."""
        if facts is None:
            raise InvalidRequestError(POOLS_NOTHING, "model")
        known = PoolingFacts.read(facts)
        texts = PoolingTexts(tokenizer, known.pooling, vocab_size, max_length, known.num_types)
        return cls(known, texts)

    @property
    def labels(self) -> Sequence[str]:
        return self.facts.pooling.labels

    def score(
        self, first: list[Any], second: list[Any], use_activation: bool | None
    ) -> PairScoring:
        """Return how this model scores pairs of texts, of which the first may be one for all.

        Raises:
            InvalidRequestError: they are not as many, or the model has several labels.
        """
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequestError(
                f"{len(second)} texts for {len(first)}: give as many, or one first", "data_2"
            )
        if not self.facts.pooling.is_classifier:
            return _Similarities(self, first, second)
        if self.facts.size != 1:
            raise InvalidRequestError(
                f"this model has {self.facts.size} labels, and a score is of one", "model"
            )
        return _CrossScores(self, first, second, use_activation)


class PairScoring:
    """A way to score pairs of texts: the texts to pool, and scores by the results.

    ``params``: how. ``texts``: what, for ``prompt`` to make token ids of. ``uses``: for each pair,
    which of these it is scored by.
    """

    params: PoolingParams
    texts: list[Any]
    uses: list[tuple[int, ...]]

    def prompt(self, text: Any, truncate: int | None) -> PoolingPrompt:
        raise NotImplementedError

    def score(self, *results: np.ndarray) -> float:
        """Return the score of a pair by the results that it uses."""
        raise NotImplementedError


class _CrossScores(PairScoring):
    """Scores by a cross-encoder, which reads both texts together."""

    def __init__(
        self, model: PoolingModel, first: list[Any], second: list[Any], use_activation: bool | None
    ):
        self._model = model
        self.params = PoolingParams(task="classify", use_activation=use_activation)
        self.texts = list(zip(first, second, strict=True))
        self.uses = [(index,) for index in range(len(self.texts))]

    def prompt(self, text: Any, truncate: int | None) -> PoolingPrompt:
        return self._model.texts.pair(*text, truncate=truncate)

    def score(self, *results: np.ndarray) -> float:
        return float(results[0][0])


class _Similarities(PairScoring):
    """Scores by comparing embeddings; a text is embedded once, wherever it is."""

    def __init__(self, model: PoolingModel, first: list[Any], second: list[Any]):
        from octavo.serving.similarity import similarity_of

        self._model = model
        self._compare = similarity_of(model.facts.pooling.similarity)
        self.params = PoolingParams()
        numbers: dict[Any, int] = {}
        for text in (*first, *second):
            numbers.setdefault(_key(text), len(numbers))
        self.texts = list(numbers)
        self.uses = [
            (numbers[_key(a)], numbers[_key(b)]) for a, b in zip(first, second, strict=True)
        ]

    def prompt(self, text: Any, truncate: int | None) -> PoolingPrompt:
        return self._model.texts.single(text, truncate=truncate)

    def score(self, *results: np.ndarray) -> float:
        return self._compare(*results)


def _key(text: Any) -> Any:
    return text if isinstance(text, str) else tuple(text)
