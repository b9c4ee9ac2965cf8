"""The kinds of draft heads, how each is created and trained, and the files of its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.base.fields import Fields
from octavo.draft_training.context_examples import ContextExamples
from octavo.draft_training.eagle import TrainableEagleHead, eagle_depths
from octavo.draft_training.evaluation import acceptance, accuracies
from octavo.draft_training.examples import (
    Examples,
    PositionExamples,
    TargetWeights,
    TrainingSequences,
)
from octavo.draft_training.medusa_tree import grow
from octavo.draft_training.stateless_heads import (
    TrainableHead,
    TrainableMedusaHeads,
    TrainableReDrafterHead,
)
from octavo.models.config import ModelConfig
from octavo.models.safetensors_writer import NewTensor
from octavo.speculation.eagle import ARCHITECTURES, layer_config

_TREE_NODES = 63
_TREE_RANKS = 10  # ranks of a head's tokens that may be in a tree
# The intermediate size of the recurrent head and of EAGLE's MLP, by the hidden size: 4.4 and 5.1
# million parameters at 576.
_INNER = 8 / 3
_INNER_MULTIPLE = 64


class DraftHeadKind(Protocol):
    """A kind of draft head: how it is created and trained, and what its folder holds."""

    @property
    def steps(self) -> int:
        """Number of tokens ahead that are trained."""
        ...

    def depths(self, model: ModelConfig) -> Sequence[int]:
        """The numbers of layers after which the head reads the residual stream, beside the last
        hidden state."""
        ...

    def examples(self, target: TargetWeights, sequences: TrainingSequences) -> Examples[Any]: ...

    def create(self, model: ModelConfig, target: TargetWeights, seed: int) -> TrainableHead[Any]:
        """Create an untrained head."""
        ...

    def config(self, model: ModelConfig, target: TargetWeights, places: Tensor) -> dict[str, Any]:
        """The contents of ``config.json``. ``places``: ``evaluation.ranks`` on held-out answers."""
        ...

    def tensors(self, head: TrainableHead[Any], target: TargetWeights) -> Iterator[NewTensor]: ...


@dataclass(frozen=True, slots=True)
class _StatelessKind:
    """The part that kinds without attention share: they read the last hidden state alone."""

    steps: int = 3

    def depths(self, model: ModelConfig) -> Sequence[int]:
        return ()

    def examples(self, target: TargetWeights, sequences: TrainingSequences) -> PositionExamples:
        return PositionExamples(target, sequences, self.steps)


@dataclass(frozen=True, slots=True)
class ReDrafterKind(_StatelessKind):
    """The ReDrafter head. Its tensors have the names of ``TrainableReDrafterHead``, with the
    shortlist's rows in ``lm_head.weight`` and their token ids in ``token_map``."""

    num_layers: int = 1

    def create(
        self, model: ModelConfig, target: TargetWeights, seed: int
    ) -> TrainableReDrafterHead:
        inner = _inner_size(model)
        return TrainableReDrafterHead(
            model.hidden_size, inner, self.num_layers, model.norm_eps, seed
        )

    def config(self, model: ModelConfig, target: TargetWeights, places: Tensor) -> dict[str, Any]:
        return {
            "architectures": ["OctavoRecurrentDraft"],
            "model_type": "octavo_recurrent_draft",
            "hidden_size": model.hidden_size,
            "intermediate_size": _inner_size(model),
            "num_hidden_layers": self.num_layers,
            "vocab_size": model.vocab_size,
            "draft_vocab_size": len(target.shortlist),
            "rms_norm_eps": model.norm_eps,
            "hidden_act": "silu",
        }

    def tensors(self, head: TrainableHead[Any], target: TargetWeights) -> Iterator[NewTensor]:
        yield _token_map(target)
        yield from _matrices(head.state_dict())
        yield _float("lm_head.weight", target.rows)


