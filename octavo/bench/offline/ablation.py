"""What each optimisation is worth: the same work with it and without, turn by turn.

An ablation is a row of `ABLATIONS`: the settings that take an optimisation away, the work that
shows what it is for, and the figure by which that is seen. With and without take turns (see
``ablation_study.py``); "worth" is the ratio of their figures in one turn, so that a machine
that drifts between turns does not enter it. Where an optimisation promises not to change answers,
that is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.base.errors import ConfigError
from octavo.base.optional_deps import NO_TORCH, has_torch
from octavo.bench.offline.ablation_workloads import (
    BATCH,
    FEW,
    LONE,
    LONE_ANSWER,
    LONG_CONTEXT,
    LONG_PROMPT_MEANWHILE,
    SHARED_DOCUMENT,
    SHARED_PREFIX,
    UNEVEN_ANSWERS,
    AblationWork,
    AblationWorkload,
    run_engine,
    run_without_kv_cache,
)
from octavo.bench.offline.session import OfflineSession
from octavo.measure.statistics import Spread
from octavo.workload.requests import WorkloadRequest

Info = Mapping[str, Any]
Run = Callable[[OfflineSession, AblationWorkload, list[WorkloadRequest]], AblationWork]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a workload; ``of`` gives None where the work was too short to have it."""

    name: str
    label: str
    higher_is_better: bool
    of: Callable[[AblationWork], float | None]

    def worth(self, on: float, off: float) -> float:
        """How many times better it is with the optimisation."""
        return on / off if self.higher_is_better else off / on


OUTPUT_TPS = Figure("output_tps", "output tok/s", True, lambda work: work.output_tps)
TTFT = Figure("ttft_ms", "median TTFT, ms", False, lambda work: work.ttft_ms)
TPOT = Figure("tpot_ms", "median TPOT, ms", False, lambda work: work.tpot_ms)
ITL_P99 = Figure("itl_p99_ms", "p99 ITL, ms", False, lambda work: work.itl_p99_ms)
FIGURES = (OUTPUT_TPS, TTFT, TPOT, ITL_P99)


def _is_invariant(info: Info) -> bool:
    """Whether answers do not depend on how work is cut: see docs/architecture.md."""
    return bool(info["device"] == "cpu" and info["dtype"] == "float32")


def _is_native(info: Info) -> bool:
    return bool(info["kernels"] == "native")


def _never(info: Info) -> bool:
    """It computes with other numbers."""
    return False


def _needs_nothing(info: Info) -> str | None:
    return None


def _needs_native(info: Info) -> str | None:
    return None if _is_native(info) else "needs the native CPU kernels"


def _needs_both_kernels(info: Info) -> str | None:
    return _needs_native(info) or (None if has_torch() else NO_TORCH)


def _needs_cuda(info: Info) -> str | None:
    return None if info["device"].startswith("cuda") else "needs a CUDA device"


@dataclass(frozen=True, slots=True)
class Ablation:
    """An optimisation, and how to do without it.

    Args:
        what: it does, in a few words.
        off: engine settings without it; ``on``: with it, beside those given by the user.
        figure: by which it is judged.
        promises_answers: whether, with an engine (its ``info``), answers are the same without it.
        needs: why it cannot be measured with an engine (its ``info``), or None.
        run_off: does the work without it, where no setting can.
        prepare_off: changes the engine without it, where no setting can.
    """

    name: str
    what: str
    workload: AblationWorkload
    figure: Figure
    off: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Any] = field(default_factory=dict)
    promises_answers: Callable[[Info], bool] = _is_invariant
    needs: Callable[[Info], str | None] = _needs_nothing
    run_off: Run = run_engine
    prepare_off: Callable[[OfflineSession], None] | None = None


def _single_step(session: OfflineSession) -> None:
    session.loaded.text_engine.engine.scheduler.lookahead.max_multi_steps = 1


