"""How much of prompts a step may compute while others are being answered.

A chunk of a prompt makes everybody's next token late by the time that it takes. ``Pacer`` learns
from the steps that were run what decoding and what a prompt's token cost, and says how many of the
latter keep the time of a step, which is the latency between tokens (ITL), near a target. Where
nobody is being answered, or nothing has been measured, a step is as large as its budget.

What Sarathi-Serve (Agrawal et al., OSDI 2024) does with a fixed size of chunks, measured once on
each machine, is done here with a size that follows the machine, the model and its load. Results do
not depend on how a prompt is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

# The least that prompts get of a step, so that they end.
MIN_CHUNK = 16
# Every step pays for the weights, so that small chunks make prompts slow. A step may last this many
# times as long as one that only decodes, whatever the target is.
_LEAST_SPAN = 4.0
_KEPT = 0.8  # of what is known, after each step


class Piece(Protocol):
    """What a step computes of a request, as a ``ScheduledRequest`` has it."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_sampled(self) -> int: ...


class Step(Protocol):
    """What is read of a ``Batch``."""

    @property
    def items(self) -> Sequence[Piece]: ...
    @property
    def num_tokens(self) -> int: ...


class Pacer:
    """Chunks of prompts for one engine.

    Args:
        target_seconds: what a step may last while somebody is being answered; 0 is no bound.
    """

    def __init__(self, target_seconds: float = 0.0):
        self.target_seconds = target_seconds
        self._decode_seconds = 0.0  # of a step that only decodes, lately
        # Of steps with prompts, the later the more: time beyond that of a decode, and tokens.
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0

    @property
    def decode_seconds(self) -> float:
        """Of a step that only decodes, lately; 0 where none is known."""
        return self._decode_seconds

    @property
    def prompt_token_seconds(self) -> float:
        """What a token of a prompt adds to a step, lately; 0 where that is not known."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else 0.0

    def prompt_tokens(self, num_decoding: int) -> float:
        """How many tokens of prompts may be beside so many that decode."""
        each = self.prompt_token_seconds
        if not (self.target_seconds and num_decoding and each > 0):
            return float("inf")
        return room_of_prompts(self.target_seconds, self._decode_seconds, each)

    def observe(self, batch: Step, seconds: float) -> None:
        """A step took so long. Of those with drafts or several steps, nothing is to be learned."""
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


def room_of_prompts(target: float, decode: float, each: float) -> int:
    """Tokens of prompts that go into a step of ``target`` seconds, if it takes ``decode`` without
    them, and so much longer for each."""
    return max(MIN_CHUNK, int(time_of_prompts(target, decode) / each))


def time_of_prompts(target: float, decode: float) -> float:
    """Seconds that prompts have of a step which takes ``decode`` without them."""
    return max(target, _LEAST_SPAN * decode) - decode


def _num_decoding(items: Iterable[Piece]) -> int:
    return sum([item.num_tokens == 1 for item in items])
