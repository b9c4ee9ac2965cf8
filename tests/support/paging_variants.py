"""Ways to run the same requests, none of which may change an answer."""

from __future__ import annotations

import random

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams

VARIANTS = {
    "block size 1": {"block_size": 1, "num_blocks": 1024},
    "block size 4": {"block_size": 4, "num_blocks": 256},
    "block size 32": {"block_size": 32, "num_blocks": 32},
    "budget 1": {"max_num_batched_tokens": 1},
    "budget 7": {"max_num_batched_tokens": 7},
    "budget 64": {"max_num_batched_tokens": 64},
    "no prefix cache": {"prefix_caching": False},
    "tiny pool": {"num_blocks": 30, "block_size": 4},
    "tiny pool, no cache": {"num_blocks": 30, "block_size": 4, "prefix_caching": False},
    "tiny pool, host cache": {"num_blocks": 30, "block_size": 4, "num_places": 60},
    "three slots": {"max_num_seqs": 3},
    "static": {"static": True, "max_num_seqs": 4},
    "unchunked": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
}


def make_requests(
    vocab_size: int, count: int = 10, most: int = 70, longest_answer: int = 40
) -> list[Request]:
    """Prompts with shared prefixes, greedy and sampled, some of them with prompt logprobs."""
    rng = random.Random(3)
    shared = [rng.randrange(2, vocab_size) for _ in range(40)]
    requests = []
    leader = None
    for index in range(count):
        own = [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, most - 40))]
        prompt = shared[: rng.choice([0, 17, 40])] + own
        params = SamplingParams(
            max_tokens=rng.randint(8, longest_answer),
            temperature=rng.choice([0.0, 0.8, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=2 if index % 4 == 0 else None,
        )
        request = Request(f"r{index}", prompt, params, 0.0, seed=index)
        if index == count - 1:  # a second sample of the prompt before it
            assert leader is not None
            request = Request(
                f"r{index}",
                leader.prompt_token_ids,
                leader.params,
                0.0,
                seed=leader.seed,
                sample_index=1,
                fork_of=leader,
            )
        leader = request
        requests.append(request)
    return requests
