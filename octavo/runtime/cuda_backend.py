"""Runs a model by its fused program: on a GPU, or with plain ops on the CPU, as its slow twin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from octavo.errors import ConfigError
from octavo.kernels.cuda.attention_plan import AttentionLimits, Gpu
from octavo.kernels.cuda.buffers import Buffers
from octavo.kernels.cuda.ops import FusedOps
from octavo.kernels.cuda.packing import pack
from octavo.kernels.cuda.plain_ops import PlainOps
from octavo.kernels.cuda.program import FusedProgram
from octavo.kernels.cuda.sampling import DeviceSampler
from octavo.kernels.cuda.weights import DeviceWeight
from octavo.kernels.fusion import CannotFuse, Matrix
from octavo.kernels.kv_stores import CODECS
from octavo.models.config import ModelConfig
from octavo.models.loader import weights_bytes
from octavo.models.registry import CausalLM
from octavo.quantization.base import Weight
from octavo.runtime.capacity import RankLimits, RankSpec, kv_dtype_of
from octavo.runtime.cuda_forward import CudaForward, num_logits_rows
from octavo.runtime.kv_cache import KVCache
from octavo.runtime.memory_ledger import (
    Line,
    activations_line,
    check_weights,
    graphs_line,
    logits_line,
)
from octavo.runtime.op_program import StepPlan, matrices_of, plan_step
from octavo.runtime.plain_sampler import PlainSampler
from octavo.runtime.streams import CudaStream, HostStream, Stream
from octavo.runtime.torch_backend import device_memory
from octavo.runtime.torch_probe import TorchProbe

Progress = Callable[[int, int], None]

# Tokens of a sequence, a draft's among them, for which attention still splits its keys.
_SPLIT_QUERIES = 16


class FusedBackend:
    """A model whose phases are launched one after the other, or replayed.

    CannotFuse if its ops do not make phases, or ask for what the kernels do not have.
    """

    name = "fused"
    isa = None
    pool = None

    def __init__(
        self,
        spec: RankSpec,
        model: CausalLM,
        model_config: ModelConfig,
        progress: Progress | None = None,
    ):
        self._spec, self._model, self._model_config = spec, model, model_config
        self._device = torch.device(spec.device)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        if self._device.type != "cpu":
            check_weights(device_memory(spec.device), weights_bytes(model))
        self._plan, weights = plan_step(model)
        self._weights = PackedOnce(self._plan, weights, self._device, self._dtype)
        total, done = sum(weight.nbytes for weight in weights.values()), 0
        for num_bytes in self._weights.pack_all():
            done += num_bytes
            if progress is not None:
                progress(done, total)
        self.weights_bytes = self._weights.num_bytes

    def planned_memory(self) -> Sequence[Line]:
        """What is allocated at the start, and graphs later."""
        tokens, seqs = self._spec.max_num_batched_tokens, self._spec.max_num_seqs
        nowhere = torch.device("meta")
        activations = Buffers(self._plan.phases, tokens, self._dtype, nowhere).num_bytes
        lines = activations_line(activations), logits_line(seqs, self._model_config.vocab_size)
        return lines if self._spec.enforce_eager else (*lines, graphs_line(seqs))

    def create_forward(self, limits: RankLimits, depths: Collection[int] = ()) -> CudaForward:
        try:
            kept = self._plan.streams(depths)
        except CannotFuse as error:
            raise ConfigError(f"hidden states of {self._model_config.name}: {error}") from error
        kv_cache = self._create_kv_cache(limits)
        ops, sampler, stream = self._create_kernels(kv_cache, limits)
        program = FusedProgram(
            self._plan.phases,
            ops,
            self._weights,
            kv_cache,
            self._dtype,
            self._device,
            limits.max_num_batched_tokens,
            num_logits_rows(limits),
            limits.max_model_len,
            kept.values(),
        )
        return CudaForward(
            program,
            kv_cache,
            sampler,
            stream,
            limits,
            lambda runner: TorchProbe(runner, self._model, kv_cache, self._device, self._dtype),
            captures=not self._spec.enforce_eager,
            kept=kept,
        )

    def _create_kernels(
        self, kv_cache: KVCache, limits: RankLimits
    ) -> tuple[FusedOps, DeviceSampler, Stream]:
        """What computes, what samples, and the queue of both."""
        if self._device.type == "cpu":
            return PlainOps(), PlainSampler(), HostStream()
        # These need Triton.
        from octavo.kernels.cuda.sampler import TritonSampler
        from octavo.kernels.cuda.triton_ops import create_triton_ops

        num_rows = num_logits_rows(limits)
        ops = create_triton_ops(
            self._plan.phases,
            self._weights,
            kv_cache,
            self._dtype,
            self._device,
            limits.max_num_batched_tokens,
            num_rows,
            AttentionLimits(limits.max_num_seqs, _SPLIT_QUERIES, limits.max_model_len),
            Gpu.of(self._device),
        )
        sampler = TritonSampler(num_rows, self._model_config.vocab_size, self._device)
        return ops, sampler, CudaStream(self._device)

    def _create_kv_cache(self, limits: RankLimits) -> KVCache:
        model = self._model_config
        return KVCache(
            model.num_layers,
            limits.num_blocks,
            self._spec.block_size,
            model.num_kv_heads,
            model.head_dim,
            CODECS[kv_dtype_of(self._spec, is_native=False)],
            self._device,
        )


class PackedOnce:
    """The weights of a plan on a device. Those that are multiplied with together are one matrix;
    one that is asked for again is there already."""

    def __init__(
        self,
        plan: StepPlan,
        weights: Mapping[str, Weight],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._plan, self._weights = plan, weights
        self._device, self._dtype = device, dtype
        self._made: dict[tuple[str, ...], DeviceWeight] = {}

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return sum(weight.nbytes for weight in self._made.values())

    def pack_all(self) -> Iterator[int]:
        """Pack what all phases multiply with; yields the bytes of the files, piece by piece."""
        for phase in self._plan.phases:
            matrices = list(matrices_of(phase))
            names = self._names(matrices)
            if names and names not in self._made:
                self(matrices)
                yield sum(self._weights[name].nbytes for name in names)

    def __call__(self, matrices: Sequence[Matrix]) -> DeviceWeight:
        names = self._names(matrices)
        if names not in self._made:
            joined = [self._weights[name] for name in names]
            self._made[names] = pack(joined, self._device, self._dtype)
        return self._made[names]

    def _names(self, matrices: Sequence[Matrix]) -> tuple[str, ...]:
        return tuple(map(self._plan.name_of, matrices))
