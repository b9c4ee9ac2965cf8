"""Models as trees of modules."""

from __future__ import annotations

import torch
from weights import stored

from octavo.layers.linear import Linear
from octavo.layers.module import Module, named_parameters
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RotaryEmbedding
from octavo.layers.rope_config import RopeConfig
from octavo.layers.tensors import with_tensors


class Model(Module):
    def __init__(self):
        self.sizes = [2, 3]
        self.layers = [Linear(2, 3, bias=True), Linear(2, 3)]
        self.norm = RMSNorm(2, 1e-5, plus=1.0)

    def forward(self, x):
        return x, self.sizes


def loaded() -> Model:
    model = Model()
    for _, parameter in named_parameters(model):
        parameter.load(stored(torch.randn(parameter.shape)))
    return model


def test_names_are_those_of_the_modules():
    assert {name: p.shape for name, p in named_parameters(Model())} == {
        "layers.0.weight": (3, 2),
        "layers.0.bias": (3,),
        "layers.1.weight": (3, 2),
        "norm.weight": (2,),
    }


def test_a_module_and_its_parts():
    model = Model()
    parts = {"": model, "layers.0": model.layers[0], "layers.1": model.layers[1]}
    assert dict(model.named_modules()) == {**parts, "norm": model.norm}
    assert model(1) == (1, [2, 3])


def test_with_tensors_it_is_another_model_of_the_same_memory():
    model = loaded()
    values = {name: p.value for name, p in named_parameters(model)}
    made = with_tensors(model)
    assert type(made) is Model and made.sizes == [2, 3]
    assert {name: p.value for name, p in named_parameters(model)} == values  # left as it was
    for name, parameter in named_parameters(made):
        assert torch.is_tensor(parameter.value) and parameter.shape == values[name].shape
    linear = made.layers[0].weight.value
    assert linear.data_ptr() == values["layers.0.weight"].data.ctypes.data
    assert made.norm.weight.value.tolist() == model.norm.weight.value.tolist()


def test_tied_weights_stay_tied():
    model = loaded()
    model.layers[1].weight.share(model.layers[0].weight)
    made = with_tensors(model, "meta", torch.bfloat16)
    assert made.layers[0].weight.value is made.layers[1].weight.value
    assert made.layers[0].weight.value.dtype == torch.bfloat16
    assert made.norm.weight.value.dtype == torch.float32  # exact, wherever it is


def test_progress_is_what_has_been_copied():
    seen = []
    with_tensors(loaded(), "meta", progress=lambda *done: seen.append(done))
    total = 4 * (6 + 3 + 6 + 2)
    assert seen[-1] == (total, total) and seen == sorted(seen)
    seen.clear()
    with_tensors(loaded(), progress=lambda *done: seen.append(done))
    assert not seen  # nothing was


def test_angles_are_computed_on_the_cpu():
    rope = RotaryEmbedding(RopeConfig(theta=100.0, rotary_dim=4, has_freq_factors=True))
    rope.freq_factors.load(stored(torch.tensor([1.0, 4.0])))
    assert with_tensors(rope, "meta").table(3).shape == (1024, 4)
