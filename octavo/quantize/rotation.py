"""Rotates the residual stream of a model, which keeps its function, so that weights round better.

Some channels have weights many times as large as others, which then determine the scale of a whole
row. In rotated coordinates outliers are spread over all channels. The rotation costs nothing at run
time, since a rotation R of the stream can be folded into all matrices that read and write it
(QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406: its R1 and R2, drawn at random and not
learned; R3 and R4, which are computed at run time, are left out). With W [N, K]::

    embedding              E R
    q, k, v, gate, up      W diag(norm) R          the norm before it becomes ones: |x R| = |x|
    o, down                R^T W                   their biases b R
    head                   W diag(last norm) R     a tied one is no longer the embedding
    v, then o              R2^T Wv, Wo R2          one R2 for each key-value head, whose query
                                                   heads share it; the bias of v: b R2

``RotatedCheckpoint`` takes the place of a checkpoint, so that it works with every method and every
format. A matrix is computed in float64 each time it is read, and is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.models.checkpoint import Checkpoint, TensorEntry
from octavo.models.config import EMBEDDING, HEAD, ModelConfig
from octavo.models.family import Family, HFNames, TensorNames
from octavo.models.llama import LlamaForCausalLM
from octavo.models.loader import load_checkpoint
from octavo.models.registry import model_class
from octavo.models.tensor_map import source_of
from octavo.quantization.base import StoredWeight, Weight, float_bytes
from octavo.quantization.ggml_types import FLOAT_TYPES, GGMLType
from octavo.quantization.tensors import WeightTensor, to_torch
from octavo.quantization.upload import Upload
from octavo.quantize.hadamard import OrthogonalRotation, random_rotation

_LAST_NORM = "model.norm.weight"
_NORM_OF_READERS = {
    "self_attn.q_proj": "input_layernorm.weight",
    "self_attn.k_proj": "input_layernorm.weight",
    "self_attn.v_proj": "input_layernorm.weight",
    "mlp.gate_proj": "post_attention_layernorm.weight",
    "mlp.up_proj": "post_attention_layernorm.weight",
}
_FOLDED_NORMS = set(_NORM_OF_READERS.values())
_WRITERS = {"self_attn.o_proj", "mlp.down_proj"}


class RotatedCheckpoint:
    """A ``Checkpoint`` of the same model with its residual stream and its value heads rotated.

    Tensors have the names of parameters and the layout of ``origin``. ``seed`` draws the rotations.

    Raises:
        ConfigError: the model has norms between a branch and the stream, as Gemma 3 has: a rotation
            cannot be folded past their weights for channels. Or its layers are not Llama's.
        ModelError: the checkpoint cannot be loaded.
    """

    def __init__(self, origin: Checkpoint, seed: int = 0):
        stored = origin.config()
        load_checkpoint(origin, stored)  # raises for a bad checkpoint, and reads little
        sources = source_of(origin, stored)
        if any(name.endswith("pre_feedforward_layernorm.weight") for name in sources):
            raise ConfigError(
                f"{origin.path} cannot be rotated: in a {stored.architecture} a norm with a weight "
                "for each channel follows attention and MLP, and a rotation of the channels cannot "
                "be folded past it. Leave the rotation out"
            )
        if not issubclass(model_class(stored.architecture), LlamaForCausalLM):
            raise ConfigError(
                f"{origin.path} cannot be rotated: a {stored.architecture} has other layers than "
                "Llama, and only those can be. Leave the rotation out"
            )
        if stored.tie_embeddings:
            sources[HEAD] = sources[EMBEDDING]
        self.origin = origin
        self.tensors: Mapping[str, TensorEntry] = {
            name: origin.tensors[source.tensor] for name, source in sources.items()
        }
        self._sources, self._stored, self._seed = sources, stored, seed
        self._stream = random_rotation(1, stored.hidden_size, np.random.default_rng([seed, 0]))

    @property
    def path(self) -> Path:
        return self.origin.path

    @property
    def files(self) -> list[Path]:
        return self.origin.files

    @property
    def quantization(self) -> str | None:
        return self.origin.quantization

    def config(self) -> ModelConfig:
        return replace(self._stored, tie_embeddings=False)

    def names(self, family: Family) -> TensorNames:
        return HFNames()

    def read(self, name: str) -> Weight:
        weight = self._sources[name].read(self.origin)
        if name == EMBEDDING:
            return RotatedWeight(weight, inputs=self._stream)
        if name == HEAD:
            return RotatedWeight(weight, self._norm(_LAST_NORM), self._stream)
        if name == _LAST_NORM:
            return _ones(weight)
        if name.startswith("model.layers."):
            index, _, part = name.removeprefix("model.layers.").partition(".")
            return self._read_of_layer(int(index), part, weight)
        return weight

    def _read_of_layer(self, index: int, part: str, weight: Weight) -> Weight:
        module, _, kind = part.rpartition(".")
        if part in _FOLDED_NORMS:
            return _ones(weight)
        gain = inputs = outputs = None
        if module in _NORM_OF_READERS and kind == "weight":
            gain = self._norm(f"model.layers.{index}.{_NORM_OF_READERS[module]}")
            inputs = self._stream
        if module == "self_attn.v_proj":
            outputs = self._values(index)
        if module in _WRITERS:
            outputs = self._stream
        if part == "self_attn.o_proj.weight":
            group = self._stored.num_heads // self._stored.num_kv_heads
            inputs = self._values(index).repeated(self._stored.head_dim, group)
        if inputs is None and outputs is None:
            return weight
        return RotatedWeight(weight, gain, inputs, outputs)

    def _norm(self, name: str) -> np.ndarray:
        return self._sources[name].read(self.origin).floats().astype(np.float64)

    def _values(self, index: int) -> OrthogonalRotation:
        """The rotation R2 of all key-value heads of a layer."""
        rng = np.random.default_rng([self._seed, 1 + index])
        return random_rotation(self._stored.num_kv_heads, self._stored.head_dim, rng)


@dataclass(frozen=True, slots=True, eq=False)
class RotatedWeight:
    """A ``Weight`` outputs^T source diag(gain) inputs, which is computed when it is read.

    ``source``: [N, K], or a bias [N], which only ``outputs`` applies to. ``gain``: float64 [K].
    Factors that are None are left out.
    """

    source: Weight
    gain: np.ndarray | None = None
    inputs: OrthogonalRotation | None = None
    outputs: OrthogonalRotation | None = None

    format = "rotated"
    is_quantized = False
    mapped = ()  # the rows of the files are not these rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def narrow(self, start: int, stop: int | None, step: int = 1) -> Weight:
        if self.outputs is None:  # rows are independent
            return replace(self, source=self.source.narrow(start, stop, step))
        return _stored(self.floats()[start:stop:step])

    def select(self, rows: np.ndarray) -> Weight:
        if self.outputs is None:
            return replace(self, source=self.source.select(rows))
        return _stored(self.floats()[rows])

    def floats(self) -> np.ndarray:
        source = self.source.dequantize() if len(self.shape) == 2 else self.source.floats()
        values = source.astype(np.float64)
        if self.gain is not None:
            values *= self.gain
        if self.inputs is not None:
            values = self.inputs.of_rows(values)
        if self.outputs is not None:
            values = self.outputs.of_rows(values.T).T
        return np.ascontiguousarray(values, dtype=np.float32)

    def dequantize(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        if self.outputs is None:
            return replace(self, source=self.source.narrow(start, stop)).floats()
        return self.floats()[start:stop]


@dataclass(frozen=True, slots=True)
class _RotatedTensor:
    """A weight tensor that is dequantized like a ``QuantizedTensor``, by computing it."""

    weight: RotatedWeight
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def dequantize(
        self, start: int = 0, stop: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        values = torch.from_numpy(self.weight.dequantize(start, stop)).to(self.device)
        return values if out is None else out.copy_(values)

    def select(self, rows: Tensor) -> Tensor:
        chosen = self.weight.select(rows.cpu().numpy())
        return torch.from_numpy(chosen.dequantize()).to(self.device)


@to_torch.register
def _(
    weight: RotatedWeight,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    upload: Upload | None = None,
) -> WeightTensor:
    return _RotatedTensor(weight, torch.device(device))


def _ones(weight: Weight) -> Weight:
    """A norm of ones in the type of the original one, from which the type of activations
    follows."""
    type = weight.type if isinstance(weight, StoredWeight) else GGMLType.F32
    assert type in FLOAT_TYPES, type
    return _stored(np.ones(weight.shape, np.float32), type)


def _stored(values: np.ndarray, type: GGMLType = GGMLType.F32) -> StoredWeight:
    rows = values.reshape(-1, values.shape[-1])
    return StoredWeight(type, float_bytes(rows, type), values.shape)
