"""Data sets: lengths as asked for, files as they are, the same for the same seed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import pytest

from octavo.base.errors import ConfigError
from octavo.workload.datasets import (
    load_dataset,
    prefix_repetition,
    random_requests,
    read_jsonl,
    read_sharegpt,
)
from octavo.workload.requests import WorkloadRequest
from octavo.workload.rows import WorkloadFileError


class Words:
    """A tokenizer: one token a word, and one before all."""

    vocab_size = 2000

    def encode(self, text: str) -> list[int]:
        return [1, *(len(word) for word in text.split())]


WORDS = Words()


def words(count: int) -> str:
    """Text of so many tokens."""
    return " ".join(["w"] * (count - 1))


def tokens(request: WorkloadRequest) -> tuple[int, ...]:
    assert request.prompt_token_ids is not None
    return request.prompt_token_ids


@pytest.fixture
def file(tmp_path: Path):
    def write(content: Any) -> Path:
        path = tmp_path / "data"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def sharegpt(*lengths: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"chat{i}",
            "conversations": [
                {"from": "human", "value": f"{i} {words(prompt - 1)}"},
                {"from": "gpt", "value": words(answer)},
                {"from": "human", "value": "never used"},
            ],
        }
        for i, (prompt, answer) in enumerate(lengths)
    ]


# -- made up --------------------------------------------------------------------------------------


def test_random_requests_have_the_lengths_asked_for() -> None:
    requests = random_requests(20, 5000, 30, 7, prefix_len=10)
    assert [r.request_id for r in requests] == [str(i) for i in range(20)]
    assert {(r.input_len, len(tokens(r)), r.output_len) for r in requests} == {(40, 40, 7)}
    assert len({tokens(r)[:10] for r in requests}) == 1
    assert len({tokens(r)[10:] for r in requests}) == 20
    drawn = {token for r in requests for token in tokens(r)}
    assert min(drawn) >= 1000 and max(drawn) < 5000


def test_random_lengths_are_uniform_within_their_bounds() -> None:
    requests = random_requests(4000, 5000, 100, 10, range_ratio=0.1, prefix_len=5)
    inputs = Counter(len(tokens(r)) - 5 for r in requests)
    outputs = Counter(r.output_len for r in requests)
    assert set(inputs) == set(range(90, 111))  # 110, though 100 * 1.1 is more as a float
    assert set(outputs) == {9, 10, 11}
    assert max(inputs.values()) < 2 * min(inputs.values())
    assert min(outputs.values()) > 1200


def test_an_answer_has_a_token_at_least() -> None:
    requests = random_requests(400, 5000, 20, 1, range_ratio=0.9)
    lengths = Counter(r.output_len for r in requests)
    assert set(lengths) == {1, 2} and lengths[2] > 160


def test_a_small_vocabulary_is_used_from_its_middle() -> None:
    drawn = {token for r in random_requests(9, 100, 50, 1, avoid={60}) for token in tokens(r)}
    assert drawn == set(range(50, 100)) - {60}


def test_more_requests_begin_with_the_same_ones() -> None:
    assert random_requests(9, 5000, 20, 4, seed=3)[:5] == random_requests(5, 5000, 20, 4, seed=3)
    assert random_requests(5, 5000, 20, 4, seed=4) != random_requests(5, 5000, 20, 4, seed=3)


def test_prefixes_are_repeated_evenly() -> None:
    requests = prefix_repetition(
        23, 5000, num_prefixes=5, prefix_len=16, suffix_len=8, output_len=3, seed=1
    )
    beginnings = Counter(tokens(r)[:16] for r in requests)
    assert sorted(beginnings.values()) == [4, 4, 5, 5, 5]
    assert len({tokens(r)[16:] for r in requests}) == 23
    assert {(len(tokens(r)), r.input_len, r.output_len) for r in requests} == {(24, 24, 3)}
    order = [tokens(r)[:16] for r in requests]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes > 10  # not one prefix after the other
    assert order[5:10] != order[:5]  # nor one by one


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random_requests(-1, 100, 1, 1), "num_prompts is -1"),
        (lambda: random_requests(1, 100, 1, 0), "output_len is 0, and must be 1 or more"),
        (lambda: random_requests(1, 100, 1, 1, range_ratio=1.0), "range ratio is 1.0"),
        (lambda: random_requests(1, 100, 0, 1), "a prompt could be empty"),
        (lambda: random_requests(1, 100, 1, 1, range_ratio=0.5), "a prompt could be empty"),
        (lambda: random_requests(1, 0, 1, 1), "vocabulary of 0 tokens"),
        (lambda: prefix_repetition(2, 100, num_prefixes=3), "2 prompts cannot have 3 prefixes"),
        (lambda: prefix_repetition(20, 100, prefix_len=0, suffix_len=0), "would be empty"),
    ],
)
def test_wrong_numbers_are_refused(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


# -- ShareGPT -------------------------------------------------------------------------------------


def test_sharegpt_keeps_what_everyone_keeps(file) -> None:
    fitting = [(4, 4), (1024, 1024), (4, 2044), (500, 600)]
    others = [(3, 50), (50, 3), (1025, 50), (1000, 1049), (4, 2045)]
    content = [*sharegpt(*fitting, *others), {"id": "a", "conversations": []}, {"id": "b"}]
    requests = read_sharegpt(file(content), WORDS, num=4)
    assert sorted((r.input_len, r.output_len) for r in requests) == sorted(fitting)
    for request in requests:
        assert request.prompt is not None
        assert len(WORDS.encode(request.prompt)) == request.input_len


def test_sharegpt_is_shuffled_as_by_vllm(file) -> None:
    """Which shuffles the conversations of two turns or more with ``random`` seeded anew."""
    content = sharegpt(*[(10 + i, 20) for i in range(30)])
    order = list(range(30))
    random.Random(5).shuffle(order)
    requests = read_sharegpt(file(content), WORDS, num=12, seed=5)
    assert [r.input_len for r in requests] == [10 + i for i in order[:12]]
    assert [r.request_id for r in requests] == [str(i) for i in range(12)]


def test_sharegpt_is_repeated_where_it_is_short(file) -> None:
    requests = read_sharegpt(file(sharegpt((10, 20), (11, 21), (12, 22))), WORDS, num=40)
    assert len(requests) == 40 and len({r.request_id for r in requests}) == 40
    assert Counter(r.input_len for r in requests[:3]) == {10: 1, 11: 1, 12: 1}
    assert set(Counter(r.input_len for r in requests[3:])) == {10, 11, 12}
    draws = random.Random(0)
    again = [draws.choice(requests[:3]).prompt for _ in range(37)]
    assert [r.prompt for r in requests[3:]] == again


def test_sharegpt_with_a_fixed_answer(file) -> None:
    content = sharegpt((10, 2), (1024, 1500))
    requests = read_sharegpt(file(content), WORDS, num=2, output_len=3)
    assert [(r.input_len, r.output_len) for r in requests] in (
        [(10, 3), (1024, 3)],
        [(1024, 3), (10, 3)],
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", r"data:1: not ShareGPT: expected a list"),
        ("[\n{,\n", r"data:2: not JSON: Expecting property name"),
        ("[" * 100_000, r"data: the JSON is nested too deeply|data:1: not JSON"),
        ("[]", r"data: no conversation fits: two turns, 4 or more tokens each, 1024 or fewer"),
        ('[{"conversations": [1, 2]}]', r"data: entry 0 is no conversation"),
        ('[{"conversations": [{"value": 1}, {"value": "b"}]}]', r"data: entry 0 is no conv"),
        ('[{"conversations": 5}]', r"data: entry 0 is no conversation"),
        ("[3]", r"data: entry 0 is no conversation"),
    ],
)
def test_what_is_no_sharegpt(file, content: str, message: str) -> None:
    with pytest.raises(WorkloadFileError, match=message):
        read_sharegpt(file(content), WORDS, num=1)


# -- JSON lines -----------------------------------------------------------------------------------

LINES = """\
{"prompt": "one two three", "output_tokens": 10}

