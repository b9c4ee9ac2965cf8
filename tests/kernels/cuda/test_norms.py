"""Norms and activation products against the reference ops, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from triton_tools import EACH_ARCH, launches

from octavo.kernels import reference
from octavo.kernels.cuda.activations import (
    activation_alone,
    activation_mul,
    activation_mul_apart,
    sigmoid_mul,
)
from octavo.kernels.cuda.elementwise import to_codes
from octavo.kernels.cuda.norms import MAX_WIDTH, layernorm, rmsnorm
from octavo.kernels.op_arguments import RowNorm

# Relative errors. The interpreter cuts bfloat16 off.
FLOATS = [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 2e-2)]
# Half a unit of the last place, relative to the greatest of a row.
CODES = [(torch.int8, 0.502 / 127), (torch.float8_e4m3fn, 16.1 / 448)]
PRODUCTS = {
    "silu": reference.silu_mul,
    "gelu_tanh": reference.gelu_mul,
    "gelu_erf": lambda gate, up: reference.gelu_mul(gate, up, approximate=False),
}


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, dtype)


def norm(width, device, seed=1):
    return RowNorm(random(width, device=device, seed=seed) + 1, 1e-5)


def assert_near(got, expected, tolerance):
    """Within a part of each row's greatest number."""
    greatest = expected.float().abs().amax(-1, keepdim=True)
    assert ((got.float() - expected.float()).abs() <= tolerance * greatest).all()


