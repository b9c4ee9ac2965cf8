"""Pools hidden states: vectors of texts, of tokens, or scores of labels.

A text may come in several chunks, one after the other. What is kept of it between two steps is a
vector for each method, whose sums are taken token after token in float64: results do not depend on
where a text was cut, nor on what else was in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.base.errors import ModelFileError
from octavo.core.pooling_params import PoolingParams
from octavo.core.request import Request
from octavo.models.pooling import Dense, Norm, Pooling, Stage

if TYPE_CHECKING:
    from octavo.models.checkpoint import Checkpoint

Vectors = np.ndarray  # float32 [..., K]
_Apply = Callable[[Vectors], Vectors]


class Pooler:
    """Makes the results of pooling requests, as a model's files say.

    Args:
        pooling: what they say.
        stages: one function for each of its stages.
        size: values of its results.
    """

    def __init__(self, pooling: Pooling, stages: Sequence[_Apply], size: int):
        self.pooling = pooling
        self.size = size
        self._stages = stages
        self._under_way: dict[str, _Text] = {}

    def take(self, request: Request, start: int, hidden: np.ndarray) -> Vectors | None:
        """Take in the hidden states [n, K] of a request's tokens from ``start`` on; return its
        result with those of the last token, None before."""
        assert request.pooling is not None
        text = self._under_way.get(request.request_id)
        if text is None or start == 0:
            text = self._under_way[request.request_id] = _Text(start)
        text.add(hidden[text.end - start :], self._kept(request.pooling.params))
        if text.end < len(request.token_ids):
            return None
        del self._under_way[request.request_id]
        return self._result(text, request.pooling.params)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept of requests that have left."""
        for request_id in request_ids:
            self._under_way.pop(request_id, None)

    def _kept(self, params: PoolingParams) -> Sequence[str]:
        return ("rows",) if params.task == "token_embed" else self.pooling.methods

    def _result(self, text: _Text, params: PoolingParams) -> Vectors:
        pooled = [text.pooled(method) for method in self._kept(params)]
        vectors = pooled[0] if len(pooled) == 1 else np.concatenate(pooled)
        for apply in self._stages:
            vectors = apply(vectors)
        if params.task == "classify":
            return self._scores(vectors, params.use_activation)
        if params.dimensions is not None:
            vectors = vectors[..., : params.dimensions]
        wanted = params.use_activation
        if self.pooling.normalize if wanted is None else wanted:
            vectors = _normalized(vectors)
        return np.ascontiguousarray(vectors, dtype=np.float32)

    def _scores(self, outputs: Vectors, use_activation: bool | None) -> Vectors:
        if use_activation is False or self.pooling.activation == "identity":
            return outputs
        wide = outputs.astype(np.float64)
        if self.pooling.activation == "sigmoid":
            return (1 / (1 + np.exp(-wide))).astype(np.float32)
        powers = np.exp(wide - wide.max())
        return (powers / powers.sum()).astype(np.float32)


@dataclass(slots=True)
class _Text:
    """A text under way: the sum, or the vector, of each method so far."""

    end: int  # the position after the tokens so far
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    rows: list[np.ndarray] = field(default_factory=list)

    def add(self, hidden: np.ndarray, methods: Sequence[str]) -> None:
        if not len(hidden):
            return
        for method in methods:
            before = self.kept.get(method)
            match method:
                case "rows":
                    self.rows.append(hidden.copy())
                case "cls":
                    self.kept.setdefault(method, hidden[0].copy())
                case "last":
                    self.kept[method] = hidden[-1].copy()
                case "max":
                    most = hidden.max(axis=0)
                    self.kept[method] = most if before is None else np.maximum(before, most)
                case _:
                    rows = hidden.astype(np.float64)
                    if method == "weighted_mean":
                        rows *= np.arange(self.end + 1, self.end + 1 + len(hidden))[:, None]
                    if before is not None:
                        rows = np.concatenate([before[None], rows])
                    # Along the first axis numpy adds row after row.
                    self.kept[method] = np.add.reduce(rows, axis=0)
        self.end += len(hidden)

    def pooled(self, method: str) -> Vectors:
        if method == "rows":
            return self.rows[0] if len(self.rows) == 1 else np.concatenate(self.rows)
        vector, count = self.kept[method], self.end
        match method:
            case "mean":
                vector = vector / count
            case "mean_sqrt_len":
                vector = vector / math.sqrt(count)
            case "weighted_mean":
                vector = vector / (count * (count + 1) / 2)
        return vector.astype(np.float32)


def _normalized(vectors: Vectors) -> Vectors:
    wide = vectors.astype(np.float64)
    length = np.sqrt((wide * wide).sum(axis=-1, keepdims=True))
    scaled: Vectors = (wide / np.maximum(length, 1e-12)).astype(np.float32)
    return scaled