{"prompt": [7, 8, 1999], "max_tokens": 20, "id": "ignored"}
{"messages": [{"role": "user", "content": "Hi"}], "output_len": 30}
{"prompt": "four"}
"""


def test_jsonl_has_prompts_of_three_kinds(file) -> None:
    text, ids, chat, plain = read_jsonl(file(LINES), WORDS)
    assert text == WorkloadRequest("0", prompt="one two three", input_len=4, output_len=10)
    assert ids == WorkloadRequest("1", prompt_token_ids=(7, 8, 1999), input_len=3, output_len=20)
    turn = {"role": "user", "content": "Hi"}
    assert chat == WorkloadRequest("2", messages=(turn,), output_len=30)
    assert plain == WorkloadRequest("3", prompt="four", input_len=2)
    assert [r.output_len for r in read_jsonl(file(LINES), output_len=5)] == [5] * 4
    assert read_jsonl(file(LINES))[0].input_len is None  # nobody counted


def test_jsonl_in_part_and_repeated(file) -> None:
    path = file("".join(f'{{"prompt": "{i}"}}\n' for i in range(100)))
    some = read_jsonl(path, num=10, seed=2)
    chosen = [int(r.prompt or "") for r in some]
    assert chosen == sorted(chosen) and chosen != list(range(10))
    assert [r.request_id for r in some] == [str(i) for i in range(10)]
    assert read_jsonl(path, num=10, seed=3) != some == read_jsonl(path, num=10, seed=2)
    more = read_jsonl(path, num=130)
    assert [r.prompt for r in more[:100]] == [str(i) for i in range(100)]
    assert [r.request_id for r in more] == [str(i) for i in range(130)]
    assert len({r.prompt for r in more[100:]}) > 10


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", r"data:6: not a JSON object"),
        ('"text"', r"data:6: a JSON str, where an object is expected"),
        ("{}", r'data:6: expected either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', r'data:6: expected either "prompt" or "messages"'),
        ('{"prompt": 5}', r"data:6: prompt is neither text nor a list of token ids"),
        ('{"prompt": []}', r"data:6: prompt is neither text nor a list"),
        ('{"prompt": [1, true]}', r"data:6: prompt is neither text nor a list"),
        ('{"prompt": [1, 2000]}', r"data:6: prompt has the token id 2000, which the vocabulary"),
        ('{"prompt": [-1]}', r"data:6: prompt has the token id -1"),
        ('{"messages": []}', r"data:6: messages is not a list of objects"),
        ('{"messages": [{"content": "a"}]}', r"data:6: messages is not a list of objects"),
        ('{"prompt": "a", "max_tokens": 0}', r"data:6: max_tokens is 0, not a whole number from 1"),
        ('{"prompt": "a", "output_len": "few"}', r"data:6: output_len is 'few'"),
    ],
)
def test_bad_lines_are_named(file, line: str, message: str) -> None:
    with pytest.raises(WorkloadFileError, match=message):
        read_jsonl(file(LINES + line + "\n"), WORDS)


def test_a_file_without_requests(file) -> None:
    with pytest.raises(WorkloadFileError, match="data: there is no request in this file"):
        read_jsonl(file("\n"))


# -- any ------------------------------------------------------------------------------------------

TRACE = '{"timestamp": 500, "input_length": 20, "output_length": 5, "hash_ids": [1]}\n' * 3
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def test_files_are_recognised_by_what_is_in_them(file) -> None:
    chats = load_dataset(file(sharegpt((10, 20))), num=2, tokenizer=WORDS)
    assert [r.output_len for r in chats] == [20, 20]
    pretty = file("\n" + json.dumps(sharegpt((10, 20)), indent=2))
    assert load_dataset(pretty, num=1, tokenizer=WORDS)[0].input_len == 10
    assert load_dataset(str(file(LINES)))[1].prompt_token_ids == (7, 8, 1999)
    traced = load_dataset(file(TRACE), vocab_size=3000, num=2, speedup=2.0)
    assert [(r.input_len, r.output_len, r.arrival_s) for r in traced] == [(20, 5, 0.0)] * 2
    assert tokens(traced[0]) == tokens(traced[1])
    assert load_dataset(file(AZURE), tokenizer=WORDS, max_input_len=50)[0].input_len == 50
    own = '{"timestamp": 0, "input_length": 1, "output_length": 9, "prompt": "Hi"}'
    assert load_dataset(file(own), vocab_size=10)[0].prompt == "Hi"


def test_data_sets_by_name(file) -> None:
    by_name = load_dataset("random", num=3, vocab_size=2000, input_len=9, output_len=2, seed=4)
    assert by_name == random_requests(3, 2000, 9, 2, seed=4)
    assert len(load_dataset("random", tokenizer=WORDS, input_len=1)) == 1000
    repeated = load_dataset("prefix_repetition", num=4, vocab_size=2000, num_prefixes=2)
    assert repeated == prefix_repetition(4, 2000, num_prefixes=2)
    lines = file(LINES)
    assert load_dataset("custom", lines) == load_dataset("jsonl", lines) == read_jsonl(lines)
    mooncake = load_dataset("mooncake", file(TRACE), vocab_size=3000, output_len=77)
    assert [r.output_len for r in mooncake] == [77] * 3
    chat = '{"chat_id": %d, "timestamp": %d, "input_length": 20, "output_length": 5}\n'
    timed = file(chat % (1, 500) + chat % (2, 2500))
    assert load_dataset("timed_trace", timed, vocab_size=3000)[1].arrival_s == 2000
    assert load_dataset("trace", timed, vocab_size=3000)[1].arrival_s == 2000
    assert load_dataset("mooncake", timed, vocab_size=3000)[1].arrival_s == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "file"), "'nothing' is no data set: choose from auto, random"),
        (("random",), "'random' needs the size of the vocabulary, or a tokenizer"),
        (("sharegpt",), "'sharegpt' needs a file"),
        (("sharegpt", "file"), "'sharegpt' needs a tokenizer"),
    ],
)
def test_what_is_missing_is_said(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dataset(*arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}', r"data:1: neither prompt nor messages, nor the fields of a trace"),
        ('{\n"prompt": "a"}', r"data:1: not a JSON object: .*; expected one object a line"),
        ("hello\n", r"data:1: no trace format has this first line"),
        ("", r"data:1: no trace format has this first line"),
    ],
)
def test_unknown_files(file, content: str, message: str) -> None:
    with pytest.raises(WorkloadFileError, match=message):
        load_dataset(file(content))


def test_the_same_in_every_process(file) -> None:
    path = file(sharegpt(*[(10 + i, 20) for i in range(9)]))
    program = """
