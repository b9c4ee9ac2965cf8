"""Who would wait too long for a first token is refused at the door, and may come again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.base.errors import InvalidRequestError, QueueFullError
from octavo.core.stats import StepStats
from octavo.cost.first_token import (
    Backlog,
    FirstToken,
    ForeseenRates,
    LearnedRates,
    SlowedRates,
    StepRates,
)
from octavo.server.engine.generation import EngineFacts
from octavo.server.engine.waiting_queue import QueuedWork

if TYPE_CHECKING:
    from octavo.cost.step_cost import StepModel

# Of what is known, after each answer, and after each step.
_KEPT_OF_ANSWERS, _KEPT_OF_STEPS = 0.9, 0.9


class TTFTAdmission:
    """Predicts the first token of every newcomer, by `octavo.cost.first_token`.

    With a step model by that, times how much longer than foreseen steps took lately: others may use
    the machine, too. Without one, by what the engine's pacer has learned of its steps. Until
    anything is known, everybody may come in. So may who comes to an idle engine, however slow its
    last steps were, unless the prompt alone would take too long: only steps tell that it has
    become quicker.

    Args:
        most_seconds: that a first token may take.
    """

    def __init__(self, most_seconds: float):
        self._most_seconds = most_seconds
        self._predicted_rates: StepRates | None = None
        self._answer_tokens = 0.0
        self._decoding, self._prompts = _Slowness(), _Slowness()  # of steps without, and with them

    def set_step_model(self, steps: StepModel, facts: EngineFacts) -> None:
        """Predict by these steps from now on."""
        self._predicted_rates = ForeseenRates(
            steps, facts.max_num_batched_tokens, facts.max_model_len
        )

    def note_answer(self, num_tokens: int) -> None:
        """An answer has ended: it says when others will."""
        known = self._answer_tokens or num_tokens
        self._answer_tokens = _KEPT_OF_ANSWERS * known + (1 - _KEPT_OF_ANSWERS) * num_tokens

    def note_step(self, before: StepStats, now: StepStats) -> None:
        """The engine has done a step."""
        if before.predicted_seconds is not None and now.predicted_seconds is not None:
            (self._prompts if now.num_prompt_tokens else self._decoding).take(
                now.step_seconds - before.step_seconds,
                now.predicted_seconds - before.predicted_seconds,
            )

    def check(
        self, facts: EngineFacts, stats: StepStats, waiting: QueuedWork, num_tokens: int
    ) -> float | None:
        """The seconds that the first token of a prompt of so many tokens is predicted to take, if
        it came now; None if nothing is known.

        Raises:
            QueueFullError: they are too many. It says after how many there will be few enough, if
                nobody else comes.
            InvalidRequestError: they would be even if nobody else were there.
        """
        rates = (
            _learned(stats)
            if self._predicted_rates is None
            else self._slowed(self._predicted_rates)
        )
        if rates is None:
            return None
        backlog = Backlog(
            num_running=stats.num_running,
            num_running_tokens=_held_tokens(stats, facts),
            num_due_tokens=stats.num_due_tokens,
            num_waiting=waiting.num_samples,
            num_waiting_tokens=waiting.num_tokens,
            num_waiting_pairs=waiting.num_pairs,
        )
        engine = FirstToken(
            facts.max_num_seqs, facts.max_num_batched_tokens, facts.target_step_seconds
        )
        seconds = engine.seconds(backlog, num_tokens, rates, self._answer_tokens)
        if seconds > self._most_seconds:
            self._check_alone(engine, num_tokens)
            if backlog.num_running or backlog.num_waiting:
                raise QueueFullError(
                    f"the first token is predicted to take {_ms(seconds)}, with "
                    f"{backlog.num_waiting} waiting and {backlog.num_running} running before it, "
                    f"and may take {_ms(self._most_seconds)} here",
                    seconds - self._most_seconds,
                )
        return seconds

    def _check_alone(self, engine: FirstToken, num_tokens: int) -> None:
        """Raise InvalidRequestError if coming again would be of no use: at the times that were
        foreseen, or quicker, if steps with prompts were."""
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
        """As steps were lately; ``most``: how much slower, at the most, than was foreseen."""
        decoding, prompts = self._decoding.factor, self._prompts.factor
        return SlowedRates(
            rates,
            min(most, decoding or prompts or 1.0),
            min(most, prompts or decoding or 1.0),
        )


@dataclass(slots=True)
class _Slowness:
    """How much longer than foreseen steps took, the later the more."""

    real_seconds: float = 0.0
    predicted_seconds: float = 0.0

    def take(self, real: float, predicted: float) -> None:
        self.real_seconds = _KEPT_OF_STEPS * self.real_seconds + real
        self.predicted_seconds = _KEPT_OF_STEPS * self.predicted_seconds + predicted

    @property
    def factor(self) -> float | None:
        """None before the first step."""
        return self.real_seconds / self.predicted_seconds if self.predicted_seconds else None


def _learned(stats: StepStats) -> StepRates | None:
    if not stats.prompt_token_seconds:
        return None
    return LearnedRates(stats.decode_seconds, stats.prompt_token_seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _held_tokens(stats: StepStats, facts: EngineFacts) -> int:
    """That running samples have in the KV pool: in the mean of its tables, where some are of
    windows."""
    slots = stats.num_used_blocks * facts.block_size / len(facts.windows)
    return round(slots * (1.0 - stats.kv_waste))
