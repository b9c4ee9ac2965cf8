"""The backend that runs a model of the transformers library, with octavo's scheduler and KV cache.

It is slower than octavo's kernels, and serves the families that octavo does not implement.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

import torch
from torch import nn

from octavo.base.errors import ConfigError
from octavo.core.executor import Probe
from octavo.kernels.cpu import library
from octavo.kernels.dispatch import create_ops
from octavo.models.config import ModelConfig
from octavo.models.footprint import WeightMatrix
from octavo.models.transformers_model import TransformersModel
from octavo.runtime.capacity import RankLimits, RankSpec, kv_dtype_of
from octavo.runtime.eager_forward import EagerForward
from octavo.runtime.forward import ObservedRunner
from octavo.runtime.kv_cache import KVCache, create_kv_cache
from octavo.runtime.memory_ledger import MemoryLine, activations_line
from octavo.runtime.torch_probe import DeviceProbe, arithmetic_of


class TransformersBackend:
    """A :class:`octavo.runtime.backends.Backend`. ConfigError for settings that need octavo's
    kernels."""

    name = "transformers"
    isa = None
    most_kv_layers = None
    pool = None
    has_window_tables = True
    has_sinks = False

    def __init__(self, spec: RankSpec, model: TransformersModel, model_config: ModelConfig):
        _check(spec)
        self._spec, self._model, self._model_config = spec, model, model_config
        weights = {p.data_ptr(): p.nbytes for p in model.model.parameters()}
        self.weights_bytes = sum(weights.values())
        torch.set_num_threads(
            spec.threads or min(torch.get_num_threads(), library.usable_threads())
        )

    def planned_memory(self) -> Sequence[MemoryLine]:
        """Estimate the memory of temporary tensors: the activations of two layers."""
        model, spec = self._model_config, self._spec
        values = 8 * model.hidden_size + 4 * model.intermediate_size
        value_bytes = getattr(torch, spec.dtype).itemsize + 4
        num_bytes = spec.max_num_batched_tokens * values * value_bytes
        logits_bytes = 24 * spec.max_num_seqs * model.vocab_size
        return (activations_line(num_bytes + logits_bytes, "estimated"),)

    def create_forward(self, limits: RankLimits, depths: Collection[int] = ()) -> EagerForward:
        if depths:
            raise ConfigError(
                f"hidden states of {self._model_config.name}: layers of transformers show none; "
                "leave the speculative method out that needs them"
            )
        spec, model = self._spec, self._model_config
        device = torch.device(spec.device)
        kv_cache = create_kv_cache(
            model.kv_layers, kv_dtype_of(spec, is_native=False), spec.block_size, limits, device
        )
        return _TransformersForward(
            self._model,
            kv_cache,
            create_ops(spec.dtype),
            device,
            limits,
        )


class _TransformersForward(EagerForward):
    model: TransformersModel

    def open_loras(self, dtype: str) -> NoReturn:
        raise ConfigError(
            "adapters: a model that transformers runs has none here; set model_impl to octavo, or "
            "merge the adapter into the model"
        )

    def probe(self, runner: ObservedRunner) -> Probe:
        dtype = getattr(torch, self._ops.dtype)
        return _Probe(runner, self.model, self.kv_cache, self._device, dtype)


class _Probe(DeviceProbe):
    """The probe of a transformers model, whose matrices are its ``nn.Linear`` modules."""

    def __init__(
        self,
        runner: ObservedRunner,
        model: TransformersModel,
        cache: KVCache,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__(runner, cache, device, dtype)
        self._model = model.model

    def matrices(self) -> list[WeightMatrix]:
        head = self._model.get_output_embeddings()
        return [
            WeightMatrix(
                module is head,
                module.weight.numel(),
                module.weight.nbytes,
                arithmetic_of(module.weight.dtype),
            )
            for module in self._model.modules()
            if isinstance(module, nn.Linear)
        ]


def _check(spec: RankSpec) -> None:
    for name, value, usual in (
        ("kernels", spec.kernels, ("auto", "reference")),
        ("activations", spec.activations, ("auto",)),
        ("batch_invariant", spec.batch_invariant, (False,)),
    ):
        if value not in usual:
            raise ConfigError(
                f"{name} {value}: a model that transformers runs has no kernels of octavo's; leave "
                "the setting out, or set model_impl to octavo"
            )
