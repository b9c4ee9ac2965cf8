"""Requests with whatever may be asked of a native step: masks, log-probabilities, forks."""

from __future__ import annotations

import random

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.token_mask import create_mask


def make_requests(vocab_size: int, count: int = 12, most: int = 70) -> list[Request]:
    """Prompts with shared prefixes, and whatever may be asked of their tokens."""
    rng = random.Random(5)
    shared = [rng.randrange(2, vocab_size) for _ in range(40)]
    requests: list[Request] = []
    for index in range(count):
        own = [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, most - 40))]
        params = SamplingParams(
            max_tokens=rng.randint(8, 40),
            temperature=[0.0, 0.8, 1.5][index % 3],
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0.0, 0.05]),
            typical_p=0.8 if index % 7 == 3 else 1.0,
            repetition_penalty=rng.choice([1.0, 1.2]),
            ignore_eos=True,
            logprobs=3 if index % 2 else None,
            logit_bias={7: 2.0} if index % 5 == 0 else None,
            prompt_logprobs=2 if index % 4 == 0 else None,
            min_tokens=4 if index % 4 == 2 else 0,
            allowed_token_ids=range(3, vocab_size, 2) if index % 6 == 1 else None,
        )
        bad_words = [(5,), (9, 11), (9,)] if index % 3 == 1 else []
        mask = create_mask(params, vocab_size, range(40, 90), bad_words)
        prompt = shared[: rng.choice([0, 17, 40])] + own
        requests.append(Request(f"r{index}", prompt, params, 0.0, seed=index, mask=mask))
    leader = requests[-1]
    requests.append(
        Request(
            "fork",
            leader.prompt_token_ids,
            leader.params,
            0.0,
            seed=leader.seed,
            sample_index=1,
            mask=leader.mask and leader.mask.fork(),
            fork_of=leader,
        )
    )
    return requests


def short_requests(vocab_size: int, count: int = 4, max_tokens: int = 8) -> list[Request]:
    rng = random.Random(11)
    return [
        Request(
            f"r{index}",
            [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, 30))],
            SamplingParams(
                max_tokens=max_tokens, temperature=index % 2, logprobs=2, ignore_eos=True
            ),
            0.0,
            seed=index,
        )
        for index in range(count)
    ]


def sink_requests() -> list[Request]:
    """Requests of which all but the first see attention sinks and a window alone."""
    return [
        Request(
            f"r{index}",
            [(7 * position + index) % 250 for position in range(90)],
            SamplingParams(
                max_tokens=150,
                temperature=index % 2,
                ignore_eos=True,
                logprobs=1,
                window=40 if index else None,
            ),
            0.0,
            seed=index,
        )
        for index in range(3)
    ]
