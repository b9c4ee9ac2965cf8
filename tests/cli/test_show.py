"""``octavo show``: the description of a model's files."""

from __future__ import annotations

import json

from octavo import cli


def shown(capsys, *argv) -> str:
    assert cli.main(["show", *argv]) == 0
    return capsys.readouterr().out


def test_a_folder_is_described(tiny_model, capsys):
    document = json.loads(shown(capsys, str(tiny_model), "--json"))
    assert document["architecture"] == "LlamaForCausalLM"
    assert (document["num_layers"], document["context_length"]) == (2, 256)
    assert document["vocab_size"] == 260
    weights = document["weights"]
    assert sum(each["tensors"] for each in weights.values()) == 20
    assert document["parameters"] * 4 == sum(each["bytes"] for each in weights.values())
    assert document["chat"]["has_template"] and not document["chat"]["takes_tools"]
    assert not document["chat"]["thinks"]
    assert (document["license"], document["why_not_run"]) == (None, None)
    text = shown(capsys, str(tiny_model))
    for words in ("architecture", "LlamaForCausalLM", "256 tokens", "ends with <eos>", "not said"):
        assert words in text


def test_the_template_alone_is_what_the_file_has(tiny_model, capsys):
    template = json.loads((tiny_model / "tokenizer_config.json").read_text())["chat_template"]
    assert shown(capsys, str(tiny_model), "--template") == template + "\n"


def test_a_gguf_file_says_its_quantization_and_licence(smollm2_gguf, capsys):
    document = json.loads(shown(capsys, "smollm2-135m", "--json"))
    assert (document["format"], document["architecture"]) == ("gguf", "llama")
    assert (document["quantization"], document["license"]) == ("Q4_1", "apache-2.0")
    assert document["parameters"] == 134_515_008


def test_a_damaged_file_is_one_line(tmp_path, capsys):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert cli.main(["show", str(tmp_path / "a.gguf")]) == 1
    assert capsys.readouterr().err.startswith("octavo: error: ")
