"""The parts of the fused backend that differ by device: Triton kernels of a GPU, or PyTorch ops.

The ops of the CPU compute the same in plain PyTorch, slowly, to test the code around the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from octavo.kernels.cuda.attention_plan import AttentionLimits, Gpu
from octavo.kernels.cuda.gemm_dispatch import GemmConditions, multiplied_as
from octavo.kernels.cuda.ops import LayerStores, StepOps
from octavo.kernels.cuda.packing import Upload
from octavo.kernels.cuda.plain_ops import PlainOps
from octavo.kernels.cuda.sampling import DeviceSampler
from octavo.kernels.cuda.weights import DeviceWeight
from octavo.kernels.fused_ops import FusedLatentAttention, FusedOp, WeightRef
from octavo.quantization.upload import ChunkedUpload, CudaQueue
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.cuda_forward import num_logits_rows
from octavo.runtime.kv_cache import CopyUnits, copy_units
from octavo.runtime.plain_sampler import PlainSampler
from octavo.runtime.streams import CudaStream, HostStream, Stream
from octavo.system import machine

# The most query tokens of a sequence, drafts included, for which attention splits its keys.
_SPLIT_QUERIES = 16
_ROPE_DIMS = 16, 32, 64, 128  # sizes of rotated keys beside latent vectors

WeightOf: TypeAlias = Callable[[Sequence[WeightRef]], DeviceWeight]


class DeviceComponents(Protocol):
    """The kernels, sampler, stream and upload of a device.

    ``where``: the device that memory is allocated on, which may be META_DEVICE to count it.
    """

    device: torch.device
    dtype: torch.dtype  # of activations
    compiles: bool  # kernels are compiled when they are first launched

    def why_not(self, ops: Sequence[FusedOp]) -> str | None:
        """Return why it cannot run a model of these fused ops, None if it can."""
        ...

    def create_ops(
        self,
        ops: Sequence[FusedOp],
        weight_of: WeightOf,
        kv_cache: LayerStores,
        limits: RankLimits,
        where: torch.device,
    ) -> StepOps: ...

    def create_sampler(
        self, vocab_size: int, limits: RankLimits, where: torch.device
    ) -> DeviceSampler: ...

    def create_stream(self) -> Stream: ...

    def compile_ahead(self, launch: Callable[[], None]) -> None:
        """Compile in parallel the kernels that ``launch`` would launch, if it ``compiles``."""
        ...

    def create_upload(self) -> Upload | None:
        """Create an upload of weights to the device; None: host memory is the device's."""
        ...

    @property
    def copy_units(self) -> CopyUnits:
        """The function that copies blocks and slots of the KV cache."""
        ...

    def multiplied_as(self, weight: DeviceWeight) -> torch.dtype:
        """Return the type in which many rows are multiplied with a weight."""
        ...


def components_of(spec: RankSpec) -> DeviceComponents:
    """Return the components of a device. Those of the CPU are always batch-invariant, and never
    round activations to 8 bits."""
    device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
    if device.type == "cpu":
        return PlainComponents(dtype)
    conditions = GemmConditions(Gpu.of(device), dtype, spec.batch_invariant, spec.activations)
    return TritonComponents(device, conditions)


class PlainComponents:
    """The CPU, with ops of PyTorch."""

    device = torch.device("cpu")
    compiles = False
    copy_units = staticmethod(copy_units)

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def why_not(self, ops: Sequence[FusedOp]) -> None:
        return None

    def create_ops(
        self,
        ops: Sequence[FusedOp],
        weight_of: WeightOf,
        kv_cache: LayerStores,
        limits: RankLimits,
        where: torch.device,
    ) -> PlainOps:
        return PlainOps()

    def create_sampler(
        self, vocab_size: int, limits: RankLimits, where: torch.device
    ) -> PlainSampler:
        return PlainSampler()

    def create_stream(self) -> HostStream:
        return HostStream()

    def compile_ahead(self, launch: Callable[[], None]) -> None:
        pass

    def create_upload(self) -> None:
        return None

    def multiplied_as(self, weight: DeviceWeight) -> torch.dtype:
        return self.dtype


class TritonComponents:
    """A GPU, with Triton kernels, which are imported when they are needed."""

    compiles = True

    def __init__(self, device: torch.device, conditions: GemmConditions):
        self.device, self.dtype = device, conditions.dtype
        self._conditions = conditions

    def why_not(self, ops: Sequence[FusedOp]) -> str | None:
        for op in ops:
            if isinstance(op, FusedLatentAttention) and op.rope.rotary_dim not in _ROPE_DIMS:
                return (
                    f"keys of {op.rope.rotary_dim} values beside latent vectors: kernels of "
                    f"GPUs have {', '.join(map(str, _ROPE_DIMS))}"
                )
        return None

    def create_ops(
        self,
        ops: Sequence[FusedOp],
        weight_of: WeightOf,
        kv_cache: LayerStores,
        limits: RankLimits,
        where: torch.device,
    ) -> StepOps:
        from octavo.kernels.cuda.triton_ops import create_triton_ops

        return create_triton_ops(
            ops,
            weight_of,
            kv_cache,
            self.dtype,
            where,
            limits.max_num_batched_tokens,
            num_logits_rows(limits),
            AttentionLimits(limits.max_num_seqs, _SPLIT_QUERIES, limits.max_model_len),
            self._conditions.gpu,
            self._conditions.invariant,
            self._conditions.activations,
        )

    def create_sampler(
        self, vocab_size: int, limits: RankLimits, where: torch.device
    ) -> DeviceSampler:
        from octavo.kernels.cuda.sampler import TritonSampler

        return TritonSampler(num_logits_rows(limits), vocab_size, where)

    def create_stream(self) -> CudaStream:
        return CudaStream(self.device)

    def compile_ahead(self, launch: Callable[[], None]) -> None:
        from octavo.kernels.cuda.compile_ahead import compile_ahead

        compile_ahead(launch, machine.cpu().usable_cores)

    def create_upload(self) -> Upload:
        return ChunkedUpload(CudaQueue(self.device)).tensor

    @property
    def copy_units(self) -> CopyUnits:
        from octavo.kernels.cuda import kv_copy

        return kv_copy.copy_units

    def multiplied_as(self, weight: DeviceWeight) -> torch.dtype:
        return multiplied_as(weight, self._conditions)
