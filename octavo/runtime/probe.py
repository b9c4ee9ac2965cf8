"""Probes of native model runners; see ``octavo.core.executor.Probe``.

``torch_probe.py`` has those of PyTorch ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from octavo.core.executor import LogitsObserver
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import ARITHMETIC, KV_FORMATS, columns_bytes
from octavo.kernels.cpu.probes import products, reads
from octavo.kernels.cpu.program import Program
from octavo.models.footprint import WeightMatrix
from octavo.runtime.forward import ObservedRunner

_KV_NAMES = {format: name for name, format in KV_FORMATS.items()}


class SizedCache(Protocol):
    @property
    def bytes_per_token(self) -> float: ...


class RunnerProbe:
    """The part of a probe that is the same for all backends."""

    def __init__(self, runner: ObservedRunner, cache: SizedCache):
        self._runner, self._cache = runner, cache

    @property
    def kernel_seconds(self) -> float:
        return self._runner.kernel_seconds

    @property
    def kv_bytes_per_token(self) -> float:
        return self._cache.bytes_per_token

    def expert_figures(self) -> Mapping[str, Any]:
        return {}

    def expert_loads(self) -> Sequence[Sequence[int]]:
        return ()

    def observe_logits(self, observer: LogitsObserver | None) -> None:
        self._runner.logits_observer = observer


class NativeProbe(RunnerProbe):
    """The probe of a native step program."""

    def __init__(self, runner: ObservedRunner, program: Program, cache: SizedCache):
        super().__init__(runner, cache)
        self._program, self._library = program, program.library
        self.isa = program.library.isa
        self.num_threads = program.pool.size
        self.attention_arithmetic = _KV_NAMES[program.kv.format]

    def matrices(self) -> list[WeightMatrix]:
        library = self._library
        return [
            WeightMatrix(
                op == abi.OCT_OP_HEAD,
                weight.n * weight.k,
                library.check(
                    library.lib.oct_packed_bytes(weight.format, weight.n, weight.k, weight.group)
                )
                + columns_bytes(weight.k, bool(weight.columns)),
                ARITHMETIC[weight.format],
                share,
            )
            for op, weight, share in self._program.weights()
            if op != abi.OCT_OP_EMBED
        ]

    def expert_figures(self) -> Mapping[str, Any]:
        return self._program.expert_counts.figures()

    def expert_loads(self) -> Sequence[Sequence[int]]:
        return cast("list[Sequence[int]]", list(self._program.expert_counts.loads))

    def products(self, arithmetic: str) -> Callable[[int], float]:
        return products(self._library, self._program.pool, arithmetic)

    def reads(self) -> Callable[[], float]:
        return reads(self._library, self._program.pool)
