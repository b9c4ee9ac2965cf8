"""Choice of the backend that runs a loaded model, and the backend of the native CPU kernels.

The others are the fused program of a GPU (``cuda_backend.py``) and ops of PyTorch on any device
(``torch_backend.py``), which are imported when they are needed. A backend is made before the size
of the KV cache is known, as that depends on the memory that the model leaves; then it creates the
forward pass over a KV cache of its own kind.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.base.errors import ConfigError, UnsupportedModelError
from octavo.base.optional_deps import ADD_GPU, need_torch
from octavo.kernels import dispatch
from octavo.kernels.cpu import library
from octavo.kernels.cpu.layout import (
    KV_CHUNK,
    KV_FORMATS,
    MAX_HEAD_SIZE,
    NIBBLE_TYPES,
    experts_bytes,
)
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.packed_weights import Progress
from octavo.kernels.fused_ops import CannotFuse
from octavo.kernels.parts import Stage
from octavo.kernels.stages import StageOps
from octavo.models.config import KVSpec, ModelConfig
from octavo.models.footprint import kv_layers_of
from octavo.runtime.capacity import RankLimits, RankSpec, StageLayers, kv_dtype_of
from octavo.runtime.forward import Forward
from octavo.runtime.memory_ledger import MemoryLine, scratch_line
from octavo.runtime.native_forward import NativeForward
from octavo.runtime.native_kv_cache import create_native_cache
from octavo.runtime.native_pooling import NativePooling
from octavo.runtime.op_program import NativeModel, StepPlan, plan_pooling, plan_step
from octavo.runtime.state_memory import create_state_memory

if TYPE_CHECKING:
    from octavo.models.registry import CausalLM

_log = logging.getLogger("octavo")

_MAX_LATENT = 4064  # and the rotated key; see csrc/latent.h


class Backend(Protocol):
    """The kernels for one model; ``name`` and ``isa`` are what the JSON outputs call them."""

    @property
    def name(self) -> str: ...
    @property
    def isa(self) -> str | None: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def pool(self) -> Pool | None:
        """The thread pool of native kernels, None without them."""
        ...

    def planned_memory(self) -> Sequence[MemoryLine]:
        """Return the memory that steps of the sizes of ``RankSpec`` take beside weights and the KV
        cache: on a GPU all of it; on a CPU, where half of the free memory is left over, only what
        is needed beside activations."""
        ...

    @property
    def has_window_tables(self) -> bool:
        """Whether layer groups have block tables of their own, so that sliding-window layers can
        free the blocks that have left the window."""
        ...

    @property
    def has_sinks(self) -> bool:
        """Whether requests may have attention sinks and a window (``core/sink_window.py``)."""
        ...

    @property
    def most_kv_layers(self) -> Sequence[KVSpec] | None:
        """KV of the rank of its group that has most; None: as `Part` deals it."""
        ...

    def create_forward(self, limits: RankLimits, depths: Collection[int] = ()) -> Forward:
        """Create the forward pass over a new KV cache.

        ``depths``: the hidden states to keep for a drafter. ConfigError if one cannot be kept.
        """
        ...


def choose_backend(
    spec: RankSpec,
    model: CausalLM,
    model_config: ModelConfig,
    files: Sequence[Path] = (),
    progress: Progress | None = None,
) -> Backend:
    """Choose the native kernels on a CPU and the fused ones on a GPU where they can run this model,
    else ops of PyTorch, unless ``spec`` says otherwise.

    ``files`` are the model's; packed weights are kept beside them. ConfigError if ``spec`` asks for
    kernels that cannot run.
    """
    check_invariance(spec)
    if spec.device != "cpu":
        need_torch(f"device {spec.device}")
        from octavo.runtime.device_memory import use_device

        use_device(spec.device)
    wanted, what = spec.kernels, "reference ops"
    if wanted == "auto":
        wanted = "native" if spec.device == "cpu" else "fused"
    if spec.pooling is not None and wanted == "fused":
        if spec.kernels == "fused":
            raise ConfigError("kernels fused: a GPU's step has a head; a model that pools has none")
        wanted = "reference"
    if wanted != "reference":
        try:
            if wanted == "native":
                return _native_backend(spec, model, model_config, files, progress)
            return _fused_backend(spec, model, model_config, progress)
        except (CannotFuse, UnsupportedModelError) as error:
            if spec.kernels != "auto" or spec.num_ranks > 1:
                raise ConfigError(f"kernels {wanted}: {error}") from error
            what = f"reference ops in place of {wanted} kernels ({error})"
            _log.warning(
                "reference ops instead of %s kernels, several times slower: %s", wanted, error
            )
    if spec.batch_invariant and spec.device != "cpu":
        raise ConfigError(f"batch_invariant: {what} leave the order of sums to libraries on a GPU")
    need_torch(what)
    from octavo.runtime.torch_backend import TorchBackend

    return TorchBackend(spec, model, model_config, progress)


def _native_backend(
    spec: RankSpec,
    model: CausalLM,
    model_config: ModelConfig,
    files: Sequence[Path],
    progress: Progress | None,
) -> Backend:
    if reason := why_not_native(spec, model_config):
        raise CannotFuse(reason)
    return NativeBackend(spec, model_config, pack_model(spec, model, files, progress))


def _fused_backend(
    spec: RankSpec, model: CausalLM, model_config: ModelConfig, progress: Progress | None
) -> Backend:
    if reason := why_not_fused(spec, model_config):
        raise CannotFuse(reason)
    need_torch("kernels fused")
    from octavo.runtime.cuda_backend import FusedBackend

    return FusedBackend(spec, model, model_config, progress)


def check_invariance(spec: RankSpec) -> None:
    """Raise ConfigError if ``batch_invariant`` is set where no backend can guarantee it."""
    if spec.batch_invariant and spec.device == "cpu" and spec.dtype != "float32":
        raise ConfigError(
            f"batch_invariant: on a CPU products in {spec.dtype} are left to libraries, which add "
            "up in an order of their own: set dtype to float32"
        )


def why_not_fused(spec: RankSpec, model_config: ModelConfig | None = None) -> str | None:
    """Return why the fused program cannot run here, None if it can: any model, or one."""
    if reason := _why_not_rounded(spec):
        return reason
    if model_config is not None and model_config.state_layers:
        return "there are no kernels of a GPU for recurrent layers"
    if spec.device == "cpu":
        return None
    if find_spec("triton") is None:
        return f"Triton is not installed: {ADD_GPU}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and there is none: install gcc, or name one in CC"
    if not has_python_headers():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return (
            "Triton compiles with Python's headers, and there is no Python.h: apt-get install "
            f"{python}-dev (dnf install {python}-devel)"
        )
    if (kv_dtype := kv_dtype_of(spec, is_native=False)) in NIBBLE_TYPES:
        return f"kernels of GPUs read no KV of {kv_dtype}: set --kv-cache-dtype to fp8 or int8"
    return None


def has_python_headers() -> bool:
    """Whether Python.h is installed, which Triton needs to compile kernel launchers."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme for /usr/local, which has no headers: Triton does not look there either.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").exists()


