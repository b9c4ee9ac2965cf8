"""The backend that runs a model by PyTorch ops, where no kernels of octavo can run it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from octavo.base.errors import ConfigError
from octavo.kernels.cpu import library
from octavo.kernels.dispatch import create_ops
from octavo.layers.module import Module
from octavo.layers.tensors import with_tensors
from octavo.models.config import ModelConfig
from octavo.models.loader import weights_bytes
from octavo.models.registry import CausalLM
from octavo.runtime.capacity import RankLimits, RankSpec, kv_dtype_of
from octavo.runtime.device_memory import device_memory, explain_out_of_memory
from octavo.runtime.eager_forward import EagerForward
from octavo.runtime.kv_cache import create_kv_cache
from octavo.runtime.memory_ledger import (
    WEIGHTS,
    MemoryLine,
    activations_line,
    check_weights,
    logits_bytes,
    open_ledger,
    tokens_line,
)
from octavo.runtime.state_memory import create_state_memory

Progress = Callable[[int, int], None]

# Copies of logits while sampling: sorted, their indices, as probabilities and as sums of these.
_COPIES_OF_LOGITS = 5


class TorchBackend:
    """A model on the reference ops, one PyTorch call each."""

    isa = None
    most_kv_layers = None
    pool = None
    has_window_tables = True
    has_sinks = True

    def __init__(
        self,
        spec: RankSpec,
        model: CausalLM,
        model_config: ModelConfig,
        progress: Progress | None = None,
    ):
        if spec.activations != "auto":
            raise ConfigError(
                f"activations {spec.activations} needs the native CPU kernels, or a GPU's: the "
                "reference ops round none"
            )
        assert isinstance(model, Module)  # as all models of octavo
        self._spec, self._model_config = spec, model_config
        self._device = torch.device(spec.device)
        if self._device.type != "cpu":
            check_weights(device_memory(spec.device), weights_bytes(model))
        with explain_out_of_memory(
            WEIGHTS, lambda: open_ledger(device_memory(spec.device), 1.0, 0, ())
        ):
            self._model = with_tensors(model, self._device, getattr(torch, spec.dtype), progress)
        self.weights_bytes = weights_bytes(self._model)
        self._ops = create_ops(spec.dtype)
        self.name = self._ops.name
        torch.set_num_threads(
            spec.threads or min(torch.get_num_threads(), library.usable_threads())
        )

    def planned_memory(self) -> Sequence[MemoryLine]:
        """Estimate the memory of temporary tensors, whose peak is not known: activations in
        ``dtype`` and in float32, and one matrix in float32, the head at most."""
        model, spec = self._model_config, self._spec
        heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        values = 4 * model.hidden_size + 3 * model.intermediate_size + 2 * heads
        value_bytes = getattr(torch, spec.dtype).itemsize + 4
        num_bytes = spec.max_num_batched_tokens * values * value_bytes
        return (
            activations_line(num_bytes, "estimated"),
            MemoryLine(
                "a matrix in float32", 4 * model.vocab_size * model.hidden_size, "estimated"
            ),
            tokens_line(
                _COPIES_OF_LOGITS * logits_bytes(spec.max_num_seqs, model.vocab_size), "estimated"
            ),
        )

    def create_forward(self, limits: RankLimits, depths: Collection[int] = ()) -> EagerForward:
        model = self._model_config
        kv_cache = create_kv_cache(
            model.kv_layers,
            kv_dtype_of(self._spec, is_native=False),
            self._spec.block_size,
            limits,
            self._device,
        )
        return EagerForward(
            self._model,
            kv_cache,
            self._ops,
            self._device,
            limits,
            depths,
            create_state_memory(model.state_layers, limits.num_state_slots),
        )
