"""Counts of the tokens that a model's experts got, and of the ranks that computed them.

The native kernels add to them in each step (``csrc/experts.cpp``); they are read between steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class ExpertCounts:
    """Tokens of experts since a program was made, by layer: of those that have experts, in order.

    Args:
        num_layers: of these. num_experts: of each of them.
        num_ranks: that have whole experts; 0 where each has some rows of all.
    """

    def __init__(self, num_layers: int, num_experts: int, num_ranks: int):
        # int64 [layers, experts]: tokens that were routed to an expert, of all ranks.
        self.loads = np.zeros((num_layers, num_experts), dtype=np.int64)
        # int64 [layers, ranks + 1]: rows that each rank computed, a token once for each of its
        # experts; and behind them, those of the rank that had most of a step, for all steps.
        self.rank_rows = np.zeros((num_layers, num_ranks + 1 if num_ranks else 0), dtype=np.int64)

    def figures(self) -> dict[str, Any]:
        """Return the fields of `octavo.core.stats.StepStats` about them; none without experts."""
        if not self.loads.size:
            return {}
        totals = np.maximum(self.loads.sum(axis=1), 1)
        imbalance = self.loads.max(axis=1) * self.loads.shape[1] / totals
        found = {
            "expert_tokens": tuple(self.loads.sum(axis=0).tolist()),
            "expert_imbalance": tuple(imbalance.round(3).tolist()),
        }
        if self.rank_rows.size:
            found["expert_rank_tokens"] = tuple(self.rank_rows[:, :-1].sum(axis=0).tolist())
            found["expert_busiest_rank_tokens"] = tuple(self.rank_rows[:, -1].tolist())
        return found
