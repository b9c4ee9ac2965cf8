"""The ``early_exit`` method, self-speculative decoding (LayerSkip, Elhoushi et al., ACL 2024).

The target's own first layers draft, followed by its last norm and head.

The first layers share the target's weights and KV cache: the KV that they write for draft tokens is
written again, the same, by the step that verifies. Models that were not trained for it predict
little before their last layers; so unless a layer is given, some are measured at the start, and the
best one and its speed-up are logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.base.errors import ConfigError
from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.runtime.capacity import RankLimits
from octavo.runtime.forward import Forward
from octavo.runtime.model_runner import ModelRunner
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.autoregressive import AutoregressiveLimits, AutoregressiveProposer
from octavo.speculation.draft_kv import TargetKV
from octavo.speculation.drafter import TargetModel

_log = logging.getLogger("octavo")

_NUM_CANDIDATES = 7  # exit layers that are tried, evenly apart
_MEASURED_TOKENS = 64
_LEAST_TOKENS = 8
_MEASURED_ROWS = 4  # draft tokens of the timed verification
_REPEATS = 5
_MAX_TOKENS = 8  # of a chain
# Defaults of an exit layer that is given, and so not measured.
_NUM_TOKENS = 3
_MIN_PROBABILITY = 0.4
_OPENING_TEXT = "In the morning they went down to the river, because"


class EarlyExit:
    """A ``Drafter`` that is a prefix of the target's layers.

    Raises:
        ConfigError: the model has no layer ``config.exit_layer``, or it is not given and contexts
            are too short to measure the best one.
    """

    kv_bytes_per_token = 0

    def __init__(self, config: SpeculativeConfig, target: TargetModel):
        self._config, self._target = config, target
        num_layers = target.model_config.num_layers
        if num_layers < 2:
            raise ConfigError("speculative_config: a model of one layer has no early exit")
        if config.exit_layer is not None and config.exit_layer >= num_layers:
            raise ConfigError(
                f"speculative_config: exit_layer {config.exit_layer} must be less than the "
                f"{num_layers} layers of the model"
            )

    def start(self, limits: RankLimits) -> AutoregressiveProposer:
        config, model = self._config, self._target.model_config
        forward = self._target.rank.forward
        layer, num_tokens, least = config.exit_layer, _NUM_TOKENS, _MIN_PROBABILITY
        if layer is None:
            best = self._best_exit(forward, limits)
            layer, num_tokens, least = best.layer, best.num_tokens, best.least_probability
        return AutoregressiveProposer(
            ModelRunner(forward.exit_after(layer)).run,
            TargetKV(),
            AutoregressiveLimits(
                max_tokens=config.num_speculative_tokens or num_tokens,
                min_probability=(
                    least if config.min_probability is None else config.min_probability
                ),
                vocab_size=model.vocab_size,
                follows_masks=True,
                max_position=limits.max_model_len,
                max_step_tokens=limits.max_num_batched_tokens,
            ),
        )

    def _best_exit(self, forward: Forward, limits: RankLimits) -> ExitMeasurement:
        num_layers = self._target.model_config.num_layers
        pool_tokens = limits.num_blocks * self._target.spec.block_size
        num_tokens = min(
            _MEASURED_TOKENS, limits.max_model_len, limits.max_num_batched_tokens, pool_tokens
        )
        if num_tokens < _LEAST_TOKENS:
            raise ConfigError(
                f"speculative_config: give exit_layer: steps and contexts of {num_tokens} tokens "
                "are too short to measure which is best"
            )
        prompt = self._target.tokenizer.encode(_OPENING_TEXT)[: num_tokens // 2] or [0]
        num_blocks = -(-num_tokens // self._target.spec.block_size)
        whole = TrialForward(forward.exit_after(num_layers), num_blocks)
        text = whole.text(prompt, num_tokens)
        best = max(
            (
                measure_exit(
                    layer,
                    TrialForward(forward.exit_after(layer), num_blocks),
                    whole,
                    text,
                    len(prompt),
                )
                for layer in exit_candidates(num_layers)
            ),
            key=lambda each: each.speedup,
        )
        _report(best, num_layers)
        return best


@dataclass(frozen=True, slots=True)
class ExitMeasurement:
    """The measured acceptance and cost of drafting with the first ``layer`` layers.

    Args:
        agreement: the share of tokens that are the same as the whole model's.
        cost: seconds to draft a token, in steps of the whole model.
        row_cost: seconds to verify a further token, in the same unit.
    """

    layer: int
    agreement: float
    cost: float
    row_cost: float

    def speedup_of(self, num_tokens: int) -> float:
        """Speed-up with chains of this length, if tokens are accepted independently."""
        expected = sum(self.agreement**i for i in range(num_tokens + 1))
        return expected / (1 + num_tokens * (self.cost + self.row_cost))

    @property
    def num_tokens(self) -> int:
        """The chain length of the greatest speed-up."""
        return max(range(1, _MAX_TOKENS + 1), key=self.speedup_of)

    @property
    def speedup(self) -> float:
        return self.speedup_of(self.num_tokens)

    @property
    def least_probability(self) -> float:
        """The probability below which a draft token is not worth its cost."""
        return min(0.9, self.cost + self.row_cost)


def exit_candidates(num_layers: int) -> list[int]:
    """The exit layers that are tried."""
    steps = _NUM_CANDIDATES + 1
    return sorted({max(1, num_layers * i // steps) for i in range(1, steps)} - {num_layers})


def _report(best: ExitMeasurement, num_layers: int) -> None:
    """Log the exit that was chosen, as a warning if it is slower than plain decoding."""
    is_worth_it = best.speedup > 1
    _log.log(
        logging.INFO if is_worth_it else logging.WARNING,
        "early exit after layer %d of %d: %.0f %% of the draft tokens of a text of the model's own "
        "are accepted, for %.2f of a step each; %s",
        best.layer,
        num_layers,
        100 * best.agreement,
        best.cost,
        "faster than plain decoding on such text"
        if is_worth_it
        else "the best exit layer, and yet slower than plain decoding: leave early_exit out",
    )


class TrialForward:
    """Runs a forward for measurements in the first KV blocks, before there are requests."""

    def __init__(self, forward: Forward, num_blocks: int):
        self._forward = forward
        self._request = Request("early-exit-trial", [], SamplingParams(temperature=0.0), 0.0)
        self._request.block_ids = list(range(num_blocks))

    def text(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """A prompt and its greedy continuation, ``num_tokens`` in all."""
        text, start = list(prompt), 0
        while len(text) < num_tokens:
            text.append(self.next_tokens(text, start)[-1])
            start = len(text) - 1
        return text

    def next_tokens(self, text: Sequence[int], start: int) -> list[int]:
        """The greedy token after each token of a text, from ``start`` on."""
        count = len(text) - start
        self._request.token_ids = [*text[: start + 1]]
        draft = Draft.chain(text[start + 1 :]) if count > 1 else None
        item = ScheduledRequest(self._request, start, count, count, draft)
        return self._forward.submit(Batch(0, (item,))).result().tokens[0]

    def seconds(self, text: Sequence[int], num_tokens: int) -> float:
        """Seconds that the kernels take for a step of the last ``num_tokens`` tokens."""
        begin = self._forward.kernel_seconds
        self.next_tokens(text, len(text) - num_tokens)
        return self._forward.kernel_seconds - begin


def measure_exit(
    layer: int, exit: TrialForward, whole: TrialForward, text: Sequence[int], num_prompt: int
) -> ExitMeasurement:
    """Measure an exit layer on a text that the whole model continued from ``num_prompt`` tokens."""
    drafted = exit.next_tokens(text[:-1], 0)[num_prompt - 1 :]
    truth = text[num_prompt:]
    right = sum(one == other for one, other in zip(drafted, truth, strict=True))
    whole.next_tokens(text, 0)  # fills the KV that the timed steps read
    rows = min(_MEASURED_ROWS, len(text) - 1)
    # Alternating, and the shortest of each: other processes may use the machine meanwhile.
    seconds = [
        (whole.seconds(text, 1), whole.seconds(text, 1 + rows), exit.seconds(text, 1))
        for _ in range(_REPEATS)
    ]
    step, verifying, drafting = (max(min(each), 1e-9) for each in zip(*seconds, strict=True))
    row_cost = max(0.0, verifying / step - 1) / rows
    return ExitMeasurement(layer, right / len(truth), drafting / step, row_cost)
