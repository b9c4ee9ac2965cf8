"""Mixtures of experts as data: the routing of tokens to experts, and the weights of both.

A router gives every token a score for each of E experts; ``top_k`` of them process the token::

    scores  = softmax or sigmoid of the router's logits
    choice  = scores + correction    (DeepSeek-V3: it balances the load, and is in no weight)
    of the experts in the best groups, those with the greatest choice; of equals, the first
    weights = scores of these, made to sum up to 1 if ``normalize``, times ``scale``

A softmax over the logits of the chosen experts alone, as Mixtral, Granite and gpt-oss define it, is
the same as a normalized softmax over all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

# Added to a normalizing sum, since all sigmoids may be zero.
LEAST_SUM = 1e-20

# gpt-oss's gate: clamp(up, -limit, limit) + 1, times gate * sigmoid(alpha * gate), which is first
# cut off at the limit too.
CLAMPED_SWIGLU = "clamped_swiglu"
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Rules by which experts are chosen.

    Args:
        num_groups: groups that experts are cut into, in order. Only the ``top_groups`` best groups
            can be chosen from: DeepSeek's group-limited routing (arXiv 2405.04434, 2412.19437).
        group_top: experts whose choice is summed up to rank a group: 1 in V2, 2 in V3.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_top: int = 1

    def why_not(self) -> str | None:
        """Describes what does not fit together; None if everything does."""
        if not 1 <= self.top_k <= self.num_experts:
            return f"{self.top_k} of {self.num_experts} experts cannot be chosen"
        if self.num_experts % self.num_groups:
            return f"{self.num_experts} experts cannot be cut into {self.num_groups} groups"
        size = self.num_experts // self.num_groups
        if not 1 <= self.top_groups <= self.num_groups or self.top_groups * size < self.top_k:
            return (
                f"{self.top_k} experts cannot be chosen from {self.top_groups} of "
                f"{self.num_groups} groups of {size}"
            )
        if not 1 <= self.group_top <= size:
            return f"groups of {size} experts have no {self.group_top} best"
        return None


class RouterWeights(NamedTuple):
    """Weights of a router: weight [E, K], float32; bias and correction [E] or None."""

    weight: Any
    bias: Any = None
    correction: Any = None


class ExpertWeights(NamedTuple):
    """Weights of an expert, down(activation(gate(x)) * up(x)): gate and up [F, K], down [K, F];
    biases, or None."""

    gate: Any
    up: Any
    down: Any
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None

    @property
    def matrices(self) -> Iterator[Any]:
        yield from (self.gate, self.up, self.down)
