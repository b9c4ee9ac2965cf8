"""Runs a model on ops of PyTorch's, one call each: on a GPU, or where native kernels cannot."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from octavo.errors import ConfigError
from octavo.kernels.cpu import library
from octavo.kernels.dispatch import EAGER, create_ops
from octavo.kernels.kv_stores import CODECS
from octavo.layers.module import Module
from octavo.layers.tensors import with_tensors
from octavo.models.config import ModelConfig
from octavo.models.loader import weights_bytes
from octavo.models.registry import CausalLM
from octavo.runtime.capacity import RankLimits, RankSpec, kv_dtype_of
from octavo.runtime.eager_forward import EagerForward
from octavo.runtime.kv_cache import KVCache

Progress = Callable[[int, int], None]


def sees_gpu() -> bool:
    return torch.cuda.is_available()


def device_memory(device: str) -> tuple[int, int]:
    """Bytes of a GPU that are free, and that it has."""
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return free, total


class TorchBackend:
    """The reference ops, one call each."""

    isa = None
    pool = None

    def __init__(
        self,
        spec: RankSpec,
        model: CausalLM,
        model_config: ModelConfig,
        progress: Progress | None = None,
    ):
        if spec.activations != "auto":
            raise ConfigError(
                f"activations {spec.activations} needs the native CPU kernels: the reference ops "
                "round none"
            )
        assert isinstance(model, Module)  # as all of our own
        self._spec, self._model_config = spec, model_config
        self._device = torch.device(spec.device)
        self._model = with_tensors(model, self._device, getattr(torch, spec.dtype), progress)
        self.weights_bytes = weights_bytes(self._model)
        self._ops = create_ops(spec.device, spec.dtype, EAGER)
        self.name = self._ops.name
        torch.set_num_threads(
            spec.threads or min(torch.get_num_threads(), library.usable_threads())
        )

    def create_forward(self, limits: RankLimits, depths: Collection[int] = ()) -> EagerForward:
        model = self._model_config
        kept = model.kv_layers[0]
        kv_cache = KVCache(
            model.num_layers,
            limits.num_blocks,
            self._spec.block_size,
            kept.num_kv_heads,
            kept.key_dim,
            CODECS[kv_dtype_of(self._spec, is_native=False)],
            self._device,
            limits.kv_groups,
        )
        return EagerForward(
            self._model,
            kv_cache,
            self._ops,
            self._device,
            limits.max_num_seqs,
            limits.max_model_len,
            depths,
            limits.kv_groups,
        )
