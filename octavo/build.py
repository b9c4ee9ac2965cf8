"""From settings to an engine: find the model, load it, size the KV pool, wire everything up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import GIB, Capacity, EngineArgs, EngineConfig, resolve
from octavo.core.admission import AdmissionPolicy, ContinuousAdmission, StaticAdmission
from octavo.core.block_manager import BlockManager
from octavo.core.clock import Clock
from octavo.core.engine import Engine
from octavo.core.executor import Executor
from octavo.core.prefix_cache import NoPrefixCache, RadixPrefixCache
from octavo.core.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.text_engine import TextEngine

if TYPE_CHECKING:
    from octavo.models.checkpoint import Checkpoint
    from octavo.models.config import ModelConfig
    from octavo.text.tokenizer import Tokenizer

_ADMISSION: dict[str, type[AdmissionPolicy]] = {
    "continuous": ContinuousAdmission,
    "static": StaticAdmission,
}

# Without a word from the user, a KV pool on the CPU takes at most this, and half of what is free.
_CPU_KV_BYTES = 4 * GIB


class LoadedEngine:
    """A model, its tokenizer and its engine, ready to serve. Made by ``load_engine``."""

    def __init__(
        self,
        config: EngineConfig,
        text_engine: TextEngine,
        model_config: ModelConfig,
        info: dict[str, Any],
    ):
        self.config = config
        self.text_engine = text_engine
        self.model_config = model_config
        self._info = info

    @property
    def info(self) -> dict[str, Any]:
        """The "engine" object of the JSON outputs."""
        return dict(self._info)


def load_engine(
    args: EngineArgs, progress: Callable[[int, int], None] | None = None
) -> LoadedEngine:
    """Find, load and wire up a model.

    Args:
        progress: called with (bytes loaded, bytes in all) while weights are read.

    Raises:
        ModelError: the model cannot be found or read. ConfigError: it does not fit the settings.
    """
    from octavo import hub
    from octavo.machine import keep_openmp_patient, memory

    keep_openmp_patient()
    import torch

    from octavo.backends import choose_backend
    from octavo.executor.local import LocalExecutor
    from octavo.models.checkpoint import open_checkpoint
    from octavo.models.loader import check_tokenizer, load_checkpoint, weights_bytes
    from octavo.runtime.kv_cache import TORCH_DTYPES

    path = hub.resolve(args.model)
    device = torch.device(_choose_device(args.device))
    dtype_name = args.dtype
    if dtype_name == "auto":
        dtype_name = "bfloat16" if device.type == "cuda" else "float32"
    dtype = TORCH_DTYPES[dtype_name]

    checkpoint = open_checkpoint(path)
    _check_quantization(args.quantization, checkpoint)
    model_config = checkpoint.config()
    tokenizer = load_tokenizer(path)
    check_tokenizer(model_config, tokenizer.vocab_size, path)
    model = load_checkpoint(checkpoint, model_config, device=device, dtype=dtype, progress=progress)
    files = sorted({entry.path for entry in checkpoint.tensors.values()})
    backend = choose_backend(args, model, model_config, files, device, dtype, progress)

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kv_memory = int(free - (1 - args.gpu_memory_utilization) * total)
    else:
        kv_memory = min(_CPU_KV_BYTES, memory().available // 2)
    capacity = Capacity(
        device=str(device),
        dtype=dtype_name,
        model_max_len=model_config.max_position,
        kv_bytes_per_token=backend.kv_bytes_per_token,
        kv_memory_bytes=max(0, kv_memory),
        kv_dtype=backend.kv_dtype,
        max_rounds=backend.max_rounds,
    )
    config = resolve(args, capacity)
    runner = backend.create_runner(config)
    engine = build_engine(config, LocalExecutor(runner))
    eos_token_ids = {*tokenizer.stop_token_ids, *model_config.eos_token_ids}
    info = {
        "device": str(device),
        "dtype": dtype_name,
        "kernels": backend.name,
        "isa": backend.isa,
        "weights_bytes": weights_bytes(model),
        "kv_blocks": config.cache.num_blocks,
        "block_size": config.cache.block_size,
    }
    text_engine = TextEngine(engine, tokenizer, model_config.vocab_size, eos_token_ids, config.seed)
    return LoadedEngine(config, text_engine, model_config, info)


def build_engine(config: EngineConfig, executor: Executor, clock: Clock | None = None) -> Engine:
    """Scheduler, block manager and prefix cache over any executor, real or simulated."""
    size = config.cache.block_size
    cache = RadixPrefixCache(size) if config.cache.enable_prefix_caching else NoPrefixCache()
    block_manager = BlockManager(executor.kv_capacity(), size, cache)
    admission = _ADMISSION[config.batching]()
    return Engine(Scheduler(config.scheduler, block_manager, admission), executor, clock)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder or of a GGUF file, without its weights and without torch."""
    from octavo.models.gguf import GGUFFile
    from octavo.text.tokenizer import Tokenizer

    if path.is_dir():
        return Tokenizer.from_folder(path)
    return Tokenizer.from_gguf(GGUFFile(path).metadata, path)


def _check_quantization(asked: str | None, checkpoint: Checkpoint) -> None:
    """The format is read from the files; a word of the user's can only agree with it."""
    from octavo.models.checkpoint import GGUFFiles

    found = "gguf" if isinstance(checkpoint, GGUFFiles) else None
    if asked is not None and asked != found:
        raise ConfigError(
            f"quantization {asked!r}: {checkpoint.path} is "
            f"{found or 'not quantized'}; leave the setting out, it is detected"
        )


def _choose_device(asked: str) -> str:
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no CUDA device; `octavo doctor` says why")
    return asked
