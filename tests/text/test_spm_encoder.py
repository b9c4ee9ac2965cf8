from __future__ import annotations

import io
import random
import time
from pathlib import Path

import numpy as np
import pytest
from pace import python_seconds

from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.text.spm_encoder import SPACE, SpmEncoder, _word_pattern

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def train(corpus, **options) -> bytes:
    """A SentencePiece BPE model over the corpus."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text for text in corpus * 3 if text.strip("\0 \n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def metadata_of(model: bytes) -> dict:
    """The GGUF metadata of a SentencePiece model."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    spec = proto.normalizer_spec
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
        "tokenizer.ggml.scores": np.array([p.score for p in proto.pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([p.type for p in proto.pieces], np.int32),
        "tokenizer.ggml.add_space_prefix": spec.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": spec.remove_extra_whitespaces,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.bos_token_id": proto.trainer_spec.bos_id,
        "tokenizer.ggml.eos_token_id": proto.trainer_spec.eos_id,
        "tokenizer.ggml.unknown_token_id": proto.trainer_spec.unk_id,
    }


OPTIONS = {
    "llama": {"add_dummy_prefix": True, "remove_extra_whitespaces": False},
    "gemma": {
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["\n", "\n\n", SPACE * 2, SPACE * 3, "<b>", "</b>"],
        "split_digits": True,
    },
    "collapsing": {"add_dummy_prefix": True, "remove_extra_whitespaces": True},
    "across words": {
        "add_dummy_prefix": True,
        "remove_extra_whitespaces": False,
        "split_by_whitespace": False,
        "split_by_unicode_script": False,
    },
}


@pytest.fixture(scope="module", params=OPTIONS)
def pair(request, corpus):
    """A trained model, as sentencepiece's processor and as a tokenizer."""
    import sentencepiece

    model = train(corpus, **OPTIONS[request.param])
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return processor, load_gguf_tokenizer(metadata_of(model), Path("trained.gguf"))


def check_equal(processor, tokenizer, texts):
    for text in texts:
        expected = processor.encode(text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == expected, text
        decoded = processor.decode(expected)
        if "\ufffd" not in decoded and SPACE not in text:
            assert tokenizer.decode(ids) == decoded, text


def test_equals_sentencepiece_on_the_corpus(pair, corpus):
    check_equal(*pair, corpus)


# The texts are always the same, and fewer are the first of more.
MUCH = pytest.param(25_000, marks=[pytest.mark.slow, pytest.mark.long])


@pytest.mark.parametrize("count", [5000, MUCH])
def test_equals_sentencepiece_on_random_text(pair, random_texts, count):
    check_equal(*pair, random_texts(count))


@pytest.fixture(scope="module")
def gemma_processor(gemma3_gguf):
    """Gemma's pieces in sentencepiece's own processor."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    metadata, _ = gemma3_gguf
    lists = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    proto = sentencepiece_model_pb2.ModelProto()
    for text, score, kind in zip(*lists, strict=True):
        kind = UNKNOWN if text == "<unk>" else int(kind)
        text = text.replace(" ", SPACE) if kind == USER_DEFINED else text
        proto.pieces.add(piece=text, score=float(score), type=kind)
    proto.trainer_spec.model_type = 2
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.vocab_size = len(proto.pieces)
    proto.trainer_spec.pad_id, proto.trainer_spec.eos_id = 0, 1
    proto.trainer_spec.bos_id, proto.trainer_spec.unk_id = 2, 3
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def gemma_texts(tokenizer, count):
    """Random pieces of the vocabulary, one after the other."""
    generator = random.Random(7)
    for _ in range(count):
        ids = generator.sample(range(500, 250_000), generator.randrange(1, 20))
        yield generator.choice(("", " ")).join(tokenizer.token_text(i) for i in ids)


@pytest.mark.parametrize("count", [5000, MUCH])
def test_gemma_equals_sentencepiece(gemma3, gemma_processor, corpus, random_texts, count):
    check_equal(gemma_processor, gemma3, corpus)
    check_equal(gemma_processor, gemma3, random_texts(count))
    check_equal(gemma_processor, gemma3, gemma_texts(gemma3, count * 2 // 5))
    check_equal(gemma_processor, gemma3, ["a >\u2581</b> > </ x>  </", "> </ > </"])


# -- the algorithm --------------------------------------------------------------------------------


def small_encoder(scores: dict[str, float], **options) -> SpmEncoder:
    pieces = {piece: i for i, piece in enumerate(scores)}
    ranks = sorted(set(scores.values()), reverse=True)
    order = [ranks.index(score) for score in scores.values()]
    options = {"add_space_prefix": False, **options}
    return SpmEncoder(pieces, order, [1000 + byte for byte in range(256)], {}, **options)


def test_both_ways_to_merge_agree():
    generator = random.Random(3)
    for _ in range(300):
        alphabet = "abc"
        scores = dict.fromkeys(alphabet, 0.0)
        for _ in range(generator.randrange(1, 25)):
            piece = "".join(generator.choices(alphabet, k=generator.randrange(2, 6)))
            scores[piece] = float(-generator.randrange(6))  # ties are common
        encoder = small_encoder(scores)
        word = "".join(generator.choices(alphabet, k=generator.randrange(0, 60)))
        assert encoder._merge_short(word) == encoder._merge_long(word)


def test_the_best_score_merges_first_and_of_equals_the_leftmost():
    encoder = small_encoder({"a": 0, "b": 0, "ab": -2, "ba": -1, "bab": -5})
    assert encoder.encode(["abab"]) == [0, 4]  # a ba b, a bab
    encoder = small_encoder({"a": 0, "aa": -1})
    assert encoder.encode(["aaa"]) == [1, 0]


def test_bytes_of_what_has_no_piece():
    encoder = small_encoder({"a": 0})
    assert encoder.encode(["a\u00e9"]) == [0, 1000 + 0xC3, 1000 + 0xA9]


def test_space_prefix_at_the_start_and_after_specials():
    encoder = small_encoder({"a": 0, SPACE: 0, SPACE + "a": -1}, add_space_prefix=True)
    assert encoder.encode(["a", 77, "a", "a"]) == [2, 77, 2, 0]
    assert encoder.encode([]) == []
    assert encoder.encode([" a"]) == [1, 2]


def test_words_are_cut_only_where_no_piece_crosses():
    cut = _word_pattern({"a": 0, SPACE + "b": 1, SPACE * 3: 2}).findall
    text = f"a{SPACE}b{SPACE}{SPACE}c{SPACE}"
    assert cut(text) == ["a", f"{SPACE}b", f"{SPACE}{SPACE}c", SPACE]
    cut = _word_pattern({f">{SPACE}<": 0}).findall
    assert cut(f"a{SPACE}b>{SPACE}<c>{SPACE}") == ["a", f"{SPACE}b>{SPACE}<c>{SPACE}"]
    glue = {f"{chr(0x4E00 + i)}{SPACE}x": i for i in range(100)}
    assert _word_pattern(glue).findall(text) == [text]


@pytest.mark.parametrize("unit", ["a", " ", "ab", "\u4e2d", "\n", "<", "a ", "\U0001f600"])
def test_time_grows_with_the_text_not_with_its_square(gemma3, unit):
    def seconds(size: int) -> float:
        text = (unit * size)[:size]
        start = time.thread_time()
        gemma3.encode(text)
        return time.thread_time() - start

    seconds(1000)
    assert seconds(160_000) < 4 * 8 * max(seconds(20_000), python_seconds(4e4, time.thread_time))


def test_loading_gemma_is_quick(gemma3_gguf):
    metadata, path = gemma3_gguf
    times = []
    for _ in range(3):
        start = time.thread_time()
        load_gguf_tokenizer(metadata, path)
        times.append(time.thread_time() - start)
    assert min(times) < python_seconds(3e7, time.thread_time)


def test_throughput(gemma3):
    generator = random.Random(5)
    text = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=100_000))
    start = time.thread_time()
    gemma3.encode(text)
    seconds = time.thread_time() - start
    assert seconds < python_seconds(200 * len(text), time.thread_time)  # 10 µs for a byte