@dataclass(frozen=True, slots=True)
class MedusaKind(_StatelessKind):
    """Medusa heads, in the layout of Medusa and vLLM, with the shortlist in ``token_map``."""

    def create(self, model: ModelConfig, target: TargetWeights, seed: int) -> TrainableMedusaHeads:
        return TrainableMedusaHeads(model.hidden_size, self.steps)

    def config(self, model: ModelConfig, target: TargetWeights, places: Tensor) -> dict[str, Any]:
        tree = grow(accuracies(places, _TREE_RANKS), _TREE_NODES)
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": model.hidden_size,
            "num_heads": self.steps,
            "num_hidden_layers": 1,
            "vocab_size": model.vocab_size,
            "truncated_vocab_size": len(target.shortlist),
            "octavo": {"tree": [list(path) for path in tree]},
        }

    def tensors(self, head: TrainableHead[Any], target: TargetWeights) -> Iterator[NewTensor]:
        yield _token_map(target)
        yield from _matrices(head.state_dict())
        for index in range(self.steps):
            yield _float(f"lm_heads.{index}.weight", target.rows)


@dataclass(frozen=True, slots=True)
class EagleKind:
    """The EAGLE-3 head, in the published layout that ``speculation/eagle.py`` reads."""

    steps: int = 3

    def depths(self, model: ModelConfig) -> Sequence[int]:
        return eagle_depths(model.num_layers)

    def examples(self, target: TargetWeights, sequences: TrainingSequences) -> ContextExamples:
        return ContextExamples(target, sequences, self.steps)

    def create(self, model: ModelConfig, target: TargetWeights, seed: int) -> TrainableEagleHead:
        fields = Fields(Path("config.json"), self._layer(model))
        return TrainableEagleHead(layer_config(fields), len(self.depths(model)), target.norm, seed)

    def config(self, model: ModelConfig, target: TargetWeights, places: Tensor) -> dict[str, Any]:
        return {
            "architectures": [ARCHITECTURES[0]],
            **self._layer(model),
            "draft_vocab_size": len(target.shortlist),
            "eagle_aux_hidden_state_layer_ids": list(self.depths(model)),
            "norm_before_residual": True,
        }

    def tensors(self, head: TrainableHead[Any], target: TargetWeights) -> Iterator[NewTensor]:
        ids = target.shortlist.numpy()
        yield _integers("d2t", ids - np.arange(len(ids)))
        yield from _matrices(head.state_dict())
        yield _float("lm_head.weight", target.rows)
        listed = np.isin(np.arange(len(target.embedding)), ids)
        yield NewTensor("t2d", "BOOL", listed.shape, [listed])

    def _layer(self, model: ModelConfig) -> dict[str, Any]:
        """The fields of ``config.json`` for the one layer: attention heads as the model's, and its
        rope without scaling."""
        return {
            "model_type": "llama",
            "hidden_size": model.hidden_size,
            "intermediate_size": _inner_size(model),
            "num_hidden_layers": 1,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_eps,
            "rope_theta": model.rope.theta,
            "max_position_embeddings": model.max_position,
            "vocab_size": model.vocab_size,
        }


KINDS: Mapping[str, Callable[[], DraftHeadKind]] = {
    "recurrent": ReDrafterKind,
    "medusa": MedusaKind,
    "eagle": EagleKind,
}


def described(
    kind: DraftHeadKind, model: ModelConfig, target: TargetWeights, places: Tensor
) -> dict[str, Any]:
    """The contents of ``config.json``, with octavo's own figures under the key ``octavo``."""
    config = kind.config(model, target, places)
    figures = {"acceptance": [round(rate, 4) for rate in acceptance(places)]}
    return {**config, "octavo": {**config.get("octavo", {}), **figures}}


def _inner_size(model: ModelConfig) -> int:
    multiples = round(model.hidden_size * _INNER / _INNER_MULTIPLE)
    return max(1, multiples) * _INNER_MULTIPLE


def _token_map(target: TargetWeights) -> NewTensor:
    return _integers("token_map", target.shortlist.numpy())


def _integers(name: str, values: np.ndarray) -> NewTensor:
    return NewTensor(name, "I64", values.shape, [values.astype("<i8")])


def _matrices(tensors: Mapping[str, Tensor]) -> Iterator[NewTensor]:
    for name, tensor in tensors.items():
        yield _float(name, tensor)


def _float(name: str, tensor: Tensor) -> NewTensor:
    """A tensor of the file: bfloat16 for a matrix, float32 for a vector."""
    shape: Sequence[int] = tuple(tensor.shape)
    if len(shape) == 1:
        return NewTensor(name, "F32", tuple(shape), [tensor.detach().numpy()])
    half = tensor.detach().to(torch.bfloat16).view(torch.int16).numpy()
    return NewTensor(name, "BF16", tuple(shape), [np.ascontiguousarray(half)])
