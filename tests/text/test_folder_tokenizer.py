from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from pace import python_seconds
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from octavo.base.errors import ModelFileError
from octavo.text.decoders import ByteDecoder, WindowDecoder
from octavo.text.folder_tokenizer import load_folder_tokenizer

SPECIALS = [
    AddedToken("<s>", normalized=False, special=True),
    AddedToken("</s>", normalized=False, special=True),
    AddedToken("<unk>", normalized=False, special=True),
    AddedToken("<|im_end|>", normalized=False, special=True),
    AddedToken("<left>", normalized=False, special=True, lstrip=True),
    AddedToken("<right>", normalized=False, special=True, rstrip=True),
]


def byte_level(corpus) -> Tokenizer:
    library = Tokenizer(models.BPE(ignore_merges=True))
    pattern = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False, special_tokens=SPECIALS
    )
    library.train_from_iterator(corpus, trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library


def sentencepiece_like(corpus, *, strip: bool, metaspace: bool = False) -> Tokenizer:
    """As Llama 2 (``strip``) and Gemma come as tokenizer.json: BPE with bytes to fall back on."""
    vocab = {token.content: i for i, token in enumerate(SPECIALS)}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    library = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    library.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=[])
    library.train_from_iterator([text for text in corpus if text.isascii()], trainer)
    trained = json.loads(library.to_str())["model"]
    for token in sorted(trained["vocab"], key=trained["vocab"].get):
        vocab.setdefault(token, len(vocab))
    model = models.BPE(
        vocab,
        [tuple(merge) for merge in trained["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    library = Tokenizer(model)
    if metaspace:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prepend = [normalizers.Prepend("\u2581")] if strip else []
        library.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * strip)])
    library.add_special_tokens(SPECIALS)
    return library


def unigram(corpus) -> Tokenizer:
    library = Tokenizer(models.Unigram())
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, special_tokens=SPECIALS, unk_token="<unk>"
    )
    library.train_from_iterator([text for text in corpus if text.isprintable()], trainer)
    return library


def word_piece(corpus) -> Tokenizer:
    library = Tokenizer(models.WordPiece(unk_token="<unk>"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, show_progress=False, special_tokens=SPECIALS
    )
    library.train_from_iterator(corpus, trainer)
    return library


KINDS = {
    "byte_level": byte_level,
    "llama2": lambda corpus: sentencepiece_like(corpus, strip=True),
    "mistral": lambda corpus: sentencepiece_like(corpus, strip=True, metaspace=True),
    "gemma": lambda corpus: sentencepiece_like(corpus, strip=False),
    "unigram": unigram,
    "word_piece": word_piece,
}
BYTEWISE = ("byte_level", "llama2", "mistral", "gemma")


def write(folder: Path, library: Tokenizer, **config) -> Path:
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def pair(kind, corpus, tmp_path_factory):
    """The same folder, loaded here and by transformers."""
    from transformers import AutoTokenizer

    folder = write(tmp_path_factory.mktemp(kind), KINDS[kind](corpus))
    return load_folder_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))


SPECIAL_TEXTS = [
    "<s>Hello</s>",
    "a <left> b <right> c<right>\n d  <left>",
    "<s> <s><s>x<|im_end|>",
    "x<left><right><left> y",
    " <|im_end|> lead",
    "<unk>",
]


def test_ids_are_those_of_transformers(pair, corpus, random_texts):
    ours, theirs = pair
    special = ours.specials.ids - {theirs.unk_token_id}
    for text in corpus + SPECIAL_TEXTS + random_texts(500):
        assert ours.encode(text, parse_special=True) == theirs.encode(text), text
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False, parse_special=True) == expected
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        if not special & set(expected):
            assert ours.encode(text, add_special_tokens=False) == expected, text


def test_specials_in_plain_text_never_are_special(pair):
    ours, theirs = pair
    for text in SPECIAL_TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert not ours.specials.ids - {theirs.unk_token_id} & set(ids), text


def test_texts_are_those_of_transformers(pair, kind, corpus, random_texts):
    ours, theirs = pair
    for text in corpus + SPECIAL_TEXTS + random_texts(500):
        for parse_special in (False, True):
            ids = ours.encode(text, parse_special=parse_special)
            for skip in (False, True):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                found = ours.decode(ids, skip_special_tokens=skip)
                assert found == expected, (text, ids, skip)
    assert isinstance(ours.decoder, ByteDecoder if kind in BYTEWISE else WindowDecoder)


def test_attributes_are_those_of_transformers(pair):
    ours, theirs = pair
    assert ours.vocab_size == len(theirs) == max(theirs.get_vocab().values()) + 1
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.named_tokens == theirs.special_tokens_map
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert {i for i in range(ours.vocab_size) if ours.is_special(i)} == special
    assert ours.stop_token_ids == {theirs.eos_token_id, theirs.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": None},
    ],
)
def test_what_the_config_says_of_bos_and_eos(corpus, tmp_path, config):
    from transformers import AutoTokenizer

    folder = write(tmp_path / "folder", byte_level(corpus), **config)
    ours, theirs = load_folder_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in ("", "Hello"):
        assert ours.encode(text) == theirs.encode(text)


