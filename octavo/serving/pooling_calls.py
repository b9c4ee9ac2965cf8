"""The calls of `LLM` whose results are vectors and scores: embed, encode, classify, score, rerank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from octavo.base.errors import InvalidRequestError
from octavo.base.plain_numbers import plain, plain_list
from octavo.core.pooling_params import PoolingParams, Task
from octavo.serving.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from octavo.serving.pooling_facts import PoolingFacts
from octavo.serving.pooling_texts import PoolingPrompt, PoolingTexts
from octavo.serving.progress import UseTqdm
from octavo.serving.similarity import similarity_of


class Pool(Protocol):
    """Pools texts, batched together."""

    def __call__(
        self, count: int, prompt: Callable[[int], PoolingPrompt], params: PoolingParams, bar: UseTqdm
    ) -> list[PoolingRequestOutput]:
        """Return the results of ``count`` texts as arrays (`PoolingOutput`), in their order.

        ``prompt`` returns a text by its number. One that is refused, or fails, has an ``error``;
        RequestError if all are refused.
        """
        ...


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document of ``rerank``: its number among those given, its text, and its score."""

    index: int
    document: str
    relevance_score: float


class PoolingCalls:
    """The calls, over whatever pools."""

    def __init__(self, texts: PoolingTexts, facts: PoolingFacts, pool: Pool):
        self._texts, self._facts, self._pool = texts, facts, pool

    def encode(
        self,
        prompts: Any,
        params: PoolingParams | None,
        task: Task | None,
        *,
        prompt_name: str | None = None,
        truncate: int | None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[PoolingRequestOutput]:
        """Return results as arrays; the task is that of ``params``, if they are given, or the
        model's."""
        if params is None:
            usual: Task = "classify" if self._facts.pooling.is_classifier else "embed"
            params = PoolingParams(task=task or usual)
        elif task is not None and task != params.task:
            raise InvalidRequestError(f"{task}, and pooling_params have {params.task}", "pooling_task")
        self._facts.check(params)
        listed = as_texts(prompts)

        def prompt(index: int) -> PoolingPrompt:
            return self._texts.single(listed[index], prompt=prompt_name, truncate=truncate)

        return self._pool(len(listed), prompt, params, use_tqdm)

    def embed(
        self, prompts: Any, params: PoolingParams | None, **options: Any
    ) -> list[PoolingRequestOutput]:
        outputs = self.encode(prompts, params, "embed", **options)
        return [_with(each, lambda data: EmbeddingOutput(data.tolist())) for each in outputs]

    def classify(
        self, prompts: Any, params: PoolingParams | None, **options: Any
    ) -> list[PoolingRequestOutput]:
        outputs = self.encode(prompts, params, "classify", **options)
        return [_with(each, lambda data: ClassificationOutput(data.tolist())) for each in outputs]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        params: PoolingParams | None = None,
        *,
        truncate: int | None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[PoolingRequestOutput]:
        """Score pairs of texts: of the first list with the second, of which one may be a single
        text."""
        first, second = as_texts(data_1, "data_1"), as_texts(data_2, "data_2")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequestError(
                f"{len(second)} texts for {len(first)}: give as many, or one first", "data_2"
            )
        if self._facts.pooling.is_classifier:
            return self._cross_scores(first, second, params, truncate, use_tqdm)
        return self._similarities(first, second, params, truncate, use_tqdm)

    def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, **options: Any
    ) -> list[RankedDocument]:
        """Return documents by their score beside the query, best first: ``top_n`` of them."""
        if top_n is not None and top_n < 0:
            raise InvalidRequestError(f"is {top_n}: give a number from 0 on", "top_n")
        outputs = self.score(query, list(documents), **options)
        for output in outputs:
            if output.error is not None:
                raise InvalidRequestError(output.error, "documents")
        scores = [_score_of(output) for output in outputs]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [
            RankedDocument(index, documents[index], scores[index]) for index in order[: top_n or None]
        ]

    def _cross_scores(
        self,
        first: Sequence[Any],
        second: Sequence[Any],
        params: PoolingParams | None,
        truncate: int | None,
        use_tqdm: UseTqdm,
    ) -> list[PoolingRequestOutput]:
        params = params or PoolingParams(task="classify")
        self._facts.check(params)
        if self._facts.size != 1:
            raise InvalidRequestError(
                f"this model has {self._facts.size} labels, and a score is of one", "model"
            )

        def prompt(index: int) -> PoolingPrompt:
            return self._texts.pair(first[index], second[index], truncate=truncate)

        outputs = self._pool(len(first), prompt, params, use_tqdm)
        return [_with(each, lambda data: ScoringOutput(float(data[0]))) for each in outputs]

    def _similarities(
        self,
        first: Sequence[Any],
        second: Sequence[Any],
        params: PoolingParams | None,
        truncate: int | None,
        use_tqdm: UseTqdm,
    ) -> list[PoolingRequestOutput]:
        """Compare embeddings; each text that is there several times is embedded once."""
        params = params or PoolingParams()
        self._facts.check(params)
        numbers: dict[Any, int] = {}
        for text in (*first, *second):
            numbers.setdefault(_key(text), len(numbers))
        texts = list(numbers)

        def prompt(index: int) -> PoolingPrompt:
            return self._texts.single(texts[index], truncate=truncate)

        pooled = self._pool(len(texts), prompt, params, use_tqdm)
        compare = similarity_of(self._facts.pooling.similarity)
        scored: list[PoolingRequestOutput] = []
        for a, b in zip(first, second, strict=True):
            left, right = pooled[numbers[_key(a)]], pooled[numbers[_key(b)]]
            tokens = [*left.prompt_token_ids, *right.prompt_token_ids]
            cached = left.num_cached_tokens + right.num_cached_tokens
            output = PoolingRequestOutput(right.request_id, None, tokens, cached)
            output.error = left.error or right.error
            if output.error is None:
                output.outputs = ScoringOutput(compare(_data(left), _data(right)))
            scored.append(output)
        return scored