def _why_not_rounded(spec: RankSpec) -> str | None:
    """Return why the fused program cannot round activations as ``spec`` asks, None if it can."""
    if spec.activations == "mixed" or (spec.activations == "int8" and spec.device == "cpu"):
        return (
            f"activations {spec.activations} needs the native CPU kernels: on a GPU auto is 8 bits "
            "where the checkpoint was made for that, int8 is 8 bits for all weights of 8 bits by "
            "rows, and int16 rounds none"
        )
    if spec.activations == "int8" and spec.batch_invariant:
        return (
            "activations int8 are for products of many rows, and of few rows they stay as they "
            "are: not with batch_invariant"
        )
    return None


def why_not_native(spec: RankSpec, model_config: ModelConfig) -> str | None:
    """Return why the native kernels cannot run a model of this config here, None if they can."""
    reason = dispatch.why_not_native(spec.device, spec.dtype)
    if reason is not None:
        return reason
    head_dim, latent = model_config.head_dim, model_config.latent
    if latent is not None:
        if latent.kv_rank + latent.rope_dim > _MAX_LATENT:
            return f"latent vectors of {latent.kv_rank} values: {_MAX_LATENT} are the most"
    elif head_dim > MAX_HEAD_SIZE:
        return f"heads of {head_dim} values: {MAX_HEAD_SIZE} are the most"
    if spec.block_size % KV_CHUNK:
        return f"block_size {spec.block_size} is not a multiple of {KV_CHUNK}"
    return None


