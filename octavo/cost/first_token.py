"""Prediction of a new request's time to first token, by the work that an engine has before it.

    steps     until the request is served: the largest of
                  1
                  tokens of prompts, its own the last / those that fit into a step
                  answers that must end until it has a batch slot / those that end in a step
    seconds   steps x a step that only decodes
              + tokens x what one more token of a prompt adds
              + pairs x what one more key adds that such a token sees

In a pipeline of d stages, a step has a d-th of the requests that decode, and of the tokens that
are due a chunk by which they are soonest through (`octavo.core.prompt_chunks`). d steps are under
way at once, and the seconds above are those between two of them, whose prompt tokens take what such
a chunk does. The last step with tokens of the new prompt then takes d - 1 times as long once more,
as it goes through the other stages.

No term falls when there is more to do, so a longer queue never predicts an earlier token. Requests
are taken in the order of their arrival, and those before the new one join the answers half-way, on
the mean. Three things are not predicted: prefix cache hits, which make the token earlier; a KV pool
that is too small for all batch slots, and priorities, which make it later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.core.prefill_pacing import MIN_CHUNK, prompt_seconds_in_step
from octavo.core.prompt_chunks import ChunkSeconds
from octavo.cost.work import Span, passes

if TYPE_CHECKING:
    from octavo.cost.step_cost import StepModel


class Backlog(NamedTuple):
    """The work of an engine before a new request gets its first token.

    Args:
        num_running: samples with a batch slot. num_running_tokens: their tokens, all together.
        num_due_tokens: of the prompts of these, that are yet to be computed.
        num_waiting: samples without a slot. num_waiting_tokens: those of their prompts.
        num_waiting_pairs: tokens of a prompt and those that each of them sees, over these prompts.
    """

    num_running: int = 0
    num_running_tokens: int = 0
    num_due_tokens: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_waiting_pairs: int = 0


class StepRates(Protocol):
    """The seconds that steps take; of a pipeline, those between two of them."""

    def decode(self, num_seqs: int, num_tokens: int) -> float:
        """Seconds of a step in which so many samples decode, with so many tokens in all."""
        ...

    @property
    def prompt_token(self) -> float:
        """Seconds that a prompt token adds to a step."""
        ...

    @property
    def prompt_pair(self) -> float:
        """Seconds that a prompt token adds for each token it attends to."""
        ...

    @property
    def chunk(self) -> ChunkSeconds:
        """Seconds of a step of prompt tokens alone, but for what they attend to, and for what comes
        with a token that is sampled."""
        ...


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Predicts times to first tokens of an engine with these limits (``SchedulerConfig``), and so
    many stages of a pipeline."""

    max_num_seqs: int
    max_num_batched_tokens: int
    target_step_seconds: float = 0.0
    stages: int = 1

    def seconds(
        self, backlog: Backlog, num_tokens: int, rates: StepRates, answer_tokens: float = 0.0
    ) -> float:
        """Seconds until a new request with a prompt of ``num_tokens`` has its first token.

        ``answer_tokens``: mean tokens of an answer, which say how soon slots become free; 0 as
        long as that is not known.
        """
        tokens = backlog.num_due_tokens + backlog.num_waiting_tokens + num_tokens
        pairs = backlog.num_waiting_pairs + num_pairs(num_tokens)
        joining = backlog.num_running + (backlog.num_waiting + 1) // 2
        decoding = -(-min(self.max_num_seqs, joining) // self.stages)
        held = (backlog.num_running_tokens + backlog.num_waiting_tokens // 2) // self.stages
        step = rates.decode(max(1, decoding), held)
        num_before = backlog.num_running + backlog.num_waiting
        ends = max(0, num_before + 1 - self.max_num_seqs)
        room = self._room(decoding, step, rates.prompt_token)
        turns = ends * answer_tokens * self.stages / self.max_num_seqs  # until a slot is free
        attention = pairs * rates.prompt_pair
        if self.stages == 1:
            return max(1.0, tokens / room, turns) * step + tokens * rates.prompt_token + attention
        chunk_seconds, of_last = rates.chunk, num_tokens * rates.prompt_pair
        sizes: list[float] = [size for size in chunk_seconds.sizes if size <= room]
        is_alone = not (decoding or turns)
        return (
            attention
            + min(
                self._through(
                    tokens, size, turns, 0.0 if is_alone else step, chunk_seconds, of_last
                )
                for size in sizes or [room]
            )
            + (max(0.0, step - chunk_seconds(0)) if is_alone else 0.0)
        )

    def _through(
        self,
        tokens: int,
        chunk: float,
        turns: float,
        step: float,
        seconds: ChunkSeconds,
        of_last: float,
    ) -> float:
        """Seconds until all stages have computed prompts in chunks of some size.

        Args:
            turns: steps until there is a slot.
            step: seconds of a step that only decodes.
            of_last: seconds of what a token of the last chunk attends to.
        """
        later = self.stages - 1  # stages that the last chunk goes through after the first one
        num_chunks, least = max(1.0, tokens / chunk), seconds(0)
        each = max(step, least)
        beyond = max(0.0, seconds(min(chunk, tokens)) - least)
        last = min(tokens, max(chunk, seconds.sizes[0])) * of_last
        return (
            (max(num_chunks, turns) + later) * each + (num_chunks + later) * beyond + later * last
        )

    def _room(self, decoding: int, step: float, prompt_token: float) -> float:
        """Tokens of prompts in a step; not a whole number, so that it rises and falls steadily."""
        room = float(max(1, self.max_num_batched_tokens - decoding))
        if not (self.target_step_seconds and decoding and prompt_token > 0):
            return room
        paced = prompt_seconds_in_step(self.target_step_seconds, step) / prompt_token
        return min(room, max(MIN_CHUNK, paced))


def num_pairs(num_tokens: int) -> int:
    """Tokens of a prompt with those that each of them sees, itself included."""
    return num_tokens * (num_tokens + 1) // 2


class PredictedRates:
    """`StepRates` of a step model: measured on the spot, or of a roofline.

    Args:
        chunk: tokens of prompts in a step. max_model_len: of a sequence. What tokens and pairs add
            is told from such chunks at both ends of a context.
    """

    def __init__(self, steps: StepModel, chunk: int, max_model_len: int):
        self._steps = steps
        first, last, least = (
            self._seconds([Span(start, size)])
            for start, size in ((0, chunk), (max_model_len, chunk), (0, 1))
        )
        self.prompt_pair = max(0.0, last - first) / (chunk * max_model_len)
        beyond = first - least - self.prompt_pair * num_pairs(chunk)
        self.prompt_token = max(0.0, beyond) / max(1, chunk - 1)
        self._chunk = chunk

    @cached_property
    def chunk(self) -> ChunkSeconds:
        return ChunkSeconds(self._chunk, self._steps.chunk_seconds)

    def decode(self, num_seqs: int, num_tokens: int) -> float:
        each, more = divmod(num_tokens, num_seqs)
        longer, shorter = [Span(each + 1, 1)] * more, [Span(each, 1)] * (num_seqs - more)
        return self._seconds(longer + shorter)

    def _seconds(self, spans: list[Span]) -> float:
        (rows,) = passes(spans)
        return self._steps.pass_seconds(rows) + self._steps.overhead(len(spans))


_MOST_LEARNED = 2048  # tokens of a chunk


@dataclass(frozen=True, slots=True)
class LearnedRates:
    """`StepRates` of nothing but the steps that were run lately, whatever was in them."""

    decode_seconds: float
    prompt_token: float
    prompt_pair: float = 0.0

    def decode(self, num_seqs: int, num_tokens: int) -> float:
        return self.decode_seconds

    @property
    def chunk(self) -> ChunkSeconds:
        return ChunkSeconds(
            _MOST_LEARNED, lambda tokens: self.decode_seconds + tokens * self.prompt_token
        )


@dataclass(frozen=True, slots=True)
class SlowedRates:
    """Rates of an engine whose steps take so many times as long as ``rates`` say: those that only
    decode, and those with prompts."""

    rates: StepRates
    decoding: float
    prompts: float

    def decode(self, num_seqs: int, num_tokens: int) -> float:
        return self.decoding * self.rates.decode(num_seqs, num_tokens)

    @property
    def prompt_token(self) -> float:
        return self.prompts * self.rates.prompt_token

    @property
    def chunk(self) -> ChunkSeconds:
        return self.rates.chunk.scaled(self.prompts)

    @property
    def prompt_pair(self) -> float:
        return self.prompts * self.rates.prompt_pair