import sys
from octavo.workload.datasets import *
class Words:
    vocab_size = 2000
    def encode(self, text):
        return [1, *text.split()]
print(random_requests(3, 4000, 20, 5, range_ratio=0.5, prefix_len=3, seed=1))
print(prefix_repetition(5, 4000, num_prefixes=2, seed=1))
print(read_sharegpt(sys.argv[1], Words(), 12))
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", program, str(path)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "4711")
    }
    assert len(printed) == 1 and len(printed.pop()) > 5000


def test_lengths_may_be_log_normal():
    requests = random_requests(4000, 5000, 400, 50, length_cv=1.0, seed=2)
    for name, mean in (("input_len", 400), ("output_len", 50)):
        lengths = [getattr(request, name) for request in requests]
        assert fmean(lengths) == pytest.approx(mean, rel=0.06)
        assert pstdev(lengths) == pytest.approx(mean, rel=0.15)
        assert median(lengths) == pytest.approx(mean / 2**0.5, rel=0.06)
        assert min(lengths) >= 1
    assert requests == random_requests(4000, 5000, 400, 50, length_cv=1.0, seed=2)
    for wrong in ({"length_cv": -1.0}, {"length_cv": 0.5, "range_ratio": 0.5}):
        with pytest.raises(ConfigError, match="variation of lengths"):
            random_requests(1, 5000, 400, 50, **wrong)
