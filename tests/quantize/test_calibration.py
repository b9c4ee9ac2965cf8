"""Text as windows of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.quantize import calibration
from octavo.quantize.calibration import calibration_windows


class Letters:
    """A tokenizer whose tokens are characters; BOS is 7 where the model wants it."""

    def __init__(self, wants_bos=False):
        self.leading_bos = 7 if wants_bos else None

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) for c in text]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz", "utf-8")
    return path


def as_text(windows):
    return ["".join(map(chr, window)) for window in windows.tolist()]


def test_windows_are_consecutive_and_the_rest_is_dropped(text):
    windows = calibration_windows(Letters(), text, window=8)
    assert windows.dtype == torch.int64
    assert as_text(windows) == ["abcdefgh", "ijklmnop", "qrstuvwx"]


def test_every_window_begins_with_bos_where_the_model_wants_it(text):
    windows = calibration_windows(Letters(wants_bos=True), text, window=8)
    assert as_text(windows) == ["\x07abcdefg", "\x07hijklmn", "\x07opqrstu"]


def test_a_budget_draws_some_of_the_windows_by_the_seed(text):
    def drawn(seed):
        return as_text(calibration_windows(Letters(), text, window=2, max_tokens=9, seed=seed))

    assert drawn(0) == drawn(0) and len({tuple(drawn(seed)) for seed in range(5)}) > 1
    for seed in range(5):
        assert len(drawn(seed)) == 4 and drawn(seed) == sorted(drawn(seed))


def test_conversations_are_in_the_template_of_the_model(byte_tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Who?\n\nMe.\n \nWhat?\n\nThat.\n\nleft over")
    expected = byte_tokenizer.encode(
        "<|user|>Who?<eos><|assistant|>Me.<eos><|user|>What?<eos><|assistant|>That.<eos>",
        add_special_tokens=False,
        parse_special=True,
    )
    windows = calibration_windows(byte_tokenizer, path, window=len(expected), chat=True)
    assert windows.tolist() == [expected]


def test_a_data_set_of_texts_and_conversations(byte_tokenizer, tmp_path):
    path = tmp_path / "set.jsonl"
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    conversations = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]
    rows = [{"text": "ab<eos>"}, {"messages": messages, "id": 1}, {"conversations": conversations}]
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    text = byte_tokenizer.encode("ab<eos>", add_special_tokens=False)
    chats = byte_tokenizer.encode(
        "<|user|>Who?<eos><|assistant|>Me.<eos><|user|>What?<eos><|assistant|>That.<eos>",
        add_special_tokens=False,
        parse_special=True,
    )
    windows = calibration_windows(byte_tokenizer, path, window=len(text + chats))
    assert windows.tolist() == [text + chats]


def test_of_a_large_data_set_no_more_is_looked_at_than_is_used(tmp_path):
    class Counting(Letters):
        encoded = 0

        def encode(self, text, **settings):
            self.encoded += 1
            return super().encode(text, **settings)

    path, tokenizer = tmp_path / "set.jsonl", Counting()
    path.write_text("".join(json.dumps({"text": chr(97 + i) * 8}) + "\n" for i in range(26)))
    taken = as_text(calibration_windows(tokenizer, path, window=8, max_tokens=32))
    assert tokenizer.encoded == len(taken) == 4 and taken == sorted(taken)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": ', "line 2: not JSON"),
        ("[1]", "line 2: an object with text, messages or conversations"),
        ('{"prompt": "x"}', "line 2: an object with text"),
        ('{"messages": [{"role": "user"}]}', "line 2: a message has role and content"),
        ('{"conversations": [{"from": "x", "value": "y"}]}', "line 2: a message has from and"),
        ('{"messages": [3]}', "line 2: a message has role"),
    ],
)
def test_lines_that_are_no_documents_are_refused(line, message, tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=rf"set\.jsonl, {message}"):
        calibration_windows(Letters(), path, window=4)


def test_the_text_that_comes_with_it(byte_tokenizer):
    """It is long enough to be of use, and has more than English in it."""
    windows = calibration_windows(byte_tokenizer, window=512)
    assert len(windows) >= 30
    text = (Path(calibration.__file__).parent / "calibration_text.txt").read_text("utf-8")
    assert 15_000 < len(text.encode()) < 25_000
    for piece in ("def ", "SELECT", "User:", "Assistant:", "| ", "ü", "é", "ж", "春", "の", "ال"):
        assert piece in text


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"window": 64}, "has 26 tokens, and one window takes 64: give a longer text"),
        ({"window": 8, "max_tokens": 7}, "windows of 8 tokens cannot be made of 7"),
        ({"window": 0}, "windows of 0 tokens"),
    ],
)
def test_settings_that_leave_nothing_are_refused(text, settings, message):
    with pytest.raises(ConfigError, match=message):
        calibration_windows(Letters(), text, **settings)


def test_files_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.txt: No such file"):
        calibration_windows(Letters(), tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ")
    with pytest.raises(ConfigError, match=r"latin\.txt is not UTF-8 at byte 3"):
        calibration_windows(Letters(), tmp_path / "latin.txt")