def as_texts(given: Any, name: str = "prompts") -> list[Any]:
    """Return texts, or token ids, of any accepted form as a list. A list of integers is one
    text."""
    if isinstance(given, (str, Mapping)):
        given = [given]
    listed = [_text_of(each, name) for each in plain_list(given)]
    if listed and all(isinstance(plain(each), int) for each in listed):
        return [listed]
    return listed


def _text_of(given: Any, name: str) -> Any:
    """Return a text, or its ids, of a mapping as ``LLM.generate`` takes it."""
    if not isinstance(given, Mapping):
        return given if isinstance(given, str) else plain_list(given) if _is_list(given) else given
    unknown = [key for key in given if key not in ("prompt", "prompt_token_ids")]
    if unknown:
        raise InvalidRequestError(f"has {unknown[0]!r:.60}, which is not supported", name)
    ids = given.get("prompt_token_ids")
    return given.get("prompt") if ids is None else plain_list(ids)


def _is_list(given: Any) -> bool:
    return hasattr(given, "__iter__")


def _key(text: Any) -> Any:
    return text if isinstance(text, str) else tuple(text)


def _data(output: PoolingRequestOutput) -> np.ndarray:
    assert isinstance(output.outputs, PoolingOutput)
    data: np.ndarray = output.outputs.data
    return data


def _score_of(output: PoolingRequestOutput) -> float:
    assert isinstance(output.outputs, ScoringOutput)
    return output.outputs.score


def _with(output: PoolingRequestOutput, make: Callable[[np.ndarray], Any]) -> PoolingRequestOutput:
    """Return a result with ``make`` of its array in place of it."""
    if output.outputs is not None:
        output.outputs = make(_data(output))
    return output
