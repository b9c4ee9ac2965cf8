from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from octavo.base.errors import InvalidRequestError
from octavo.text.unicode import clean_text


def test_import_is_light():
    code = (
        "import sys; import octavo.text.tokenizer, octavo.text.detokenizer;"
        "heavy = {'torch', 'transformers', 'jinja2', 'tokenizers', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "chatml"])
def test_lone_surrogates_are_read_as_replacements(request, name):
    tokenizer = request.getfixturevalue(name)
    assert clean_text("a\ud800b\udfff") == "a\ufffdb\ufffd"
    assert clean_text("\ud83d\ude00") == "\U0001f600"  # a pair is a character
    for text in ("\ud800", "a\udc00b", "\ud83d\ude00 \ud83d"):
        assert tokenizer.encode(text) == tokenizer.encode(clean_text(text))
        assert tokenizer.encode(text, parse_special=True)


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", ["a"]])
def test_prompts_that_are_no_text(chatml, prompt):
    with pytest.raises(InvalidRequestError) as caught:
        chatml.encode(prompt)
    assert caught.value.field == "prompt"


def test_ids_that_name_no_token(smollm2, gemma3, chatml):
    for tokenizer in (smollm2, gemma3, chatml):
        for token_id in (tokenizer.vocab_size, 10**9, -1):
            assert tokenizer.token_bytes(token_id) == b""
            assert tokenizer.token_text(token_id) == ""
            assert tokenizer.decode([token_id]) == ""
            assert not tokenizer.is_special(token_id)


def test_every_token_has_bytes(smollm2, gemma3):
    for tokenizer in (smollm2, gemma3):
        empty = [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i)]
        assert empty == []


def test_display_text(gemma3):
    ids = gemma3.encode("\U000e0041", add_special_tokens=False)
    assert len(ids) == 4 and all(gemma3.token_text(i) == "\ufffd" for i in ids)
    assert gemma3.token_text(gemma3.eos_token_id) == "<eos>"


def test_round_trip(gemma3, corpus, random_texts):
    for text in corpus + random_texts(300):
        text = text.replace("\u2581", " ")
        assert gemma3.decode(gemma3.encode(text)) == text


def test_gemma(gemma3):
    assert (gemma3.bos_token_id, gemma3.eos_token_id) == (2, 1)
    assert gemma3.stop_token_ids == {1, 106}
    assert gemma3.encode("<start_of_turn>", parse_special=True) == [2, 105]
    assert 105 not in gemma3.encode("<start_of_turn>")
    assert gemma3.chat_template is None


def test_threads_share_a_tokenizer(smollm2, gemma3, corpus):
    expected = {
        id(tokenizer): [
            (tokenizer.encode(text), tokenizer.encode(text + "<|im_end|><bos>", parse_special=True))
            for text in corpus
        ]
        for tokenizer in (smollm2, gemma3)
    }
    wrong = []

    def work(tokenizer):
        for _ in range(5):
            for text, (plain, special) in zip(corpus, expected[id(tokenizer)], strict=True):
                if tokenizer.encode(text) != plain:
                    wrong.append(text)
                if tokenizer.encode(text + "<|im_end|><bos>", parse_special=True) != special:
                    wrong.append(text)

    threads = [threading.Thread(target=work, args=(t,)) for t in (smollm2, gemma3) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
