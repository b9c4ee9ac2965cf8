"""What runs a loaded model: the native CPU kernels, or ops of PyTorch on any device.

A backend knows its KV cache's type and size before there is one, since the pool is sized by them,
and then makes the runner that the executor gives its batches to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from octavo import hub
from octavo.config import EngineArgs, EngineConfig
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.executor.local import Runner
from octavo.kernels.cpu import abi, library
from octavo.kernels.cpu.fusion import CannotFuse, fuse
from octavo.kernels.cpu.program import KVLayout
from octavo.kernels.dispatch import CANDIDATES, EAGER, create_ops, explain
from octavo.models.config import ModelConfig
from octavo.models.footprint import kv_bytes_per_token
from octavo.models.registry import CausalLM
from octavo.runtime.kv_cache import NATIVE_CHUNK, TORCH_DTYPES, KVCache, NativeKVCache
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.native_runner import MAX_ROUNDS, NativeModelRunner
from octavo.runtime.op_program import create_program, pack_weights, record

_log = logging.getLogger("octavo")

# The types of the native KV cache, by what a user may call them.
_NATIVE_KV = {
    "auto": abi.OCT_KV_BF16,
    "bf16": abi.OCT_KV_BF16,
    "f32": abi.OCT_KV_F32,
    "int8": abi.OCT_KV_INT8,
}
_KV_NAMES = {abi.OCT_KV_BF16: "bfloat16", abi.OCT_KV_F32: "float32", abi.OCT_KV_INT8: "int8"}
_MAX_HEAD_DIM = 256

Progress = Callable[[int, int], None]


class Backend(Protocol):
    """Made for one model; ``name`` and ``isa`` are what the JSON outputs call it."""

    @property
    def name(self) -> str: ...
    @property
    def isa(self) -> str | None: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def max_rounds(self) -> int: ...

    def create_runner(self, config: EngineConfig) -> Runner: ...


def choose_backend(
    args: EngineArgs,
    model: CausalLM,
    model_config: ModelConfig,
    files: Sequence[Path],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Backend:
    """The native kernels where they can run this model, unless ``args`` say otherwise.

    ``files`` are the model's: packed weights are kept beside them. ConfigError if native kernels
    are asked for and cannot be had.
    """
    if args.kernels != "reference":
        reason = _why_not_native(args, model_config, device, dtype)
        if reason is None:
            try:
                return NativeBackend(args, model, model_config, files, progress)
            except (CannotFuse, UnsupportedModelError) as error:
                reason = str(error)
        if args.kernels == "native":
            raise ConfigError(f"kernels native: {reason}")
        _log.log(
            logging.DEBUG if device.type != "cpu" else logging.WARNING,
            "reference ops instead of native kernels, several times slower: %s",
            reason,
        )
    return TorchBackend(args, model, model_config, device, dtype)


def _why_not_native(
    args: EngineArgs, model_config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> str | None:
    for choice in explain(device, dtype, CANDIDATES):
        if choice.chosen != "native":
            return dict(choice.refused)["native"]
    head_dim = model_config.head_dim
    if head_dim % 16 or head_dim > _MAX_HEAD_DIM:
        return f"heads of {head_dim} values: only multiples of 16 up to {_MAX_HEAD_DIM} are native"
    if args.block_size % NATIVE_CHUNK:
        return f"block_size {args.block_size} is not a multiple of {NATIVE_CHUNK}"
    return None


class NativeBackend:
    """One native call a step, on our own threads. CannotFuse if the model's ops do not fit it."""

    name = "native"
    max_rounds = MAX_ROUNDS

    def __init__(
        self,
        args: EngineArgs,
        model: CausalLM,
        model_config: ModelConfig,
        files: Sequence[Path],
        progress: Progress | None,
    ):
        self._model_config = model_config
        self._library = library.load()
        self.isa = self._library.isa
        self._phases = fuse(record(model, create_ops("cpu", candidates=CANDIDATES)))
        self._pool = library.Pool(self._library, args.threads or library.usable_threads())
        # What is left for torch is small; its threads would only get in the way of ours.
        torch.set_num_threads(1)
        self._packed, self._names = pack_weights(
            model,
            self._phases,
            self._library,
            self._pool,
            files=files,
            fallback=hub.home() / "packed",
            progress=progress,
        )
        self._kv_format = _NATIVE_KV[args.kv_cache_dtype]
        self.kv_dtype = _KV_NAMES[self._kv_format]
        lib = self._library.lib
        self._chunk_bytes = self._library.check(
            lib.oct_kv_chunk_bytes(self._kv_format, model_config.head_dim)
        )
        chunks = model_config.num_layers * model_config.num_kv_heads
        self.kv_bytes_per_token = chunks * self._chunk_bytes // NATIVE_CHUNK

    def create_runner(self, config: EngineConfig) -> NativeModelRunner:
        model = self._model_config
        kv_cache = NativeKVCache(
            model.num_layers,
            config.cache.num_blocks,
            config.cache.block_size,
            model.num_kv_heads,
            self._chunk_bytes,
        )
        layout = KVLayout(
            self._kv_format, model.num_kv_heads, model.head_dim, kv_cache.layer_addresses()
        )
        limits = config.scheduler
        program = create_program(
            self._phases,
            self._library,
            self._pool,
            layout,
            self._packed,
            self._names,
            limits.max_num_batched_tokens,
        )
        return NativeModelRunner(
            program,
            kv_cache,
            limits.max_num_seqs,
            limits.max_model_len,
            limits.max_num_batched_tokens,
        )


class TorchBackend:
    """The reference ops, one call each."""

    isa = None
    max_rounds = 1

    def __init__(
        self,
        args: EngineArgs,
        model: CausalLM,
        model_config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._model, self._model_config, self._device = model, model_config, device
        if args.kv_cache_dtype == "int8":
            raise ConfigError("kv_cache_dtype int8 needs the native CPU kernels: use f32 or bf16")
        self._ops = create_ops(device, dtype, EAGER)
        self.name = self._ops.name
        kv_dtype = dtype if args.kv_cache_dtype == "auto" else TORCH_DTYPES[args.kv_cache_dtype]
        self._kv_dtype = kv_dtype
        self.kv_dtype = str(kv_dtype).removeprefix("torch.")
        self.kv_bytes_per_token = kv_bytes_per_token(model_config, kv_dtype.itemsize)
        threads = args.threads or min(torch.get_num_threads(), library.usable_threads())
        torch.set_num_threads(threads)

    def create_runner(self, config: EngineConfig) -> ModelRunner:
        model = self._model_config
        kv_cache = KVCache(
            model.num_layers,
            config.cache.num_blocks,
            config.cache.block_size,
            model.num_kv_heads,
            model.head_dim,
            self._kv_dtype,
            self._device,
        )
        limits = config.scheduler
        return ModelRunner(
            self._model,
            kv_cache,
            self._ops,
            self._device,
            limits.max_num_seqs,
            limits.max_model_len,
        )
