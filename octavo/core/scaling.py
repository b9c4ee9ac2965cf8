"""A policy of when a front starts one more replica, and lets one go. It has no I/O and no clock.

    up      the predicted time to first token has been longer than its target for a while, with more
            than one request a replica, and all replicas that were asked for are there
    down    one replica less would have done for a long while: the requests would have taken no more
            than half of its places, and the prediction was at most half of the target

A request that is alone on its replica may take longer than the target by itself: the prediction
counts only where requests share a replica. Both have to last, each by itself, and each change
begins the wait anew: so a burst starts nothing, and what was just started is not let go. Between
the two thresholds nothing happens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

_QUIET_SHARE = 0.5  # of the target, and of the places of the replicas that would be left


class Load(NamedTuple):
    """The load of the replicas, as a front knows it.

    Args:
        num_ready: that serve. num_coming: that are being started.
        num_samples: under way, waiting ones too.
        places: samples that one replica runs at once.
        predicted_ttft: seconds, for a request that came now; None if unknown.
    """

    num_ready: int
    num_coming: int
    num_samples: int
    places: int
    predicted_ttft: float | None


class Change(enum.Enum):
    """A change of the number of replicas."""

    NOTHING = "nothing"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """Bounds and times.

    Args:
        least, most: replicas at once.
        target_ttft: seconds. up_after, down_after: seconds that a reason has to last.
    """

    least: int
    most: int
    target_ttft: float
    up_after: float = 1.0
    down_after: float = 60.0


class ScalingPolicy:
    """Decides, told of the load every now and then."""

    def __init__(self, limits: ScalingLimits):
        self._limits = limits
        self._busy_since: float | None = None
        self._quiet_since: float | None = None

    def decide(self, now: float, load: Load) -> Change:
        """Return what to do at ``now``, in seconds of any clock that does not go back."""
        self._busy_since = _since(self._busy_since, now, self._is_busy(load))
        self._quiet_since = _since(self._quiet_since, now, self._is_quiet(load))
        number = load.num_ready + load.num_coming
        if number < self._limits.least:
            return self._changed(Change.UP)
        if number > self._limits.most:
            return self._changed(Change.DOWN)
        if _lasts(self._busy_since, now, self._limits.up_after) and number < self._limits.most:
            return self._changed(Change.UP)
        if _lasts(self._quiet_since, now, self._limits.down_after) and number > self._limits.least:
            return self._changed(Change.DOWN)
        return Change.NOTHING

    def _is_busy(self, load: Load) -> bool:
        predicted = load.predicted_ttft or 0.0
        is_shared = load.num_samples > load.num_ready
        return is_shared and not load.num_coming and predicted > self._limits.target_ttft

    def _is_quiet(self, load: Load) -> bool:
        num_left = load.num_ready - 1
        would_share = load.num_samples > num_left
        predicted = load.predicted_ttft or 0.0
        return (
            not load.num_coming
            and load.num_samples <= _QUIET_SHARE * num_left * load.places
            and not (would_share and predicted > _QUIET_SHARE * self._limits.target_ttft)
        )

    def _changed(self, change: Change) -> Change:
        self._busy_since = self._quiet_since = None
        return change


def _since(before: float | None, now: float, is_so: bool) -> float | None:
    if not is_so:
        return None
    return now if before is None else before


def _lasts(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since >= seconds
