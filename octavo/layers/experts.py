"""Mixtures of experts: the feed-forward part of a layer, of which each token uses a few experts."""

from __future__ import annotations

from octavo.kernels import routing
from octavo.kernels.routing import Routing
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.linear import Linear
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.parameter import Parameter


class Router(Module):
    """Logits of experts, and the correction that some models add when they choose among them."""

    def __init__(self, hidden_size: int, num_experts: int, bias: bool, correction: bool):
        self.weight = Parameter(num_experts, hidden_size, exact=True)
        self.bias = Parameter(num_experts, exact=True) if bias else None
        self.e_score_correction_bias = Parameter(num_experts, exact=True) if correction else None

    @property
    def values(self) -> routing.RouterWeights:
        """The router's weights as ops take them."""
        return routing.RouterWeights(
            self.weight.value, _value(self.bias), _value(self.e_score_correction_bias)
        )


class ExpertMLPs(Module):
    """A mixture of experts, and beside it the MLP that all tokens use (shared experts), if there is
    one.

    Args:
        inner: width between the two products of an expert.
        activation: of experts, as in ``ModelConfig``, or ``CLAMPED_SWIGLU``.
        bias: whether experts have biases.
        router_bias, correction: whether the router has them.
        shared_inner: width of the shared MLP; 0 for none.
        shared_gate: whether the shared MLP's output is scaled by the sigmoid of one number a token.
    """

    def __init__(
        self,
        hidden_size: int,
        inner: int,
        routing: Routing,
        activation: str,
        *,
        bias: bool = False,
        router_bias: bool = False,
        correction: bool = False,
        shared_inner: int = 0,
        shared_gate: bool = False,
    ):
        self.routing, self.activation = routing, activation
        self.gate = Router(hidden_size, routing.num_experts, router_bias, correction)
        self.experts = [
            GatedMLP(hidden_size, inner, activation, bias) for _ in range(routing.num_experts)
        ]
        self.shared_experts = (
            GatedMLP(hidden_size, shared_inner, activation) if shared_inner else None
        )
        self.shared_expert_gate = Linear(hidden_size, 1, exact=True) if shared_gate else None

    def forward(self, x: Activations, ctx: ForwardContext) -> Activations:
        experts = [_expert(mlp) for mlp in self.experts]
        if self.shared_experts is None:
            return ctx.ops.moe(x, self.gate.values, experts, self.routing, self.activation)
        shared = self.shared_experts(x, ctx)
        if self.shared_expert_gate is not None:
            shared = ctx.ops.sigmoid_mul(self.shared_expert_gate(x, ctx), shared)
        chosen = ctx.ops.moe(x, self.gate.values, experts, self.routing, self.activation)
        return ctx.ops.add(shared, chosen)


def shares(model: Module) -> dict[int, tuple[int, int]]:
    """Experts that a token uses, and all experts, for each matrix of an expert, by the id of its
    module."""
    return {
        id(matrix): (layer.routing.top_k, layer.routing.num_experts)
        for _, layer in model.named_modules()
        if isinstance(layer, ExpertMLPs)
        for mlp in layer.experts
        for matrix in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    }


def _expert(mlp: GatedMLP) -> routing.ExpertWeights:
    projections = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    weights = [projection.weight.value for projection in projections]
    return routing.ExpertWeights(*weights, *(_value(projection.bias) for projection in projections))


def _value(parameter: Parameter | None) -> object:
    return None if parameter is None else parameter.value
