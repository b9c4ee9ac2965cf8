"""The calls of `LLM` whose results are vectors and scores: embed, encode, classify, score and
rerank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

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
from octavo.serving.pooling_model import PoolingModel
from octavo.serving.pooling_texts import PoolingPrompt
from octavo.serving.progress import UseTqdm

T = TypeVar("T")


class Pool(Protocol):
    """Pools texts, batched together."""

    def __call__(
        self,
        count: int,
        prompt: Callable[[int], PoolingPrompt],
        params: PoolingParams,
        use_tqdm: UseTqdm,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
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

    def __init__(self, model: PoolingModel, pool: Pool):
        self._model, self._pool = model, pool

    def encode(
        self,
        prompts: Any,
        params: PoolingParams | None,
        task: Task | None,
        *,
        prompt_name: str | None = None,
        truncate: int | None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return results as arrays; the task is that of ``params``, if they are given, or the
        model's."""
        if params is None:
            params = PoolingParams(task=task or self._model.facts.pooling.task)
        elif task is not None and task != params.task:
            raise InvalidRequestError(
                f"{task}, and pooling_params have {params.task}", "pooling_task"
            )
        self._model.facts.check(params)
        listed, texts = as_texts(prompts), self._model.texts

        def prompt(index: int) -> PoolingPrompt:
            return texts.single(listed[index], prompt=prompt_name, truncate=truncate)

        return self._pool(len(listed), prompt, params, use_tqdm)

    def embed(
        self, prompts: Any, params: PoolingParams | None, **options: Any
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        outputs = self.encode(prompts, params, "embed", **options)
        return [_with(each, lambda data: EmbeddingOutput(data.tolist())) for each in outputs]

    def classify(
        self, prompts: Any, params: PoolingParams | None, **options: Any
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
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
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Score pairs of texts: of the first list with the second, of which the first may be a
        single text."""
        activation = None if params is None else params.use_activation
        first, second = as_texts(data_1, "data_1"), as_texts(data_2, "data_2")
        scoring = self._model.score(first, second, activation)
        if params is not None:
            self._model.facts.check(params)
            scoring.params = params

        def prompt(index: int) -> PoolingPrompt:
            return scoring.prompt(scoring.texts[index], truncate)

        pooled = self._pool(len(scoring.texts), prompt, scoring.params, use_tqdm)
        return [_scored([pooled[use] for use in uses], scoring.score) for uses in scoring.uses]

    def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, **options: Any
    ) -> list[RankedDocument]:
        """Return documents by their score beside the query, best first: ``top_n`` of them."""
        if top_n is not None and top_n < 1:
            raise InvalidRequestError(f"is {top_n}: give a number above 0", "top_n")
        scores = []
        for output in self.score(query, list(documents), **options):
            if output.outputs is None:
                raise InvalidRequestError(output.error or "no score", "documents")
            scores.append(output.outputs.score)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [RankedDocument(index, documents[index], scores[index]) for index in order[:top_n]]


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
        is_list = hasattr(given, "__iter__") and not isinstance(given, (str, bytes))
        return plain_list(given) if is_list else given
    unknown = [key for key in given if key not in ("prompt", "prompt_token_ids")]
    if unknown:
        raise InvalidRequestError(f"has {unknown[0]!r:.60}, which is not supported", name)
    ids = given.get("prompt_token_ids")
    return given.get("prompt") if ids is None else plain_list(ids)


def _scored(
    used: Sequence[PoolingRequestOutput[PoolingOutput]], score: Callable[..., float]
) -> PoolingRequestOutput[ScoringOutput]:
    """Return the output of a pair by the results that it is scored by."""
    ids = [token_id for each in used for token_id in each.prompt_token_ids]
    cached = sum(each.num_cached_tokens for each in used)
    arrays = [each.outputs.data for each in used if each.outputs is not None]
    scored = ScoringOutput(score(*arrays)) if len(arrays) == len(used) else None
    error = next((each.error for each in used if each.error is not None), None)
    return PoolingRequestOutput(used[-1].request_id, scored, ids, cached, error=error)


def _with(
    output: PoolingRequestOutput[PoolingOutput], make: Callable[[Any], T]
) -> PoolingRequestOutput[T]:
    """Return a result with ``make`` of its array in place of it."""
    made = None if output.outputs is None else make(output.outputs.data)
    ids, cached = output.prompt_token_ids, output.num_cached_tokens
    return PoolingRequestOutput(output.request_id, made, ids, cached, error=output.error)
