"""Training whole models: that it helps on other text, and what is kept of it."""

from __future__ import annotations

import math

import pytest
import torch
from loading import load_model

from octavo.base.errors import ConfigError
from octavo.quantize import qat
from octavo.quantize.calibration import in_epochs
from octavo.quantize.distillation import Distillation
from octavo.quantize.fake_quant import FakeQuantMatrix, ScaledMatrix
from octavo.quantize.grid import QuantizedMatrix, Scheme
from octavo.quantize.pipeline import quantize_model
from octavo.quantize.qat import split, train, train_model
from tests.conftest import write_calm_model

LENGTH = 32
SCHEME = Scheme(2, 16, symmetric=False)
WINDOWS = torch.randint(256, (40, LENGTH), generator=torch.Generator().manual_seed(4))
OTHER = torch.randint(256, (8, LENGTH), generator=torch.Generator().manual_seed(5))
STEPS = 20
TOKENS = STEPS * 2 * LENGTH


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_calm_model(tmp_path_factory.mktemp("qat") / "model", 0.1)


@pytest.fixture
def exactly(monkeypatch):
    """As on a processor without bfloat16; and in strides, as there are few steps."""
    monkeypatch.setattr(qat, "_FAST_BFLOAT16", set())
    monkeypatch.setitem(qat._RATES, "factors", 0.01)


def divergence(path, matrices, windows=OTHER):
    distillation = Distillation(load_model(path).model, LENGTH)
    weights = {name: matrix.dequantize() for name, matrix in matrices.items()}
    return sum(distillation.divergence(weights, window) for window in windows) / len(windows)


def start_of(path, windows=WINDOWS):
    return dict(quantize_model(path, SCHEME, "gptq", split(windows, seed=0).trained[:32]))


def same(some, others):
    return some.keys() == others.keys() and all(
        torch.equal(some[name].codes, others[name].codes)
        and torch.equal(some[name].scales, others[name].scales)
        for name in some
    )


def test_it_is_nearer_than_gptq_on_text_that_nobody_saw(model_path, exactly):
    start = start_of(model_path)
    trained = train_model(model_path, SCHEME, WINDOWS, tokens=TOKENS)
    assert divergence(model_path, trained) < 0.97 * divergence(model_path, start)
    for name, matrix in trained.items():
        assert matrix.scheme == SCHEME
        assert torch.equal(matrix.codes, start[name].codes), name
        assert torch.equal(matrix.zeros, start[name].zeros), name
        assert not torch.equal(matrix.scales, start[name].scales), name


def test_codes_fit_what_scales_cannot(model_path, monkeypatch):
    """Of two windows, gone through again and again, and looked at too."""
    monkeypatch.setitem(qat._RATES, "places", 0.015)
    model, start = load_model(model_path).model, start_of(model_path)
    windows = qat.TrainingWindows(WINDOWS[:2], WINDOWS[:2])
    lost = [divergence(model_path, start, WINDOWS[:2])]
    for given in (None, model):
        matrices = qat._in_training(start, given)
        made = train(Distillation(model, LENGTH), matrices, windows, tokens=2 * TOKENS)
        lost.append(divergence(model_path, made, WINDOWS[:2]))
    assert any(not torch.equal(made[name].codes, start[name].codes) for name in start)
    assert lost[2] < 0.8 * lost[1] < 0.8 * lost[0]


@pytest.mark.parametrize("codes", [False, True])
def test_a_seed_is_a_result(codes, model_path):
    def trained(seed):
        return train_model(model_path, SCHEME, WINDOWS, codes=codes, tokens=256, seed=seed)

    first = trained(0)
    assert same(first, trained(0)) and not same(first, trained(1))


def test_training_that_does_harm_is_not_kept(model_path, exactly, monkeypatch):
    monkeypatch.setitem(qat._RATES, "factors", 3.0)
    reports: list[qat.QatStepReport] = []
    trained = train_model(model_path, SCHEME, WINDOWS, tokens=256, on_step=reports.append)
    start = start_of(model_path)
    assert same(trained, start)
    assert reports[-1].held_out > divergence(model_path, start, split(WINDOWS, 0).held_out)


class Scripted:
    """A distillation in whose eyes looks are as good as it was told."""

    def __init__(self, *looks):
        self._looks = iter(looks)

    def divergence(self, weights, window):
        return next(self._looks)

    def add_gradient(self, weights, window):
        for weight in weights.values():
            weight.sum().backward()
        return 1.0


