"""Admission control that refuses requests whose predicted time to first token (TTFT) is too
long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.base.errors import InvalidRequestError, QueueFullError
from octavo.core.stats import StepStats
from octavo.cost.first_token import (
    Backlog,
    FirstToken,
    LearnedRates,
    PredictedRates,
    SlowedRates,
    StepRates,
)
from octavo.server.engine.generation import EngineFacts
from octavo.server.engine.waiting_queue import QueuedWork

if TYPE_CHECKING:
    from octavo.cost.step_cost import StepModel

# Decay of the running means, at each answer and at each step.
_KEPT_OF_ANSWERS, _KEPT_OF_STEPS = 0.9, 0.9


class TTFTAdmission:
    """Predicts the time to first token of every new request, by `octavo.cost.first_token`.

    With a step model the prediction is by that, times how much longer than predicted recent steps
    took: other programs may use the machine, too. Without one, it is by what the engine's pacer has
    learned of its steps. Until anything is known, every request is admitted. So is every request to
    an idle engine, however slow its last steps were, unless the prompt alone would take too long:
    only new steps can show that it has become quicker.

    Args:
        most_seconds: limit of the predicted TTFT; by default none is refused.
    """

    def __init__(self, most_seconds: float = math.inf):
        self._most_seconds = most_seconds
        self._predicted_rates: StepRates | None = None
        self._answer_tokens = self._prompt_tokens = 0.0
        self._decoding, self._prompts = _Slowdown(), _Slowdown()  # steps without and with prompts

    def set_step_model(self, steps: StepModel, facts: EngineFacts) -> None:
        """Predict by this step model from now on."""
        self._predicted_rates = PredictedRates(
            steps, facts.max_num_batched_tokens, facts.max_model_len
        )

    def note_answer(self, num_tokens: int) -> None:
        """Take in the length of an answer that has ended, by which the ends of others are
        predicted."""
        known = self._answer_tokens or num_tokens
        self._answer_tokens = _KEPT_OF_ANSWERS * known + (1 - _KEPT_OF_ANSWERS) * num_tokens

    @property
    def prompt_tokens(self) -> int:
        """The tokens of a prompt on the mean; 1 before the first."""
        return max(1, round(self._prompt_tokens))

    def note_prompt(self, num_tokens: int) -> None:
        """Take in the length of a prompt that has come."""
        known = self._prompt_tokens or num_tokens
        self._prompt_tokens = _KEPT_OF_ANSWERS * known + (1 - _KEPT_OF_ANSWERS) * num_tokens

    def note_step(self, before: StepStats, now: StepStats) -> None:
        """Take in the real and the predicted time of a step."""
        if None not in (before.predicted_seconds, now.predicted_seconds):
            (self._prompts if now.num_prompt_tokens else self._decoding).take(
                (now.measured_seconds or 0.0) - (before.measured_seconds or 0.0),
                (now.predicted_seconds or 0.0) - (before.predicted_seconds or 0.0),
            )

    def predict(
        self, facts: EngineFacts, stats: StepStats, waiting: QueuedWork, num_tokens: int
    ) -> float | None:
        """Return the predicted seconds to the first token of a prompt that came now; None if
        unknown."""
        rates = self._rates(stats)
        if rates is None:
            return None
        engine, backlog = _engine_of(facts), _backlog(facts, stats, waiting)
        return engine.seconds(backlog, num_tokens, rates, self._answer_tokens)

    def check(
        self, facts: EngineFacts, stats: StepStats, waiting: QueuedWork, num_tokens: int
    ) -> float | None:
        """Return what `predict` does, for a request that has come.

        Raises:
            QueueFullError: they are too many. Its ``retry_after`` says when they will be few
                enough, if no other request comes.
            InvalidRequestError: they would be too many even on an idle engine.
        """
        seconds = self.predict(facts, stats, waiting, num_tokens)
        if seconds is not None and seconds > self._most_seconds:
            self._check_alone(_engine_of(facts), num_tokens)
            if stats.num_running or waiting.num_samples:
                raise QueueFullError(
                    f"the first token is predicted to take {_ms(seconds)}, with "
                    f"{waiting.num_samples} waiting and {stats.num_running} running before it, "
                    f"and may take {_ms(self._most_seconds)} here",
                    seconds - self._most_seconds,
                )
        return seconds

    def _rates(self, stats: StepStats) -> StepRates | None:
        if self._predicted_rates is None:
            return _learned(stats)
        return self._slowed(self._predicted_rates)

    def _check_alone(self, engine: FirstToken, num_tokens: int) -> None:
        """Raise InvalidRequestError if the prompt would take too long even on an idle engine.

        That is by the predicted times, or by the real ones of steps with prompts where these were
        shorter.
        """
        if self._predicted_rates is None or self._prompts.factor is None:
            return
        rates = self._slowed(self._predicted_rates, most=1.0)
        seconds = engine.seconds(Backlog(), num_tokens, rates)
        if seconds > self._most_seconds:
            raise InvalidRequestError(
                f"has {num_tokens} tokens, which alone are predicted to take {_ms(seconds)} to the "
                f"first token, and may take {_ms(self._most_seconds)} here: shorten it",
                "prompt",
            )

    def _slowed(self, rates: StepRates, most: float = math.inf) -> StepRates:
        """Return the rates of recent steps.

        Args:
            most: bound on how much slower than predicted they are taken to be.
        """
        decoding, prompts = self._decoding.factor, self._prompts.factor
        return SlowedRates(
            rates,
            min(most, decoding or prompts or 1.0),
            min(most, prompts or decoding or 1.0),
        )


@dataclass(slots=True)
class _Slowdown:
    """Ratio of the real to the predicted time of steps, with a decaying memory."""

    real_seconds: float = 0.0
    predicted_seconds: float = 0.0

    def take(self, real: float, predicted: float) -> None:
        self.real_seconds = _KEPT_OF_STEPS * self.real_seconds + real
        self.predicted_seconds = _KEPT_OF_STEPS * self.predicted_seconds + predicted

    @property
    def factor(self) -> float | None:
        """The ratio; None before the first step."""
        return self.real_seconds / self.predicted_seconds if self.predicted_seconds else None


def _learned(stats: StepStats) -> StepRates | None:
    if not stats.prompt_token_seconds:
        return None
    return LearnedRates(stats.decode_seconds, stats.prompt_token_seconds)


def _engine_of(facts: EngineFacts) -> FirstToken:
    return FirstToken(
        facts.max_num_seqs,
        facts.max_num_batched_tokens,
        facts.target_step_seconds,
        facts.num_stages,
    )


def _backlog(facts: EngineFacts, stats: StepStats, waiting: QueuedWork) -> Backlog:
    return Backlog(
        num_running=stats.num_running,
        num_running_tokens=_held_tokens(stats, facts),
        num_due_tokens=stats.num_due_tokens,
        num_waiting=waiting.num_samples,
        num_waiting_tokens=waiting.num_tokens,
        num_waiting_pairs=waiting.num_pairs,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _held_tokens(stats: StepStats, facts: EngineFacts) -> int:
    """Return how many tokens running samples have in the KV pool.

    It is the mean of the block tables, where some are of sliding windows.
    """
    slots = stats.num_used_blocks * facts.block_size / len(facts.windows)
    return round(slots * (1.0 - stats.kv_waste))
