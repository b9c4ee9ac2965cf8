"""Encoders in GGUF files, and real weights: all-MiniLM-L6-v2 beside transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from tiny_encoders import make_encoder, write_modules

from octavo import LLM
from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.core.pooling_params import PoolingParams
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_export import export_gguf
from octavo.quantization.ggml_types import GGMLType

WORDS = ["cat", "dog", "sit", "the", "a", "mat", "on", "caf", "is", "2"]
ENDS = ["##s", "##e", "##ting", "##0", "##1"]
TEXTS = ["The cats sit on a mat.", "Cafés, 2010!", "", "a dog is a dog  is a\n\tcat"]


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    """A BERT whose tokenizer cuts words in lower case into pieces."""
    from tokenizers import BertWordPieceTokenizer

    folder = tmp_path_factory.mktemp("wordpiece")
    make_encoder("bert", folder)
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *ENDS, *".,!"]
    tokenizer = BertWordPieceTokenizer({token: i for i, token in enumerate(vocab)})
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    write_modules(folder, ("Pooling", {"pooling_mode_cls_token": True}), ("Normalize", None))
    return folder


def vectors(model, texts, **settings):
    with LLM(str(model), **settings) as llm:
        outputs = llm.embed(texts)
    return (
        [output.prompt_token_ids for output in outputs],
        np.array([output.outputs.embedding for output in outputs]),
    )


def test_a_gguf_file_has_the_same_tokens_and_vectors(wordpiece, tmp_path):
    out = tmp_path / "tiny.gguf"
    export_gguf(out, open_checkpoint(wordpiece), lambda matrix: GGMLType.F32)
    fields = GGUFReader(out).fields
    assert fields["general.architecture"].contents() == "bert"
    assert fields["bert.pooling_type"].contents() == 2
    assert fields["bert.attention.causal"].contents() is False
    assert fields["tokenizer.ggml.tokens"].contents()[2:7] == [
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "▁cat",
        "▁dog",
    ]
    ids, expected = vectors(wordpiece, TEXTS)
    again, found = vectors(out, TEXTS)
    assert again == ids
    assert np.array_equal(found, expected)
    with LLM(str(out)) as llm:
        pair = llm._pooled()._model.texts.pair("the cat", "a dog")
    assert pair.token_types == (0, 0, 0, 0, 1, 1, 1)


def test_what_a_gguf_file_cannot_say_is_refused(wordpiece, tmp_path):
    dense = {"in_features": 64, "out_features": 8, "bias": False}
    pooling = ("Pooling", {"pooling_mode_cls_token": True})
    write_modules(wordpiece, pooling, ("Dense", dense))
    try:
        with pytest.raises(UnsupportedModelError, match="how it pools"):
            export_gguf(
                tmp_path / "a.gguf", open_checkpoint(wordpiece), lambda matrix: GGMLType.F32
            )
    finally:
        write_modules(wordpiece, pooling, ("Normalize", None))


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"hidden_size": 65}, ""),
        ({"num_attention_heads": 7}, ""),
        ({"num_hidden_layers": 3000}, "num_hidden_layers"),
        ({"type_vocab_size": -1}, "type_vocab_size"),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings"),
        ({"layer_norm_eps": 0}, "layer_norm_eps"),
        ({"vocab_size": 100}, ""),
    ],
)
def test_a_hostile_config_is_a_model_file_error(wordpiece, tmp_path, value, field):
    config = json.loads((wordpiece / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **value}))
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((wordpiece / name).read_bytes())
    with pytest.raises(ModelFileError, match=field):
        LLM(str(tmp_path))


# -- real weights ----------------------------------------------------------------------------------

SENTENCES = [
    "A cat sits on the mat.",
    "Berlin ist die Hauptstadt von Deutschland, seit 1990!",
    "naïve café",
    "def f(x):\n    return x ** 2",
    "word " * 200,
]


@pytest.mark.long
def test_real_vectors_are_those_of_transformers(tmp_path):
    from transformers import AutoModel, AutoTokenizer

    from octavo import hub
    from octavo.cli import main

    folder = hub.pull("minilm")
    model = AutoModel.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = []
    with torch.no_grad():
        for text in SENTENCES:
            given = tokenizer([text], return_tensors="pt", truncation=True, max_length=256)
            mean = model(**given).last_hidden_state[0].mean(0)
            expected.append((mean / mean.norm()).numpy())
    _, ours = vectors(folder, SENTENCES)
    assert (ours * expected).sum(1).min() > 0.9999
    small = tmp_path / "minilm-q8.gguf"
    assert main(["quantize", str(folder), str(small), "--method", "gguf", "--type", "Q8_0"]) == 0
    _, ours = vectors(small, SENTENCES)
    assert (ours * expected).sum(1).min() > 0.999
    with LLM(str(folder)) as llm:
        short = llm.embed(SENTENCES[:1], pooling_params=PoolingParams(dimensions=64))
    assert len(short[0].outputs.embedding) == 64
