"""What runs a loaded model: the native CPU kernels, or ops of PyTorch on any device
(``torch_backend.py``, which is imported when it is needed).

A backend is made for a model before it is known how much it is to hold, as that depends on what the
model leaves; then it makes the forward pass over a KV cache of its own kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo.errors import ConfigError, UnsupportedModelError
from octavo.extras import need_torch
from octavo.kernels.cpu import library
from octavo.kernels.cpu.fusion import CannotFuse
from octavo.kernels.cpu.layout import KV_CHUNK, KV_FORMATS
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.packed_weights import Progress
from octavo.kernels.dispatch import CANDIDATES, explain
from octavo.models.config import ModelConfig
from octavo.runtime.capacity import RankLimits, RankSpec, kv_dtype_of
from octavo.runtime.forward import Forward
from octavo.runtime.native_forward import NativeForward
from octavo.runtime.native_kv_cache import NativeKVCache
from octavo.runtime.op_program import NativeModel, plan_step

if TYPE_CHECKING:
    from octavo.models.registry import CausalLM

_log = logging.getLogger("octavo")

_MAX_HEAD_DIM = 256


class Backend(Protocol):
    """Made for one model; ``name`` and ``isa`` are what the JSON outputs call it."""

    @property
    def name(self) -> str: ...
    @property
    def isa(self) -> str | None: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def pool(self) -> Pool | None:
        """Its threads, if they are our own."""
        ...

    def create_forward(self, limits: RankLimits, depths: Collection[int] = ()) -> Forward:
        """``depths``: of the hidden states that are to be kept. ConfigError if one cannot be."""
        ...


def choose_backend(
    spec: RankSpec,
    model: CausalLM,
    model_config: ModelConfig,
    files: Sequence[Path] = (),
    progress: Progress | None = None,
) -> Backend:
    """The native kernels where they can run this model, unless ``spec`` says otherwise.

    ``files`` are the model's: packed weights are kept beside them. ConfigError if native kernels
    are asked for and cannot be had.
    """
    what = "reference ops"
    if spec.kernels != "reference":
        reason = why_not_native(spec, model_config)
        if reason is None:
            try:
                prepare = pack_model(spec, model, files, progress)
                return NativeBackend(spec, model_config, prepare)
            except (CannotFuse, UnsupportedModelError) as error:
                reason = str(error)
        if spec.kernels == "native":
            raise ConfigError(f"kernels native: {reason}")
        what = f"reference ops in place of native kernels ({reason})"
        _log.log(
            logging.WARNING if spec.device == "cpu" else logging.DEBUG,
            "reference ops instead of native kernels, several times slower: %s",
            reason,
        )
    need_torch(what)
    from octavo.runtime.torch_backend import TorchBackend

    return TorchBackend(spec, model, model_config, progress)


def why_not_native(spec: RankSpec, model_config: ModelConfig) -> str | None:
    """What keeps the native kernels from running a model of this config here, None if nothing."""
    for choice in explain(spec.device, spec.dtype, CANDIDATES):
        if choice.chosen != "native":
            return dict(choice.refused)["native"]
    head_dim = model_config.head_dim
    if head_dim % 16 or head_dim > _MAX_HEAD_DIM:
        return f"heads of {head_dim} values: only multiples of 16 up to {_MAX_HEAD_DIM} are native"
    if spec.block_size % KV_CHUNK:
        return f"block_size {spec.block_size} is not a multiple of {KV_CHUNK}"
    return None


class NativeBackend:
    """One native call a step, on our own threads.

    Args:
        prepare: makes the model for a library, with the threads of a pool. What it raises is
            raised here.
    """

    name = "native"

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
        self._model = prepare(self._library, self.pool)
        self.weights_bytes = self._model.weights_bytes

    @property
    def shared(self) -> tuple[NativeModel, Library, Pool]:
        """The model, and what runs it, for heads that go on from its hidden states."""
        return self._model, self._library, self.pool

    def create_forward(self, limits: RankLimits, depths: Collection[int] = ()) -> NativeForward:
        model = self._model_config
        kv_format = KV_FORMATS[kv_dtype_of(self._spec, is_native=True)]
        kept = model.kv_layers[0]
        kv_cache = NativeKVCache(
            self._library,
            model.num_layers,
            limits.num_blocks,
            self._spec.block_size,
            kept.num_kv_heads,
            kept.key_dim,
            kv_format,
            limits.kv_groups,
        )
        try:
            streams = self._model.plan.streams(depths)
        except CannotFuse as error:
            raise ConfigError(f"hidden states of {model.name}: {error}") from error
        layout, max_tokens = kv_cache.layout(), limits.max_num_batched_tokens
        program = self._model.create_program(
            self._library, self.pool, layout, max_tokens, streams.values()
        )
        return NativeForward(
            program,
            kv_cache,
            limits.max_num_seqs,
            limits.max_model_len,
            limits.max_num_batched_tokens,
            streams,
            1 if limits.kv_groups is None else limits.kv_groups.num_groups,
        )


def pack_model(
    spec: RankSpec,
    model: CausalLM,
    files: Sequence[Path] = (),
    progress: Progress | None = None,
) -> Callable[[Library, Pool], NativeModel]:
    """A loaded model for a ``NativeBackend``, its weights packed as ``choose_backend`` says.

    CannotFuse if its ops do not fit the native kernels, UnsupportedModelError if weights do not.
    """

    from octavo.kernels.cpu.pack_cache import open_or_pack  # an engine folder has none of that
    from octavo.models.loader import weights_bytes

    def prepare(library: Library, pool: Pool) -> NativeModel:
        plan, weights = plan_step(model, spec.activations)
        packed = open_or_pack(
            weights,
            files,
            library,
            pool,
            home=spec.packed_folder,
            gathered=plan.gathered(),
            progress=progress,
        )
        return NativeModel(plan, packed, weights_bytes(model))

    return prepare
