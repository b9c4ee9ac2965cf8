"""The cases that are measured on a GPU, the most important first: the last are left out if time is
short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.bench.peers.workers.workloads import PeerWorkload

EngineName = Literal["octavo", "transformers", "vllm"]


@dataclass(frozen=True, slots=True)
class GpuCase:
    """An engine over a model of random weights.

    Args:
        settings: of the engine, as its worker takes them.
        workloads: in the order in which they are run.
        checked: answers are compared with those of the reference ops, instead of timed.
        seconds: estimated time, with the start: where less is left, it is not begun.
    """

    name: str
    shape: str
    format: str
    engine: EngineName = "octavo"
    settings: Mapping[str, Any] = field(default_factory=dict)
    workloads: tuple[PeerWorkload, ...] = ()
    checked: bool = False
    seconds: float = 25.0

    @property
    def model(self) -> str:
        return f"{self.shape}-{self.format}"


def decode(num_seqs: int) -> PeerWorkload:
    name = f"decode-{num_seqs}"
    kind, repeat = ("decode", 3) if num_seqs == 1 else ("batch", 1)
    return PeerWorkload(name, f"decode of {num_seqs}", kind, num_seqs, 128, 129, repeat)


def prefill(num_tokens: int) -> PeerWorkload:
    name = f"prefill-{num_tokens}"
    return PeerWorkload(name, f"prompt of {num_tokens:,}", "prefill", 1, num_tokens, 1, 3)


# Prompts and answers of ShareGPT have 220 and 190 tokens on average.
MIX = PeerWorkload("mix", "256 prompts as of ShareGPT", "mix", 256, 220, 190, 1, length_cv=1.0)

_ALL = (*map(decode, (1, 4, 16, 64, 256)), *map(prefill, (512, 4096, 16_384)), MIX)
_SOME = (*map(decode, (1, 16, 64)), prefill(4096))
_DECODE = (decode(1), decode(16))
_LIMITS = {"max_model_len": 17_408, "max_num_seqs": 256}
_EAGER = {**_LIMITS, "enforce_eager": True}
_IN_TURN = {**_LIMITS, "async_scheduling": False}
_STATIC = {"device": "cuda", "cache_implementation": "static", "disable_compile": True}
_VLLM = {"max_model_len": 17_408, "max_num_seqs": 256}

CASES = (
    GpuCase("0.6b", "0.6b", "bf16", settings=_LIMITS, workloads=_ALL, seconds=45),
    GpuCase("0.6b against reference ops", "0.6b", "bf16", checked=True),
    GpuCase("8b", "8b", "bf16", settings=_LIMITS, workloads=_ALL, seconds=60),
    GpuCase("0.6b, no graphs", "0.6b", "bf16", settings=_EAGER, workloads=_DECODE),
    GpuCase("0.6b, one step in flight", "0.6b", "bf16", settings=_IN_TURN, workloads=_DECODE),
    GpuCase("8b in FP8", "8b", "fp8", settings=_LIMITS, workloads=_SOME, seconds=35),
    GpuCase("8b in 4 bits", "8b", "w4", settings=_LIMITS, workloads=_SOME, seconds=35),
    GpuCase("0.6b in FP8 against reference ops", "0.6b", "fp8", checked=True),
    GpuCase("0.6b in 4 bits against reference ops", "0.6b", "w4", checked=True),
    GpuCase("0.6b, transformers", "0.6b", "bf16", "transformers", _STATIC, _DECODE, seconds=40),
    GpuCase("1b", "1b", "bf16", settings=_LIMITS, workloads=_SOME, seconds=40),
    GpuCase("8b, transformers", "8b", "bf16", "transformers", _STATIC, _DECODE, seconds=50),
    GpuCase("8b, no graphs", "8b", "bf16", settings=_EAGER, workloads=_DECODE, seconds=40),
    GpuCase("8b, vLLM", "8b", "bf16", "vllm", _VLLM, _ALL, seconds=120),
    GpuCase("0.6b, vLLM", "0.6b", "bf16", "vllm", _VLLM, _ALL, seconds=100),
)


def dry_run_cases(kernels: str) -> tuple[GpuCase, ...]:
    """Return cases of the same kinds that a CPU runs in seconds, whose figures mean nothing."""
    tiny = (
        PeerWorkload("decode-1", "decode of 1", "decode", 1, 16, 9, 1),
        PeerWorkload("decode-4", "decode of 4", "batch", 4, 16, 9, 1),
        PeerWorkload("prefill-64", "prompt of 64", "prefill", 1, 64, 1, 1),
        PeerWorkload("mix", "8 prompts", "mix", 8, 16, 8, 1, length_cv=1.0),
    )
    settings = {"device": "cpu", "kernels": kernels, "max_model_len": 256, "max_num_seqs": 8}
    return (
        GpuCase("tiny", "tiny", "bf16", settings=settings, workloads=tiny),
        GpuCase("tiny in 4 bits", "tiny", "w4", settings=settings, workloads=tiny[:1]),
        GpuCase("tiny against reference ops", "tiny", "fp8", settings=settings, checked=True),
        GpuCase("tiny, vLLM", "tiny", "bf16", "vllm", {"device": "cpu"}, tiny[:1]),
    )