# -- stages ----------------------------------------------------------------------------------------


def create_pooler(pooling: Pooling, checkpoint: Checkpoint, width: int) -> Pooler:
    """Create the pooler of a model.

    Args:
        checkpoint: the model's files, which its stages are read from.
        width: values of a hidden state.

    Raises:
        ModelFileError: a tensor is missing, or of a shape that does not fit.
    """
    read = _Reader(checkpoint)
    size = width * len(pooling.methods)
    stages: list[_Apply] = []
    for stage in pooling.stages:
        apply, size = read.stage(stage, size)
        stages.append(apply)
    if pooling.is_classifier and size != len(pooling.labels):
        raise ModelFileError(
            checkpoint.path, f"its head has {size} outputs, for {len(pooling.labels)} labels"
        )
    return Pooler(pooling, stages, size)


class _Reader:
    """Reads the tensors of stages."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint

    def stage(self, stage: Stage, size: int) -> tuple[_Apply, int]:
        """Return a stage of vectors of ``size`` values, and the values that it makes of them."""
        weight = self._floats(stage, stage.weight)
        if isinstance(stage, Dense) and stage.rows:
            weight = np.ascontiguousarray(weight[list(stage.rows)])
        is_dense = isinstance(stage, Dense)
        if weight.ndim != (2 if is_dense else 1) or weight.shape[-1] != size:
            raise self._error(
                stage, stage.weight, f"{list(weight.shape)} does not fit {size} values"
            )
        outputs = len(weight)
        bias = np.zeros(outputs, np.float32)
        if stage.bias is not None:
            bias = self._floats(stage, stage.bias)
            if bias.shape != (outputs,):
                raise self._error(stage, stage.bias, f"{list(bias.shape)}, for {outputs} outputs")
        if isinstance(stage, Norm):
            return _LayerNorm(weight, bias, stage.eps), outputs
        return _Affine(weight, bias, _ACTIVATIONS[stage.activation]), outputs

    def _floats(self, stage: Stage, name: str) -> np.ndarray:
        if not stage.folder:
            if name not in self._checkpoint.tensors:
                raise ModelFileError(self._checkpoint.path, "a head lacks this tensor", field=name)
            return self._checkpoint.read(name).floats()
        return _floats_of_file(self._file(stage), name)

    def _file(self, stage: Stage) -> Path:
        return self._checkpoint.path / stage.folder / "model.safetensors"

    def _error(self, stage: Stage, name: str, reason: str) -> ModelFileError:
        path = self._file(stage) if stage.folder else self._checkpoint.path
        return ModelFileError(path, f"a stage of the pooling: {reason}", field=name)


def _floats_of_file(path: Path, name: str) -> np.ndarray:
    """Return a tensor of one of a module's own files, float32."""
    from octavo.base.model_files import ModelFolder
    from octavo.quantization.base import StoredWeight
    from octavo.quantization.ggml_types import FLOAT_TYPES

    folder = ModelFolder(path.parent, path.parent.parent.resolve())
    if folder.find(path.name) is None:
        raise ModelFileError(path, "there is no such file, and pickled weights are not read")
    from octavo.models.safetensors import SafetensorsFile  # engine folders do without

    file = SafetensorsFile(path)
    if name not in file.tensors:
        raise ModelFileError(path, "is missing", field=name)
    dtype, shape = file.tensors[name]
    types = {each.name: each for each in FLOAT_TYPES}
    if dtype not in types:
        raise ModelFileError(path, f"tensors of {dtype} are not supported here", field=name)
    return StoredWeight(types[dtype], file.data(name), shape).floats().copy()


@dataclass(frozen=True, slots=True)
class _Affine:
    weight: np.ndarray  # [N, K]
    bias: np.ndarray
    activation: Callable[[np.ndarray], np.ndarray]

    def __call__(self, vectors: Vectors) -> Vectors:
        if vectors.ndim == 1:
            return self.activation(self.weight @ vectors + self.bias)
        # Row by row: the rounding of a product of many depends on how many they are.
        return np.stack([self(row) for row in vectors])


@dataclass(frozen=True, slots=True)
class _LayerNorm:
    weight: np.ndarray
    bias: np.ndarray
    eps: float

    def __call__(self, vectors: Vectors) -> Vectors:
        wide = vectors.astype(np.float64)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        normed = centred / np.sqrt(variance + self.eps) * self.weight + self.bias
        return normed.astype(np.float32)


def _gelu(x: np.ndarray) -> np.ndarray:
    erf = np.array([math.erf(value) for value in (x * math.sqrt(0.5)).tolist()])
    return (0.5 * x * (1 + erf)).astype(np.float32)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return (0.5 * x * (1 + np.tanh(inner))).astype(np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


_ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "silu": lambda x: (x * _sigmoid(x)).astype(np.float32),
    "sigmoid": _sigmoid,
}
