"""Learned rounding: what must hold of its codes, and what it gains."""

from __future__ import annotations

import pytest
import torch

from octavo.quantize.autoround import LayerSamples, learn_rounding
from octavo.quantize.gptq import quantize_gptq
from octavo.quantize.grid import Scheme, full_grid, grouped, matrix_on_grid

SCHEMES = [
    Scheme(2, 16, symmetric=False),
    Scheme(3, 8),
    Scheme(2, "channel"),
    Scheme(2, "tensor", symmetric=False),
]
WINDOWS, LENGTH, HIDDEN, INNER = 6, 256, 32, 48


def two_linears(hidden, weights):
    """A layer whose second linear can make up for what the first one gets wrong."""
    return hidden + torch.tanh(hidden @ weights["up"].t()) @ weights["down"].t()


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    inputs = torch.randn(WINDOWS, LENGTH, HIDDEN, generator=generator) @ mixing
    weights = {
        "up": torch.randn(INNER, HIDDEN, generator=generator) / HIDDEN**0.5,
        "down": torch.randn(HIDDEN, INNER, generator=generator) / INNER**0.5,
    }
    return LayerSamples(inputs, two_linears(inputs, weights)), weights


def started(windows, weights, scheme):
    """What GPTQ makes of both."""
    inner = torch.tanh(windows.inputs @ weights["up"].t())
    found = {}
    for name, x in (("up", windows.inputs), ("down", inner)):
        rows = x.flatten(0, 1)
        found[name] = quantize_gptq(weights[name], 2 / len(rows) * rows.t() @ rows, scheme)
    return found


def error(windows, matrices):
    given = {name: matrix.dequantize() for name, matrix in matrices.items()}
    missed = two_linears(windows.inputs, given) - windows.targets
    return float((missed.square().mean(-1) / windows.targets.square().mean(-1)).mean())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_layer_is_closer_than_by_gptq_and_on_other_inputs_too(scheme):
    windows, weights = problem()
    seen, other = (
        LayerSamples(*(each[part] for each in windows)) for part in (slice(4), slice(4, 6))
    )
    start = started(seen, weights, scheme)
    learned = learn_rounding(two_linears, seen, weights, start, steps=200)
    assert error(seen, learned) < 0.95 * error(seen, start)
    assert error(other, learned) < 0.97 * error(other, start)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_are_in_range_and_scales_are_what_a_file_can_hold(scheme):
    windows, weights = problem()
    start = started(windows, weights, scheme)
    learned = learn_rounding(two_linears, windows, weights, start, steps=100)
    assert any(not torch.equal(learned[name].codes, start[name].codes) for name in start)
    for name, matrix in learned.items():
        assert matrix.scheme == scheme and matrix.shape == weights[name].shape
        assert int(matrix.codes.max()) <= scheme.max_code
        assert torch.equal(matrix.scales.half().float(), matrix.scales)
        assert (matrix.scales > 0).all() and torch.equal(matrix.zeros, start[name].zeros)


def test_no_step_makes_it_worse_than_the_start():
    """Targets that the start has exactly: whatever is learned, the start is the best."""
    windows, weights = problem()
    start = {
        name: matrix_on_grid(weight, full_grid(grouped(weight, SCHEMES[0]), SCHEMES[0]), SCHEMES[0])
        for name, weight in weights.items()
    }
    exact = {name: matrix.dequantize() for name, matrix in start.items()}
    windows = windows._replace(targets=two_linears(windows.inputs, exact))
    learned = learn_rounding(two_linears, windows, weights, start, steps=7)
    assert error(windows, learned) == error(windows, start) == 0
    for name in start:
        assert torch.equal(learned[name].codes, start[name].codes)


def test_it_makes_up_for_errors_that_came_in():
    """Targets are of inputs without an error that all tokens have."""
    windows, weights = problem()
    shift = 0.3 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
    drifted = windows._replace(inputs=windows.inputs + shift)
    scheme = Scheme(4, 16)
    start = started(drifted, weights, scheme)
    learned = learn_rounding(two_linears, drifted, weights, start, steps=60)
    assert error(drifted, learned) < 0.95 * error(drifted, weights_as_they_are(weights))


def weights_as_they_are(weights):
    class Exact:
        def __init__(self, weight):
            self.dequantize = lambda: weight

    return {name: Exact(weight) for name, weight in weights.items()}


def test_a_seed_is_a_result():
    windows, weights = problem()
    start = started(windows, weights, SCHEMES[0])

    def codes(seed):
        made = learn_rounding(two_linears, windows, weights, start, steps=30, seed=seed)
        return torch.cat([made[name].codes.flatten() for name in ("up", "down")])

    assert torch.equal(codes(0), codes(0)) and not torch.equal(codes(0), codes(1))