def scripted(*looks):
    """The factor of a single scale, as it was kept."""
    start = QuantizedMatrix(
        torch.full((1, 16), 3, dtype=torch.uint8), torch.ones(1, 1), torch.zeros(1, 1), SCHEME
    )
    reports: list[qat.QatStepReport] = []
    windows = qat.TrainingWindows(WINDOWS, WINDOWS[:1])
    made = train(
        Scripted(*looks),
        {"matrix": ScaledMatrix(start)},
        windows,
        tokens=8 * 2 * LENGTH,
        on_step=reports.append,
    )
    return float(made["matrix"].scales[0, 0]), reports


def test_the_best_look_is_kept():
    """The gradient is one, so a scale shrinks with every step."""
    none, _ = scripted(*([1.0] * 9))
    third, reports = scripted(1.0, 0.9, 0.8, 0.7, 0.8, 0.8, 0.8, 0.9, 0.9)
    last, _ = scripted(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
    assert none == 1.0 > third > last > 0.9
    assert [report.held_out for report in reports] == [0.9, 0.8, 0.7, 0.8, 0.8, 0.8, 0.9, 0.9]
    assert [report.number for report in reports] == list(range(1, 9))
    assert {report.total for report in reports} == {8}


def test_damage_is_not_kept():
    assert scripted(1.0, *([math.nan] * 8))[0] == 1.0


@pytest.mark.parametrize("bits, rate", [(2, 0.006), (3, 0.003), (4, 0.003)])
def test_rates_rise_and_fall(bits, rate):
    codes, scheme = torch.zeros((1, 16), dtype=torch.uint8), Scheme(bits, 16, symmetric=False)
    matrix = ScaledMatrix(QuantizedMatrix(codes, torch.ones(1, 1), torch.zeros(1, 1), scheme))
    optimizer = qat._Optimizer([matrix], total=100)
    moved = []
    for _ in range(100):
        before = float(matrix.factors.detach())
        matrix.factors.grad = torch.ones(1, 1)
        optimizer.step()
        moved.append(before - float(matrix.factors.detach()))
        assert matrix.factors.grad is None
    assert moved[0] == pytest.approx(rate / 5, rel=1e-3) and moved[0] < moved[2] < moved[4]
    assert max(moved) == pytest.approx(rate, rel=0.01)
    assert moved[5:] == sorted(moved[5:], reverse=True) and 0 < moved[-1] < 1e-3 * rate


def test_what_is_held_out_is_not_trained_on():
    windows = torch.arange(100)[:, None].expand(-1, LENGTH)
    for count, held_out in ((2, 1), (8, 1), (24, 3), (100, 8)):
        parts = split(windows[:count], seed=3)
        assert len(parts.held_out) == held_out
        found = torch.cat([parts.trained, parts.held_out])[:, 0]
        assert sorted(found.tolist()) == list(range(count))
    assert not torch.equal(split(windows, 0).held_out, split(windows, 1).held_out)


def test_all_windows_are_gone_through_before_any_comes_again():
    windows = torch.arange(7)[:, None]
    drawn = windows[in_epochs(len(windows), 17, seed=0)][:, 0].tolist()
    assert len(drawn) == 17
    assert sorted(drawn[:7]) == sorted(drawn[7:14]) == list(range(7))
    assert drawn[:7] != drawn[7:14]


def test_a_short_text_is_gone_through_eight_times(model_path):
    reports: list[qat.QatStepReport] = []
    train_model(model_path, SCHEME, WINDOWS[:6], on_step=reports.append)
    assert len(reports) == 5 * 8 / 2


def test_what_is_in_training_begins_as_the_start(model_path):
    start = start_of(model_path)
    model = load_model(model_path).model
    for given, kind in ((None, ScaledMatrix), (model, FakeQuantMatrix)):
        matrices = qat._in_training(start, given)
        assert {type(matrix) for matrix in matrices.values()} == {kind}
        assert same({name: matrix.quantized() for name, matrix in matrices.items()}, start)


def test_errors(model_path):
    with pytest.raises(ConfigError, match="a single window: give a longer text"):
        train_model(model_path, SCHEME, WINDOWS[:1])
    with pytest.raises(ConfigError, match="a window has 32 tokens, and training is to see 31"):
        train_model(model_path, SCHEME, WINDOWS, tokens=31)
    for scheme in (Scheme(4, 16, False, True), Scheme(4, 16, table="nf4")):
        with pytest.raises(ConfigError, match="integer codes and zeros"):
            train_model(model_path, scheme, WINDOWS, tokens=TOKENS)
    with pytest.raises(ConfigError, match="q_proj.weight: rows of"):
        train_model(model_path, Scheme(2, 7), WINDOWS, tokens=TOKENS)
    with pytest.raises(ConfigError, match="has token 999, and the model has"):
        train_model(model_path, SCHEME, torch.full((4, LENGTH), 999), tokens=TOKENS)
