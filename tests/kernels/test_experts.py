"""Mixtures of experts in plain torch: who is chosen, and that no token sees its company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kernels import recorder, reference
from octavo.kernels.experts import clamped_swiglu, route
from octavo.kernels.fuser import fuse
from octavo.kernels.recorder import Tape, Value
from octavo.kernels.routing import CLAMPED_SWIGLU, ExpertWeights, RouterWeights, Routing

ROUTINGS = {
    "softmax": Routing(num_experts=7, top_k=3, normalize=False),
    "normalized": Routing(num_experts=7, top_k=3),
    "sigmoid": Routing(num_experts=7, top_k=2, scoring="sigmoid", scale=2.5),
    "groups-v2": Routing(num_experts=8, top_k=3, normalize=False, num_groups=4, top_groups=2),
    "groups-v3": Routing(
        num_experts=8, top_k=2, scoring="sigmoid", num_groups=4, top_groups=2, group_top=2
    ),
}


def by_hand(logits: list[float], routing: Routing, correction: list[float]) -> dict[int, float]:
    """The weights of the chosen, as the docstring of routing.py has them, token by token."""
    x = np.array(logits, dtype=np.float64)
    scores = np.exp(x) / np.exp(x).sum() if routing.scoring == "softmax" else 1 / (1 + np.exp(-x))
    choice = scores + correction
    size = routing.num_experts // routing.num_groups
    worth = [
        sum(sorted(choice[g * size : (g + 1) * size])[-routing.group_top :])
        for g in range(routing.num_groups)
    ]
    groups = sorted(range(routing.num_groups), key=lambda g: (-worth[g], g))[: routing.top_groups]
    allowed = [e for e in range(routing.num_experts) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: routing.top_k]
    total = sum(scores[e] for e in chosen) if routing.normalize else 1.0
    return {e: scores[e] / total * routing.scale for e in chosen}


@pytest.mark.parametrize("name", ROUTINGS)
def test_tokens_go_to_their_experts(name):
    routing = ROUTINGS[name]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, routing.num_experts, generator=generator)
    correction = 0.3 * torch.randn(routing.num_experts, generator=generator)
    ids, weights = route(logits, routing, correction)
    for row in range(len(logits)):
        expected = by_hand(logits[row].tolist(), routing, correction.tolist())
        assert ids[row].tolist() == list(expected)
        assert weights[row].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


def test_of_equals_the_first_is_chosen():
    routing = Routing(num_experts=6, top_k=3)
    assert route(torch.zeros(1, 6), routing)[0].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"top_k": 9}, "9 of 8"),
        ({"num_groups": 3}, "3 groups"),
        ({"num_groups": 4, "top_groups": 1}, "from 1 of 4 groups of 2"),
        ({"num_groups": 4, "top_groups": 4, "group_top": 3}, "no 3 best"),
    ],
)
def test_routings_that_cannot_be_are_told(changed, said):
    routing = Routing(**{"num_experts": 8, "top_k": 3, **changed})
    assert said in routing.why_not()
    assert Routing(num_experts=8, top_k=3).why_not() is None


def make_experts(routing: Routing, hidden: int, inner: int, biases: bool = False):
    generator = torch.Generator().manual_seed(11)

    def tensor(*shape):
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def bias(size):
        return tensor(size) if biases else None

    router = RouterWeights(tensor(routing.num_experts, hidden), bias(routing.num_experts))
    experts = [
        ExpertWeights(
            *(tensor(inner, hidden), tensor(inner, hidden), tensor(hidden, inner)),
            *(bias(inner), bias(inner), bias(hidden)),
        )
        for _ in range(routing.num_experts)
    ]
    return router, experts, torch.randn(37, hidden, generator=generator)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", CLAMPED_SWIGLU])
def test_what_experts_make_is_weighed_and_added_up(activation):
    routing = ROUTINGS["normalized"]
    router, experts, x = make_experts(routing, 12, 10, biases=True)
    made = reference.moe(x, router, experts, routing, activation)
    gates = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_mul}
    gates |= {"gelu": lambda g, u: reference.gelu_mul(g, u, False), CLAMPED_SWIGLU: clamped_swiglu}
    logits = x @ router.weight.T + router.bias
    for row in range(len(x)):
        total = torch.zeros(12)
        for e, weight in by_hand(logits[row].tolist(), routing, [0.0] * 7).items():
            expert = experts[e]
            gate = expert.gate @ x[row] + expert.gate_bias
            up = expert.up @ x[row] + expert.up_bias
            total += weight * (expert.down @ gates[activation](gate, up) + expert.down_bias)
        assert torch.allclose(made[row], total, atol=1e-5)


def test_a_token_is_the_same_in_any_company():
    routing = ROUTINGS["softmax"]
    router, experts, x = make_experts(routing, 24, 17)
    together = reference.moe(x, router, experts, routing, "silu")
    alone = torch.cat([reference.moe(row[None], router, experts, routing, "silu") for row in x])
    assert torch.equal(together, alone)


def test_gates_are_cut_off():
    far = torch.tensor([100.0, -100.0, 0.5])
    seven = 7 / (1 + np.exp(-1.702 * 7))
    half = 0.5 / (1 + np.exp(-1.702 * 0.5))
    assert clamped_swiglu(far, far).tolist() == pytest.approx([seven * 8, 0.0, half * 1.5])


def recorded(shared: bool) -> tuple[Tape, Value]:
    """norm > experts (and an MLP for all) > add, behind an embedding."""

    def matrix(n: int, k: int):
        return np.ones((n, k), dtype=np.float32)

    routing = Routing(num_experts=2, top_k=1)
    tape = Tape()
    x = recorder.embed(Value(tape, None, ()), matrix(11, 8))
    normed = recorder.rmsnorm(x, np.ones(8), 1e-5)
    experts = [ExpertWeights(matrix(6, 8), matrix(6, 8), matrix(8, 6))] * 2
    if shared:
        gate, up = (recorder.linear(normed, matrix(5, 8)) for _ in range(2))
        made = recorder.linear(recorder.silu_mul(gate, up), matrix(8, 5))
        made = recorder.sigmoid_mul(recorder.linear(normed, matrix(1, 8)), made)
    chosen = recorder.moe(normed, RouterWeights(matrix(2, 8)), experts, routing, "silu")
    out = recorder.add(made, chosen) if shared else chosen
    recorder.lm_head(recorder.rmsnorm(recorder.add(x, out), np.ones(8), 1e-5), matrix(11, 8))
    return tape, x


def test_a_norm_and_a_sum_are_part_of_experts():
    tape, x = recorded(shared=False)
    ops = fuse(tape)
    assert [type(op).__name__ for op in ops] == [
        *("FusedEmbedding", "FusedLinear", "FusedExperts", "FusedCheck", "FusedHead")
    ]
    router, experts = ops[1:3]
    assert router.norm is not None and experts.norm is not None
    assert router.source is experts.source is experts.residual is x
    assert experts.logits is router.segments[0].out
    assert ops[-1].source is experts.out


def test_an_mlp_for_all_is_multiplied_by_its_gate_as_it_is_made():
    ops = fuse(recorded(shared=True)[0])
    gate_up, down, scale = ops[1:4]
    assert gate_up.activation == "silu" and len(gate_up.segments) == 2
    assert down.residual is None
    kinds = [type(op).__name__ for op in ops[3:]]
    assert kinds == [
        "FusedLinear",
        "FusedRows",
        "FusedLinear",
        "FusedExperts",
        "FusedRows",
        "FusedCheck",
        "FusedHead",
    ]
    assert scale.segments[0].weight.shape == (1, 8)
    rows, experts = ops[4], ops[6]
    assert rows.kind == "sigmoid" and experts.residual is rows.out
