"""The settings that are searched with their values, and the candidates that are tried."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from octavo.settings.engine import EngineConfig
from octavo.system.machine import Cpu

# What a step takes depends on these, so that each of their values is an engine to be measured.
ENGINE_SETTINGS = ("model", "kv_cache_dtype", "threads")
SPECULATION = "spec_method"

_ITL_TARGETS_MS = (0.0, 20.0, 40.0, 80.0, 160.0, 320.0)


@dataclass(frozen=True, slots=True)
class CandidateSettings:
    """Settings that differ from the defaults, by name and in order."""

    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.changes)

    @property
    def engine(self) -> CandidateSettings:
        """The settings among them that step times depend on."""
        return CandidateSettings(tuple(each for each in self.changes if each[0] in ENGINE_SETTINGS))

    def having(self, name: str, value: Any) -> CandidateSettings:
        return CandidateSettings(tuple(sorted({**self.settings, name: value}.items())))

    def without(self, name: str) -> CandidateSettings:
        """Return the same with this one setting at its default."""
        return CandidateSettings(tuple(each for each in self.changes if each[0] != name))

    def __str__(self) -> str:
        return ", ".join(starmap(said, self.changes)) or "the defaults"


DEFAULTS = CandidateSettings()


def said(name: str, value: Any) -> str:
    """Describe a setting: ``itl_target_ms 40``."""
    if isinstance(value, bool):
        return f"{name} {'on' if value else 'off'}"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


@dataclass(frozen=True, slots=True)
class SearchedSetting:
    """One setting: its default, and the other values that are tried."""

    name: str
    default: Any
    others: tuple[Any, ...]


def scheduling_settings(config: EngineConfig, held: Collection[str]) -> list[SearchedSetting]:
    """Return the settings of scheduling, with values around their defaults.

    ``held``: the names of settings that are to stay as they are.
    """
    limits = config.scheduler
    seqs, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    target_ms = limits.target_step_seconds * 1e3
    found = [
        SearchedSetting("max_num_seqs", seqs, _around(seqs, (1 / 8, 1 / 4, 1 / 2, 2, 4))),
        SearchedSetting("max_num_batched_tokens", budget, _around(budget, (1 / 4, 1 / 2, 2, 4))),
        SearchedSetting(
            "itl_target_ms", target_ms, tuple(x for x in _ITL_TARGETS_MS if x != target_ms)
        ),
        SearchedSetting("enable_chunked_prefill", True, (False,)),
    ]
    return [each for each in found if each.name not in held]


def speculation_setting() -> SearchedSetting:
    """Return the setting that turns speculative decoding on."""
    return SearchedSetting(SPECULATION, None, ("auto",))


def engine_changes(
    held: Collection[str], *, on_gpu: bool, threads: Iterable[int] = (), also: Iterable[str] = ()
) -> list[CandidateSettings]:
    """Return the engines beside the usual one, each with one change.

    Of the types of the KV cache, that of eight bits is tried: with fewer, answers differ more, and
    nothing here would measure that.

    Args:
        held: the names of settings that are to stay as they are.
        threads: numbers of them, beside the usual one.
        also: other files of the model.
    """
    changes = [
        ("kv_cache_dtype", "fp8" if on_gpu else "int8"),
        *(("threads", number) for number in threads),
        *(("model", file) for file in also),
    ]
    return [DEFAULTS.having(name, value) for name, value in changes if name not in held]


def fewer_threads(cpu: Cpu) -> list[int]:
    """Return numbers of threads that may be as fast as all: one for each core, and half."""
    usable = cpu.usable_cores
    return sorted({usable // 2, cpu.physical_cores or usable} & set(range(1, usable)))


def candidates(
    searched: Sequence[SearchedSetting],
    engines: Sequence[CandidateSettings],
    count: int,
    seed: int = 0,
) -> list[CandidateSettings]:
    """Return the defaults, each change alone, and then random draws of several, no candidate twice.

    Args:
        engines: changes of ``ENGINE_SETTINGS`` that were measured; a candidate has one of them
            or none.
        count: how many there are at most; the changes alone are in any case.
    """
    alone = [DEFAULTS.having(each.name, value) for each in searched for value in each.others]
    found = dict.fromkeys([DEFAULTS, *engines, *alone])
    draws = _draws(searched, engines, random.Random(f"candidates {seed}"))
    for _ in range(20 * count):  # there may be fewer than are wanted
        if len(found) >= count:
            break
        found[next(draws)] = None
    return list(found)


def _draws(
    searched: Sequence[SearchedSetting], engines: Sequence[CandidateSettings], rng: random.Random
) -> Iterator[CandidateSettings]:
    while True:
        drawn = rng.choice([DEFAULTS, *engines])
        for each in searched:
            value = rng.choice([each.default, *each.others])
            if value != each.default:
                drawn = drawn.having(each.name, value)
        yield drawn


def _around(value: int, factors: Sequence[float]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(value * factor) for factor in factors if value * factor >= 1))
