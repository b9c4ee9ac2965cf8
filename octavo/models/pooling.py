"""`Pooling`, by which the hidden states of a text become one vector.

    hidden states [T, K]  ──pooling──▶ [K] ──stages──▶ [N] ──normalize──▶  an embedding
                                                        └──activation────▶  scores of labels

``pooling_files.py`` reads it from the files of a model, and ``runtime/pooler.py`` does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

# How a vector is made of those of tokens: that of the first, of the last, their mean, their sum
# over the root of their number, their maximum; the mean weighted by 1, 2, 3, ...
Method = Literal["cls", "last", "mean", "mean_sqrt_len", "max", "weighted_mean"]
METHODS: tuple[Method, ...] = get_args(Method)

StageActivation = Literal["identity", "tanh", "gelu", "gelu_tanh", "relu", "silu", "sigmoid"]
ScoreActivation = Literal["identity", "sigmoid", "softmax"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


@dataclass(frozen=True, slots=True)
class Dense:
    """A stage: W x + b, activated.

    Args:
        weight, bias: the names of tensors; ``bias`` may be None.
        folder: of the model's folder, whose safetensors have them; empty: the model's own.
        rows: of the weight, where it is some of them: of a head over the vocabulary.
    """

    weight: str
    bias: str | None = None
    activation: StageActivation = "identity"
    folder: str = ""
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Norm:
    """A stage: a LayerNorm, whose tensors are named as those of `Dense`."""

    weight: str
    bias: str | None
    eps: float
    folder: str = ""


Stage = Dense | Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The way in which a model pools.

    Args:
        methods: of several, the vectors are joined one behind the other.
        normalize: embeddings are scaled to length 1.
        labels: of a classifier, whose scores the last stage makes; empty: it embeds.
        activation: what makes scores of a classifier's outputs.
        max_length: tokens of a text that its authors have it read; None: all positions.
        prompts: texts that go before others, by name. default_prompt: the name of one that goes
            before those for which none is named.
        similarity: the function by which its embeddings are compared.
        source: what said so, for people to read.
    """

    methods: tuple[Method, ...] = ("mean",)
    stages: tuple[Stage, ...] = ()
    normalize: bool = True
    labels: tuple[str, ...] = ()
    activation: ScoreActivation = "identity"
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    default_prompt: str | None = None
    similarity: Similarity = "cosine"
    source: str = ""

    @property
    def is_classifier(self) -> bool:
        return bool(self.labels)

    @property
    def task(self) -> Literal["embed", "classify"]:
        """The task that it does with a text, where none is asked for."""
        return "classify" if self.labels else "embed"

    @property
    def sees_last_alone(self) -> bool:
        """Whether the last token's hidden state is all that it needs."""
        return self.methods == ("last",)

    @property
    def tensors(self) -> frozenset[str]:
        """The names of the tensors of its stages in the model's own files."""
        names = (name for stage in self.stages if not stage.folder for name in _tensors(stage))
        return frozenset(names)


def _tensors(stage: Stage) -> tuple[str, ...]:
    return (stage.weight,) if stage.bias is None else (stage.weight, stage.bias)
