from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from pace import python_seconds

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.text.pretokenizers import PRE_TOKENIZERS

PATH = Path("model.gguf")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def metadata_of(library, **changes) -> dict:
    """GGUF metadata of a byte-level BPE of the ``tokenizers`` library."""
    import json

    model = json.loads(library.to_str())["model"]
    added = library.get_added_tokens_decoder()
    size = library.get_vocab_size()
    types = [NORMAL] * size
    for i, token in added.items():
        types[i] = CONTROL if token.special else USER_DEFINED
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [library.id_to_token(i) for i in range(size)],
        "token_type": np.array(types, np.int32),
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": library.token_to_id("<s>"),
        "eos_token_id": library.token_to_id("</s>"),
        "add_bos_token": False,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


@pytest.fixture(scope="module")
def metadata(chatml_library):
    return metadata_of(chatml_library())


def changed(metadata: dict, **changes) -> dict:
    new = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    return {key: value for key, value in new.items() if value is not None}


# -- byte-level BPE -------------------------------------------------------------------------------


def check_equal(tokenizer, library, texts):
    library.encode_special_tokens = True
    plain = [library.encode(text, add_special_tokens=False).ids for text in texts]
    library.encode_special_tokens = False
    special = [library.encode(text, add_special_tokens=False).ids for text in texts]
    for text, plain_ids, special_ids in zip(texts, plain, special, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == plain_ids, text
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded == library.decode(ids, skip_special_tokens=False)
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        assert ids == special_ids, text
        assert tokenizer.decode(ids) == library.decode(ids)


SPECIAL_TEXTS = [
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|><|im_start|>",
    "<|im_<|im_end|>start|>",
    "a <s>b</s> <tool_call> [X] x[X]x <|im_end",
]


def test_equals_the_library(chatml_library, metadata, corpus, random_texts):
    tokenizer = load_gguf_tokenizer(metadata, PATH)
    check_equal(tokenizer, chatml_library(), corpus + SPECIAL_TEXTS + random_texts(3000))


@pytest.mark.long
def test_equals_the_library_on_much_text(chatml_library, metadata, random_texts):
    tokenizer = load_gguf_tokenizer(metadata, PATH)
    check_equal(tokenizer, chatml_library(), random_texts(25_000))


def test_bytes_of_tokens_are_their_part_of_the_text(metadata, corpus):
    tokenizer = load_gguf_tokenizer(metadata, PATH)
    for text in corpus:
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""


def smollm2_library(metadata):
    """SmolLM2's tokenizer as its tokenizer.json has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    library = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.pre_tokenizer = pre_tokenizers.Sequence([digits, bytewise])
    library.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [AddedToken(tokens[i], normalized=False) for i in np.flatnonzero(types == CONTROL)]
    library.add_special_tokens(control)
    return library


def test_smollm2_equals_the_library(smollm2, smollm2_gguf, corpus, random_texts):
    library = smollm2_library(smollm2_gguf[0])
    check_equal(smollm2, library, corpus + SPECIAL_TEXTS[:3] + random_texts(3000))


@pytest.mark.long
def test_smollm2_equals_the_library_on_much_text(smollm2, smollm2_gguf, random_texts):
    check_equal(smollm2, smollm2_library(smollm2_gguf[0]), random_texts(25_000))


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2, smollm2_gguf, corpus):
    from transformers import AutoTokenizer

    _, path = smollm2_gguf
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in corpus:
        if any(character.isnumeric() for character in text):
            continue  # transformers does not know the pre-tokenizer, which separates digits
        assert smollm2.encode(text) == theirs.encode(text), text


def test_smollm2(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.stop_token_ids == {2}
    assert smollm2.encode("") == []
    assert smollm2.encode("Hello", parse_special=True) == smollm2.encode("Hello")
    assert "SmolLM" in smollm2.chat_template
    assert smollm2.token_text(smollm2.encode(" Hello")[0]) == " Hello"


def test_loading_smollm2_is_quick(smollm2_gguf):
    times = []
    for _ in range(3):
        start = time.thread_time()
        load_gguf_tokenizer(*smollm2_gguf)
        times.append(time.thread_time() - start)
    assert min(times) < python_seconds(6e6, time.thread_time)


def test_throughput(smollm2):
    text = "The quick brown fox jumps over the lazy dog, 123 times. " * 4000
    start = time.thread_time()
    smollm2.encode(text)
    seconds = time.thread_time() - start
    assert seconds < python_seconds(100 * len(text), time.thread_time)  # 5 µs for a byte


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_loads_and_is_lossless(metadata, corpus, pre):
    import unicodedata

    tokenizer = load_gguf_tokenizer(changed(metadata, pre=pre), PATH)
    for text in corpus:
        expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_ignore_merges_takes_whole_words(metadata):
    tokens = [*metadata["tokenizer.ggml.tokens"], "zebra"]
    types = np.append(metadata["tokenizer.ggml.token_type"], NORMAL)
    grown = changed(metadata, tokens=tokens, token_type=types)
    whole = len(tokens) - 1
    assert whole not in load_gguf_tokenizer(grown, PATH).encode("zebra")
    llama3 = load_gguf_tokenizer(changed(grown, pre="llama-bpe"), PATH)
    assert llama3.encode("zebra") == [whole]


# -- BOS, EOS and stops ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "begins", "ends"),
    [
        ({"add_bos_token": None}, False, False),
        ({"add_bos_token": None, "pre": "llama-bpe"}, True, False),
        ({"add_bos_token": None, "pre": "tekken"}, True, False),
        ({"add_bos_token": False, "pre": "llama-bpe"}, False, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"add_bos_token": None, "pre": "llama-bpe", "bos_token_id": None}, False, False),
    ],
)
def test_bos_and_eos(metadata, changes, begins, ends):
    tokenizer = load_gguf_tokenizer(changed(metadata, **changes), PATH)
    inner = tokenizer.encode("a b", add_special_tokens=False)
    bos = [tokenizer.bos_token_id] * begins
    eos = [tokenizer.eos_token_id] * ends
    assert tokenizer.encode("a b") == [*bos, *inner, *eos]
    assert tokenizer.encode("") == [*bos, *eos]
    assert tokenizer.encode("a b", add_special_tokens=False) == inner


def test_glm_has_no_bos(metadata):
    tokenizer = load_gguf_tokenizer(changed(metadata, pre="glm4"), PATH)
    assert tokenizer.bos_token_id is None and "bos_token" not in tokenizer.named_tokens


def test_stop_ids(metadata, chatml_library):
    ids = chatml_library().token_to_id
    tokenizer = load_gguf_tokenizer(metadata, PATH, extra_stop_ids=[7])
    assert tokenizer.stop_token_ids == {ids("</s>"), ids("<|im_end|>"), 7}
    eot = changed(metadata, eot_token_id=9, eom_token_id=11)
    assert load_gguf_tokenizer(eot, PATH).stop_token_ids >= {9, 11}
    # A file that forgot what kind of token it is.
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[ids("<|im_end|>")] = USER_DEFINED
    tokenizer = load_gguf_tokenizer(changed(metadata, token_type=types), PATH)
    assert ids("<|im_end|>") in tokenizer.stop_token_ids
    assert tokenizer.is_special(ids("<|im_end|>"))
    # Normal tokens are text, whatever they look like.
    types[ids("<|im_end|>")] = NORMAL
    tokenizer = load_gguf_tokenizer(changed(metadata, token_type=types), PATH)
    assert ids("<|im_end|>") not in tokenizer.stop_token_ids


def test_harmony_messages_end_without_ending_the_turn(metadata):
    def stops(*texts):
        tokens = [*metadata["tokenizer.ggml.tokens"], *texts]
        types = np.append(metadata["tokenizer.ggml.token_type"], [CONTROL] * len(texts))
        tokenizer = load_gguf_tokenizer(changed(metadata, tokens=tokens, token_type=types), PATH)
        return {tokenizer.token_text(i) for i in tokenizer.stop_token_ids}

    assert "<|end|>" in stops("<|end|>")
    assert stops("<|end|>", "<|return|>", "<|call|>") >= {"<|return|>", "<|call|>"}
    assert "<|end|>" not in stops("<|end|>", "<|return|>", "<|call|>")


def test_phi3_strips_behind_specials(metadata):
    named = {**metadata, "general.name": "Phi-3 mini"}
    text = "<|im_start|> \n a<s> b"
    plain = load_gguf_tokenizer(metadata, PATH).encode(text, parse_special=True)
    stripped = load_gguf_tokenizer(named, PATH).encode(text, parse_special=True)
    other = load_gguf_tokenizer(metadata, PATH)
    assert plain != stripped == other.encode("<|im_start|>a<s> b", parse_special=True)


def test_templates_and_named_tokens(metadata):
    tokenizer = load_gguf_tokenizer(
        {
            **changed(metadata, padding_token_id=3, unknown_token_id=4),
            "tokenizer.chat_template": "default",
            "tokenizer.chat_template.tool_use": "with tools",
        },
        PATH,
    )
    assert tokenizer.chat_template == "default"
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat_template(messages) == "default"
    assert tokenizer.render_chat_template(messages, tools=[{"name": "f"}]) == "with tools"
    assert tokenizer.render_chat_template(messages, chat_template="tool_use") == "with tools"
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    assert names.items() <= tokenizer.named_tokens.items()
    assert {"pad_token", "unk_token"} <= tokenizer.named_tokens.keys()


# -- damaged and unknown --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", None),
        ("model", 5),
        ("pre", 5),
        ("tokens", None),
        ("tokens", []),
        ("tokens", "abc"),
        ("tokens", ["a", 5]),
        ("tokens", np.arange(3)),
        ("token_type", np.ones(3, np.int32)),
        ("token_type", "abc"),
        ("token_type", np.ones((2, 2), np.int32)),
        ("token_type", ["a"]),
        ("token_type", "out of range"),
        ("merges", None),
        ("merges", [1]),
        ("merges", ["ab"]),
        ("merges", ["a "]),
        ("merges", [" a"]),
        ("merges", [""]),
        ("merges", ["zz zz"]),
        ("merges", ["a\u4e2d b"]),
        ("bos_token_id", 10**6),
        ("bos_token_id", -1),
        ("bos_token_id", "1"),
        ("bos_token_id", 1.5),
        ("bos_token_id", True),
        ("eos_token_id", 10**12),
        ("eot_token_id", 10**6),
        ("add_bos_token", "yes"),
        ("add_bos_token", 1),
        ("add_eos_token", []),
    ],
)
def test_damaged_metadata(metadata, key, value):
    if isinstance(value, str) and value == "out of range":
        value = np.full(len(metadata["tokenizer.ggml.tokens"]), 99, np.int32)
    with pytest.raises(ModelFileError) as caught:
        load_gguf_tokenizer(changed(metadata, **{key: value}), PATH)
    assert caught.value.field == f"tokenizer.ggml.{key}"
    assert caught.value.path == PATH


def test_bos_is_wanted_but_missing(metadata):
    with pytest.raises(ModelFileError, match="bos_token_id is missing"):
        load_gguf_tokenizer(changed(metadata, add_bos_token=True, bos_token_id=None), PATH)


def test_template_that_is_no_text(metadata):
    with pytest.raises(ModelFileError, match="chat_template"):
        load_gguf_tokenizer({**metadata, "tokenizer.chat_template": 5}, PATH)


@pytest.mark.parametrize("model", ["t5", "rwkv", "gemma4", "plamo2", "no_vocab"])
def test_other_kinds_are_named(metadata, model):
    with pytest.raises(UnsupportedModelError, match=f"{model!r}.*gpt2, llama"):
        load_gguf_tokenizer(changed(metadata, model=model), PATH)


def test_unknown_pre_tokenizers_are_named(metadata):
    with pytest.raises(UnsupportedModelError, match="'mystery'.*llama-bpe.*qwen2"):
        load_gguf_tokenizer(changed(metadata, pre="mystery"), PATH)


def spm_metadata(**changes) -> dict:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 3]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array([0.0] * 259 + [-3.0, -2.0, -1.0], np.float32),
        "token_type": np.array(types, np.int32),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def test_sentencepiece_defaults():
    tokenizer = load_gguf_tokenizer(spm_metadata(), PATH)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    # BOS, and a space that has no piece here, as the bytes of U+2581.
    space = [3 + byte for byte in "\u2581".encode()]
    assert tokenizer.encode("ab") == [1, *space, 261]
    assert tokenizer.decode(tokenizer.encode("ab \u00e9")) == "\u2581ab\u2581\u00e9"
    assert tokenizer.encode("") == [1]
    plain = load_gguf_tokenizer(spm_metadata(add_space_prefix=False, add_bos_token=False), PATH)
    assert plain.encode("ab<s>", parse_special=True) == [261, 1]
    assert 1 not in plain.encode("ab<s>")
    assert plain.is_special(0) and not plain.is_special(5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", None),
        ("scores", np.zeros(3, np.float32)),
        ("scores", "abc"),
        ("add_space_prefix", 5),
        ("remove_extra_whitespaces", "no"),
        ("tokens", ["a"]),
    ],
)
def test_damaged_sentencepiece_metadata(key, value):
    with pytest.raises(ModelFileError) as caught:
        load_gguf_tokenizer(spm_metadata(**{key: value}), PATH)
    assert caught.value.field.startswith("tokenizer.ggml.")


def test_bytes_without_tokens():
    small = {"tokens": ["a"], "scores": np.zeros(1), "token_type": np.array([NORMAL])}
    tokenizer = load_gguf_tokenizer(
        spm_metadata(**small, add_bos_token=False, add_space_prefix=False), PATH
    )
    assert tokenizer.encode("ab") == [0, 0]  # the unknown token is number 0 unless a file says