def test_a_post_processor_with_both(corpus, tmp_path):
    library = byte_level(corpus)
    ids = {text: library.token_to_id(text) for text in ("<s>", "</s>")}
    library.post_processor = processors.TemplateProcessing(
        single="<s> <s> $A </s>", special_tokens=list(ids.items())
    )
    tokenizer = load_folder_tokenizer(write(tmp_path / "folder", library))
    inner = tokenizer.encode("x y", add_special_tokens=False)
    assert tokenizer.encode("x y") == [ids["<s>"], ids["<s>"], *inner, ids["</s>"]]


def test_tokens_that_only_the_config_has(corpus, tmp_path):
    library = byte_level(corpus)
    size = library.get_vocab_size()
    new = {"content": "<new>", "special": True, "normalized": False}
    more = {"content": "<more>", "special": False, "normalized": False, "lstrip": False}
    changed = {"content": "<s>", "special": False, "normalized": False}
    config = {"added_tokens_decoder": {str(size): new, str(size + 1): more}}
    tokenizer = load_folder_tokenizer(write(tmp_path / "a", library, **config))
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.is_special(size) and not tokenizer.is_special(size + 1)
    ids = tokenizer.encode("<new><more>", add_special_tokens=False)
    assert size not in ids and ids[-1] == size + 1
    assert tokenizer.encode("<new>", parse_special=True)[-1] == size
    config = {"added_tokens_decoder": {str(library.token_to_id("<s>")): changed}}
    tokenizer = load_folder_tokenizer(write(tmp_path / "b", library, **config))
    assert not tokenizer.is_special(tokenizer.bos_token_id)
    with pytest.raises(ModelFileError, match="added_tokens_decoder"):
        config = {"added_tokens_decoder": {str(size + 9): new}}
        load_folder_tokenizer(write(tmp_path / "c", library, **config))


def test_truncation_and_padding_in_the_file_do_not_count(corpus, tmp_path):
    library = byte_level(corpus)
    library.enable_truncation(3)
    library.enable_padding(length=50)
    tokenizer = load_folder_tokenizer(write(tmp_path / "folder", library))
    assert 3 < len(tokenizer.encode("one two three four five six")) < 50


def test_special_tokens_map_fills_in(corpus, tmp_path):
    folder = write(tmp_path / "folder", byte_level(corpus))
    (folder / "tokenizer_config.json").unlink()
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = load_folder_tokenizer(folder, extra_stop_ids=[5])
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.stop_token_ids >= {5, tokenizer.eos_token_id}


def test_chat_templates(corpus, tmp_path):
    library = byte_level(corpus)
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    folder = write(tmp_path / "folder", library, chat_template=named)
    tokenizer = load_folder_tokenizer(folder)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.chat_template == "d"
    assert tokenizer.render_chat_template(messages, tools=[{"name": "f"}]) == "t"
    (folder / "chat_template.jinja").write_text("from a file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    tokenizer = load_folder_tokenizer(folder)
    assert tokenizer.chat_template == "from a file"
    assert tokenizer.render_chat_template(messages, chat_template="rag") == "r"


# -- damaged --------------------------------------------------------------------------------------


def test_no_tokenizer(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer.json: there is no such file$"):
        load_folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"convert tokenizer.model"):
        load_folder_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": 5}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        b'{"version": "1.0", "model": {"type": "Mystery"}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_damaged_tokenizer_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        load_folder_tokenizer(tmp_path)
    assert caught.value.path == tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "5",
        "[" * 100_000,
        '{"added_tokens_decoder": 5}',
        '{"added_tokens_decoder": {"x": {"content": "a"}}}',
        '{"added_tokens_decoder": {"1": {}}}',
        '{"added_tokens_decoder": {"1": 5}}',
        '{"chat_template": 5}',
        '{"chat_template": ["x"]}',
        '{"chat_template": [{"name": "x"}]}',
    ],
)
def test_damaged_tokenizer_config(corpus, tmp_path, content):
    folder = write(tmp_path / "folder", byte_level(corpus))
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelFileError) as caught:
        load_folder_tokenizer(folder)
    assert caught.value.path == folder / "tokenizer_config.json"


def test_cut_and_mutated_tokenizer_json(corpus, tmp_path):
    import random

    generator = random.Random(1)
    folder = write(tmp_path / "folder", byte_level(corpus[:8]))
    whole = (folder / "tokenizer.json").read_bytes()
    for _ in range(60):
        data = bytearray(whole[: generator.randrange(len(whole))])
        if generator.random() < 0.7:
            data = bytearray(whole)
            for _ in range(3):
                data[generator.randrange(len(data))] = generator.randrange(256)
        (folder / "tokenizer.json").write_bytes(data)
        try:
            load_folder_tokenizer(folder).encode("Hello, world <s>")
        except ModelFileError:
            continue


# -- patterns -------------------------------------------------------------------------------------


def test_slow_patterns_of_a_file_are_made_linear(corpus, tmp_path):
    library = byte_level(corpus)
    library.normalizer = normalizers.Replace(Regex(r"\s+$"), "")
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (r"\s+$", r"\d")]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer = load_folder_tokenizer(write(tmp_path / "folder", library))
    for text in ("a  b \n c 1 ", "x \n\n  ", " \n a", ""):
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected
    start = time.thread_time()
    tokenizer.encode(" " * 100_000 + "x")
    seconds = time.thread_time() - start
    assert seconds < python_seconds(4e7, time.thread_time)  # 2 s; else a minute
