"""Probes of model runners on PyTorch; see ``octavo.core.executor.Probe``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from octavo.kernels.cpu.probes import READ_BYTES
from octavo.kernels.cuda.weights import DeviceWeight, parts_of
from octavo.layers.experts import Router, shares
from octavo.layers.linear import Linear, LMHead
from octavo.layers.module import Module
from octavo.models.footprint import WeightMatrix
from octavo.models.registry import CausalLM
from octavo.runtime.forward import ObservedRunner
from octavo.runtime.probe import RunnerProbe, SizedCache


class DeviceProbe(RunnerProbe):
    """The probe of a device under PyTorch. Arithmetic is named by the multiplied type, such as
    "torch float32"."""

    isa: str | None = None

    def __init__(
        self, runner: ObservedRunner, cache: SizedCache, device: torch.device, dtype: torch.dtype
    ):
        super().__init__(runner, cache)
        self._device = device
        self.attention_arithmetic = arithmetic_of(dtype)

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def products(self, arithmetic: str) -> Callable[[int], float]:
        return products(self._device, getattr(torch, arithmetic.removeprefix(_PREFIX)))

    def reads(self) -> Callable[[], float]:
        return reads(self._device)


class TorchProbe(DeviceProbe):
    """The probe of a model that runs op by op, in the type of the activations."""

    def __init__(
        self,
        runner: ObservedRunner,
        model: CausalLM,
        cache: SizedCache,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__(runner, cache, device, dtype)
        assert isinstance(model, Module)
        self._model = model

    def matrices(self) -> list[WeightMatrix]:
        share_of = shares(self._model)
        return [
            WeightMatrix(
                isinstance(module, LMHead),
                module.weight.shape[0] * module.weight.shape[1],
                module.weight.value.nbytes,
                self.attention_arithmetic,
                share_of.get(id(module)),
            )
            for _, module in self._model.named_modules()
            if isinstance(module, Linear | LMHead | Router)
        ]


class FusedProbe(DeviceProbe):
    """The probe of a model that runs by fused ops.

    Args:
        weights: triples of whether a weight is the head, the weight, and for experts how many of
            how many a token uses.
        multiplied_as: returns the type in which many rows are multiplied with a weight.
    """

    def __init__(
        self,
        runner: ObservedRunner,
        weights: Iterable[tuple[bool, DeviceWeight, tuple[int, int] | None]],
        multiplied_as: Callable[[DeviceWeight], torch.dtype],
        cache: SizedCache,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__(runner, cache, device, dtype)
        self._matrices = [
            WeightMatrix(
                is_head,
                part.shape[0] * part.shape[1],
                part.nbytes,
                arithmetic_of(multiplied_as(part)),
                share,
            )
            for is_head, weight, share in weights
            for part in parts_of(weight)
        ]

    def matrices(self) -> list[WeightMatrix]:
        return self._matrices


def arithmetic_of(dtype: torch.dtype) -> str:
    return _PREFIX + str(dtype).removeprefix("torch.")


_PREFIX = "torch "


def products(device: torch.device, dtype: torch.dtype) -> Callable[[int], float]:
    """Return ``run(repeats)``, which multiplies square matrices of a type by the device's libraries
    and returns the number of operations. RuntimeError where the device has no such products, as
    FP8 before compute capability 8.9, and on a CPU."""
    size = 512 if device.type == "cpu" else 8192
    multiply = _product(torch.ones(size, size, device=device).to(dtype))

    def run(repeats: int) -> float:
        with torch.inference_mode():
            for _ in range(repeats):
                multiply()
        _finish(device)
        return 2.0 * size**3 * repeats

    run(1)  # the first call loads the kernels
    return run


def reads(device: torch.device) -> Callable[[], float]:
    """Return ``run()``, which copies more memory than any cache holds and returns the bytes that
    were read and written."""
    num_bytes = READ_BYTES * (1 if device.type == "cpu" else 8)
    memory = torch.ones(num_bytes, dtype=torch.uint8, device=device)

    def run() -> float:
        half = memory.numel() // 2
        memory[:half].copy_(memory[half:])
        _finish(device)
        return float(memory.numel())

    run()
    return run


def _product(factors: torch.Tensor) -> Callable[[], torch.Tensor]:
    transposed = factors.t()  # like weights [N, K], and as the libraries require for 8 bits
    if factors.dtype == torch.int8:
        return lambda: torch._int_mm(factors, transposed)
    if factors.dtype == torch.float8_e4m3fn:
        if factors.device.type == "cpu":  # PyTorch takes seconds for a small matrix
            raise RuntimeError("a CPU has no products of FP8")
        one = torch.ones((), device=factors.device)
        return lambda: torch._scaled_mm(factors, transposed, one, one, out_dtype=torch.bfloat16)
    return lambda: torch.mm(factors, transposed)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
