"""MLPs, the parts of layers that see one position alone: dense, or experts of which each token uses
some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.cost.exchange import Meeting, Shared
from octavo.cost.weight_shape import Part, WeightShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlp:
    """Up to ``inner`` values and down again; with ``is_gated``, two matrices go up."""

    inner: int
    is_gated: bool = True
    has_bias: bool = False

    @property
    def num_experts(self) -> int:
        """0: every token uses all of it."""
        return 0

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        return _matrices("mlp", "mlp", "mlp", self, hidden)

    def activation_values(self, hidden: int, tp: int) -> float:
        """Values between its matrix products that a device holds for one token at once."""
        return (3 if self.is_gated else 2) * self.inner / tp

    def meetings(self, hidden: int) -> Iterator[Meeting]:
        """Return the values of one token that ranks exchange, in order (scheme `gather`)."""
        yield (Shared(self.inner),)
        yield (Shared(hidden),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMlp:
    """Experts, a router that chooses ``per_token`` of them, and an MLP beside them for all tokens.

    Args:
        inner: of one expert.
        shared: all that every token uses, as one MLP.
        has_bias: experts have biases (gpt-oss).
        router_bias: the router has one, or what corrects its choice (DeepSeek-V3).
        has_shared_gate: a vector scales what the shared MLP gives (Qwen).
        latent: values that experts have in place of the hidden ones, with a projection to them
            before all experts and one back after them; 0 without (Nemotron 3 Super, Kimi K3).
        has_latent_norm: these are normed.
    """

    num_experts: int
    per_token: int
    inner: int
    is_gated: bool = True
    has_bias: bool = False
    router_bias: bool = False
    shared: DenseMlp | None = None
    has_shared_gate: bool = False
    latent: int = 0
    has_latent_norm: bool = False

    def weights(self, hidden: int) -> Iterator[WeightShape]:
        yield WeightShape("mlp.gate", "router", self.num_experts, hidden, "router")
        if self.router_bias:
            yield WeightShape("mlp.gate.bias", "norm", self.num_experts)
        expert = DenseMlp(inner=self.inner, is_gated=self.is_gated, has_bias=self.has_bias)
        size = self.latent or hidden
        if self.latent:
            yield WeightShape("mlp.latent_in", "mlp", self.latent, hidden, "experts.latent_in")
        yield from _matrices(
            "mlp.experts", "experts", "experts", expert, size, self.num_experts, self.per_token
        )
        if self.latent:
            yield WeightShape("mlp.latent_out", "mlp", hidden, self.latent, "experts.latent_out")
        if self.has_latent_norm:
            yield WeightShape("mlp.latent_norm", "norm", size)
        if self.shared is not None:
            yield from _matrices("mlp.shared_expert", "mlp", "shared", self.shared, hidden)
        if self.has_shared_gate:
            yield WeightShape("mlp.shared_expert_gate", "router", 1, hidden, "router")

    def activation_values(self, hidden: int, tp: int) -> float:
        """The same; rows are copied to each of their experts."""
        return self.per_token * (2 * self.inner + (self.latent or hidden))

    def meetings(self, hidden: int) -> Iterator[Meeting]:
        """The same; a rank adds up its outputs of all experts that a token uses."""
        if self.shared is not None:
            yield from self.shared.meetings(hidden)
        yield (Shared(self.num_experts),)
        if self.latent:
            yield (Shared(self.latent),)
        yield (Shared(self.inner, self.per_token, of_whole=self.latent or hidden),)
        yield (Shared(self.latent or hidden),)
        if self.latent:
            yield (Shared(hidden),)


Mlp = DenseMlp | ExpertMlp


def _matrices(
    name: str,
    part: Part,
    op: str,
    mlp: DenseMlp,
    hidden: int,
    experts: int = 1,
    per_token: int = 1,
) -> Iterator[WeightShape]:
    up_op = f"{op}.gate_up" if mlp.is_gated else f"{op}.up"
    for matrix, outputs, inputs, matrix_op in (
        ("gate_proj", mlp.inner, hidden, up_op),
        ("up_proj", mlp.inner, hidden, up_op),
        ("down_proj", hidden, mlp.inner, f"{op}.down"),
    ):
        if matrix == "gate_proj" and not mlp.is_gated:
            continue
        full = f"{name}.{matrix}"
        yield WeightShape(full, part, outputs, inputs, matrix_op, 0, experts, per_token)
        if mlp.has_bias:
            yield WeightShape(
                f"{full}.bias",
                "experts" if part == "experts" else "norm",
                outputs,
                experts=experts,
                experts_per_token=per_token,
            )
