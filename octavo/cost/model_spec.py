"""The shape of a model: what its layers are made of, without a weight.

It is wider than ``octavo.models.config``, which describes what octavo runs: models of other
families can be planned too. ``spec_hf.py`` reads it from a ``config.json``, ``spec_gguf.py`` from a
GGUF file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from octavo.cost.mixers import Mixer
from octavo.cost.mlps import ExpertMlp, Mlp
from octavo.cost.weight_shape import Part, WeightShape

_VOCABULARY_UNIT = 64  # rows of an embedding that is shared out are padded to a multiple of these


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer; ``norm_size`` are values of its norms, those inside of the mixer left out.

    ``mixers`` are several where they work side by side (Falcon-H1), none where a layer is an MLP
    alone (Nemotron-H). ``beside``: other weights of it. ``has_last_norm``: what its MLP gives is
    normed before it is added to the hidden states.
    """

    mixers: tuple[Mixer, ...]
    mlp: Mlp | None
    norm_size: int
    beside: tuple[WeightShape, ...] = ()
    has_last_norm: bool = False

    @property
    def rows_after(self) -> int:
        """Rows of the hidden size that a token has between this layer and the next, where a stage
        of a pipeline may end (`octavo.kernels.stages`): the hidden states, and what the next
        layer's first op has yet to norm, or to add up of two MLPs."""
        adds_up = isinstance(self.mlp, ExpertMlp) and self.mlp.shared is not None
        return 2 if self.has_last_norm or adds_up else 1

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        for mixer in self.mixers:
            yield from mixer.weights(hidden)
        if self.mlp is not None:
            yield from self.mlp.weights(hidden)
        if self.norm_size:
            yield WeightShape("layernorm", "norm", self.norm_size)
        yield from self.beside


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only model of text.

    Args:
        max_position: tokens that it was made for.
        final_norm_size: values of the norms outside of the layers.
        learned_positions: rows of an embedding of positions, 0 without.
        head_bias: the head has one.
        inputs: other weights that come before the layers.
        other_params: parameters that are loaded beside it, such as those of a vision tower.
        dtype: of the weights that are not quantized, as its config says: ``bfloat16``...
        quantization: ``quantization_config`` of its config, if there is one.
        source: the folder or file that has the weights, None where only the shape is known.
        why_not_run: why octavo cannot run models of this family, for people; None if it can.
        notes: what there is to say of how its config was read.
    """

    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    tie_embeddings: bool
    max_position: int
    final_norm_size: int
    learned_positions: int = 0
    head_bias: bool = False
    inputs: tuple[WeightShape, ...] = ()
    other_params: int = 0
    dtype: str = "bfloat16"
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    source: Path | None = None
    why_not_run: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def layer_weights(self, first: int, last: int) -> Iterator[WeightShape]:
        """The weights of the layers from ``first`` to before ``last``."""
        for index in range(first, last):
            yield from _layer_weights(self.layers[index], self.hidden_size, index)

    def first_weights(self) -> Iterator[WeightShape]:
        """The tensors before the layers."""
        yield self._vocabulary_matrix("model.embed_tokens", "embedding", "")
        if self.learned_positions:
            yield WeightShape(
                "model.embed_positions", "embedding", self.learned_positions, self.hidden_size
            )
        yield from self.inputs
        if self.other_params:
            yield WeightShape("other", "other", self.other_params)

    def last_weights(self) -> Iterator[WeightShape]:
        """The tensors after the layers, with the head, whether or not it is the embedding."""
        if self.final_norm_size:
            yield WeightShape("model.norm", "norm", self.final_norm_size)
        yield self._vocabulary_matrix("lm_head", "head", "head")
        if self.head_bias:
            yield replace(self._vocabulary_matrix("lm_head.bias", "norm", ""), inputs=0)

    def _vocabulary_matrix(self, name: str, part: Part, op: str) -> WeightShape:
        units = -(-self.vocab_size // _VOCABULARY_UNIT)
        return WeightShape(name, part, self.vocab_size, self.hidden_size, op, units)


@lru_cache(maxsize=1024)  # layouts, precisions and devices are compared for the same models
def _layer_weights(layer: LayerSpec, hidden_size: int, index: int) -> tuple[WeightShape, ...]:
    return tuple(replace(weight, layer=index) for weight in layer.weights(hidden_size))
