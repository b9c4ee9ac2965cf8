"""Parameters of a request whose result is a vector and not text, validated when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from octavo.base.errors import InvalidRequestError

Task = Literal["embed", "token_embed", "classify"]
TASKS: tuple[Task, ...] = get_args(Task)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of a pooling request. Names are vLLM's.

    Args:
        task: "embed" is one vector for the text, "token_embed" one for each token, "classify" a
            number for each label of the model.
        dimensions: the first so many values of an embedding (Matryoshka); None: all.
        use_activation: whether an embedding is scaled to length 1, and scores of labels go through
            the model's sigmoid or softmax; None: as the model's files say.

    Raises:
        InvalidRequestError: a value cannot be.
    """

    task: Task = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidRequestError(f"must be one of {', '.join(TASKS)}: {self.task!r}", "task")
        size = self.dimensions
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise InvalidRequestError(f"must be a whole number above 0: {size!r}", "dimensions")
        if size is not None and self.task == "classify":
            raise InvalidRequestError("is for embeddings, and labels have none", "dimensions")
        if self.use_activation not in (None, True, False):
            raise InvalidRequestError(
                f"must be true or false: {self.use_activation!r}", "use_activation"
            )


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """Marks a request as one whose result is a vector, and says of what.

    Args:
        token_types: for each token, which of two texts it is of: 0 or 1; empty: all are 0.
        sees_all: its vector depends on hidden states of all tokens, so that none of them may come
            from the prefix cache.
    """

    params: PoolingParams
    token_types: tuple[int, ...] = ()
    sees_all: bool = True
