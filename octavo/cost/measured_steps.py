"""Step times of one machine, as measured there.

The time of a step is linear in functions of what it computes:

    seconds =  step + sequences                    once: planning, bookkeeping, delivery
            +  for each pass
                   pass + rows + sampled rows
                 + keys that are read by requests that decode, and by pieces of prompts
                 + pairs of a query and a key, in requests that decode and in pieces of prompts

Rows cost what they cost: a line in pieces, bent where kernels change what they do. All coefficients
are seconds of something, none is negative, and so no more work ever takes less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any

from octavo.base.fields import Fields
from octavo.cost.efficiency import efficiency_of
from octavo.cost.hardware import Device
from octavo.cost.prediction import Prediction
from octavo.cost.rank_model import RankModel
from octavo.cost.step_cost import StepFeatures, StepModel

# Where the lines of rows, and of rows that are sampled, may be bent.
ROW_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SAMPLED_KNOTS = (0, 1, 4, 16, 64)

# Beyond what was measured an interval grows by this share for each doubling.
WIDENING = 0.1
_BELOW_ZERO = -1e-30  # what is read may be 0


def step_terms(num_seqs: int) -> Iterator[tuple[str, float]]:
    """Costs once a step: the names of coefficients, and their multipliers."""
    yield "step", 1.0
    yield "sequence", num_seqs


def pass_terms(features: StepFeatures) -> Iterator[tuple[str, float]]:
    """The same of one pass. What is not named is multiplied with 0."""
    yield "pass", 1.0
    yield from _pieces("rows", ROW_KNOTS, features.num_tokens)
    yield from _pieces("sampled", SAMPLED_KNOTS, features.num_sampled)
    yield "decode_key", features.decode_keys
    yield "decode_score", features.decode_scores
    yield "prompt_key", features.prompt_keys
    yield "prompt_score", features.prompt_scores


def regime_of(features: StepFeatures) -> str:
    """``decode``, ``prompt``, or ``mixed``: what an interval is known of."""
    if not features.num_prompt_tokens:
        return "decode"
    return "mixed" if features.decode_keys else "prompt"


def _pieces(name: str, knots: Sequence[int], value: int) -> Iterator[tuple[str, float]]:
    """Shares of a value between each two knots, by the first of them."""
    for knot, following in zip(knots, (*knots[1:], None), strict=True):
        if value <= knot:
            return
        end = value if following is None else min(value, following)
        yield f"{name}_from_{knot}", end - knot


def goes_on(seconds_of: Mapping[str, float], most_rows: int, most_sampled: int) -> dict[str, float]:
    """The same coefficients, and beyond the rows that were measured those of lines that go on as
    they rose over the last half of them."""
    found = dict(seconds_of)
    for name, knots, most in (
        ("rows", ROW_KNOTS, most_rows),
        ("sampled", SAMPLED_KNOTS, most_sampled),
    ):
        half = most // 2
        rise = _on_line(seconds_of, name, knots, most) - _on_line(seconds_of, name, knots, half)
        found |= {f"{name}_from_{knot}": rise / (most - half) for knot in knots if knot >= most}
    return found


def _on_line(seconds_of: Mapping[str, float], name: str, knots: Sequence[int], value: int) -> float:
    pieces = _pieces(name, knots, value)
    return sum(seconds_of.get(piece, 0.0) * length for piece, length in pieces)


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of measured over predicted step times of a regime: the 5th and the 95th percentile of
    their quotient."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The times of one engine's steps; `octavo.cost.step_cost.StepModel` asks for its passes.

    Args:
        seconds_of: coefficients by the names of the terms.
        errors_of: their standard errors.
        spreads: by regime.
        drift: how much slower or quicker the same steps were from one time to another, as a share.
        most_rows, most_seqs, most_keys: of the passes that were measured.
        slowness: by regime, how much longer passes take now, if that is known.
    """

    seconds_of: Mapping[str, float]
    spreads: Mapping[str, Spread]
    most_rows: int
    most_seqs: int
    most_keys: int
    drift: float = 0.0
    errors_of: Mapping[str, float] = field(default_factory=dict)
    slowness: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds once a step, whatever is in it."""
        return self.seconds_of.get("step", 0.0)

    @property
    def sequence_s(self) -> float:
        """Seconds once a step for each sequence."""
        return self.seconds_of.get("sequence", 0.0)

    def seconds(self, features: StepFeatures) -> float:
        """Seconds of a pass."""
        known = self.seconds_of
        value = sum([known.get(name, 0.0) * amount for name, amount in pass_terms(features)])
        return value * self.slowness.get(regime_of(features), 1.0) if self.slowness else value

    def step_seconds(self, passes: Sequence[StepFeatures]) -> float:
        """Seconds of a step with these passes."""
        once = self.step_s + self.sequence_s * passes[0].num_seqs
        return once + sum(map(self.seconds, passes))

    def prediction(self, features: StepFeatures) -> Prediction:
        """Seconds of a pass as a prediction. The interval is wider, and the source another, beyond
        the measured range."""
        value = self.seconds(features)
        spread = self.spreads.get(regime_of(features)) or _widest(self.spreads.values())
        beyond = self._doublings_beyond(features)
        share = self.drift + WIDENING * beyond
        return Prediction(
            value,
            value * min(1.0, spread.low) / (1 + share),
            value * max(1.0, spread.high) * (1 + share),
            "extrapolated" if beyond else "measured",
        )

    def _doublings_beyond(self, features: StepFeatures) -> float:
        """Number of doublings of the measured range until it holds these."""
        quotients = (
            features.num_tokens / self.most_rows,
            features.num_seqs / self.most_seqs,
            (features.decode_keys + features.prompt_keys) / self.most_keys,
        )
        return sum(log2(quotient) for quotient in quotients if quotient > 1)

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds_of": dict(self.seconds_of),
            "errors_of": dict(self.errors_of),
            "spreads": {name: [each.low, each.high] for name, each in self.spreads.items()},
            "drift": self.drift,
            "most_rows": self.most_rows,
            "most_seqs": self.most_seqs,
            "most_keys": self.most_keys,
        }

    @classmethod
    def of_json(cls, fields: Fields) -> MeasuredSteps:
        """ModelFileError, which names the field, for what ``as_json`` has not written."""
        spreads = fields.section("spreads")
        return cls(
            seconds_of=_numbers(fields.section("seconds_of")),
            errors_of=_numbers(fields.section("errors_of")),
            spreads={name: Spread(*spreads.each(name, Fields.number, 2)) for name in spreads},
            drift=fields.number("drift", above=_BELOW_ZERO),
            most_rows=fields.integer("most_rows"),
            most_seqs=fields.integer("most_seqs"),
            most_keys=fields.integer("most_keys"),
        )


def calibrated(model: RankModel, device: Device, steps: MeasuredSteps) -> StepModel:
    """A model on the device that its steps were measured on."""
    efficiency = replace(
        efficiency_of("octavo", device),
        step_s=steps.step_s,
        sequence_s=steps.sequence_s,
        overhead_spread=steps.drift,
        source="measured",
        overhead_source="measured",
    )
    return StepModel(model, device, efficiency, steps)


def _numbers(fields: Fields) -> dict[str, float]:
    return {name: fields.number(name, above=_BELOW_ZERO) for name in fields}


def _widest(spreads: Iterable[Spread]) -> Spread:
    spreads = list(spreads)
    return Spread(min(each.low for each in spreads), max(each.high for each in spreads))
