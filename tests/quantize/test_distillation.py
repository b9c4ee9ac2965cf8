"""How far a model with other weights is from itself, held against the definition."""

from __future__ import annotations

import pytest
import torch
from loading import load_model

from octavo.layers.module import named_parameters
from octavo.layers.tensors import with_tensors
from octavo.quantize import distillation as module
from octavo.quantize.distillation import Distillation
from octavo.quantize.layerwise_model import LayerwiseModel, dense, linear_names

LENGTH = 40
WINDOWS = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def model(tiny_model):
    return load_model(tiny_model).model


def others(model, size=0.05):
    """The weights of the model's linears, a little changed."""
    generator = torch.Generator().manual_seed(6)
    values = {name: parameter.value for name, parameter in named_parameters(with_tensors(model))}
    names = [name for layer in linear_names(model) for name in layer]
    return {
        name: dense(values[name]) + size * torch.randn(values[name].shape, generator=generator)
        for name in names
    }


def log_probabilities(model, weights):
    running = LayerwiseModel(model, WINDOWS[:1])
    for index in range(running.num_layers):
        running.run_layer(index, lambda name, x, weight: weights.get(name, weight))
    return running.logits(0).log_softmax(dim=-1)


@pytest.mark.parametrize("rows", [256, 16])
def test_it_is_the_divergence_of_whole_models(rows, model, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", rows)  # of which 40 is no multiple
    weights = others(model)
    exact, found = log_probabilities(model, {}), log_probabilities(model, weights)
    expected = float((exact.exp() * (exact - found)).sum(dim=-1).mean())
    distillation = Distillation(model, LENGTH)
    assert distillation.divergence(weights, WINDOWS[0]) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.01
    assert distillation.divergence(others(model, size=0.0), WINDOWS[0]) == pytest.approx(
        0, abs=1e-6
    )


def test_bfloat16_is_near(model):
    weights = others(model)
    exact, near = (
        Distillation(model, LENGTH, dtype).divergence(weights, WINDOWS[0])
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact != near and near == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("rows", [256, 16])
def test_gradients(rows, model, monkeypatch):
    """By differences along a direction, in every matrix at once."""
    monkeypatch.setattr(module, "_ROWS", rows)
    distillation = Distillation(model, LENGTH)
    weights = {name: weight.requires_grad_() for name, weight in others(model).items()}
    said = distillation.add_gradient(weights, WINDOWS[0])
    assert said == pytest.approx(distillation.divergence(weights, WINDOWS[0]), rel=1e-6)
    slope = sum(float(weight.grad.square().sum()) for weight in weights.values())
    step = 0.02 / slope  # what the divergence should change by, in both directions together
    with torch.no_grad():
        ends = [
            {name: weight + sign * step / 2 * weight.grad for name, weight in weights.items()}
            for sign in (1, -1)
        ]
    up, down = (distillation.divergence(each, WINDOWS[0]) for each in ends)
    assert up - down == pytest.approx(step * slope, rel=0.05)


def test_gradients_of_windows_add_up(model):
    distillation = Distillation(model, LENGTH)

    def gradient(windows):
        weights = {name: weight.requires_grad_() for name, weight in others(model).items()}
        for window in windows:
            distillation.add_gradient(weights, window)
        return torch.cat([weight.grad.flatten() for weight in weights.values()])

    both = gradient(WINDOWS)
    assert torch.allclose(both, gradient(WINDOWS[:1]) + gradient(WINDOWS[1:]), atol=1e-6)


def test_the_model_stays_as_it_is(model):
    def values():
        places = named_parameters(with_tensors(model))
        return {name: place.value.clone() for name, place in places}

    before = values()
    weights = {name: weight.requires_grad_() for name, weight in others(model).items()}
    Distillation(model, LENGTH).add_gradient(weights, WINDOWS[0])
    after = values()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(value.requires_grad for value in after.values())
