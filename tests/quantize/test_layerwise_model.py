"""A model run layer by layer: the same function, and statistics of what it computes."""

from __future__ import annotations

import json

import pytest
import torch
from loading import load_model
from safetensors.torch import save_file

from octavo.layers.module import named_parameters
from octavo.models.config_hf import config_from_hf
from octavo.models.registry import model_class
from octavo.quantize.layerwise_model import (
    LayerwiseModel,
    LinearObserver,
    input_statistics,
    linear_names,
    observe,
)
from tests.models.conftest import Driver

SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "biases": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "gelu": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "gelu"},
    "two ropes, windows, caps": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
    },
}


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path):
    """A random model of every kind of layer that there is."""
    fields = {**SIZES, **CONFIGS[request.param]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = config_from_hf(fields, None, path=tmp_path / "config.json")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(parameter.shape, generator=generator) * 0.3
        for name, parameter in named_parameters(model_class(config.architecture)(config))
        if name != "lm_head.weight"
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def windows(num_windows=3, length=12, vocab_size=90):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(vocab_size, (num_windows, length), generator=generator)


def run(folder, visitor, token_ids):
    model = LayerwiseModel(load_model(folder).model, token_ids)
    for index in range(model.num_layers):
        model.run_layer(index, visitor)
    return model


def test_a_model_run_layer_by_layer_is_the_model(folder):
    token_ids = windows()
    model = run(folder, LinearObserver(), token_ids)
    for window, expected in enumerate(Driver(folder).logits(token_ids.tolist())):
        torch.testing.assert_close(model.logits(window), expected, rtol=1e-3, atol=1e-3)


def test_a_layer_can_be_run_on_some_windows(folder):
    model = LayerwiseModel(load_model(folder).model, windows())
    hidden = model.hidden
    with torch.no_grad():
        second = model.outputs(0, hidden[12:24], lambda name, x, weight: weight)
    assert model.hidden is hidden
    model.run_layer(0, lambda name, x, weight: weight)
    torch.testing.assert_close(second, model.hidden[12:24])


def test_a_layer_has_gradients_by_its_weights(folder):
    """Held against the difference that a small step makes, along the gradient."""
    model = LayerwiseModel(load_model(folder).model, windows())
    names = linear_names(load_model(folder).model)[0]
    aim = torch.randn(model.hidden.shape, generator=torch.Generator().manual_seed(3))

    def score(moved, by, gradients):
        def visitor(name, x, weight):
            return weight + by * gradients[name] if name == moved else weight

        with torch.no_grad():
            return float((model.outputs(0, model.hidden, visitor) * aim).double().sum())

    leaves = {}

    def watch(name, x, weight):
        leaves[name] = weight.clone().requires_grad_()
        return leaves[name]

    (model.outputs(0, model.hidden, watch) * aim).sum().backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    for name in names:
        step = 1e-2 / float(gradients[name].norm())
        ends = [score(name, by, gradients) for by in (-step, step)]
        expected = float(gradients[name].square().sum())
        assert (ends[1] - ends[0]) / (2 * step) == pytest.approx(expected, rel=2e-2), name


def test_every_linear_is_seen_in_the_order_in_which_it_computes(folder):
    seen = []

    def visitor(name, x, weight):
        seen.append((name, x.shape, weight.shape))
        return weight

    run(folder, visitor, windows())
    names = [name for layer in linear_names(load_model(folder).model) for name in layer]
    assert [name for name, _, _ in seen] == names and len(names) == 3 * 7
    assert all(x == (36, weight[1]) for _, x, weight in seen)


def test_linears_after_one_see_what_comes_of_its_new_weight(tiny_model):
    changed = "model.layers.0.self_attn.o_proj.weight"

    class Changing(LinearObserver):
        def __call__(self, name, x, weight):
            super().__call__(name, x, weight)
            return torch.zeros_like(weight) if name == changed else weight

    before, after = LinearObserver(), Changing()
    for observer in (before, after):
        run(tiny_model, observer, windows())
    first = list(before.statistics).index(changed) + 1
    for place, name in enumerate(before.statistics):
        moments = [o.statistics[name].second_moment for o in (before, after)]
        assert torch.equal(*moments) == (place < first), name


def test_statistics_are_those_of_the_inputs(tiny_model):
    inputs = {}

    class Noting(LinearObserver):
        def __call__(self, name, x, weight):
            inputs[name] = x
            return super().__call__(name, x, weight)

    observer = Noting(hessian=True)
    run(tiny_model, observer, windows())
    for name, x in inputs.items():
        statistics, wide = observer.statistics[name], x.double()
        expected = 2 * wide.t() @ wide / len(x)
        torch.testing.assert_close(statistics.hessian.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(statistics.second_moment, x.square().mean(dim=0))
        assert statistics.num_tokens == 36


def test_linears_of_one_input_share_its_statistics(tiny_model):
    statistics = observe(load_model(tiny_model).model, windows(), hessian=True)
    query, key, value, out, gate, up, down = list(statistics.values())[:7]
    assert query is key is value and gate is up
    assert len({id(each) for each in (query, out, gate, down)}) == 4


def test_a_long_input_is_summed_up_in_pieces(monkeypatch):
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(3))
    whole = input_statistics(x)
    monkeypatch.setattr("octavo.quantize.layerwise_model._HESSIAN_ROWS", 7)
    torch.testing.assert_close(input_statistics(x).hessian, whole.hessian)
    assert input_statistics(x, hessian=False).hessian is None


def test_the_model_itself_stays_as_it_is(tiny_model):
    model = load_model(tiny_model).model
    before = {name: parameter.value for name, parameter in named_parameters(model)}
    LayerwiseModel(model, windows()).run_layer(0, lambda name, x, weight: weight * 0)
    assert all(parameter.value is before[name] for name, parameter in named_parameters(model))
