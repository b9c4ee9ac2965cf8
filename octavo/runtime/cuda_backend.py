"""The backend that runs a model's fused program, on a GPU or with PyTorch ops on the CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from octavo.base.errors import ConfigError
from octavo.kernels.cuda.device_group import ALONE, DeviceGroup, NcclGroup
from octavo.kernels.cuda.ops import StepOps
from octavo.kernels.cuda.packing import Upload, expanded, pack
from octavo.kernels.cuda.program import FusedProgram
from octavo.kernels.cuda.sampling import DeviceSampler
from octavo.kernels.cuda.weights import DeviceWeight, parts_of
from octavo.kernels.fused_ops import (
    CannotFuse,
    FusedEmbedding,
    FusedExperts,
    FusedHead,
    FusedLatentAttention,
    WeightRef,
    products_of,
)
from octavo.kernels.recorder import Value
from octavo.models.config import ModelConfig
from octavo.models.kv_groups import group_layers
from octavo.models.loader import weights_bytes
from octavo.models.registry import CausalLM
from octavo.quantization.base import Weight
from octavo.runtime.capacity import RankLimits, RankSpec, kv_dtype_of
from octavo.runtime.cuda_components import DeviceComponents, components_of
from octavo.runtime.cuda_forward import CudaForward, captured_shapes, num_logits_rows
from octavo.runtime.device_memory import (
    META_DEVICE,
    CountedMemory,
    MetaStream,
    device_memory,
    explain_out_of_memory,
)
from octavo.runtime.forward import ObservedRunner
from octavo.runtime.kv_cache import KVCache, create_kv_cache
from octavo.runtime.memory_ledger import (
    STEP,
    WEIGHTS,
    MemoryLedger,
    MemoryLine,
    activations_line,
    check_weights,
    gib,
    graphs_line,
    open_ledger,
    scratch_line,
    tokens_line,
)
from octavo.runtime.op_program import StepPlan, plan_step, share_of
from octavo.runtime.streams import Stream
from octavo.runtime.sum_plan import divide
from octavo.runtime.torch_probe import FusedProbe

Progress = Callable[[int, int], None]

_log = logging.getLogger("octavo")


class FusedBackend:
    """A model as fused ops, launched one after the other or replayed from a CUDA graph.

    ``components``: the kernels and queues of a device; by default those of ``spec.device``.

    Raises:
        CannotFuse: its ops cannot be fused, need what the kernels lack, or the kernels do not
            compile and run on this GPU.
    """

    name = "fused"
    isa = None
    has_window_tables = True
    has_sinks = False
    pool = None

    def __init__(
        self,
        spec: RankSpec,
        model: CausalLM,
        model_config: ModelConfig,
        progress: Progress | None = None,
        components: DeviceComponents | None = None,
    ):
        self._spec, self._model_config = spec, model_config
        self._components = components or components_of(spec)
        self._group = open_group(spec)
        self._plan, weights, self._kv_layers, self.most_kv_layers = divide(
            *plan_step(model), model_config.kv_layers, spec.part, spec.batch_invariant
        )
        if reason := self._components.why_not(self._plan.ops):
            raise CannotFuse(reason)
        self._weights = PackedDeviceWeights(self._plan, weights, self._components)
        if spec.device != "cpu":
            check_weights(device_memory(spec.device), weights_bytes(model))
        with explain_out_of_memory(WEIGHTS, self._ledger):
            self._weights.pack_all(progress)
        self._tell_activations()
        self.weights_bytes = self._weights.num_bytes
        if self._components.compiles:
            self._try_kernels()

    def _ledger(self) -> MemoryLedger:
        """The uses of the GPU's memory while weights are packed."""
        return open_ledger(device_memory(self._spec.device), 1.0, self._weights.num_bytes, ())

    def _tell_activations(self) -> None:
        """Warn if activations are to be rounded to int8 and no weight takes them so."""
        in_8_bits = torch.int8, torch.float8_e4m3fn
        if self._spec.activations == "int8" and not any(
            self._components.multiplied_as(part) in in_8_bits for part in self._weights.all_parts()
        ):
            _log.warning(
                "activations int8 change nothing for %s: it has no weights that this GPU "
                "multiplies so, which are int8, or FP8 in bfloat16 from compute capability 8.9 "
                "on, with one scale a row",
                self._model_config.name,
            )

    def _planned_limits(self) -> RankLimits:
        """Limits of the largest step, over a KV cache of one block."""
        spec = self._spec
        return RankLimits(
            num_blocks=1,
            max_num_seqs=spec.max_num_seqs,
            max_model_len=spec.max_model_len or self._model_config.max_position,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            kv_groups=group_layers(self._model_config.kv_layers),
        )

    def _try_kernels(self) -> None:
        """Compile and launch every kernel that steps use, while another backend can still be
        chosen. CannotFuse if the GPU, its driver or the compiler fails at one."""
        try:
            with explain_out_of_memory(STEP, self._ledger):
                forward = self._made_forward(self._planned_limits())
                self._components.compile_ahead(forward.warm_up)
                forward.warm_up()
        except ConfigError:
            raise
        except Exception as error:  # Triton, compilers and drivers raise many types
            raise CannotFuse(f"a kernel does not run on this GPU: {_in_a_line(error)}") from error

    def planned_memory(self) -> Sequence[MemoryLine]:
        """Return the memory that the start takes, counted by allocating all of it on ``meta``."""
        spec, limits = self._spec, self._planned_limits()
        kv_cache = self._create_kv_cache(limits, META_DEVICE)
        with CountedMemory() as counted:
            ops = self._create_ops(kv_cache, limits, META_DEVICE)
            scratch = counted.take()
            program = self._create_program(ops, kv_cache, limits, META_DEVICE)
            activations = counted.take()
            sampler = self._create_sampler(limits, META_DEVICE)
            self._create_forward(program, kv_cache, sampler, MetaStream(), limits)
            tokens = counted.take()
        lines = activations_line(activations), tokens_line(tokens), scratch_line(scratch)
        if spec.enforce_eager:
            return lines
        return *lines, graphs_line(len(captured_shapes(limits, program.ops_per_token)))

    def create_forward(self, limits: RankLimits, depths: Collection[int] = ()) -> CudaForward:
        try:
            kept = self._plan.streams(depths)
        except CannotFuse as error:
            raise ConfigError(f"hidden states of {self._model_config.name}: {error}") from error
        forward = self._made_forward(limits, kept)
        if self._components.compiles:
            begin = time.perf_counter()
            forward.warm_up()
            _log.info("kernels are there after %.1f s", time.perf_counter() - begin)
        forward.capture()
        return forward

    def _made_forward(
        self, limits: RankLimits, kept: Mapping[int, Value] = MappingProxyType({})
    ) -> CudaForward:
        """Create a forward with all of its memory, on a stream of its own."""
        here = self._components.device
        kv_cache = self._create_kv_cache(limits, here)
        ops = self._create_ops(kv_cache, limits, here)
        program = self._create_program(ops, kv_cache, limits, here, kept.values())
        sampler = self._create_sampler(limits, here)
        return self._create_forward(
            program, kv_cache, sampler, self._components.create_stream(), limits, kept
        )

    def _create_forward(
        self,
        program: FusedProgram,
        kv_cache: KVCache,
        sampler: DeviceSampler,
        stream: Stream,
        limits: RankLimits,
        kept: Mapping[int, Value] = MappingProxyType({}),
    ) -> CudaForward:
        kind, options = _forward_of(self._spec)
        return kind(
            program,
            kv_cache,
            sampler,
            stream,
            limits,
            lambda runner: self._create_probe(runner, kv_cache),
            captures=not self._spec.enforce_eager,
            runs_ahead=self._spec.async_scheduling,
            kept=kept,
            group=self._group,
            **options,
        )

    def _create_probe(self, runner: ObservedRunner, kv_cache: KVCache) -> FusedProbe:
        weights = [
            (isinstance(op, FusedHead), self._weights(together), share_of(op))
            for op in self._plan.ops
            if not isinstance(op, FusedEmbedding)
            for together in products_of(op)
        ]
        components = self._components
        return FusedProbe(
            runner, weights, components.multiplied_as, kv_cache, components.device, components.dtype
        )

    def _create_program(
        self,
        ops: StepOps,
        kv_cache: KVCache,
        limits: RankLimits,
        device: torch.device,
        kept: Collection[Value] = (),
    ) -> FusedProgram:
        return FusedProgram(
            self._plan.ops,
            ops,
            self._weights,
            kv_cache,
            self._components.dtype,
            device,
            limits.max_num_batched_tokens,
            num_logits_rows(limits),
            limits.max_model_len,
            kept,
            self._group,
        )

    def _create_ops(self, kv_cache: KVCache, limits: RankLimits, device: torch.device) -> StepOps:
        return self._components.create_ops(self._plan.ops, self._weights, kv_cache, limits, device)

    def _create_sampler(self, limits: RankLimits, device: torch.device) -> DeviceSampler:
        return self._components.create_sampler(self._model_config.vocab_size, limits, device)

    def _create_kv_cache(self, limits: RankLimits, device: torch.device) -> KVCache:
        return create_kv_cache(
            self._kv_layers,
            kv_dtype_of(self._spec, is_native=False),
            self._spec.block_size,
            limits,
            device,
            self._components.copy_units,
        )