def by_codes(codes, scales):
    assert scales.isfinite().all()
    return codes.float() * scales.unsqueeze(1)


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
@pytest.mark.parametrize("width", [1, 64, 577])
def test_norm(device, dtype, tolerance, width):
    x, n = random(3, width, dtype=dtype, device=device), norm(width, device)
    out = torch.full_like(x, torch.nan)
    rmsnorm(x, n, out)
    assert_near(out, reference.rmsnorm(x, *n), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
@pytest.mark.parametrize("gemma", [False, True])
def test_sum_and_norm(device, dtype, tolerance, gemma):
    x = random(3, 130, dtype=dtype, device=device)
    residual = random(3, 130, dtype=dtype, device=device, seed=2)
    n, before = norm(130, device), norm(130, device, seed=3) if gemma else None
    expected = residual + (reference.rmsnorm(x, *before) if before else x)
    out = torch.empty_like(x)
    rmsnorm(x, n, out, residual=residual, norm_before_add=before)
    assert_near(residual, expected, tolerance)
    assert_near(out, reference.rmsnorm(residual, *n), tolerance)


def test_a_sum_that_goes_elsewhere(device):
    x, residual = random(3, 130, device=device), random(3, 130, device=device, seed=2)
    n, wide = norm(130, device), torch.zeros(3, 400, device=device)
    before, total, out = residual.clone(), wide[:, 130:260], torch.empty_like(x)
    rmsnorm(x, n, out, residual=residual, total=total)
    assert torch.equal(residual, before) and torch.equal(total, residual + x)
    assert not wide[:, :130].any() and not wide[:, 260:].any()
    assert_near(out, reference.rmsnorm(total, *n), 2e-6)


def test_norm_of_some_rows(device):
    x, n = random(5, 96, device=device), norm(96, device)
    rows = torch.tensor([4, 0, 0, 2], dtype=torch.int32, device=device)
    out = torch.empty(4, 96, device=device)
    rmsnorm(x, n, out, rows=rows)
    assert_near(out, reference.rmsnorm(x[rows], *n), 2e-6)


def test_norm_of_rows_that_are_apart(device):
    wide, n = random(4, 200, device=device), norm(70, device)
    x, out = wide[:, 130:], torch.zeros(4, 100, device=device)
    rmsnorm(x, n, out[:, :70])
    assert_near(out[:, :70], reference.rmsnorm(x, *n), 2e-6)
    assert not out[:, 70:].any()


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layernorm(device, dtype, tolerance, has_bias):
    wide, n = random(3, 700, dtype=dtype, device=device) + 3, norm(577, device)
    bias = random(577, device=device, seed=2) if has_bias else None
    x, out = wide[:, 100:677], torch.full((3, 577), torch.nan, dtype=dtype, device=device)
    layernorm(x, n, bias, out)
    assert_near(out, reference.layernorm(x, n.weight, bias, n.eps), 3 * tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
def test_activations_alone(device, activation):
    x = random(3, 1100, device=device) * 3
    x[1, 5] = torch.nan
    out = torch.zeros_like(x)
    activation_alone(x, out, "gelu_erf" if activation == "gelu" else activation)
    expected = reference.activate(x, activation)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("width", [1, 1100])
def test_sigmoids_of_values_and_of_rows(device, width):
    gate, x = random(3, width, device=device) * 3, random(3, 1100, device=device, seed=2)
    out = torch.full_like(x, torch.nan)
    sigmoid_mul(gate, x, out)
    assert_near(out, reference.sigmoid_mul(gate, x), 2e-6)


def test_rows_of_no_length(device):
    rmsnorm(torch.zeros(0, 8, device=device), norm(8, device), torch.zeros(0, 8, device=device))
    activation_mul(torch.zeros(0, 8, device=device), torch.zeros(0, 4, device=device), "silu")


@pytest.mark.parametrize(("dtype", "step"), CODES)
def test_norm_in_codes(device, dtype, step):
    x, n = random(4, 577, device=device), norm(577, device)
    x[2] = 0
    codes, scales = torch.empty_like(x, dtype=dtype), torch.full((4,), torch.nan, device=device)
    rmsnorm(x, n, codes, scales=scales)
    assert_near(by_codes(codes, scales), reference.rmsnorm(x, *n), step)
    assert scales[2] == 0 and not codes[2].float().any()


@triton.jit
def _to_codes(x, scale, out, CODE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, to_codes(tl.load(x + place), scale, CODE))


def test_codes_are_rounded_to_even(device):
    x = torch.tensor([-127, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 126.5], device=device)
    out = torch.empty(8, dtype=torch.uint8, device=device)
    _to_codes[(1,)](x / 4, 0.25, out, "s8", BLOCK=8)
    assert out.view(torch.int8).tolist() == [-127, -2, -2, 0, 0, 2, 2, 126]
    x = torch.tensor([448, -440, 1.0625, 1.1875, 1.95, 0.0039, -(2.0**-10), 0], device=device)
    _to_codes[(1,)](x, 1.0, out, "e4m3", BLOCK=8)
    expected = [448, -448, 1, 1.25, 2, 2.0**-8, 0, 0]
    assert out.view(torch.float8_e4m3fn).float().tolist() == expected


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
@pytest.mark.parametrize("activation", PRODUCTS)
def test_activation_times_up(device, dtype, tolerance, activation):
    gate_up = random(3, 2 * 1100, dtype=dtype, device=device) * 3
    out = torch.full((3, 1100), torch.nan, dtype=dtype, device=device)
    activation_mul(gate_up, out, activation)
    expected = PRODUCTS[activation](*gate_up.float().chunk(2, dim=1))
    assert_near(out, expected, tolerance)


def test_gates_and_ups_that_are_apart(device):
    wide = random(3, 700, device=device)
    gate, up, out = wide[:, 400:500], wide[:, :100], torch.empty(3, 100, device=device)
    activation_mul_apart(gate, up, out, "silu")
    assert_near(out, reference.silu_mul(gate, up), 2e-6)


@pytest.mark.parametrize("activation", PRODUCTS)
def test_activations_far_from_0(device, activation):
    gate = torch.tensor([[-1e4, -200.0, -30.0, -0.0, 30.0, 200.0, 1e4]], device=device)
    out = torch.empty_like(gate)
    activation_mul(torch.cat([gate, torch.ones_like(gate)], dim=1), out, activation)
    assert torch.allclose(out, gate.clamp(min=0), atol=1e-6)


@pytest.mark.parametrize(("dtype", "step"), CODES)
def test_activation_in_codes(device, dtype, step):
    gate_up = random(3, 2 * 5000, device=device)
    codes = torch.empty(3, 5000, dtype=dtype, device=device)
    scales = torch.empty(3, device=device)
    activation_mul(gate_up, codes, "silu", scales=scales)
    assert_near(by_codes(codes, scales), reference.silu_mul(*gate_up.chunk(2, dim=1)), step)


@pytest.mark.parametrize("arch", EACH_ARCH)
def test_compiled(arch):
    """The widest rows stay in registers."""
    x = torch.empty(2, MAX_WIDTH, dtype=torch.bfloat16)
    half, scales = x[:, ::2].contiguous(), torch.empty(2)
    n = RowNorm(x[0], 1e-5)

    def all_kinds():
        rmsnorm(x, n, x, residual=x)
        rmsnorm(x, n, x, rows=torch.zeros(2, dtype=torch.int32))
        rmsnorm(x, n, x.to(torch.float8_e4m3fn), residual=x, norm_before_add=n, scales=scales)
        layernorm(x, n, n.weight, x)
        activation_alone(x, x, "relu")
        sigmoid_mul(x[:, :1], x, x)
        activation_mul(x, half, "gelu_tanh")
        activation_mul(x, half.to(torch.int8), "silu", scales=scales)

    for launch in launches(all_kinds):
        made = launch.compiled(arch)
        assert made.spills == 0 and made.registers <= 64
        assert made.shared <= 32 << 10
        assert "ld.global.v4" in made.ptx  # 16 bytes at a time
