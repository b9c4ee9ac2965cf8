"""Scales of channels: the same model before rounding, and a better one after."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.base.errors import ConfigError
from octavo.layers.module import named_parameters
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config_hf import config_from_hf
from octavo.models.loader import load_model
from octavo.models.parameters import Parameters
from octavo.models.registry import model_class
from octavo.quantize.awq import AWQ
from octavo.quantize.channel_scaling import Scaling, SharedInputLinears, centred, find_scales
from octavo.quantize.grid import quantize_to_nearest
from octavo.quantize.layerwise_model import LayerwiseModel, linear_names
from octavo.quantize.methods import QuantizeRequest
from octavo.quantize.pipeline import quantize_model
from octavo.quantize.quantization_job import make
from octavo.quantize.scheme import Scheme
from octavo.quantize.smoothquant import SMOOTHQUANT, round_tokens
from octavo.sources.open import load_tokenizer
from tests.conftest import write_byte_tokenizer

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "biases": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "gemma": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
}
SCHEME = Scheme(4, 32, symmetric=False)
WINDOWS = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(4))


def write_model(folder, name):
    """A random model some channels of which are far larger than others, as in trained ones."""
    fields = {**SIZES, **CONFIGS[name]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    config = config_from_hf(fields, None, path=folder / "config.json")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        parameter: torch.randn(place.shape, generator=generator) * 0.1
        for parameter, place in named_parameters(model_class(config.architecture)(config))
        if parameter != "lm_head.weight"
    }
    for parameter, values in tensors.items():
        if parameter.endswith("norm.weight"):
            values += 0.0 if config.norm_plus_one else 1.0
        if "input_layernorm" in parameter or "pre_feedforward" in parameter:
            values[::9] += 4.0
    save_file(tensors, folder / "model.safetensors")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("scaled")
    return {name: write_model(root / name, name) for name in CONFIGS}


@pytest.fixture(params=CONFIGS)
def folder(request, folders):
    return folders[request.param]


def schemes_of(folder):
    return dict.fromkeys(
        (name for names in linear_names(load_model(folder).model) for name in names), SCHEME
    )


def logits(folder, scaling=None):
    """Of a model whose weights are not rounded."""
    model, schemes = LayerwiseModel(load_model(folder).model, WINDOWS), schemes_of(folder)
    for index in range(model.num_layers):
        visitor = _same_weight
        if scaling is not None:
            scales = find_scales(model, index, schemes, scaling)
            assert scales.columns
            model.set_vectors(index, scales.vectors)
            visitor = scales.before(visitor)
        model.run_layer(index, visitor)
    return torch.cat([model.logits(window) for window in range(len(WINDOWS))])


def _same_weight(name, x, weight):
    return weight


def divergence(folder, other):
    exact, found = (logits(each).log_softmax(dim=-1) for each in (folder, other))
    return float((exact.exp() * (exact - found)).sum(dim=-1).mean())


class Drawn:
    """A criterion that likes any scales but 1; the scales of a linear's inputs are random."""

    def __init__(self, linears):
        generator = torch.Generator().manual_seed(linears.x.shape[1])
        self._scales = torch.rand(linears.x.shape[1], generator=generator) * 4 + 0.2

    def candidates(self):
        yield self._scales

    def loss(self, scales, rows_apart=1):
        return float((scales == 1).all())


def as_bfloat16_less_one(name, values):
    return (values - 1).bfloat16().float() + 1


@pytest.mark.parametrize(
    "scaling", [Scaling(Drawn), Scaling(Drawn, as_stored=as_bfloat16_less_one)]
)
def test_scales_change_nothing_of_what_a_model_computes(folder, scaling):
    """Nor does it matter that norms are rounded, if scales are what that leaves them."""
    torch.testing.assert_close(logits(folder, scaling), logits(folder), rtol=1e-3, atol=1e-3)


