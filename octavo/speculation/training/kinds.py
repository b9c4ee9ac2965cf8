"""The kinds of heads: how one is made, and what its folder says and holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.safetensors_writer import NewTensor
from octavo.speculation.training.evaluation import acceptance, accuracies
from octavo.speculation.training.examples import Target
from octavo.speculation.training.heads import Head, MedusaHeads, RecurrentHead
from octavo.speculation.training.tree import grow

_TREE_NODES = 63
_GUESSES = 10  # of a head, that may be in a tree
# A recurrent head has this many times the hidden size inside: 4.4 million parameters at 576.
_INNER = 8 / 3
_INNER_MULTIPLE = 64


class Kind(Protocol):
    """``steps``: how many tokens ahead are trained."""

    @property
    def steps(self) -> int: ...

    def create(self, config: ModelConfig, seed: int) -> Head:
        """A head that is not trained yet."""
        ...

    def config(self, model: ModelConfig, target: Target, places: Tensor) -> dict[str, Any]:
        """What ``config.json`` says. ``places``: where it was right on held-out answers, as of
        ``evaluation.ranks``."""
        ...

    def tensors(self, head: Head, target: Target) -> Iterator[NewTensor]: ...


@dataclass(frozen=True, slots=True)
class Recurrent:
    """See ``heads.py``. Tensors are called as in ``RecurrentHead``, with the shortlist's rows in
    ``lm_head.weight`` and their ids in ``token_map``."""

    steps: int = 3
    num_layers: int = 1

    def create(self, config: ModelConfig, seed: int) -> RecurrentHead:
        inner = self._inner(config)
        return RecurrentHead(config.hidden_size, inner, self.num_layers, config.norm_eps, seed)

    def config(self, model: ModelConfig, target: Target, places: Tensor) -> dict[str, Any]:
        return {
            "architectures": ["OctavoRecurrentDraft"],
            "model_type": "octavo_recurrent_draft",
            "hidden_size": model.hidden_size,
            "intermediate_size": self._inner(model),
            "num_hidden_layers": self.num_layers,
            "vocab_size": model.vocab_size,
            "draft_vocab_size": len(target.shortlist),
            "rms_norm_eps": model.norm_eps,
            "hidden_act": "silu",
        }

    def tensors(self, head: Head, target: Target) -> Iterator[NewTensor]:
        yield _token_map(target)
        yield from _matrices(head.state_dict())
        yield _float("lm_head.weight", target.rows)

    def _inner(self, config: ModelConfig) -> int:
        multiples = round(config.hidden_size * _INNER / _INNER_MULTIPLE)
        return max(1, multiples) * _INNER_MULTIPLE


@dataclass(frozen=True, slots=True)
class Medusa:
    """As Medusa's own files and vLLM have it, the shortlist in ``token_map``."""

    steps: int = 3

    def create(self, config: ModelConfig, seed: int) -> MedusaHeads:
        return MedusaHeads(config.hidden_size, self.steps)

    def config(self, model: ModelConfig, target: Target, places: Tensor) -> dict[str, Any]:
        tree = grow(accuracies(places, _GUESSES), _TREE_NODES)
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

    def tensors(self, head: Head, target: Target) -> Iterator[NewTensor]:
        yield _token_map(target)
        yield from _matrices(head.state_dict())
        for index in range(self.steps):
            yield _float(f"lm_heads.{index}.weight", target.rows)


KINDS: Mapping[str, Callable[[], Kind]] = {"recurrent": Recurrent, "medusa": Medusa}


def described(kind: Kind, model: ModelConfig, target: Target, places: Tensor) -> dict[str, Any]:
    """The whole of ``config.json``; octavo's own figures are in ``octavo``."""
    config = kind.config(model, target, places)
    figures = {"acceptance": [round(rate, 4) for rate in acceptance(places)]}
    return {**config, "octavo": {**config.get("octavo", {}), **figures}}


def _token_map(target: Target) -> NewTensor:
    ids = target.shortlist.numpy().astype("<i8")
    return NewTensor("token_map", "I64", ids.shape, [ids])


def _matrices(tensors: Mapping[str, Tensor]) -> Iterator[NewTensor]:
    for name, tensor in tensors.items():
        yield _float(name, tensor)


def _float(name: str, tensor: Tensor) -> NewTensor:
    """Matrices in bfloat16, vectors in float32."""
    shape: Sequence[int] = tuple(tensor.shape)
    if len(shape) == 1:
        return NewTensor(name, "F32", tuple(shape), [tensor.detach().numpy()])
    half = tensor.detach().to(torch.bfloat16).view(torch.int16).numpy()
    return NewTensor(name, "BF16", tuple(shape), [np.ascontiguousarray(half)])
