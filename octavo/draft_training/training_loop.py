"""The training loop of a draft head, its loss, AdamW, and the learning-rate schedule.

A step takes positions of answers, and has the head predict K tokens ahead of each, along the answer
and from the head's own states (training as it is used: Li et al. 2025, "EAGLE-3", arXiv
2503.01840). The loss is the cross entropy to the target's distribution over the shortlist, weighted
by 0.8^i for the token ahead by i; positions whose token is not in the shortlist do not count. The
rate rises over a fiftieth of the steps, then falls as a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.draft_training.examples import Examples, TrainingBatch
from octavo.draft_training.stateless_heads import TrainableHead

_DECAY = 0.8
_RISE = 0.02
_BETAS = 0.9, 0.95
_WEIGHT_DECAY = 0.01
_MAX_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of a training, of about ``batch_size`` positions each, whose order ``seed`` draws.
    ``rate`` is the highest learning rate."""

    steps: int
    batch_size: int = 256
    rate: float = 1.5e-3
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        rise = max(1, round(_RISE * self.steps))
        fall = (1 + math.cos(math.pi * step / self.steps)) / 2
        return self.rate * fall * min(1.0, (step + 1) / rise)


class TrainStepReport(NamedTuple):
    """A finished step, number ``step`` of ``of``; ``loss`` is that before the step, in nats."""

    step: int
    of: int
    loss: float


class Training:
    """A training in progress. ``step`` is the number of finished steps; together with the states of
    the head and the optimizer it can be saved and restored (``training_state.py``)."""

    def __init__(self, head: TrainableHead[Any], examples: Examples[Any], schedule: Schedule):
        self.head, self.schedule, self.step = head, schedule, 0
        self._examples = examples
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=schedule.rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY
        )

    def run(
        self, until: int, on_step: Callable[[TrainStepReport], None] = lambda report: None
    ) -> None:
        """Train until ``until`` steps are finished, or all of the schedule."""
        while self.step < min(until, self.schedule.steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule.rate_at(self.step)
            batch = self._examples.batch(self._drawn(self.step))
            total = loss(self.head, batch, self._examples.target.rows)
            self.optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), _MAX_NORM)
            self.optimizer.step()
            self.step += 1
            on_step(TrainStepReport(self.step, self.schedule.steps, float(total.detach())))

    def _drawn(self, step: int) -> Tensor:
        """The units of a step: each once in an epoch, in an order that is drawn by the seed and the
        number of the epoch."""
        units, size = self._examples.units, self.schedule.batch_size // self._examples.unit_size
        size = min(max(1, size), len(units))
        steps_of_epoch = len(units) // size
        number, place = divmod(step, steps_of_epoch)
        if self._epoch != number:
            generator = torch.Generator().manual_seed(self.schedule.seed + number)
            self._order = units[torch.randperm(len(units), generator=generator)]
            self._epoch = number
        return self._order[place * size : (place + 1) * size]

    _epoch = -1
    _order: Tensor


def loss(head: TrainableHead[Any], batch: TrainingBatch[Any], rows: Tensor) -> Tensor:
    """The loss of a batch in nats. ``rows``: the target head's rows of the shortlist, float32
    [S, d]."""
    total, weights = torch.zeros(()), 0.0
    for ahead, state in enumerate(head.states(batch.inputs)):
        counts = batch.wanted[:, ahead] >= 0
        logits = F.linear(state[counts], rows)
        likely = logits.gather(1, batch.likely[counts, ahead])
        said = likely - logits.logsumexp(dim=-1, keepdim=True)
        each = -(batch.shares[counts, ahead] * said).sum(dim=-1)
        total = total + _DECAY**ahead * each.sum() / max(1, len(each))
        weights += _DECAY**ahead
    return total / weights
