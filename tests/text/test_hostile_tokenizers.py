"""Whatever a model's files say of its tokenizer, it is one or a ModelError comes out of reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.base.errors import ModelError
from octavo.text.folder_tokenizer import load_folder_tokenizer
from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.text.tokenizer import Tokenizer

FILES = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # files that are written anew
)
BYTES = [chr(i) for i in range(33, 127)] + [f"<0x{i:02X}>" for i in range(256)]
TEXTS = ["", "a", "<s>", "Ā", "a b", "\u0120", "x" * 300, "\U0001f600"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, 10**400, 1e308])
    | st.floats()
    | st.sampled_from(["\ud800", "special", "BPE", "ByteLevel", "(a+)+$", "[", *TEXTS])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "content", "special", "name", "template", "id", "0", "9" * 5000]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can be put into a JSON value; of long lists and tables, a few entries."""
    found = [path]
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, entry in list(inner)[:12]:
        found += places(entry, (*path, key))
    return found


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


def use(tokenizer: Tokenizer) -> None:
    """What was let through can be worked with."""
    ids = tokenizer.encode("Hello, <s> a 1\n", parse_special=True)
    tokenizer.decode(ids)
    assert isinstance(tokenizer.vocab_size, int)
    assert all(isinstance(i, int) for i in tokenizer.stop_token_ids)


NEW = {"content": "<new>", "special": True, "lstrip": False, "normalized": False}
NAMED = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "<|endoftext|>",
    "unk_token": None,
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    "add_bos_token": True,
}


@pytest.fixture(scope="module")
def sound_config(chatml_folder) -> dict[str, Any]:
    """One that goes with the tokenizer, to which it adds a token."""
    size = load_folder_tokenizer(chatml_folder).vocab_size
    return {**NAMED, "added_tokens_decoder": {str(size): NEW}}


def from_files(folder: Path, tokenizer: Path, config: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_folder_tokenizer(folder)


@given(data=st.data(), value=JSON)
@FILES
def test_tokenizer_config(chatml_folder, sound_config, tmp_path, data, value):
    place = data.draw(st.sampled_from(places(sound_config)))
    config = put(sound_config, place, value)
    try:
        tokenizer = from_files(tmp_path, chatml_folder, config)
    except ModelError:
        return
    use(tokenizer)


@given(data=st.data(), value=JSON)
@FILES
def test_tokenizer_json(chatml_folder, tmp_path, data, value):
    whole = json.loads((chatml_folder / "tokenizer.json").read_text())
    place = data.draw(st.sampled_from(places(whole)))
    (tmp_path / "tokenizer.json").write_text(json.dumps(put(whole, place, value)))
    try:
        load_folder_tokenizer(tmp_path)
    except ModelError:
        return


@pytest.mark.parametrize(
    "entries",
    [
        {"0": "special"},
        {"0": {"content": 5}},
        {"0": {"content": None}},
        {"-1": {"content": "a"}},
        {"\u0663": {"content": "a"}},
        {"9" * 5000: {"content": "a"}},
        {"0": ["a"]},
        ["a"],
    ],
)
def test_added_tokens_that_are_none(chatml_folder, tmp_path, entries):
    with pytest.raises(ModelError, match="added_tokens_decoder") as caught:
        from_files(tmp_path, chatml_folder, {"added_tokens_decoder": entries})
    assert caught.value.path == tmp_path / "tokenizer_config.json"
    assert len(str(caught.value)) < 500


METADATA = {
    "general.name": "phi-3",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTES, "ab"],
    "tokenizer.ggml.token_type": np.array([2, 3, 3, *[1] * 94, *[6] * 256, 1], np.int32),
    "tokenizer.ggml.scores": np.zeros(354, np.float32),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.ggml.remove_extra_whitespaces": True,
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.chat_template.tool_use": "{{ messages }}",
    "tokenizer.chat_templates": ["tool_use"],
}
GGUF = (
    st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.sampled_from([*TEXTS, "default", 0, 1, 353, 354, 7])
    | st.sampled_from([np.array(v) for v in ([], [7], [1.5] * 354, [9] * 354, [np.nan] * 354)])
    | st.lists(st.sampled_from(TEXTS), max_size=5)
)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@given(changes=st.dictionaries(st.sampled_from(list(METADATA)), GGUF, max_size=3))
@settings(max_examples=150, deadline=None)
def test_gguf_metadata(model, changes):
    metadata = {"tokenizer.ggml.model": model, **METADATA, **changes}
    try:
        tokenizer = load_gguf_tokenizer(metadata, Path("m.gguf"))
    except ModelError:
        return
    use(tokenizer)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_metadata_that_is_changed_is_sound(model):
    use(load_gguf_tokenizer({"tokenizer.ggml.model": model, **METADATA}, Path("m.gguf")))


def test_the_config_that_is_changed_is_sound(chatml_folder, sound_config, tmp_path):
    tokenizer = from_files(tmp_path, chatml_folder, sound_config)
    use(tokenizer)
    assert tokenizer.encode("<new>", parse_special=True)[-1:] == [tokenizer.vocab_size - 1]