class NativeBackend:
    """Runs a step as one call of the native kernels, on a thread pool of octavo's.

    Args:
        prepare: packs the model's weights for a library, on the threads of a pool. Its exceptions
            are passed on.
    """

    name = "native"
    most_kv_layers = None
    has_window_tables = True
    has_sinks = True

    def __init__(
        self,
        spec: RankSpec,
        model_config: ModelConfig,
        prepare: Callable[[Library, Pool], NativeModel],
    ):
        self._spec, self._model_config = spec, model_config
        self._library = library.load()
        self.isa = self._library.isa
        self.pool = spec.pool or Pool(self._library, spec.threads or library.usable_threads())
        bind = _prefer_nodes(spec.numa_nodes) if spec.numa_nodes else None
        self._model = prepare(self._library, self.pool)
        if bind is not None:
            self._model = self._model.copied(_rows_of(spec, self._model.plan), bind)
        self._bind = bind
        self.weights_bytes = self._model.weights_bytes

    @property
    def shared(self) -> tuple[NativeModel, Library, Pool]:
        """The packed model, the library and the thread pool, for draft heads that share them."""
        return self._model, self._library, self.pool

    def layers_of(self, stage: Stage) -> StageLayers:
        """Return the layers with KV, and with states, of any stage of the model."""
        ops = self._model.plan.stage(stage)
        return StageLayers(ops.kv_layers, ops.state_layers)

    def planned_memory(self) -> Sequence[MemoryLine]:
        copies = (
            self._spec.part.size if self._spec.by_sequences else 1
        )  # of all heads, in each rank
        latent_bytes = copies * self._model.latent_bytes
        lines = [MemoryLine("weights of latent attention", latent_bytes, "counted")]
        experts, tokens = self._model_config.experts, self._spec.max_num_batched_tokens
        if experts is not None:
            sizes = self._model_config.hidden_size, experts.inner, experts.routing.top_k
            lines.append(scratch_line(experts_bytes(*sizes, tokens)))
        return lines

    def create_forward(self, limits: RankLimits, depths: Collection[int] = ()) -> Forward:
        spec, model, plan = self._spec, self._model_config, self._model.plan
        try:
            streams = plan.streams(depths)
        except CannotFuse as error:
            raise ConfigError(f"hidden states of {model.name}: {error}") from error
        own = plan.stage(spec.stage, streams.values())
        kv_cache = create_native_cache(
            self._library,
            kv_layers_of(model, spec.part),
            spec.block_size,
            KV_FORMATS[kv_dtype_of(spec, is_native=True)],
            limits,
            create_state_memory(
                model.state_layers_of(spec.part)[own.state_layers.start : own.state_layers.stop],
                limits.num_state_slots,
            ),
            own.kv_layers,
        )
        if self._bind is not None:
            self._bind(*kv_cache.memory_range)
        layout, max_tokens = kv_cache.layout(), limits.max_num_batched_tokens
        kept = streams.values() if spec.stage.is_last else own.outputs
        if plan.output is not None:
            kept = (plan.output,)
        program = self._model.create_program(
            *(self._library, self.pool, layout, max_tokens, kept),
            group=spec.group,
            part=spec.part,
            ops=own.ops,
        )
        arguments = program, kv_cache, limits, spec.shared_prefix_decode, streams
        if plan.output is not None:
            return NativePooling(plan.output, *arguments)
        if spec.num_ranks == 1:
            return NativeForward(*arguments)
        return _forward_of_rank(spec, own, arguments)


def _prefer_nodes(numbers: Sequence[int]) -> Callable[[int, int], object]:
    """Have this process allocate memory on these NUMA nodes; return a function that binds memory at
    an address, of a size, to them."""
    from octavo.system.numa import MemoryPolicy

    policy = MemoryPolicy(numbers)
    policy.prefer()
    return policy.bind


def _forward_of_rank(spec: RankSpec, own: StageOps, arguments: tuple[Any, ...]) -> Forward:
    """Return the forward of one of several ranks: the one that samples, or one of its followers."""
    if spec.by_sequences:
        from octavo.runtime.owned_sequences import OwnedForward, OwningForward

        return (OwningForward if spec.is_home else OwnedForward)(spec.part, *arguments)
    if spec.pipeline is None:
        from octavo.runtime.following_forward import FollowingForward
        from octavo.runtime.leading_forward import LeadingForward

        return LeadingForward(*arguments) if spec.is_home else FollowingForward(*arguments)
    from octavo.runtime.pipelined_forward import PipelinedForward
    from octavo.runtime.stage_forward import StageForward

    if spec.is_home:
        return PipelinedForward(spec.pipeline, own, *arguments)
    return StageForward(spec.pipeline, own, *arguments)


def _rows_of(spec: RankSpec, plan: StepPlan) -> dict[str, range]:
    """Return the rows of each matrix that a rank reads."""
    with_embedding = spec.is_home and spec.has_drafts
    return plan.rows_of(spec.part, spec.stage, with_embedding=with_embedding)


def pack_model(
    spec: RankSpec,
    model: CausalLM,
    files: Sequence[Path] = (),
    progress: Progress | None = None,
) -> Callable[[Library, Pool], NativeModel]:
    """Return a function that packs a loaded model's weights for a ``NativeBackend``.

    It raises CannotFuse if the model's ops do not fit the native kernels, UnsupportedModelError if
    a weight's format does not.
    """

    from octavo.kernels.cpu.pack_cache import open_or_pack  # an engine folder has none of that
    from octavo.models.loader import weights_bytes

    def prepare(library: Library, pool: Pool) -> NativeModel:
        make_plan = plan_step if spec.pooling is None else plan_pooling
        plan, weights = make_plan(model, spec.activations)
        packed = open_or_pack(
            weights,
            files,
            library,
            pool,
            home=spec.packed_folder,
            gathered=plan.gathered(),
            rows=_rows_of(spec, plan),
            progress=progress,
        )
        return NativeModel(plan, packed, weights_bytes(model))

    return prepare