def _forward_of(spec: RankSpec) -> tuple[type[CudaForward], dict[str, Any]]:
    """Return the forward of a rank, with its own options: alone, the first of a group, or one of
    its followers."""
    if spec.group is None:
        return CudaForward, {}
    from octavo.runtime.cuda_ranks import FollowingCudaForward, LeadingCudaForward

    if spec.part.rank == 0:
        return LeadingCudaForward, {"messages": spec.group}
    return FollowingCudaForward, {}


def open_group(spec: RankSpec) -> DeviceGroup:
    """Join the group that a rank's tensors are added up in. ConfigError if not all ranks come."""
    if spec.group is None:
        return ALONE
    assert spec.meeting_point is not None, "ranks of fused kernels meet at a file"
    spec.group.meet()  # a rank that waits here sees the end of another; in PyTorch it does not
    store = torch.distributed.FileStore(str(spec.meeting_point), spec.part.size)
    group = NcclGroup(store, spec.part.rank, spec.part.size, torch.device(spec.device))
    spec.group.when_aborted(group.abort)
    return group


def _in_a_line(error: Exception) -> str:
    """Return an error's type and the first line of its message, cut to 300 characters."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return f"{name}: {said[:300]}" if said else name


class PackedDeviceWeights:
    """The packed weights of a plan on a device. Matrices that are multiplied with the same rows are
    joined; each is packed once."""

    def __init__(
        self,
        plan: StepPlan,
        weights: dict[str, Weight],
        components: DeviceComponents,
    ):
        self._plan, self._weights, self._components = plan, weights, components
        self._made: dict[tuple[str, ...], DeviceWeight] = {}

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._made.values())

    def all_parts(self) -> Iterator[DeviceWeight]:
        """Yield each packed matrix; a joined matrix of several formats as its parts."""
        for weight in self._made.values():
            yield from parts_of(weight)

    def pack_all(self, progress: Progress | None) -> None:
        """Pack the weights of all fused ops, reading files once and in the order of ops.

        ``progress`` is called with (bytes read, bytes in all).
        """
        upload = self._components.create_upload()
        total, done = sum(weight.nbytes for weight in self._weights.values()), 0
        products = ((p, together) for p in self._plan.ops for together in products_of(p))
        for op, together in products:
            names = tuple(map(self._plan.name_of, together))
            if names not in self._made:
                self._made[names] = self._pack(
                    names,
                    upload,
                    as_one=isinstance(op, FusedExperts),
                    as_floats=isinstance(op, FusedLatentAttention),
                )
                done += sum(self._weights[name].nbytes for name in names)
                if progress is not None:
                    progress(done, total)
        self._tell_expanded()

    def __call__(self, matrices: Sequence[WeightRef]) -> DeviceWeight:
        names = tuple(map(self._plan.name_of, matrices))
        if names not in self._made:
            self._made[names] = self._pack(names)
        return self._made[names]

    def _pack(
        self, names: Sequence[str], upload: Upload | None = None, **forms: bool
    ) -> DeviceWeight:
        joined = [self._weights[name] for name in names]
        return pack(joined, self._components.device, self._components.dtype, upload, **forms)

    def _tell_expanded(self) -> None:
        found = expanded({", ".join(names): weight for names, weight in self._made.items()})
        for formats in sorted({formats for formats, _ in found.values()}):
            num_bytes = sum(size for name, size in found.values() if name == formats)
            _log.warning(
                "no kernel reads %s: %s of weights are kept as %s",
                formats,
                gib(num_bytes),
                str(self._components.dtype).removeprefix("torch."),
            )
