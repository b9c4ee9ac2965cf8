"""Facts about a model that pools, as JSON, and their reader: for the other end of a connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import InvalidRequestError
from octavo.core.pooling_params import PoolingParams
from octavo.models.pooling import Pooling


def pooling_facts(pooling: Pooling, size: int, num_types: int) -> dict[str, Any]:
    """Return the facts of a model as JSON.

    Args:
        size: values of its results.
        num_types: types of tokens that it knows.
    """
    return {
        "task": pooling.task,
        "size": size,
        "methods": list(pooling.methods),
        "normalize": pooling.normalize,
        "labels": list(pooling.labels),
        "prompts": dict(pooling.prompts),
        "default_prompt": pooling.default_prompt,
        "similarity": pooling.similarity,
        "num_types": num_types,
        "source": pooling.source,
    }


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """Facts about a model that pools, as its callers have to know them."""

    pooling: Pooling
    size: int
    num_types: int

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> PoolingFacts:
        """Return what ``pooling_facts`` wrote."""
        pooling = Pooling(
            methods=tuple(values["methods"]),
            normalize=values["normalize"],
            labels=tuple(values["labels"]),
            prompts=values["prompts"],
            default_prompt=values["default_prompt"],
            similarity=values["similarity"],
            source=values["source"],
        )
        return cls(pooling, values["size"], values["num_types"])

    def check(self, params: PoolingParams) -> None:
        """Raise InvalidRequestError if the model has no such results."""
        is_classifier = self.pooling.is_classifier
        if is_classifier != (params.task == "classify"):
            what = (
                "scores labels, and embeds nothing"
                if is_classifier
                else "embeds, and has no labels"
            )
            raise InvalidRequestError(f"{params.task}: this model {what}", "task")
        if params.dimensions is not None and params.dimensions > self.size:
            raise InvalidRequestError(
                f"{params.dimensions}, and embeddings of this model have {self.size}", "dimensions"
            )
