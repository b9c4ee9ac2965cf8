"""Mixtures of experts in plain torch, as the reference: see ``routing.py`` and ``reference.py``.

Results are batch invariant here too: an expert multiplies its rows in tiles of a fixed size, and a
token sums the outputs of its experts in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.routing import LEAST_SUM, SWIGLU_ALPHA, SWIGLU_LIMIT, Routing

Run = Callable[[int, Tensor], Tensor]


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of tokens by the router's logits (float32 [T, E]).

    Returns their ids, best first (int64 [T, top_k]), and their weights (float32 [T, top_k]).
    """
    scores = _scores(logits, routing)
    choice = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        choice = choice.masked_fill(~_in_best_groups(choice, routing), -torch.inf)
    ranked = choice.sort(dim=-1, descending=True, stable=True).indices
    ids = ranked[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return ids, weights * routing.scale


def add_up(x: Tensor, ids: Tensor, weights: Tensor, run: Run) -> Tensor:
    """Sum the outputs of the chosen experts for x [T, K] by weight: [T, K] of the dtype of x.

    ``run(expert, rows)`` returns an expert's output [n, K] for the rows [n, K] that are routed to
    it.
    """
    made = x.new_zeros(*ids.shape, x.shape[1])
    for expert in ids.unique().tolist():
        rows, ranks = (ids == expert).nonzero(as_tuple=True)
        made[rows, ranks] = run(expert, x.index_select(0, rows))
    total = torch.zeros_like(x, dtype=torch.float32)
    for rank in range(ids.shape[1]):
        total = total + made[:, rank] * weights[:, rank, None]
    return total.to(x.dtype)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's gated activation, see ``routing.py``."""
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate / (1 + torch.exp(-SWIGLU_ALPHA * gate)) * (up + 1)


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    if routing.scoring == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    powers = torch.exp(logits - logits.max(dim=-1, keepdim=True).values)
    return powers / powers.sum(dim=-1, keepdim=True)


def _in_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """True for experts in a group that may be chosen from: bool [T, E]."""
    groups = choice.unflatten(1, (routing.num_groups, -1))
    worth = groups.topk(routing.group_top, dim=-1).values.sum(dim=-1)
    ranked = worth.sort(dim=-1, descending=True, stable=True).indices
    best = torch.zeros_like(worth, dtype=torch.bool)
    best.scatter_(1, ranked[:, : routing.top_groups], True)
    return best.repeat_interleave(groups.shape[-1], dim=1)
