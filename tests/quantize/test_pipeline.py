"""A tiny random Llama, end to end."""

from __future__ import annotations

import pytest
import torch
from loading import load_model
from safetensors.torch import load_file, save_file

from octavo.base.errors import ConfigError, ModelFileError
from octavo.quantize.grid import Scheme, quantize_to_nearest
from octavo.quantize.layerwise_model import LayerwiseModel, linear_names
from octavo.quantize.pipeline import quantize_model
from tests.conftest import write_tiny_model

SCHEME = Scheme(3, 16)
WINDOWS = torch.randint(256, (6, 64), generator=torch.Generator().manual_seed(4))
OTHER = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(5))
DOWN = "model.layers.1.mlp.down_proj.weight"


def run(path, matrices):
    model = LayerwiseModel(load_model(path).model, OTHER)
    for index in range(model.num_layers):
        model.run_layer(
            index, lambda name, x, w: matrices[name].dequantize() if name in matrices else w
        )
    return model


def last_hidden(path, matrices):
    return run(path, matrices).hidden


def log_probabilities(path, matrices):
    model = run(path, matrices)
    return torch.cat([model.logits(window) for window in range(len(OTHER))]).log_softmax(dim=-1)


def divergence(path, matrices):
    """The mean KL divergence of a quantized model from its own, on tokens it was not made with."""
    exact = log_probabilities(path, {})
    return float((exact.exp() * (exact - log_probabilities(path, matrices))).sum(dim=-1).mean())


def test_every_linear_comes_once_and_in_order(tiny_model):
    names = [name for layer in linear_names(load_model(tiny_model).model) for name in layer]
    for method, calibration in (("rtn", None), ("search", WINDOWS), ("gptq", WINDOWS)):
        made = list(quantize_model(tiny_model, SCHEME, method, calibration))
        assert [name for name, _ in made] == names
    learned = quantize_model(tiny_model, SCHEME, "autoround", WINDOWS, steps=2)
    assert [name for name, _ in learned] == names


def test_each_method_is_better_than_the_one_before(tiny_model):
    nearest = dict(quantize_model(tiny_model, SCHEME, "rtn"))
    searched = dict(quantize_model(tiny_model, SCHEME, "search", WINDOWS))
    corrected = dict(quantize_model(tiny_model, SCHEME, "gptq", WINDOWS))
    lost = [divergence(tiny_model, matrices) for matrices in (nearest, searched, corrected)]
    assert lost[0] > lost[1] > lost[2] > 0


def test_hidden_states_are_closer_by_learning_than_by_gptq(tiny_model):
    """On tokens of neither; at the end of the model, so that errors of a layer reach the next."""
    coarse = Scheme(2, 16, symmetric=False)
    many = torch.randint(256, (24, 64), generator=torch.Generator().manual_seed(4))
    exact = last_hidden(tiny_model, {})

    def error(method):
        made = dict(quantize_model(tiny_model, coarse, method, many))
        missed = last_hidden(tiny_model, made) - exact
        return float((missed.square().mean(dim=1) / exact.square().mean(dim=1)).mean())

    assert error("autoround") < 0.93 * error("gptq")


def test_what_is_learned_goes_around_what_is_settled(tiny_model):
    """Matrices of a run before, whole layers of them too, and linears that stay as they are."""
    whole = dict(quantize_model(tiny_model, SCHEME, "autoround", WINDOWS, steps=4))
    first = {name: matrix for name, matrix in whole.items() if "layers.0." in name}
    seen = []
    again = quantize_model(
        tiny_model,
        lambda name: None if name == DOWN else SCHEME,
        "autoround",
        WINDOWS,
        steps=4,
        done=first,
        on_matrix=seen.append,
    )
    made = dict(again)
    assert set(whole) - set(made) == {DOWN}
    assert all(made[name] is matrix for name, matrix in first.items())
    assert len(seen) == 6 and all(report.seconds > 0 for report in seen)


