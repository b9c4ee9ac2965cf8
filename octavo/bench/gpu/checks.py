"""Checks of a GPU in a process of its own: the speed of the device, and the agreement of octavo's
kernels with the reference ops, each as one JSON object.

    python -m octavo.bench.gpu.checks device cuda
    python -m octavo.bench.gpu.checks agreement FOLDER '{"kernels": "auto"}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

_PROMPTS, _PROMPT_TOKENS, _ANSWER_TOKENS, _TOP = 8, 96, 8, 5
_PEAKS = ("bfloat16", "float8_e4m3fn", "int8")


def device_facts(device: str) -> dict[str, Any]:
    """Return name, versions, bytes per second of copies, and operations per second of products by
    type; None for a type without products on the device."""
    import torch

    from octavo.bench.record import versions
    from octavo.cost.probing import best_bandwidth, best_rate
    from octavo.doctor import find_cuda
    from octavo.runtime.torch_probe import products, reads
    from octavo.system.gpu_software import driver_version

    where = torch.device(device)
    peaks: dict[str, float | None] = {}
    for name in _PEAKS:
        try:
            peaks[name] = best_rate(products(where, getattr(torch, name)))
        except (RuntimeError, NotImplementedError):
            peaks[name] = None
    found = find_cuda().devices[:1] if where.type == "cuda" else ()
    return {
        "name": found[0].name if found else device,
        "uuid": found[0].uuid if found else None,
        "capability": found[0].capability if found else None,
        "memory_bytes": found[0].memory_bytes if found else None,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "versions": versions(),
        "bytes_per_s": best_bandwidth(reads(where)),
        "ops_per_s": peaks,
    }


def agreement(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Compare greedy answers of an engine and of the reference ops: the number of equal first
    tokens, and the largest difference of the log-probabilities that both give to the most probable
    tokens after the prompts. Random weights have near ties, so that answers may differ where
    nothing is wrong; log-probabilities may not."""
    reference = _answers(model, {**settings, "kernels": "reference"})
    ours = _answers(model, settings)
    pairs = list(zip(ours["answers"], reference["answers"], strict=True))
    apart = [
        abs(first[token] - logprob)
        for first, expected in zip(ours["first"], reference["first"], strict=True)
        for token, logprob in expected.items()
        if token in first
    ]
    return {
        "kernels": ours["kernels"],
        "prompts": len(pairs),
        "same_first_token": sum(ours[0] == theirs[0] for ours, theirs in pairs),
        "same_answer": sum(ours == theirs for ours, theirs in pairs),
        "largest_difference": max(apart, default=None),
    }


def _answers(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    import random

    from octavo import LLM, SamplingParams

    llm = LLM(model, **{"max_model_len": 512, "max_num_seqs": _PROMPTS, **settings})
    rng = random.Random(0)
    # Text has tokens below 256 in these models.
    prompts = [[rng.randrange(256) for _ in range(_PROMPT_TOKENS)] for _ in range(_PROMPTS)]
    params = SamplingParams(
        temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, logprobs=_TOP
    )
    answers = [output.outputs[0] for output in llm.generate(prompts, params)]
    first = [
        {token: each.logprob for token, each in (answer.logprobs or [{}])[0].items()}
        for answer in answers
    ]
    kernels = llm.engine_info()["kernels"]
    llm.close()
    return {
        "answers": [list(answer.token_ids) for answer in answers],
        "first": first,
        "kernels": kernels,
    }


def main() -> None:
    what, *arguments = sys.argv[1:]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not end up in the answer
    if what == "device":
        found = device_facts(arguments[0])
    else:
        found = agreement(arguments[0], json.loads(arguments[1]))
    print(json.dumps(found), file=answer, flush=True)


if __name__ == "__main__":
    main()
