"""Limits the prompt tokens of a step while other requests decode, to keep inter-token latency low.

A chunk of a prompt delays every decoding request's next token by the time that it takes. ``Pacer``
learns from past steps what decoding and what a prompt token cost, and says how many prompt tokens
keep the time of a step, which is the inter-token latency (ITL), near a target. Where no request
decodes, or nothing has been measured, a step is as large as its budget.

Sarathi-Serve (Agrawal et al., OSDI 2024) has a fixed size of chunks, measured once on each machine;
here the size follows the machine, the model and its load. Results do not depend on how a prompt is
cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

# Prompt tokens that a step has at least, so that prompts end.
MIN_CHUNK = 16
# Every step pays for the weights, so that small chunks make prompts slow. A step may last this many
# times as long as one that only decodes, whatever the target is.
_LEAST_SPAN = 4.0
_KEPT = 0.8  # weight of earlier steps


class ItemSize(Protocol):
    """The part of a ``ScheduledRequest`` that is read here."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_sampled(self) -> int: ...


class BatchSize(Protocol):
    """The part of a ``Batch`` that is read here."""

    @property
    def items(self) -> Sequence[ItemSize]: ...
    @property
    def num_tokens(self) -> int: ...


class Pacer:
    """Sizes the chunks of prompts of one engine.

    Args:
        target_seconds: the longest that a step should take while a request decodes; 0 is no bound.
    """

    def __init__(self, target_seconds: float = 0.0):
        self.target_seconds = target_seconds
        self._decode_seconds = 0.0  # of a step that only decodes, lately
        # Weighted sums over steps with prompts, recent ones most: time beyond decoding, and tokens.
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0

    @property
    def decode_seconds(self) -> float:
        """Recent time of a step that only decodes; 0 where none is known."""
        return self._decode_seconds

    @property
    def prompt_token_seconds(self) -> float:
        """Recent time that a prompt token adds to a step; 0 where none is known."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else 0.0

    def prompt_tokens(self, num_decoding: int) -> float:
        """Return how many prompt tokens a step may have beside ``num_decoding`` requests that
        decode."""
        each = self.prompt_token_seconds
        if not (self.target_seconds and num_decoding and each > 0):
            return float("inf")
        return prompt_tokens_in_step(self.target_seconds, self._decode_seconds, each)

    def observe(self, batch: BatchSize, seconds: float) -> None:
        """Learn from the time of a step. Steps with drafts or multi-step decoding are ignored."""
        if not self.target_seconds or any(item.num_sampled > 1 for item in batch.items):
            return
        num_decoding = _num_decoding(batch.items)
        num_prompt = batch.num_tokens - num_decoding
        if num_prompt == 0:
            known = self._decode_seconds or seconds
            self._decode_seconds = _KEPT * known + (1 - _KEPT) * seconds
            return
        beyond = max(0.0, seconds - self._decode_seconds) if num_decoding else seconds
        self._prompt_seconds = _KEPT * self._prompt_seconds + beyond
        self._prompt_tokens = _KEPT * self._prompt_tokens + num_prompt


def prompt_tokens_in_step(target: float, decode: float, each: float) -> int:
    """Return how many prompt tokens fit into a step of ``target`` seconds that takes ``decode``
    seconds without them, and ``each`` more for each."""
    return max(MIN_CHUNK, int(prompt_seconds_in_step(target, decode) / each))


def prompt_seconds_in_step(target: float, decode: float) -> float:
    """Return the seconds that prompts have in a step which takes ``decode`` seconds without
    them."""
    return max(target, _LEAST_SPAN * decode) - decode


def _num_decoding(items: Iterable[ItemSize]) -> int:
    return sum([item.num_tokens == 1 for item in items])
