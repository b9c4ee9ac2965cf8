"""What the files of a model say of how it pools, and what is refused of them."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_encoders import make_encoder, write_modules

from octavo import LLM
from octavo.base.errors import ConfigError, ModelFileError, UnsupportedModelError
from octavo.core.pooling_params import PoolingParams
from octavo.models.pooling import Dense, Norm
from octavo.models.pooling_files import pooling_of_folder, pooling_of_gguf, with_method

MEAN = ("Pooling", {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 64})


def read(folder, **more):
    return pooling_of_folder(folder, is_encoder=True, is_asked=False, **more)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    return tmp_path


def write_config(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))


# -- sentence-transformers -------------------------------------------------------------------------


def test_modules_say_all(folder):
    dense = {
        "in_features": 64,
        "out_features": 8,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    write_modules(
        folder,
        MEAN,
        ("Dense", dense),
        ("LayerNorm", {"dimension": 8}),
        ("Normalize", None),
        prompts={"query": "Q: "},
        default="query",
        max_length=100,
    )
    found = read(folder)
    assert found.methods == ("mean",) and found.normalize
    assert found.stages == (
        Dense("linear.weight", None, "identity", "2_Dense"),
        Norm("norm.weight", "norm.bias", 1e-5, "3_LayerNorm"),
    )
    assert (found.prompts, found.default_prompt, found.max_length) == (
        {"query": "Q: "},
        "query",
        100,
    )


@pytest.mark.parametrize(
    ("config", "methods"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_lasttoken": True}, ("last",)),
        ({"pooling_mode_weightedmean_tokens": True}, ("weighted_mean",)),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, ("cls", "max")),
        ({"pooling_mode": "mean"}, ("mean",)),
        ({"pooling_mode": ["cls", "mean"]}, ("cls", "mean")),
    ],
)
def test_methods_of_pooling(folder, config, methods):
    write_modules(folder, ("Pooling", config))
    found = read(folder)
    assert found.methods == methods and not found.normalize


def test_without_modules_it_is_the_familys_default(folder):
    assert read(folder).methods == ("mean",)
    write_config(folder, architectures=["Qwen3ForCausalLM"])
    assert pooling_of_folder(folder, is_encoder=False, is_asked=False) is None
    assert pooling_of_folder(folder, is_encoder=False, is_asked=True).methods == ("last",)
    write_config(folder, architectures=["Qwen3Model"])
    assert pooling_of_folder(folder, is_encoder=False, is_asked=False).methods == ("last",)


def test_a_setting_replaces_the_method(folder):
    assert with_method(read(folder), "cls").methods == ("cls",)
    write_config(folder, architectures=["BertForSequenceClassification"], id2label={"0": "x"})
    with pytest.raises(ConfigError, match="classifier"):
        with_method(read(folder), "cls")


HOSTILE = {
    "not a list": ("modules.json", {}),
    "too many": ("modules.json", [{"type": "a.Transformer", "path": ""}] * 1000),
    "no type": ("modules.json", [{"path": ""}]),
    "a number": ("modules.json", [5]),
    "outside": ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "../x"}]),
    "no folder": ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "x"}]),
    "a text": ("1_Pooling/config.json", {"pooling_mode_mean_tokens": "yes"}),
    "prompts": ("config_sentence_transformers.json", {"prompts": {"query": 5}}),
    "a long prompt": ("config_sentence_transformers.json", {"prompts": {"q": "x" * 100_000}}),
    "no such prompt": ("config_sentence_transformers.json", {"default_prompt_name": "other"}),
    "a length": ("sentence_bert_config.json", {"max_seq_length": -5}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_file_is_named(folder, name):
    path, contents = HOSTILE[name]
    write_modules(folder, MEAN)
    (folder / path).write_text(json.dumps(contents))
    with pytest.raises(ModelFileError, match=path.rpartition("/")[2]):
        read(folder)


@pytest.mark.parametrize(
    ("path", "contents", "what"),
    [
        (
            "1_Pooling/config.json",
            {"pooling_mode_mean_tokens": True, "include_prompt": False},
            "prompt",
        ),
        ("1_Pooling/config.json", {"pooling_mode_median_tokens": True}, "median"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "no method"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "angle"}, "angle"),
        ("modules.json", [{"type": "a.WordEmbeddings", "path": ""}], "WordEmbeddings"),
        ("modules.json", [{"type": "a.Transformer", "path": "0_Transformer"}], "0_Transformer"),
        ("modules.json", [{"type": "a.Transformer"}], "no module pools"),
    ],
)
def test_what_octavo_has_not_is_refused_by_name(folder, path, contents, what):
    write_modules(folder, MEAN)
    (folder / path).write_text(json.dumps(contents))
    with pytest.raises(UnsupportedModelError, match=what):
        read(folder)


def test_keys_that_nobody_reads_are_a_warning(folder, caplog):
    write_modules(folder, ("Pooling", {**MEAN[1], "pooling_strength": 5}))
    with caplog.at_level(logging.WARNING):
        read(folder)
    assert "pooling_strength" in caplog.text


# -- classifiers and GGUF files --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"id2label": {"0": "a", "1": "b"}}, "softmax"),
        ({"id2label": {"0": "a"}, "problem_type": "regression"}, "identity"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "identity",
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            "sigmoid",
        ),
    ],
)
def test_what_makes_scores_of_outputs(folder, config, activation):
    write_config(folder, architectures=["BertForSequenceClassification"], **config)
    assert read(folder).activation == activation


def test_labels_are_in_the_order_of_their_numbers(folder):
    labels = {"1": "good", "0": "bad"}
    write_config(folder, architectures=["RobertaForSequenceClassification"], id2label=labels)
    assert read(folder).labels == ("bad", "good")
    for wrong in ({"0": 5}, "x", {}):
        config = {"id2label": wrong, "num_labels": 0}
        write_config(folder, architectures=["RobertaForSequenceClassification"], **config)
        with pytest.raises(ModelFileError):
            read(folder)


def test_gguf_files_name_their_method(tmp_path):
    def of(kind, is_encoder=False, **values):
        metadata = {f"{kind}.{name}": value for name, value in values.items()}
        return pooling_of_gguf(metadata, kind, tmp_path, is_encoder=is_encoder, is_asked=False)

    assert of("qwen3", pooling_type=3).methods == ("last",)
    assert of("bert", is_encoder=True, pooling_type=2).methods == ("cls",)
    assert of("bert", is_encoder=True).methods == ("mean",)
    assert of("qwen3") is None
    with pytest.raises(UnsupportedModelError, match="pooling_type"):
        of("bert", is_encoder=True, pooling_type=4)


# -- whole models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    make_encoder("bert", folder)
    return folder


def test_modules_behind_the_pooling_are_computed(tiny_bert):
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(8, 64)), rng.normal(size=8)
    dense = {"in_features": 64, "out_features": 8, "bias": True}
    dense["activation_function"] = "torch.nn.modules.activation.Tanh"
    write_modules(tiny_bert, MEAN, ("Dense", dense), ("Normalize", None), prompts={"q": "ab"})
    tensors = {"linear.weight": weight.astype("f4"), "linear.bias": bias.astype("f4")}
    save_file(tensors, tiny_bert / "2_Dense" / "model.safetensors")
    with LLM(str(tiny_bert)) as llm:
        rows = llm.encode(["cd", "abcd"], PoolingParams("token_embed", use_activation=False))
        ours = llm.embed(["cd", "abcd"])
        assert llm.embed(["cd"], prompt_name="q")[0].outputs == ours[1].outputs
        small = llm.embed(["cd"], pooling_params=PoolingParams(dimensions=3))[0].outputs.embedding
    assert rows[0].outputs.data.shape == (4, 8)  # the stages, of each token
    first = np.array(ours[0].outputs.embedding)
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-6)
    assert small == pytest.approx(first[:3] / np.linalg.norm(first[:3]), abs=1e-6)


@pytest.mark.parametrize("damage", ["missing", "shape", "pickled", "type"])
def test_a_damaged_module_is_a_model_file_error(tiny_bert, damage):
    dense = {"in_features": 64, "out_features": 8, "bias": False}
    write_modules(tiny_bert, MEAN, ("Dense", dense))
    file = tiny_bert / "2_Dense" / "model.safetensors"
    file.unlink(missing_ok=True)
    if damage == "missing":
        save_file({"other": np.zeros((8, 64), "f4")}, file)
    elif damage == "shape":
        save_file({"linear.weight": np.zeros((8, 65), "f4")}, file)
    elif damage == "type":
        save_file({"linear.weight": np.zeros((8, 64), "i4")}, file)
    with pytest.raises(ModelFileError, match="2_Dense"):
        LLM(str(tiny_bert))


def test_settings_of_generation_alone_are_refused(tiny_bert):
    for settings in ({"spec_method": "ngram"}, {"window": 64}, {"tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match="pools"):
            LLM(str(tiny_bert), **settings)
    with pytest.raises(ConfigError, match="runner generate"):
        LLM(str(tiny_bert), runner="generate")
