"""Mixtures of experts by Triton's kernels, against those in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from device_weights import KINDS, device_weight, random
from triton_tools import EACH_ARCH, SHARED_LIMIT, launches

from octavo.kernels.cuda.attention_plan import StepTables
from octavo.kernels.cuda.expert_choice import choose, gather
from octavo.kernels.cuda.expert_products import ExpertProducts, ExpertSizes
from octavo.kernels.cuda.ops import ExpertLayer, StepTensors
from octavo.kernels.cuda.plain_ops import PlainOps
from octavo.kernels.cuda.weights import DenseWeight, W4Weight, W8Weight
from octavo.kernels.experts import route
from octavo.kernels.routing import CLAMPED_SWIGLU, Routing

ROUTINGS = {
    "softmax": Routing(num_experts=7, top_k=3, normalize=False),
    "normalized": Routing(num_experts=8, top_k=8),
    "sigmoid": Routing(num_experts=6, top_k=2, scoring="sigmoid", scale=2.5),
    "groups as in V2": Routing(
        num_experts=20, top_k=3, normalize=False, num_groups=4, top_groups=2
    ),
    "groups as in V3": Routing(
        num_experts=12, top_k=4, scoring="sigmoid", num_groups=3, top_groups=2, group_top=2
    ),
}
FEW_BYTES = 24


def chosen(logits, routing, correction=None, slots=None):
    shape = len(logits), routing.top_k
    ids = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
    weights = torch.full(shape, torch.nan, device=logits.device)
    if slots is None:
        slots = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    choose(logits, slots, routing, correction, ids, weights)
    return ids, weights


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("corrected", [False, True])
def test_experts_are_chosen_as_in_plain_torch(device, name, corrected):
    routing = ROUTINGS[name]
    logits = random(9, routing.num_experts + 3, device=device)[:, 2:-1]
    correction = random(routing.num_experts, device=device, seed=1) if corrected else None
    ids, weights = chosen(logits, routing, correction)
    expected = route(logits, routing, correction)
    assert torch.equal(ids.long(), expected[0])
    torch.testing.assert_close(weights, expected[1], rtol=1e-5, atol=1e-6)


def test_of_equal_experts_the_first_are_chosen(device):
    for name in ("softmax", "groups as in V3"):
        routing = ROUTINGS[name]
        logits = torch.zeros(2, routing.num_experts, device=device)
        assert chosen(logits, routing)[0][0].tolist() == list(range(routing.top_k))


def test_damage_stays_and_padding_goes_nowhere(device):
    routing = ROUTINGS["groups as in V2"]
    logits = random(3, routing.num_experts, device=device)
    logits[1, 4] = torch.nan
    slots = torch.tensor([5, 6, -1], dtype=torch.int32, device=device)
    ids, weights = chosen(logits, routing, slots=slots)
    assert weights[1].isnan().all() and weights[0].isfinite().all()
    assert (ids[:2] >= 0).all() and (ids[:2] < routing.num_experts).all()
    assert (ids[2] == routing.num_experts).all()


@pytest.mark.parametrize("num_tokens", [1, 700])
def test_pairs_are_gathered_by_expert_in_their_order(device, num_tokens):
    num_experts = 5
    ids = torch.randint(0, num_experts + 1, (num_tokens, 2), dtype=torch.int32).to(device)
    order = torch.full((2 * num_tokens,), -1, dtype=torch.int32, device=device)
    offsets = torch.full((num_experts + 1,), -1, dtype=torch.int32, device=device)
    gather(ids, order, offsets)
    flat = ids.flatten().cpu()
    assert offsets.tolist() == [int((flat < expert).sum()) for expert in range(num_experts + 1)]
    expected = flat.sort(stable=True).indices[: int(offsets[-1])]
    assert order[: len(expected)].tolist() == expected.tolist()


def layer_of(kind, routing, activation, biases, dtype=torch.float32, device="cpu", f=40, k=256):
    e = routing.num_experts
    gates_up = device_weight(kind, e * 2 * f, k, dtype, device)
    # Inputs of GGUF's types are multiples of 256.
    down_kind = kind if f % 128 == 0 else "float"
    down = device_weight(down_kind, e * k, f, dtype, device)
    vectors = [random(size, device=device, seed=2) for size in (e * 2 * f, e * k)]
    return ExpertLayer(gates_up, down, routing, activation, *(vectors if biases else (None, None)))


def step_of(num_tokens, device):
    nothing = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    return StepTensors(nothing, nothing, [nothing], [StepTables(nothing, nothing, nothing)], 1)


def products_for(layer, num_tokens, k, **settings):
    inner = layer.gate_up.shape[0] // layer.routing.num_experts // 2
    sizes = [ExpertSizes(layer.routing, inner, k)]
    dtype, device = settings.pop("dtype", torch.float32), settings.pop("device", "cpu")
    made = ExpertProducts(sizes, num_tokens, dtype, torch.device(device), **settings)
    for memory in (made._inner, made._made):
        memory.fill_(torch.nan)
    return made


def run(layer, x, logits, residual=None, **settings):
    products = products_for(layer, len(x), x.shape[1], dtype=x.dtype, device=x.device, **settings)
    out = torch.full_like(x, torch.nan)
    slots = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    products.run(x, logits, slots, layer, residual, out)
    return out


def expected_of(layer, x, logits, residual=None):
    out = torch.full_like(x, torch.nan)
    PlainOps().run_experts(x, logits, step_of(len(x), x.device), layer, residual, out)
    return out


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "activation"), [(1, "silu"), (37, CLAMPED_SWIGLU)])
def test_the_same_as_in_plain_torch(device, kind, num_tokens, activation):
    routing = replace(ROUTINGS["softmax"], num_experts=3, top_k=2)
    layer = layer_of(kind, routing, activation, num_tokens > 1, device=device)
    x = random(num_tokens, 256 + 5, device=device)[:, 5:]
    logits, residual = random(num_tokens, 3, device=device), random(num_tokens, 256, seed=4)
    residual = residual.to(device)
    got = run(layer, x, logits, residual)
    expected = expected_of(layer, x, logits, residual)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", CLAMPED_SWIGLU])
def test_activations_in_16_bits(device, activation):
    layer = layer_of("float", ROUTINGS["sigmoid"], activation, True, torch.bfloat16, device)
    x = random(5, 256, dtype=torch.bfloat16, device=device)
    logits = random(5, 6, device=device)
    expected = expected_of(layer, x, logits).float()
    assert (run(layer, x, logits).float() - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_more_tokens_than_memory_is_for_come_in_pieces(device, monkeypatch):
    from octavo.kernels.cuda import expert_products

    monkeypatch.setattr(expert_products, "PIECE_TOKENS", 16)
    layer = layer_of("float", ROUTINGS["softmax"], "silu", False, device=device, f=16, k=32)
    x, logits = random(37, 32, device=device), random(37, 7, device=device)
    expected = expected_of(layer, x, logits)
    torch.testing.assert_close(run(layer, x, logits), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["float", "nibbles in 32, mins"])
def test_a_token_has_the_same_bits_in_any_company(device, kind):
    layer = layer_of(kind, ROUTINGS["sigmoid"], "silu", False, device=device, f=16)
    x, logits = random(60, 256, device=device), random(60, 6, device=device)
    together = run(layer, x, logits, is_invariant=True)
    for rows in (slice(0, 1), slice(59, 60), slice(7, 31)):
        assert torch.equal(run(layer, x[rows], logits[rows], is_invariant=True), together[rows])


def nothing(*shape, dtype=torch.bfloat16):
    """A tensor of no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def weight_of(kind, n, k):
    match kind:
        case "float":
            return DenseWeight(nothing(n, k))
        case "nibbles":
            scales = nothing(k // 32, n, dtype=torch.float16)
            return W4Weight(nothing(k // 8, n, dtype=torch.int32), scales, None, 32, (n, k))
        case "MXFP4":
            scales = nothing(k // 32, n, dtype=torch.float16)
            return W8Weight(nothing(n, k, dtype=torch.int8), scales, None, 32)
    scales = nothing(k // 128, n, dtype=torch.float32)
    return W8Weight(nothing(n, k, dtype=torch.float8_e4m3fn), scales, None, 128)


QWEN = Routing(num_experts=128, top_k=8)
V3 = Routing(num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, group_top=2)
CASES = [
    ("float", 1),
    ("float", 4096),
    *(
        pytest.param(kind, tokens, marks=pytest.mark.long)
        for kind in ("float", "nibbles", "MXFP4", "FP8")
        for tokens in (1, 300, 4096)
        if (kind, tokens) not in (("float", 1), ("float", 4096))
    ),
]


@pytest.mark.parametrize(("kind", "num_tokens"), CASES)
@pytest.mark.parametrize("arch", EACH_ARCH)
def test_compiled(kind, num_tokens, arch):
    gates_up, down = weight_of(kind, 128 * 2 * 768, 2048), weight_of(kind, 128 * 2048, 768)
    layer = ExpertLayer(gates_up, down, QWEN, "silu")
    products = ExpertProducts(
        [ExpertSizes(QWEN, 768, 2048)], num_tokens, torch.bfloat16, torch.device("meta")
    )
    x, slots = nothing(num_tokens, 2048), nothing(num_tokens, dtype=torch.int32)
    logits = nothing(num_tokens, 128, dtype=torch.float32)
    seen = launches(lambda: products.run(x, logits, slots, layer, x, x))
    assert [launch.kernel.__name__ for launch in seen] == [
        *("_choose", "_gather", "_multiply", "_multiply", "_sum_ranks")
    ]
    for launch in seen:
        made = launch.compiled(arch)
        assert made.spills <= FEW_BYTES and made.shared <= SHARED_LIMIT[arch], launch.key
        if launch.kernel.__name__ == "_multiply":
            words = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
            assert words.get(arch, "mma.sync") in made.ptx and "cp.async" in made.ptx


def test_choices_in_groups_are_compiled_without_spills():
    ids, weights = nothing(3, 8, dtype=torch.int32), nothing(3, 8, dtype=torch.float32)
    logits, correction = nothing(3, 256, dtype=torch.float32), nothing(256, dtype=torch.float32)
    slots = nothing(3, dtype=torch.int32)
    (launch,) = launches(lambda: choose(logits, slots, V3, correction, ids, weights))
    made = launch.compiled(90)
    assert made.spills == 0 and made.registers <= 128


def test_sums_of_experts_in_float32(device):
    """Parts that ranks add up in a fixed order are not rounded to the activations' type."""
    routing = ROUTINGS["normalized"]
    gate_up = device_weight("float", 8 * 2 * 32, 64, torch.bfloat16, device)
    down = device_weight("float", 8 * 64, 32, torch.bfloat16, device)
    layer = ExpertLayer(gate_up, down, routing, "silu")
    x = random(3, 64, dtype=torch.bfloat16, device=device)
    logits = random(3, 8, device=device, seed=2)
    experts = ExpertProducts([ExpertSizes(routing, 32, 64)], 3, torch.bfloat16, device)
    slots, wide = (
        torch.zeros(3, dtype=torch.int32, device=device),
        torch.empty(3, 64, device=device),
    )
    rounded = torch.empty(3, 64, dtype=torch.bfloat16, device=device)
    for out in (wide, rounded):
        experts.run(x, logits, slots, layer, None, out)
    assert torch.equal(wide.bfloat16(), rounded)
    assert not torch.equal(wide, rounded.float())
