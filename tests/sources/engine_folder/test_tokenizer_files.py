"""The tokenizer of an engine folder is that of its model."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from octavo import hub
from octavo.base.errors import ModelFileError
from octavo.base.model_files import ModelFolder
from octavo.models.gguf import GGUFFile
from octavo.sources.engine_folder.tokenizer_files import copy_files, load, write_metadata
from octavo.text.folder_tokenizer import load_folder_tokenizer
from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.text.tokenizer import Tokenizer

TEXTS = [
    *("", "Hello, world!", "  two  spaces", "naïve 你好 🙂 \u200b\x00", "1234567 + 89 = ?"),
    *("<|im_start|>user\nHi<|im_end|>", "<start_of_turn>model", "a\n\n\tb\r\n", "é" * 40),
]
CHAT = [{"role": "user", "content": "Hi <|im_end|> there"}]


def check_equal(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in TEXTS:
        for special in (False, True):
            assert ours.encode(text, parse_special=special) == theirs.encode(
                text, parse_special=special
            )
    assert ours.vocab_size == theirs.vocab_size
    ids = range(theirs.vocab_size)
    assert [ours.token_bytes(i) for i in ids] == [theirs.token_bytes(i) for i in ids]
    assert ours.decode(list(ids)[:2000]) == theirs.decode(list(ids)[:2000])
    for name in ("bos_token_id", "eos_token_id", "stop_token_ids", "named_tokens", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.specials.ids == theirs.specials.ids
    if theirs.chat_template is not None:
        assert ours.chat_prompt(CHAT) == theirs.chat_prompt(CHAT)


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["smollm2-135m", "gemma3-270m"])
def test_of_a_gguf_file(alias, tmp_path):
    path = hub.pull(alias, accept_terms=True)
    metadata = GGUFFile(path).metadata
    assert write_metadata(metadata, tmp_path) == ["tokenizer.gguf.json"]
    check_equal(load(ModelFolder(tmp_path), "gguf"), load_gguf_tokenizer(metadata, path))


def test_numbers_of_a_gguf_file_keep_their_bits(tmp_path):
    scores = np.random.default_rng(0).normal(size=50).astype(np.float32)
    metadata = {
        "general.name": "Phi-3",
        "general.architecture": "llama",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.arange(50, dtype=np.int32),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.tokens": ["\u2581a", "\x85\u2028", '"\\'],
    }
    write_metadata(metadata, tmp_path)
    read = json.loads((tmp_path / "tokenizer.gguf.json").read_text("utf-8"))
    assert read.pop("tokenizer.ggml.scores") == scores.tolist()
    assert np.array(scores.tolist(), np.float32).tobytes() == scores.tobytes()
    assert read.pop("tokenizer.ggml.token_type") == list(range(50))
    del metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    assert read == {k: v for k, v in metadata.items() if k != "general.architecture"}


def test_of_a_folder(tiny_model, tmp_path):
    """With all files that a tokenizer is made of, and one that it is not."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(tiny_model, source)
    target.mkdir()
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}<eos>")
    (source / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<eos>"}))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "loud.jinja").write_text("{{ messages[0].content }}!")
    names = copy_files(source, target)
    assert set(names) == {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("chat_template.jinja", "additional_chat_templates/loud.jinja"),
    }
    ours, theirs = load(ModelFolder(target), "folder"), load_folder_tokenizer(source)
    check_equal(ours, theirs)
    assert ours.render_chat_template(CHAT, chat_template="loud").endswith("there!")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer\.gguf\.json"):
        load(ModelFolder(tmp_path), "gguf")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        load(ModelFolder(tmp_path), "folder")
