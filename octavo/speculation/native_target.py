"""Packed matrices, last norm and threads of the target model, which draft heads share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from octavo.base.errors import ConfigError
from octavo.kernels import fused_ops
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.library import Library, Pool
from octavo.layers.parameter import Parameter
from octavo.runtime.backends import NativeBackend

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.runtime.op_program import NativeModel
    from octavo.speculation.drafter import TargetModel

P = TypeVar("P", bound=fused_ops.FusedOp)


@dataclass(frozen=True, slots=True, eq=False)
class SharedMatrix:
    """A packed matrix of the target, shared and not copied."""

    shape: tuple[int, ...]
    struct: abi.Weight


def normalized(weight: np.ndarray, eps: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return an RMS norm as a function of float32 [..., width]."""

    def norm(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # values that are not finite stay so, and end the draft
            scale = 1 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(eps))
            y: np.ndarray = x * scale * weight
        return y

    return norm


class NativeTarget:
    """A target model that the native CPU kernels run, loaded and not started.

    Raises:
        ConfigError: names the ``method`` whose heads need the native kernels, if others run the
            model: heads read hidden states from native buffers, and share packed matrices.
    """

    def __init__(self, target: TargetModel, method: str):
        backend = target.rank.backend
        if not isinstance(backend, NativeBackend):
            raise ConfigError(
                f"speculative_config: method {method} needs the native CPU kernels, and "
                f"{target.model_config.name} is run by {target.rank.kernels} ops"
            )
        self.config: ModelConfig = target.model_config
        self.block_size: int = target.spec.block_size
        self._model: NativeModel
        self.library: Library
        self.pool: Pool
        self._model, self.library, self.pool = backend.shared

    @property
    def depth(self) -> int:
        """Number of layers before the last norm, which reads the hidden state at this depth."""
        return self.config.num_layers

    def last_norm(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return the last norm as a function of hidden states, float32 [..., hidden_size]."""
        _, norm = fused_ops.residual_stream(self._model.plan.ops, self.depth)
        return normalized(norm.weight, norm.eps)

    def share_norm(self, parameter: Parameter) -> Parameter:
        """Return a parameter that holds the weight of the last norm, in place of this one."""
        _, norm = fused_ops.residual_stream(self._model.plan.ops, self.depth)
        return parameter.holding(norm.weight)

    def share_embedding(self, parameter: Parameter) -> tuple[Parameter, float]:
        """Return a parameter that holds the target's embedding, and the scale of its rows."""
        embed = self._op(fused_ops.FusedEmbedding)
        return parameter.holding(self._shared(embed.weight)), embed.scale

    def share_head(self, parameter: Parameter) -> Parameter:
        """Return a parameter that holds the target's output head, in place of this one."""
        return parameter.holding(self._shared(self._op(fused_ops.FusedHead).weight))

    def _shared(self, matrix: fused_ops.WeightRef) -> SharedMatrix:
        struct = self._model.packed.struct(self._model.plan.name_of(matrix))
        return SharedMatrix(tuple(matrix.shape), struct)

    def _op(self, kind: type[P]) -> P:
        return next(op for op in self._model.plan.ops if isinstance(op, kind))
