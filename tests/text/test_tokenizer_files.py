"""Tokenizers that go from GGUF metadata to files of a folder, and back."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from octavo.base.errors import UnsupportedModelError
from octavo.text.folder_tokenizer import load_folder_tokenizer
from octavo.text.gguf_tokenizer import TokenType, load_gguf_tokenizer
from octavo.text.pretokenizers import PRE_TOKENIZERS
from octavo.text.tokenizer_json import tokenizer_files
from octavo.text.tokenizer_metadata import tokenizer_metadata

PATH = Path("model.gguf")
SPECIALS = {"<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL, "<tag>": TokenType.USER_DEFINED}


def byte_level(**changes):
    """A vocabulary of bytes and a few merges."""
    from octavo.text.decoders import byte_level_table

    tokens = sorted(byte_level_table())
    merges = ["t h", "th e", "Ġ the", "1 2", "12 3", "Ġ 1", "I T", "' s", "Ċ Ċ", "Ġ Ġ"]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [TokenType.NORMAL] * len(tokens)
    keys = {"model": "gpt2", "pre": "smollm", "merges": merges, **changes}
    return metadata_of(tokens, types, **keys)


def sentencepiece(**changes):
    """Pieces with scores, of which "ab" comes before "bc", and bytes for all else."""
    pieces = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁ab", "▁a", "aa", "cab", "x", "▁x"]
    tokens = [*pieces, *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [-float(i) for i in range(len(pieces))] + [-1000.0] * 259
    types = [TokenType.NORMAL] * len(pieces) + [TokenType.BYTE] * 256
    return metadata_of(tokens, types, model="llama", scores=np.array(scores, np.float32), **changes)


def metadata_of(tokens, types, **keys):
    start = len(tokens)
    values = {
        "tokens": [*tokens, *SPECIALS],
        "token_type": np.array([*types, *SPECIALS.values()], np.int32),
        "bos_token_id": start,
        "eos_token_id": start + 1,
        "unknown_token_id": start,
        "add_bos_token": True,
        "add_eos_token": False,
        **keys,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    return {**metadata, "tokenizer.chat_template": template}


def without_user_defined(metadata):
    """Behind which llama.cpp and the models' own tokenizers disagree, where texts have a prefix."""
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[types == TokenType.USER_DEFINED] = TokenType.CONTROL
    return {**metadata, "tokenizer.ggml.token_type": types}


CASES = {
    "byte-level": byte_level(),
    "byte-level-llama3": byte_level(pre="llama-bpe"),
    "sentencepiece": without_user_defined(sentencepiece(add_space_prefix=True)),
    "sentencepiece-no-prefix": sentencepiece(add_space_prefix=False, add_eos_token=True),
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    metadata = CASES[request.param]
    for name, text in tokenizer_files(metadata, PATH).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return metadata, tmp_path


@pytest.fixture
def texts(corpus, random_texts):
    handmade = [
        "the 123 IT's  the\n\nthe",
        "abc abcab  aab<tag>x cab",
        "<s> ab</s>x",
        " x",
        "<tag>",
    ]
    return [*handmade, *corpus, *random_texts(200)]


def test_the_files_give_the_ids_of_the_metadata(case, texts):
    metadata, folder = case
    ours, theirs = load_gguf_tokenizer(metadata, PATH), load_folder_tokenizer(folder)
    for text in texts:
        ids = ours.encode(text, parse_special=True)
        assert theirs.encode(text, parse_special=True) == ids, text
        assert theirs.encode(text) == ours.encode(text), text
        assert theirs.decode(ids) == ours.decode(ids), text
    assert theirs.stop_token_ids == ours.stop_token_ids and theirs.vocab_size == ours.vocab_size
    messages = [{"role": "user", "content": "the <s> end"}]
    assert theirs.apply_chat_template(messages) == ours.apply_chat_template(messages)


def test_transformers_gives_these_ids_too(case, texts):
    metadata, folder = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_gguf_tokenizer(metadata, PATH)
    for text in texts:
        assert theirs.encode(text) == ours.encode(text, parse_special=True), text
    messages = [{"role": "user", "content": "the end"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False)
    assert rendered == ours.render_chat_template(messages)


def test_metadata_comes_back(case):
    metadata, folder = case
    back = tokenizer_metadata(folder, len(metadata["tokenizer.ggml.tokens"]))
    scores = "tokenizer.ggml.scores"
    for key, value in metadata.items():
        if key != scores:
            np.testing.assert_array_equal(back[key], value, err_msg=key)
    if scores in metadata:  # the order of what can be merged
        mergeable = [4, 5, 6, 7, 8, 9, 10, 12]
        for values in (metadata[scores], back[scores]):
            assert (np.diff(values[mergeable]) < 0).all()


def test_rows_that_no_token_has_become_unused_tokens(case):
    metadata, folder = case
    count = len(metadata["tokenizer.ggml.tokens"])
    back = tokenizer_metadata(folder, count + 2)
    assert back["tokenizer.ggml.tokens"][-2:] == [f"[PAD{count}]", f"[PAD{count + 1}]"]
    assert back["tokenizer.ggml.token_type"][-2:].tolist() == [TokenType.UNUSED] * 2


@pytest.mark.parametrize("pre", ["default", "gpt-2", "falcon", "llama-bpe", "qwen2", "tekken"])
def test_each_way_of_cutting_has_its_name(pre, tmp_path):
    for name, text in tokenizer_files(byte_level(pre=pre), PATH).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = tokenizer_metadata(tmp_path, 269)["tokenizer.ggml.pre"]
    assert PRE_TOKENIZERS[found] == PRE_TOKENIZERS[pre]


def test_several_templates_have_names(tmp_path):
    templates = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    for name, text in tokenizer_files({**byte_level(), **templates}, PATH).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    back = tokenizer_metadata(tmp_path, 269)
    assert {key: back[key] for key in templates} == templates


def test_what_no_file_can_say(tmp_path):
    with pytest.raises(UnsupportedModelError, match="takes spaces away"):
        tokenizer_files(sentencepiece(remove_extra_whitespaces=True), PATH)
    for name, text in tokenizer_files(byte_level(), PATH).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "the"}
    path.write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match=r"no name \(tokenizer.ggml.pre\)"):
        tokenizer_metadata(tmp_path, 269)