def test_a_norm_of_zero_keeps_its_value(folders, tmp_path):
    folder = write_model(tmp_path / "dead", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][3] = 0
    save_file(tensors, folder / "model.safetensors")
    model = LayerwiseModel(load_model(folder).model, WINDOWS)
    scales = find_scales(model, 0, schemes_of(folder), Scaling(Drawn))
    assert scales.vectors["model.layers.0.input_layernorm.weight"][3] == 0
    assert scales.columns["model.layers.0.self_attn.q_proj.weight"][3] == 1


def test_heads_that_share_values_share_scales(folders):
    model = LayerwiseModel(load_model(folders["llama"]).model, WINDOWS)
    scales = find_scales(model, 0, schemes_of(folders["llama"]), Scaling(Drawn))
    of_heads = scales.columns["model.layers.0.self_attn.o_proj.weight"].view(2, 2, 16)
    assert torch.equal(of_heads[:, 0], of_heads[:, 1])
    of_values = scales.rows["model.layers.0.self_attn.v_proj.weight"].view(2, 16)
    assert torch.equal(of_heads[:, 0], of_values) and not torch.equal(*of_values)


def test_scales_that_do_not_help_are_not_taken(folders):
    class Averse(Drawn):
        def loss(self, scales, rows_apart=1):
            return 1 - super().loss(scales)

    model = LayerwiseModel(load_model(folders["llama"]).model, WINDOWS)
    scales = find_scales(model, 0, schemes_of(folders["llama"]), Scaling(Averse))
    assert not scales.columns and not scales.rows and not scales.vectors


def test_only_what_is_quantized_is_scaled(folders):
    """Other matrices would have to be written too."""
    prefix = "model.layers.0"
    for left_out, norms in (
        ("self_attn.k_proj", ["post_attention_layernorm"]),
        ("mlp.up_proj", ["input_layernorm"]),
    ):
        schemes = schemes_of(folders["llama"])
        del schemes[f"{prefix}.{left_out}.weight"]
        model = LayerwiseModel(load_model(folders["llama"]).model, WINDOWS)
        scales = find_scales(model, 0, schemes, Scaling(Drawn))
        assert list(scales.vectors) == [f"{prefix}.{norm}.weight" for norm in norms]
        assert f"{prefix}.{left_out}.weight" not in {**scales.columns, **scales.rows}


def test_smoothquant_scales_norms_alone(folders):
    model = LayerwiseModel(load_model(folders["biases"]).model, WINDOWS)
    scales = find_scales(model, 0, schemes_of(folders["biases"]), SMOOTHQUANT)
    assert scales.vectors and not scales.rows
    assert all("norm" in name for name in scales.vectors)


