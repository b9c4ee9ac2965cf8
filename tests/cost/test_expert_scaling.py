"""Eight devices that share the experts of a model, to eight times one device: steps of prompts, as
the cost of steps has them. What is missing from 1 is the exchange, where products compute longer
than they read; where they do not, eight devices read each expert once for the tokens of all.
"""

from __future__ import annotations

import pytest

from octavo.cost.find_device import find_device
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.cost.rank import rank_model
from octavo.cost.step_cost import StepCost, StepModel
from octavo.cost.work import Span

PROMPT = 2048


def cost_of(model: str, num_tokens: int, parallel: Parallel) -> StepCost:
    """A step of prompts, on one of the devices. Whether the weights fit is not asked: of a model
    that does not, this is what one of more memory would need."""
    spec, (device, _) = open_spec(model), find_device("h100-sxm")
    rank = rank_model(spec, precision_of(spec, None, None, None), parallel)
    return StepModel.of(rank, device).cost([Span(0, PROMPT)] * (num_tokens // PROMPT))


def share_of_eight(model: str, num_tokens: int) -> tuple[float, StepCost, StepCost]:
    one = cost_of(model, num_tokens, Parallel())
    eight = cost_of(model, num_tokens, Parallel(dp=8, ep=8))
    return one.total.value / eight.total.value, one, eight


def products_bound_by(cost: StepCost) -> set[str]:
    return {op.bound for op in cost.ops if op.name.startswith(("attention.q", "experts"))}


# Width of an expert, and the share: as docs/parallelism.md has it.
WHERE_COMPUTING_BINDS = [
    ("mixtral-8x22b", 16384, 0.93),
    ("mixtral-8x7b", 14336, 0.92),
    ("phi-3.5-moe", 6400, 0.88),
    ("gpt-oss-120b", 2880, 0.82),
    ("deepseek-v3", 2048, 0.79),
    ("qwen3-235b-a22b", 1536, 0.76),
    ("deepseek-v2-lite", 1408, 0.75),
    ("qwen3-30b-a3b", 768, 0.65),
]


@pytest.mark.parametrize(("model", "width", "expected"), WHERE_COMPUTING_BINDS)
def test_where_products_compute_longer_than_they_read(model, width, expected):
    share, one, eight = share_of_eight(model, 16 * PROMPT)
    mlps = [layer.mlp for layer in open_spec(model).layers]
    assert {mlp.inner for mlp in mlps if mlp.num_experts} == {width}
    assert products_bound_by(one) == products_bound_by(eight) == {"compute"}
    assert share == pytest.approx(expected, abs=0.01)
    # Nothing else is missing: neither do the busiest devices keep the others waiting for long.
    without_exchange = one.total.value / (eight.total.value - eight.comm.value)
    assert 0.96 <= without_exchange <= 1.01


def test_the_wider_experts_are_the_less_an_exchange_takes_of_a_step():
    shares = {
        width: share_of_eight(model, 16 * PROMPT)[0] for model, width, _ in WHERE_COMPUTING_BINDS
    }
    assert [*shares.values()] == sorted(shares.values(), reverse=True)
    assert min(share for width, share in shares.items() if width >= 2880) >= 0.80


@pytest.mark.parametrize(
    ("model", "expected"), [("deepseek-v2-lite", 0.94), ("qwen3-30b-a3b", 1.03)]
)
def test_where_one_device_reads_longer_than_it_computes(model, expected):
    """In steps of 2,048 tokens, the fewest that an engine takes by default."""
    share, one, eight = share_of_eight(model, PROMPT)
    assert "memory" in products_bound_by(one)
    assert products_bound_by(eight) == {"compute"}
    assert share == pytest.approx(expected, abs=0.01)
