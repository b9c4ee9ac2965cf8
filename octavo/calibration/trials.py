"""The loads that a calibration runs: together they hold every kind of step there is.

Steps are those of production: prompts of every length, alone and beside requests that decode; few
and many requests, short and long; a lone stream, several steps a call. What a step
costs is asked of all of them at once (`fit`), so no load has to show one thing alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_SHORT = 16  # tokens of a prompt that is there to be decoded from
_MULTI_STEP_OUTPUT = 26  # three calls of eight tokens, and two that end the answer
_LONG_CONTEXTS = ((1, 2048), (4, 1024), (16, 384))  # streams, and tokens before their answers


@dataclass(frozen=True, slots=True)
class Size:
    """What an engine takes: requests and tokens of a step, tokens of a request, tokens of the KV
    pool."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class CalibrationLoad:
    """Requests that are given at once.

    Args:
        lengths: tokens of each prompt, and of its answer.
        shared: tokens that all prompts begin with, of theirs; computed, and cached, before.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    shared: int = 0

    @property
    def num_tokens(self) -> int:
        """To compute."""
        own = sum(prompt - self.shared + answer for prompt, answer in self.lengths)
        return self.shared + own


def trials(size: Size, *, quick: bool = False) -> list[CalibrationLoad]:
    """The loads for an engine, the most telling ones first; ``quick``: fewer of them."""
    found = [
        CalibrationLoad("a lone stream", ((_SHORT, _MULTI_STEP_OUTPUT),)),
        *_batches(size, quick),
        *_prompts(size, quick),
        _mixed(size, quick),
        *_long_contexts(size, quick),
        _shared_prefix(size),
    ]
    return [trial for trial in found if fits(trial, size)]


def _batches(size: Size, quick: bool) -> Iterator[CalibrationLoad]:
    """So many requests, decoding together."""
    count, factor = 2, 4 if quick else 2
    while count <= size.max_num_seqs:
        yield CalibrationLoad(f"{count} short streams", ((_SHORT, 10),) * count)
        count *= factor


def _prompts(size: Size, quick: bool) -> Iterator[CalibrationLoad]:
    """Prompts alone, of which one token is sampled; the longest in several chunks."""
    length, factor = 8, 4 if quick else 2
    end = min(2 * size.max_num_batched_tokens, size.max_model_len)
    while length < end:
        yield CalibrationLoad(f"a prompt of {length}", ((length, 1),))
        between = length * 3 // 2
        if not quick and length >= 64 and between < end:  # where steps of a server mostly are
            yield CalibrationLoad(f"a prompt of {between}", ((between, 1),))
        length *= factor


def _long_contexts(size: Size, quick: bool) -> Iterator[CalibrationLoad]:
    """Answers far into a text, alone and together. The more of them, the shorter the texts: else
    prompts would take most of the time."""
    for count, length in _LONG_CONTEXTS[: 2 if quick else None]:
        length = min(length, size.max_model_len - 16, size.kv_tokens // count - 32)
        if length > 4 * _SHORT and count <= size.max_num_seqs:
            yield CalibrationLoad(f"{count} streams after {length} tokens", ((length, 10),) * count)


def _shared_prefix(size: Size) -> CalibrationLoad:
    """Answers to prompts that begin alike: keys and values of that are read by all, from a cache
    of the processor, mostly."""
    count = min(8, size.max_num_seqs)
    shared = min(512, size.max_model_len // 2, size.kv_tokens // 2)
    return CalibrationLoad(
        f"{count} streams that begin alike", ((shared + 64, 16),) * count, shared
    )


def _mixed(size: Size, quick: bool) -> CalibrationLoad:
    """More requests than there is room for, of all lengths: some begin while others go on."""
    rng = random.Random(0)
    longest = min(512, size.max_model_len // 2)
    count = 2 * min(size.max_num_seqs, 16) // (2 if quick else 1)
    lengths = tuple((rng.randint(_SHORT, longest), rng.randint(4, 40)) for _ in range(count))
    return CalibrationLoad("requests of all lengths", lengths)


def fits(trial: CalibrationLoad, size: Size) -> bool:
    """Whether an engine takes its requests."""
    return all(prompt + answer <= size.max_model_len for prompt, answer in trial.lengths)
