"""What runners say of themselves; see ``octavo.core.executor.Probe``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from octavo.core.executor import LogitsObserver
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import ARITHMETIC, KV_FORMATS
from octavo.kernels.cpu.program import Program
from octavo.layers.linear import Linear, LMHead
from octavo.models.footprint import Matrix
from octavo.runtime.forward import Observed

_READ_BYTES = 256 * 2**20

# A packed format that stands for all whose products are computed in the same.
_FORMAT_OF = {name: format for format, name in reversed(ARITHMETIC.items())}
_KV_NAMES = {format: name for name, format in KV_FORMATS.items()}


class _Cache(Protocol):
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...


class _RunnerProbe:
    """What is the same whatever a runner computes with."""

    def __init__(self, runner: Observed, cache: _Cache):
        self._runner, self._cache = runner, cache

    @property
    def kernel_seconds(self) -> float:
        return self._runner.kernel_seconds

    @property
    def kv_bytes_per_token(self) -> float:
        return self._cache.num_bytes / (self._cache.num_blocks * self._cache.block_size)

    def observe_logits(self, observer: LogitsObserver | None) -> None:
        self._runner.logits_observer = observer


class NativeProbe(_RunnerProbe):
    """Of a step program, with the threads that run it."""

    def __init__(self, runner: Observed, program: Program, cache: _Cache):
        super().__init__(runner, cache)
        self._program, self._library = program, program.library
        self.isa = program.library.isa
        self.num_threads = program.pool.size
        self.attention_arithmetic = _KV_NAMES[program.kv.format]

    def matrices(self) -> list[Matrix]:
        library = self._library
        return [
            Matrix(
                op == abi.OCT_OP_HEAD,
                weight.n * weight.k,
                library.check(
                    library.lib.oct_packed_bytes(weight.format, weight.n, weight.k, weight.group)
                ),
                ARITHMETIC[weight.format],
            )
            for op, weight in self._program.weights()
            if op != abi.OCT_OP_EMBED
        ]

    def products(self, arithmetic: str) -> Callable[[int], float]:
        library, pool = self._library, self._program.pool

        def run(rounds: int) -> float:
            done: int = library.check(
                library.lib.oct_probe_products(pool, _FORMAT_OF[arithmetic], rounds)
            )
            return done

        return run

    def reads(self) -> Callable[[], float]:
        library, pool = self._library, self._program.pool
        memory = np.ones(_READ_BYTES, dtype=np.uint8)  # zeros would all be one page

        def run() -> float:
            library.check(library.lib.oct_probe_read(pool, memory.ctypes.data, memory.nbytes))
            return memory.nbytes

        return run


class TorchProbe(_RunnerProbe):
    """Of a model that runs op by op: matrix products and copies in PyTorch, in the type of the
    activations."""

    isa: str | None = None

    def __init__(
        self,
        runner: Observed,
        model: Any,
        cache: _Cache,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__(runner, cache)
        self._model: nn.Module = model
        self._device, self._dtype = device, dtype
        self.attention_arithmetic = str(dtype).replace(".", " ")  # torch float32

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def matrices(self) -> list[Matrix]:
        return [
            Matrix(
                isinstance(module, LMHead),
                module.weight.shape[0] * module.weight.shape[1],
                module.weight.value.nbytes,
                self.attention_arithmetic,
            )
            for module in self._model.modules()
            if isinstance(module, Linear | LMHead)
        ]

    def products(self, arithmetic: str) -> Callable[[int], float]:
        size = 512 if self._device.type == "cpu" else 8192
        factors = torch.ones(size, size, device=self._device, dtype=self._dtype)

        def run(rounds: int) -> float:
            with torch.inference_mode():
                for _ in range(rounds):
                    torch.mm(factors, factors)
            self._finish()
            return 2.0 * size**3 * rounds

        run(1)  # the first one loads what it runs
        return run

    def reads(self) -> Callable[[], float]:
        num_bytes = _READ_BYTES * (1 if self._device.type == "cpu" else 8)
        memory = torch.ones(num_bytes, dtype=torch.uint8, device=self._device)

        def run() -> float:
            half = memory.numel() // 2
            memory[:half].copy_(memory[half:])
            self._finish()
            return float(memory.numel())  # half of it read, half of it written

        run()
        return run

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
