"""`BeamSearch` keeps the likeliest continuations of a prompt: each round adds a token to all.

    prompt ── a ── b ──      a round asks, for each running beam, for the most likely next tokens;
          │     └─ d ──      of all, the ``beam_width`` most likely go on, and those that end the
          └── c ── a ──      text compete with them by their score

A beam's score is its log-probability over its length to the power of ``length_penalty``, both of
the generated tokens, the one that ends the text included. The rules are those of transformers'
``generate(num_beams=…)``, so that both find the same beams; names are vLLM's.

KV is shared: the whole blocks of a beam come from the prefix cache. The tokens of its last block,
up to ``block_size`` - 1, are computed again in each round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.base.errors import InvalidRequestError
from octavo.core.sampling_params import MAX_LOGPROBS, SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search. Names and defaults are vLLM's, and transformers' where it lacks
    them.

    Args:
        beam_width: continuations that are kept, and returned.
        max_tokens: tokens to generate at most.
        ignore_eos: go on after the model's end-of-text tokens.
        temperature: 0 and 1 are the model's own probabilities; there are no others.
        length_penalty: the power of the length by which a log-probability is divided; above 0 it
            favours long answers.
        include_stop_str_in_output: keep the end-of-text token in ``text``.
        early_stopping: True ends the search with the first ``beam_width`` finished beams; False
            once no running beam of its present length could be better than them; "never" once none
            of any length could.

    Raises:
        InvalidRequestError: a value is out of its range; names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    skip_special_tokens: bool = True
    watermarking: Any = None
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_LOGPROBS), ("max_tokens", 2**31 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidRequestError(f"must be in [1, {most}], not {value!r}", name)
        if self.temperature not in (0, 1):
            raise InvalidRequestError(
                f"must be 0 or 1: beams are compared by the model's own probabilities, "
                f"not {self.temperature!r}",
                "temperature",
            )
        penalty = self.length_penalty
        if not isinstance(penalty, int | float) or not abs(penalty) <= 100:
            raise InvalidRequestError(f"must be in [-100, 100], not {penalty!r}", "length_penalty")
        for name in ("structured_outputs", "watermarking"):
            if getattr(self, name) not in (None, False):
                raise InvalidRequestError("is not supported in a beam search", name)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f'must be True, False or "never", not {self.early_stopping!r}', "early_stopping"
            )


@dataclass(frozen=True)
class BeamSearchSequence:
    """A beam. ``tokens`` and ``text`` begin with those of the prompt, as vLLM's do."""

    tokens: list[int]
    cum_logprob: float
    score: float
    finish_reason: str | None = None  # "stop" or "length"; None while it runs
    stop_reason: int | str | None = None
    text: str | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The beams of a prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


# By token id: its log-probability after a beam.
NextTokens = Mapping[int, float]


class BeamSearch:
    """One search: ``running`` has the beams whose next tokens a round asks for."""

    def __init__(
        self, prompt_token_ids: Sequence[int], params: BeamSearchParams, ends: Collection[int]
    ):
        self._params = params
        self._num_prompt_tokens = len(prompt_token_ids)
        self._ends = frozenset() if params.ignore_eos else frozenset(ends)
        self.num_next = params.beam_width + len(self._ends)
        if self.num_next > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"must be at most {MAX_LOGPROBS - len(self._ends)} for a model with "
                f"{len(self._ends)} end-of-text tokens, not {params.beam_width}",
                "beam_width",
            )
        self.running = [BeamSearchSequence(list(prompt_token_ids), 0.0, 0.0)]
        self._finished: list[BeamSearchSequence] = []

    @property
    def sampling_params(self) -> SamplingParams:
        """The parameters by which the next tokens of a beam are asked for."""
        return SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=self.num_next, detokenize=False, ignore_eos=True
        )

    @property
    def is_over(self) -> bool:
        return not self.running

    def advance(self, next_tokens: Sequence[NextTokens]) -> None:
        """Take the most likely next tokens of each running beam, ``num_next`` of them."""
        width = self._params.beam_width
        candidates = sorted(
            self._candidates(next_tokens), key=lambda beam: beam.cum_logprob, reverse=True
        )
        ended = [beam for beam in candidates[:width] if beam.finish_reason is not None]
        self._finished = sorted(
            [*self._finished, *ended], key=lambda beam: beam.score, reverse=True
        )[:width]
        going_on = [beam for beam in candidates if beam.finish_reason is None]
        self.running = going_on[:width] if self._may_improve(going_on) else []

    def _candidates(self, next_tokens: Sequence[NextTokens]) -> Iterator[BeamSearchSequence]:
        for beam, tokens in zip(self.running, next_tokens, strict=True):
            for token_id, logprob in tokens.items():
                yield self._longer(beam, token_id, logprob)

    def _longer(
        self, beam: BeamSearchSequence, token_id: int, logprob: float
    ) -> BeamSearchSequence:
        tokens, cum_logprob = [*beam.tokens, token_id], beam.cum_logprob + logprob
        length = len(tokens) - self._num_prompt_tokens
        reason = None
        if token_id in self._ends:
            reason = "stop"
        elif length == self._params.max_tokens:
            reason = "length"
        return BeamSearchSequence(tokens, cum_logprob, self._score(cum_logprob, length), reason)

    def _score(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / math.pow(length, self._params.length_penalty)

    def _may_improve(self, going_on: Sequence[BeamSearchSequence]) -> bool:
        """Tell whether a running beam may still become better than the worst finished one."""
        params = self._params
        if not going_on or len(self._finished) < params.beam_width:
            return bool(going_on)
        if params.early_stopping is True:
            return False
        best = going_on[0]
        score = best.score
        if params.early_stopping == "never" and params.length_penalty > 0:
            score = self._score(best.cum_logprob, params.max_tokens)
        return score > self._finished[-1].score

    def written(self, decode: Callable[[list[int]], str]) -> BeamSearchOutput:
        """Return the beams with their texts, as ``decode`` writes tokens."""
        keeps_end = self._params.include_stop_str_in_output
        return BeamSearchOutput(
            [
                replace(
                    beam,
                    text=decode(
                        beam.tokens[:-1]
                        if beam.finish_reason == "stop" and not keeps_end
                        else beam.tokens
                    ),
                )
                for beam in self._finished
            ]
        )
