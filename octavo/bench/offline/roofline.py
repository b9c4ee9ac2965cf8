"""How close a run came to what the machine can do, and what held it back.

The least that the steps had to do (`octavo.sim.cost_model`: every weight read once a step, keys and
values once, two operations for each weight and token) is put over two measured ceilings: bytes that
the processor reads a second, and operations that it does a second with the instruction that the
kernels multiply with. Whichever of the two times is longer binds the run; nothing can be faster,
but for what the caches still hold of the step before. docs/metrics.md has the definitions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.sim.cost_model import AttentionCost, ModelCost, StepWork

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession, StepTiming
    from octavo.build import LoadedEngine

_PROBE_SECONDS = 0.05
_READ_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight as a step uses it. ``arithmetic``: what its products are done in."""

    is_head: bool
    num_params: int
    num_bytes: int
    arithmetic: str


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that was ever measured here.

    Args:
        bytes_per_s: of reads.
        linear, head, attention: operations a second, in what each part is computed in.
        arithmetic: what that is, for each part.
    """

    bytes_per_s: float
    linear: float
    head: float
    attention: float
    arithmetic: tuple[str, str, str]

    def memory_s(self, work: StepWork) -> float:
        return work.total.bytes / self.bytes_per_s

    def compute_s(self, work: StepWork) -> float:
        return (
            work.linear.flops / self.linear
            + work.head.flops / self.head
            + work.attention.flops / self.attention
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "read_gbytes_per_s": self.bytes_per_s / 1e9,
            "linear_gops": self.linear / 1e9,
            "head_gops": self.head / 1e9,
            "attention_gops": self.attention / 1e9,
            "arithmetic": dict(zip(("linear", "head", "attention"), self.arithmetic, strict=True)),
        }


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Steps of one kind, against the ceilings. Seconds are sums over ``num_steps``."""

    num_steps: int
    wall_s: float
    work: StepWork
    memory_s: float
    compute_s: float

    @property
    def floor_s(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s >= self.compute_s else "compute"

    @property
    def mbu(self) -> float:
        """Share of the read bandwidth (model bandwidth utilisation)."""
        return self.memory_s / self.wall_s

    @property
    def mfu(self) -> float:
        """Share of the arithmetic (model FLOPs utilisation)."""
        return self.compute_s / self.wall_s

    def as_json(self) -> dict[str, Any]:
        total = self.work.total
        return {
            "bound": self.bound,
            "achieved": self.floor_s / self.wall_s,
            "mbu": self.mbu,
            "mfu": self.mfu,
            "steps": self.num_steps,
            "step_ms": self.wall_s / self.num_steps * 1e3,
            "floor_ms": self.floor_s / self.num_steps * 1e3,
            "bytes": total.bytes,
            "ops": total.flops,
            "gbytes_per_s": total.bytes / self.wall_s / 1e9,
            "gops": total.flops / self.wall_s / 1e9,
        }


@dataclass(frozen=True, slots=True)
class Roofline:
    """Prefill (steps with a piece of a prompt) and decode (all others), apart; None if none ran."""

    ceilings: Ceilings
    prefill: Utilisation | None
    decode: Utilisation | None

    def as_json(self) -> dict[str, Any]:
        return {
            "ceilings": self.ceilings.as_json(),
            "prefill": self.prefill and self.prefill.as_json(),
            "decode": self.decode and self.decode.as_json(),
        }


def draw(session: OfflineSession, steps: Iterable[StepTiming], read_bandwidth: float) -> Roofline:
    """Measure the ceilings, now that the run is over, and put the steps under them.

    Args:
        read_bandwidth: bytes a second that were seen before, as by the Recorder's probes; the
            best of these and of a probe with the engine's own threads is the ceiling.
    """
    if session.info["device"] != "cpu":
        read_bandwidth = 0.0  # that of other memory
    matrices = find_matrices(session.loaded)
    cost = model_cost(session.loaded, matrices)
    ceilings = measure_ceilings(session.loaded, matrices, read_bandwidth)
    return place(cost, ceilings, list(steps))


def place(cost: ModelCost, ceilings: Ceilings, steps: Sequence[StepTiming]) -> Roofline:
    def of(kind: Sequence[StepTiming]) -> Utilisation | None:
        if not kind:
            return None
        work = sum((cost.work(step.chunks, step.num_rounds) for step in kind), StepWork())
        return Utilisation(
            len(kind),
            sum(step.wall_s for step in kind),
            work,
            ceilings.memory_s(work),
            ceilings.compute_s(work),
        )

    return Roofline(
        ceilings,
        of([step for step in steps if not step.is_pure_decode]),
        of([step for step in steps if step.is_pure_decode]),
    )


def model_cost(loaded: LoadedEngine, matrices: Sequence[Matrix]) -> ModelCost:
    """What a step of this engine costs: its weights as they lie in memory, and its KV cache."""
    config = loaded.model_config
    cache = _runner(loaded).kv_cache
    per_layer = cache.num_bytes / (cache.num_blocks * cache.block_size) / config.num_layers
    windows = Counter(config.layer_windows or [None] * config.num_layers)
    layers = [matrix for matrix in matrices if not matrix.is_head]
    heads = [matrix for matrix in matrices if matrix.is_head]
    return ModelCost(
        linear_params=sum(matrix.num_params for matrix in layers),
        linear_bytes=sum(matrix.num_bytes for matrix in layers),
        head_params=sum(matrix.num_params for matrix in heads),
        head_bytes=sum(matrix.num_bytes for matrix in heads),
        attention=tuple(
            AttentionCost(count * config.num_heads * config.head_dim, count * per_layer, window)
            for window, count in windows.items()
        ),
    )


def find_matrices(loaded: LoadedEngine) -> list[Matrix]:
    """The weights that a step reads whole. An embedding is not: a step takes rows of it."""
    runner = _runner(loaded)
    if _is_native(loaded):
        return _native_matrices(runner.program)
    return _torch_matrices(runner.model, _torch_arithmetic(loaded))


def _runner(loaded: LoadedEngine) -> Any:
    return loaded.text_engine.engine.executor.runner  # type: ignore[attr-defined]


def _is_native(loaded: LoadedEngine) -> bool:
    return loaded.info["kernels"] == "native"


def _native_matrices(program: Any) -> list[Matrix]:
    from octavo.kernels.cpu import abi

    library = program.library
    return [
        Matrix(
            op == abi.OCT_OP_HEAD,
            weight.n * weight.k,
            library.check(
                library.lib.oct_packed_bytes(weight.format, weight.n, weight.k, weight.group)
            ),
            _NATIVE_ARITHMETIC[weight.format],
        )
        for op, weight in program.weights()
        if op != abi.OCT_OP_EMBED
    ]


def _torch_arithmetic(loaded: LoadedEngine) -> str:
    return f"torch {loaded.config.dtype}"


def _torch_matrices(model: Any, arithmetic: str) -> list[Matrix]:
    from octavo.layers.linear import Linear, LMHead

    return [
        Matrix(
            isinstance(module, LMHead),
            module.weight.shape[0] * module.weight.shape[1],
            module.weight.value.nbytes,
            arithmetic,
        )
        for module in model.modules()
        if isinstance(module, Linear | LMHead)
    ]


# ---- Ceilings

# What weights of a packed format (OCT_W4S …) are multiplied as, and a format that stands for it.
_NATIVE_ARITHMETIC = ("int4 x int8", "int4 x int8", "int8", "int8", "bfloat16", "float32")
_NATIVE_FORMATS = {"int4 x int8": 0, "int8": 2, "bfloat16": 4, "float32": 5}


def measure_ceilings(
    loaded: LoadedEngine, matrices: Sequence[Matrix], read_bandwidth: float = 0.0
) -> Ceilings:
    """Operations a second for what each part of a step is computed in, and bytes a second."""
    if _is_native(loaded):
        program = _runner(loaded).program
        probe = _native_probe(program.library, program.pool)
        bandwidth = _native_bandwidth(program.library, program.pool)
        attention = loaded.config.cache.dtype
    else:
        probe, bandwidth = _torch_probe(loaded)
        attention = _torch_arithmetic(loaded)
    found: dict[str, float] = {}

    def rate(name: str) -> float:
        if name not in found:
            found[name] = probe(name)
        return found[name]

    def rate_of(parts: Sequence[Matrix]) -> float:
        """Of one part after the other."""
        seconds = sum(matrix.num_params / rate(matrix.arithmetic) for matrix in parts)
        return sum(matrix.num_params for matrix in parts) / seconds

    heads = [matrix for matrix in matrices if matrix.is_head]
    layers = [matrix for matrix in matrices if not matrix.is_head]
    return Ceilings(
        max(read_bandwidth, bandwidth),
        rate_of(layers),
        rate_of(heads),
        rate(attention),
        (_names(layers), _names(heads), attention),
    )


def _names(matrices: Sequence[Matrix]) -> str:
    return ", ".join(dict.fromkeys(matrix.arithmetic for matrix in matrices))


def _native_probe(library: Any, pool: Any) -> Callable[[str], float]:
    """Operations a second of the product instruction for weights of a kind."""

    def probe(name: str) -> float:
        def run(rounds: int) -> int:
            done: int = library.check(
                library.lib.oct_probe_products(pool, _NATIVE_FORMATS[name], rounds)
            )
            return done

        return _best_rate(run)

    return probe


def _best_rate(run: Callable[[int], float]) -> float:
    """What ``run(rounds)`` returns, a second: the best of several runs of some milliseconds."""
    rounds, seconds = 64, 0.0
    while seconds < _PROBE_SECONDS / 5:
        rounds *= 4
        seconds, _ = _timed(run, rounds)
    best, begin = 0.0, time.perf_counter()
    while time.perf_counter() - begin < _PROBE_SECONDS:
        seconds, done = _timed(run, rounds)
        best = max(best, done / seconds)
    return best


def _timed(run: Callable[[int], float], rounds: int) -> tuple[float, float]:
    begin = time.perf_counter()
    done = run(rounds)
    return max(time.perf_counter() - begin, 1e-9), done


def _native_bandwidth(library: Any, pool: Any) -> float:
    """Bytes a second that the engine's own threads read, of more than any cache holds."""
    import numpy as np

    memory = np.ones(_READ_BYTES, dtype=np.uint8)  # zeros would all be one page

    def read(_: int) -> float:
        library.check(library.lib.oct_probe_read(pool, memory.ctypes.data, memory.nbytes))
        return memory.nbytes

    return max(done / seconds for seconds, done in (_timed(read, 1) for _ in range(4)))


def _torch_probe(loaded: LoadedEngine) -> tuple[Callable[[str], float], float]:
    """Of matrix products and copies in PyTorch, on the engine's device and in its type."""
    import torch

    from octavo.runtime.kv_cache import TORCH_DTYPES

    device = torch.device(loaded.config.device)
    on_cpu = device.type == "cpu"
    size = 512 if on_cpu else 8192
    factors = torch.ones(size, size, device=device, dtype=TORCH_DTYPES[loaded.config.dtype])
    memory = torch.ones(_READ_BYTES * (1 if on_cpu else 8), dtype=torch.uint8, device=device)

    def finish() -> None:
        if not on_cpu:
            torch.cuda.synchronize(device)

    def multiply(rounds: int) -> float:
        for _ in range(rounds // 64):
            torch.mm(factors, factors)
        finish()
        return 2.0 * size**3 * (rounds // 64)

    def copy(_: int) -> float:
        half = memory.numel() // 2
        memory[:half].copy_(memory[half:])
        finish()
        return float(memory.numel())  # half of it read, half of it written

    with torch.inference_mode():
        copy(1)
        bandwidth = max(done / seconds for seconds, done in (_timed(copy, 1) for _ in range(4)))

    def probe(_: str) -> float:
        with torch.inference_mode():
            multiply(64)
            return _best_rate(multiply)

    return probe, bandwidth