def test_rounding_to_nearest_is_of_the_weights_in_the_file(tiny_model):
    tensors = load_file(tiny_model / "model.safetensors")
    for name, matrix in quantize_model(tiny_model, SCHEME, "rtn"):
        assert torch.equal(matrix.codes, quantize_to_nearest(tensors[name], SCHEME).codes)


def test_layers_are_handed_out_as_they_are_done(tiny_model):
    seen = []
    made = quantize_model(tiny_model, SCHEME, "gptq", WINDOWS, on_matrix=seen.append)
    next(made)
    assert len(seen) == 7 and [report.number for report in seen] == [*range(1, 8)]
    assert {report.total for report in seen} == {14}
    list(made)
    assert len(seen) == 14


def test_reports_are_of_weights_and_of_outputs(tiny_model):
    def reports(method, calibration):
        seen = []
        list(quantize_model(tiny_model, SCHEME, method, calibration, on_matrix=seen.append))
        return seen

    nearest, searched = reports("rtn", None), reports("search", WINDOWS)
    for report in nearest:
        assert report.output_error is None and 0 < report.weight_error < 0.1
    for report in searched:
        assert 0 < report.output_error < 0.1 and report.scheme == SCHEME
    for report, other in zip(reports("gptq", WINDOWS), nearest, strict=True):
        assert report.name == other.name and report.seconds > 0
        assert 0 < report.output_error < report.weight_error


def test_what_was_done_before_is_used_and_not_made_again(tiny_model):
    whole = dict(quantize_model(tiny_model, SCHEME, "gptq", WINDOWS))
    first = {name: matrix for name, matrix in whole.items() if "layers.0." in name}
    seen = []
    again = quantize_model(tiny_model, SCHEME, "gptq", WINDOWS, done=first, on_matrix=seen.append)
    for name, matrix in again:
        assert torch.equal(matrix.codes, whole[name].codes)
        assert name not in first or matrix is first[name]
    assert [report.number for report in seen] == [*range(8, 15)]


def test_schemes_may_differ_and_leave_linears_as_they_are(tiny_model):
    def scheme_of(name):
        if "self_attn" in name:
            return None
        return Scheme(8, "channel") if name == DOWN else SCHEME

    for method, calibration in (("rtn", None), ("gptq", WINDOWS)):
        made = dict(quantize_model(tiny_model, scheme_of, method, calibration))
        assert len(made) == 6 and made[DOWN].scheme == Scheme(8, "channel")


def test_what_cannot_be_done_is_said_at_once(tiny_model):
    """Before anything is computed, or asked for."""
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj\.weight: rows of 48 .*32"):
        quantize_model(tiny_model, Scheme(4, 32), "rtn")
    with pytest.raises(ConfigError, match="method must be rtn, search, gptq, autoround, not 'awq'"):
        quantize_model(tiny_model, SCHEME, "awq", WINDOWS)
    with pytest.raises(ConfigError, match="gptq needs calibration text"):
        quantize_model(tiny_model, SCHEME, "gptq")
    with pytest.raises(ConfigError, match="autoround needs calibration text"):
        quantize_model(tiny_model, SCHEME, "autoround")
    with pytest.raises(ConfigError, match="one step or more, not 0"):
        quantize_model(tiny_model, SCHEME, "autoround", WINDOWS, steps=0)
    with pytest.raises(ConfigError, match=r"q_proj\.weight: autoround needs integer zeros"):
        floats = Scheme(4, 16, symmetric=False, float_minimum=True)
        quantize_model(tiny_model, floats, "autoround", WINDOWS)
    with pytest.raises(ConfigError, match="has token 300, and the model has 260"):
        quantize_model(tiny_model, SCHEME, "gptq", torch.full((1, 8), 300))


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[DOWN][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    for method, calibration in (("rtn", None), ("autoround", WINDOWS)):
        with pytest.raises(ModelFileError, match=rf"\({DOWN}\): has values that are not finite"):
            list(quantize_model(folder, SCHEME, method, calibration))