ABLATIONS = (
    Ablation(
        "kv-cache",
        "keys and values are kept; without: the whole text again for every token",
        LONE,
        OUTPUT_TPS,
        off={"enable_prefix_caching": False},
        run_off=run_without_kv_cache,
    ),
    Ablation(
        "batching",
        "requests share a step; without: one at a time",
        BATCH,
        OUTPUT_TPS,
        off={"max_num_seqs": 1},
    ),
    Ablation(
        "continuous-batching",
        "a seat is filled when it is free; without: when all are",
        UNEVEN_ANSWERS,
        OUTPUT_TPS,
        on={"max_num_seqs": 4},  # fewer seats than requests
        off={"batching": "static"},
    ),
    Ablation(
        "chunked-prefill",
        "a long prompt is spread over steps; without: others wait for all of it",
        LONG_PROMPT_MEANWHILE,
        ITL_P99,
        off={"enable_chunked_prefill": False, "max_num_batched_tokens": None},
    ),
    Ablation(
        "prefix-cache",
        "what prompts have in common is computed once",
        SHARED_PREFIX,
        TTFT,
        off={"enable_prefix_caching": False},
    ),
    Ablation(
        "shared-prefix-decode",
        "the KV of a common prefix is read once a step for all; without: for each",
        SHARED_DOCUMENT,
        TPOT,
        off={"shared_prefix_decode": False},
        promises_answers=_is_native,
        needs=_needs_native,
    ),
    Ablation(
        "native-kernels",
        "a step is one call of a native program; without: PyTorch, op by op",
        FEW,
        OUTPUT_TPS,
        off={"kernels": "reference"},
        promises_answers=_never,
        needs=_needs_both_kernels,
    ),
    Ablation(
        "rounds",
        "a lone request gets several tokens of one call; without: one",
        LONE_ANSWER,
        OUTPUT_TPS,
        needs=_needs_native,
        prepare_off=_single_step,
    ),
    Ablation(
        "kv-bf16",
        "keys and values in bf16; without: f32, twice the memory",
        LONG_CONTEXT,
        TPOT,
        on={"kv_cache_dtype": "bf16"},
        off={"kv_cache_dtype": "f32"},
        promises_answers=_never,
    ),
    Ablation(
        "kv-int8",
        "keys and values in int8; without: bf16, twice the memory",
        LONG_CONTEXT,
        TPOT,
        on={"kv_cache_dtype": "int8"},
        off={"kv_cache_dtype": "bf16"},
        promises_answers=_never,
        needs=_needs_native,
    ),
    Ablation(
        "threads",
        "all processors; without: one",
        BATCH,
        OUTPUT_TPS,
        off={"threads": 1},
        promises_answers=_is_native,
    ),
    Ablation(
        "cuda-graphs",
        "a step's kernels are launched as one graph; without: one by one",
        LONE_ANSWER,
        OUTPUT_TPS,
        off={"enforce_eager": True},
        needs=_needs_cuda,
    ),
    Ablation(
        "async-scheduling",
        "a step is prepared while the GPU computes the one before; without: after it",
        LONE_ANSWER,
        OUTPUT_TPS,
        off={"async_scheduling": False},
        needs=_needs_cuda,
    ),
)


@dataclass(frozen=True, slots=True)
class AblationResult:
    """``on`` and ``off`` in turn: the work of each repetition, with and without."""

    ablation: Ablation
    workload: str
    on: list[AblationWork]
    off: list[AblationWork]
    are_answers_promised: bool

    def spreads(self, figure: Figure) -> tuple[Spread, Spread, Spread] | None:
        """With, without, and how many times better; None if the work has no such figure."""
        with_it = [figure.of(work) for work in self.on]
        without = [figure.of(work) for work in self.off]
        pairs = [
            (on, off)
            for on, off in zip(with_it, without, strict=True)
            if on is not None and off is not None
        ]
        if not pairs:
            return None
        return (
            Spread.of([on for on, _ in pairs]),
            Spread.of([off for _, off in pairs]),
            Spread.of([figure.worth(on, off) for on, off in pairs]),
        )

    @property
    def worth(self) -> Spread:
        found = self.spreads(self.ablation.figure)
        assert found is not None, f"{self.ablation.name} is judged by what its work has not"
        return found[2]

    @property
    def num_answers(self) -> int:
        return sum(len(work.answers) for work in self.on)

    @property
    def num_same_answers(self) -> int:
        return sum(
            work.answers[name] == tokens
            for work, other in zip(self.on, self.off, strict=True)
            for name, tokens in other.answers.items()
        )

    @property
    def same_answers(self) -> str:
        """ "yes", "no" or "not promised"."""
        if not self.are_answers_promised:
            return "not promised"
        return "yes" if self.num_same_answers == self.num_answers else "no"

    def as_json(self) -> dict[str, Any]:
        found = {figure.name: self.spreads(figure) for figure in FIGURES}
        judged = found[self.ablation.figure.name]
        assert judged is not None
        return {
            "name": self.ablation.name,
            "what": self.ablation.what,
            "workload": self.workload,
            "figure": self.ablation.figure.name,
            **_worth_json(judged),
            "same_answers": self.same_answers,
            "num_same_answers": self.num_same_answers,
            "num_answers": self.num_answers,
            "on_settings": dict(self.ablation.on),
            "off_settings": dict(self.ablation.off),
            "figures": {name: _worth_json(each) for name, each in found.items() if each},
        }


def _worth_json(spreads: tuple[Spread, Spread, Spread]) -> dict[str, Any]:
    return {
        name: spread.as_json() for name, spread in zip(("on", "off", "worth"), spreads, strict=True)
    }


def choose_ablations(names: Collection[str] | None) -> tuple[Ablation, ...]:
    """Those with these names, in the order of the table; all for None. Raises ConfigError."""
    known = [ablation.name for ablation in ABLATIONS]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"there is no ablation {name!r}: choose of {', '.join(known)}")
    return tuple(each for each in ABLATIONS if names is None or each.name in names)
