"""What a runner on ops of PyTorch's says of itself; see ``octavo.core.executor.Probe``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.kernels.cpu.probes import READ_BYTES
from octavo.layers.linear import Linear, LMHead
from octavo.layers.module import Module
from octavo.models.footprint import Matrix
from octavo.models.registry import CausalLM
from octavo.runtime.forward import Observed
from octavo.runtime.probe import Cache, RunnerProbe


class TorchProbe(RunnerProbe):
    """Of a model that runs op by op: matrix products and copies in PyTorch, in the type of the
    activations."""

    isa: str | None = None

    def __init__(
        self,
        runner: Observed,
        model: CausalLM,
        cache: Cache,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__(runner, cache)
        assert isinstance(model, Module)
        self._model = model
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
            for _, module in self._model.named_modules()
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
        num_bytes = READ_BYTES * (1 if self._device.type == "cpu" else 8)
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
