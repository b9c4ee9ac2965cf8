"""A drafting model of arithmetic, which knows what lies in each of its slots."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from hash_model import expected_tokens

from octavo.core.batch import Batch, ScheduledRequest, StepOutput, TokenLogprobs


class DraftingDouble:
    """Runs batches as a rank does. Keys and values of a position are all tokens up to it; a slot
    that is read and has others is noted in ``faults``, but for what breaks while it is read.

    Args:
        says: the next token of a text, and the probability that it is given.
        most: steps that it takes in one call.
    """

    def __init__(
        self,
        says: Callable[[list[int]], tuple[int, float]],
        num_blocks: int,
        block_size: int,
        most: int = 8,
    ):
        self._says = says
        self._block_size = block_size
        self._most = most
        self._slots: list[tuple[int, ...]] = [()] * (num_blocks * block_size)
        self.faults: list[str] = []
        self.batches: list[Batch] = []
        self.num_computed = 0
        self._is_broken = False
        self.breaks: Callable[[ScheduledRequest], str | None] = lambda item: None

    def run(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        output = StepOutput({})
        errors = [self.breaks(item) for item in batch.items]
        self._is_broken = any(errors)
        for item, error in zip(batch.items, errors, strict=True):
            request_id = item.request.request_id
            text = item.request.token_ids[: item.start + item.num_tokens]
            self._compute(item, text, item.start, spoilt=error is not None)
            if error is not None:
                output.errors[request_id] = error
                continue
            sampled: list[TokenLogprobs] = []
            while len(sampled) < min(item.num_sampled, self._most):
                if sampled:
                    self._compute(item, text, len(text) - 1)
                token_id, probability = self._says(text)
                sampled.append(TokenLogprobs(token_id, math.log(probability), 1, ()))
                text = [*text, token_id]
            if sampled:
                output.token_ids[request_id] = [entry.token_id for entry in sampled]
                output.logprobs[request_id] = sampled
        return output

    def _compute(
        self, item: ScheduledRequest, text: list[int], start: int, *, spoilt: bool = False
    ) -> None:
        table = item.request.block_ids
        for position in range(len(text)):
            slot = table[position // self._block_size] * self._block_size
            slot += position % self._block_size
            content = tuple(text[: position + 1])
            if position >= start:
                self._slots[slot] = () if spoilt else content
                self.num_computed += 1
            elif self._slots[slot] != content and not self._is_broken:
                self.faults.append(f"position {position} of {item.request.request_id}")


def knows_the_hash_model(
    prompts: dict[tuple[int, ...], int], seed: int, vocab_size: int = 97
) -> Callable[[list[int]], tuple[int, float]]:
    """What the hash model says to prompts (and their lengths), mostly."""
    rng = random.Random(seed)

    def says(text: list[int]) -> tuple[int, float]:
        for prompt in prompts:
            count = len(text) - len(prompt)
            if count >= 0 and tuple(text[: len(prompt)]) == prompt and rng.random() < 0.8:
                return expected_tokens(prompt, count + 1, vocab_size)[-1], 0.9
        return rng.randrange(vocab_size), rng.choice([0.05, 0.5, 0.9])

    return says
