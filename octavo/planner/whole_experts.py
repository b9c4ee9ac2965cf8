"""Comparison of a step whose devices have whole experts (ep) with one where they have a part of
each, or all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.base.errors import ConfigError
from octavo.cost.work import Span
from octavo.planner.figures import ms
from octavo.planner.verdict import Verdict

# Numbers of streams of which it is asked from which one on steps are shorter, and the share of the
# time that counts as shorter.
_STREAMS = tuple(2**power for power in range(9))
_SHORTER = 0.98


@dataclass(frozen=True, slots=True)
class WholeExperts:
    """Seconds of a step of answers, with whole experts on devices and without.

    Args:
        streams: that decode in the step, of each copy of the rest of the model.
        is_copied: without, each copy has all experts; else they are cut like other matrices.
        ahead_from: the fewest streams of which steps are shorter with whole ones; None: up to 256
            they are not.
    """

    streams: int
    without: float
    whole: float
    is_copied: bool
    ahead_from: int | None

    @property
    def text(self) -> str:
        without = "all experts on each copy" if self.is_copied else "experts cut"
        ahead = "not ahead" if self.ahead_from is None else f"ahead from {self.ahead_from:,} on"
        return (
            f"{self.streams:,} at once take {ms(self.without)} with {without}, and "
            f"{ms(self.whole)} with whole ones, {ahead}"
        )


def whole_experts(verdict: Verdict) -> WholeExperts | None:
    """Compare the layout of a plan with and without expert parallelism. None for a model without
    experts, for devices that share nothing, and where such layouts cannot be."""
    deployment, parallel = verdict.deployment, verdict.deployment.parallel
    num_ranks = parallel.tp * parallel.dp
    if num_ranks == 1 or not any(op.experts for op in deployment.steps.model.matrices):
        return None
    service = verdict.service
    under_way = service.streams.value if service is not None and service.is_stable else 0.0
    streams = max(1, round(under_way / deployment.num_groups))
    span = Span(verdict.traffic.input_len, 1)
    try:
        without, whole = (
            {
                count: layout.step_time([span] * count).value
                for layout in [replace(deployment, parallel=replace(parallel, ep=ep))]
                for count in (*_STREAMS, streams)
            }
            for ep in (1, num_ranks)
        )
    except ConfigError:
        return None
    ahead = (count for count in _STREAMS if whole[count] < _SHORTER * without[count])
    is_copied = parallel.dp > 1
    return WholeExperts(streams, without[streams], whole[streams], is_copied, next(ahead, None))