@pytest.mark.parametrize("scaling", [AWQ, SMOOTHQUANT])
def test_outputs_err_less_with_the_best_scales(scaling):
    """By the error that the criterion says, which for AWQ is that of outputs."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(512, 64, generator=generator)
    x[:, ::13] *= 30
    weights = [torch.randn(rows, 64, generator=generator) for rows in (24, 40)]
    scheme = Scheme(8, "channel") if scaling is SMOOTHQUANT else Scheme(3, 32, symmetric=False)
    criterion = scaling.criterion(SharedInputLinears(x, weights, [scheme, scheme]))
    one = torch.ones(64)
    scales = min(criterion.candidates(), key=criterion.loss)
    assert criterion.loss(scales) < 0.9 * criterion.loss(one)
    for tried in (one, scales):
        importance = x.square().mean(dim=0) / tried.square()
        total = 0.0
        for weight in weights:
            rounded = quantize_to_nearest(
                weight * tried, scheme, search=True, importance=importance
            ).dequantize()
            inputs = round_tokens(x / tried) if scaling is SMOOTHQUANT else x / tried
            total += float((inputs @ rounded.t() - x @ weight.t()).square().sum())
        in_units = 1 if scaling is SMOOTHQUANT else 2 / len(x)
        assert criterion.loss(tried) == pytest.approx(total * in_units, rel=1e-3)


def test_tokens_are_rounded_to_their_own_steps():
    x = torch.tensor([[127.0, 1.4, -3.6], [0.0, 0.0, 0.0], [1.27, -0.011, 0.0]])
    expected = torch.tensor([[127.0, 1.0, -4.0], [0.0, 0.0, 0.0], [1.27, -0.01, 0.0]])
    torch.testing.assert_close(round_tokens(x), expected)


def test_the_largest_and_the_smallest_scale_are_inverse():
    scales = centred(torch.tensor([2.0, 4.0, 32.0]))
    torch.testing.assert_close(scales, torch.tensor([0.25, 0.5, 4.0]))


# -- whole models ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory):
    """``made(name, method, format)``: the folder of a model that was made of one of ``folders``."""
    root = tmp_path_factory.mktemp("made")
    text = root / "text.txt"
    text.write_text(" ".join(str(i * i) for i in range(200)))

    @cache
    def make_once(name, method, format):
        choices = {} if method == "smoothquant" else {"group_size": 32, "symmetric": False}
        out = root / f"{name}-{method}-{format}"
        wanted = QuantizeRequest(
            method, format=format, calibration=text, calibration_tokens=512, **choices
        )
        make(open_checkpoint(folders[name]), load_tokenizer(folders[name]), out, wanted)
        return out

    return make_once


WHOLE = pytest.mark.parametrize("name", ["llama", "gemma"])


@WHOLE
def test_awq_loses_less_than_rounding_alone(name, folders, made):
    lost = [divergence(folders[name], made(name, method, "awq")) for method in ("rtn", "awq")]
    assert lost[1] < 0.9 * lost[0]


def test_other_formats_of_integers_hold_it_too(folders, made):
    found = [logits(made("llama", "awq", format)) for format in ("awq", "gptq")]
    torch.testing.assert_close(*found)


@WHOLE
def test_smoothquant_keeps_the_model(name, folders, made):
    out = made(name, "smoothquant", "compressed-tensors")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "int-quantized"
    assert divergence(folders[name], out) < 1e-3


@WHOLE
@pytest.mark.parametrize(
    ("method", "format"), [("awq", "awq"), ("smoothquant", "compressed-tensors")]
)
def test_norms_and_columns_of_a_file_make_up_for_each_other(name, method, format, folders, made):
    """Gemma's norms too, of which files have what is added to 1."""
    norm, linear = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
    before, after = (
        Parameters(open_checkpoint(path)) for path in (folders[name], made(name, method, format))
    )
    plus = before.plus(norm)
    assert plus == after.plus(norm) == (1 if name == "gemma" else 0)
    assert before.plus(linear) == 0
    assert abs(before.rows(norm) - after.rows(norm)).max() > 0.1
    expected, found = (
        torch.from_numpy((each.rows(norm) + plus) * each.rows(linear)) for each in (before, after)
    )
    assert (found - expected).norm() < (0.15 if method == "awq" else 0.02) * expected.norm()


def test_settings_that_a_method_has_or_lacks():
    awq = QuantizeRequest("awq")
    assert awq.scheme([64]) == Scheme(4, 64, symmetric=False) and awq.format_name == "awq"
    assert QuantizeRequest("awq", format="gptq", symmetric=True).scheme([64]).symmetric
    assert QuantizeRequest("smoothquant").scheme([64]) == Scheme(8, "channel")
    with pytest.raises(ConfigError, match="--method smoothquant has no --bits"):
        QuantizeRequest("smoothquant", bits=4)
    with pytest.raises(ConfigError, match="--method awq needs a text: .* take --method rtn"):
        QuantizeRequest("awq", calibrate=False)


def test_scales_need_a_text(folders):
    with pytest.raises(ConfigError, match="a scaling of channels needs calibration text"):
        quantize_model(folders["llama"], SCHEME, "search", scaling=AWQ)
