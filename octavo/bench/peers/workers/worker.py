"""The loop of a worker, the child process of an engine with a Python API, which loads once and is
measured many times.

A worker reads one JSON object a line from standard input and answers each with one, on what was
its standard output; what the engine itself prints goes to standard error. It ends when its input
does. Standard library only: each worker runs in its engine's own environment.

    -> {"workload": {…}, "seed": 3}
    <- {"samples": [{"decode_tps": 254.1}, …]}      or {"error": "…"}
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workloads import PeerWorkload, batch_figures

TokenIds = list[int]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a call. ``elapsed_s``: the whole call. ``decode_s``: of one request, from its
    first token to its last, where the engine tells."""

    elapsed_s: float
    decode_s: float | None = None


class WorkerEngine(Protocol):
    """An engine, as a worker measures it."""

    vocab_size: int

    def generate(self, prompts: list[TokenIds], max_tokens: int) -> Timing:
        """Answer with exactly ``max_tokens`` tokens each, greedily, whatever the tokens are."""
        ...

    def about(self) -> dict[str, Any]:
        """Return version and settings, for the record."""
        ...


def check_lengths(answers: Sequence[Sequence[int]], expected: int) -> None:
    """Raise RuntimeError if an answer has another length: an engine that stopped early did less
    work."""
    lengths = {len(answer) for answer in answers}
    if lengths != {expected}:
        raise RuntimeError(f"answers of {sorted(lengths)} tokens instead of {expected}")


def measure(engine: WorkerEngine, workload: PeerWorkload, seed: int) -> list[dict[str, float]]:
    """Return the figures of every repetition."""
    # Not counted: buffers, code and caches that exist from the first batch of this shape on.
    warm_up = workload.prompts(seed, engine.vocab_size, repetition=-1)
    engine.generate(warm_up, min(4, workload.output_len))
    return [
        _measure_once(engine, workload, seed, repetition) for repetition in range(workload.repeat)
    ]


def _measure_once(
    engine: WorkerEngine, workload: PeerWorkload, seed: int, repetition: int
) -> dict[str, float]:
    # "Alone" is the same work up to the first tokens. Its prompts are others, so that nothing of
    # them is in a prefix cache.
    alone = workload.prompts(seed, engine.vocab_size, repetition + 1000)
    prompts = workload.prompts(seed, engine.vocab_size, repetition)
    if workload.kind == "prefill":
        elapsed = engine.generate(prompts, 1).elapsed_s
        return {"prefill_tps": workload.input_len / elapsed}
    if workload.kind == "mix":
        elapsed = engine.generate(prompts, workload.output_len).elapsed_s
        return {"output_tps": workload.num_seqs * workload.output_len / elapsed}
    if workload.kind == "batch":
        prefill_s = engine.generate(alone, 1).elapsed_s
        whole_s = engine.generate(prompts, workload.output_len).elapsed_s
        return batch_figures(workload, whole_s, prefill_s)
    if workload.kind == "decode":
        timing = engine.generate(prompts, workload.output_len)
        decode_s = timing.decode_s
        if decode_s is None:
            decode_s = timing.elapsed_s - engine.generate(alone, 1).elapsed_s
        return {"decode_tps": (workload.output_len - 1) / decode_s}
    raise ValueError(f"a worker does not measure workloads of kind {workload.kind!r}")


def serve(load: Callable[[dict[str, Any]], WorkerEngine]) -> None:
    """Load the engine with the settings in the first argument, then answer until input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # an engine, or a library of it, that prints must not end up among the answers
    sys.stdout = sys.stderr

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    try:
        engine = load(json.loads(sys.argv[1]))
        started = time.perf_counter()
        engine.generate([[1000 % engine.vocab_size]], 1)
        answer({"first_token_s": time.perf_counter() - started, "about": engine.about()})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            samples = measure(engine, PeerWorkload(**request["workload"]), request["seed"])
            answer({"samples": samples})
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
