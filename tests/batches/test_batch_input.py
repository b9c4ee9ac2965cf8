"""Requests of a batch: what a line may say, and the order in which they are sent."""

from __future__ import annotations

import json
import random

import pytest

from octavo.batches import batch_input
from octavo.batches.batch_input import BatchFileError, in_order, read_body, read_requests


def line(custom_id="a", **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": custom_id}]}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
    return {**request, "body": body, **fields}


@pytest.fixture
def file_of(tmp_path):
    def write(*lines):
        path = tmp_path / "requests.jsonl"
        texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
        path.write_text("\n".join(texts))
        return path

    return write


def test_a_body_is_read_where_it_is(file_of):
    path = file_of(line("a"), "", line("bé", body={"prompt": "x\n"}, url="/v1/completions"))
    first, second = read_requests(path)
    assert (first.custom_id, first.model, second.custom_id, second.model) == ("a", "m", "bé", None)
    with open(path, "rb") as file:
        assert json.loads(read_body(file, second)) == {"prompt": "x\n"}
        assert json.loads(read_body(file, first))["messages"][0]["content"] == "a"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "line 2"),
        ("[]", "is no object"),
        ("[" * 100_000, "line 2"),
        (line("a"), "'a' was there before"),
        (line(""), "custom_id"),
        (line("x" * 513), "custom_id"),
        (line(3), "custom_id"),
        (line("b", method="GET"), "method must be POST"),
        (line("b", url="/v1/files"), "url must be one of"),
        (line("b", body=[]), "body must be an object"),
        (line("b", body={"stream": True}), "stream"),
        (line("b", body={"model": 3}), "model must be a text"),
        (line("b", priority=1), "'priority'"),
    ],
)
def test_a_line_that_is_no_request_is_named(file_of, wrong, said):
    with pytest.raises(BatchFileError, match="line 2") as refused:
        read_requests(file_of(line("a"), wrong))
    assert said in str(refused.value)


def test_a_file_without_requests_and_a_line_without_end(file_of, monkeypatch):
    with pytest.raises(BatchFileError, match="no requests"):
        read_requests(file_of(""))
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 1000)
    with pytest.raises(BatchFileError, match="more than 1,000 bytes"):
        read_requests(file_of(line("a"), "x" * 1001))


def test_prompts_that_begin_alike_are_neighbours(file_of):
    systems = ["You are a cat. " * 40, "You are a cat. " * 39 + "You are a dog. ", "Short."]
    lines = [
        line(
            f"{system} {index}",
            body={"messages": [{"content": systems[system]}, {"content": f"question {index}"}]},
        )
        for system in range(3)
        for index in range(6)
    ]
    random.Random(1).shuffle(lines)
    order = [each.custom_id.split()[0] for each in in_order(read_requests(file_of(*lines)))]
    assert all(order.index(name) + 5 == len(order) - 1 - order[::-1].index(name) for name in "012")
    assert abs(order.index("0") - order.index("1")) == 6  # they share more than others
