"""What a sampler of a GPU is told of rows: the same whether it is told anew or knows them."""

from __future__ import annotations

from array import array

import pytest
import torch
from device_sampling import described, sample_on_device
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import assert_same, make_row, random_logits

from octavo.core.batch import Draft
from octavo.core.request import Request
from octavo.core.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.kernels.cuda.sampling import MAX_TOP, RECORD_WORDS, Asked
from octavo.runtime.cuda_sampling import LogitEdits, SamplingArrays, needs_host
from octavo.runtime.plain_sampler import PlainSampler
from octavo.runtime.sampling_row import rows_of, sampling_row
from octavo.runtime.streams import HostStream

VOCAB_SIZE = 23


def arrays_of(num_rows: int) -> SamplingArrays:
    words = torch.zeros(num_rows, RECORD_WORDS, dtype=torch.int32)
    return SamplingArrays(words, VOCAB_SIZE, HostStream().host_buffer)


def make_request(index: int = 0, prompt=(1, 2, 3), **asked) -> Request:
    return Request(f"r{index}", list(prompt), SamplingParams(**asked), 0.0, seed=index)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Asked()),
        ({"min_p": 0.1, "temperature": 0.3}, Asked()),
        ({"top_k": 5}, Asked(cuts=True)),
        ({"top_p": 0.5}, Asked(cuts=True)),
        ({"typical_p": 0.5}, Asked(cuts=True, typical=True)),
        ({"top_k": 5, "typical_p": 0.5, "temperature": 0.0}, Asked()),
        ({"logit_bias": {1: 2.0}}, Asked(edits=True)),
        ({"presence_penalty": 1.0, "logprobs": 3}, Asked(edits=True, num_top=3)),
        ({"logprobs": 0}, Asked(num_top=0)),
        ({"allowed": (3,), "vocab_size": VOCAB_SIZE}, Asked(masks=True)),
    ],
    ids=str,
)
def test_what_a_step_asks_is_what_its_rows_ask(asked, expected):
    assert described([make_row(**asked)], VOCAB_SIZE)[1] == expected
    assert described([make_row(logprobs=1), make_row(**asked)], VOCAB_SIZE)[1] == expected._replace(
        num_top=max(1, expected.num_top or 0)
    )


def test_as_many_of_the_likeliest_as_may_be_asked_for():
    assert MAX_TOP == MAX_LOGPROBS


def test_who_needs_the_host_says_why():
    assert needs_host(SamplingParams(top_p=0.5, logit_bias={1: 2.0}, logprobs=2)) is None
    reason = needs_host(SamplingParams(repetition_penalty=1.1))
    assert reason is not None and "penalties" in reason


PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": -0.4}
CHOICES = [
    {"temperature": 1.0, "presence_penalty": 1.0},  # of nothing, at first
    {"temperature": 0.0, **PENALTIES},
    {"temperature": 1.0, "frequency_penalty": 0.5, "logit_bias": {3: 1.0, 22: -2.0, 99: 1.0}},
    {"temperature": 1.0, "logit_bias": {0: 3.0}, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": 2, **PENALTIES},
]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_steps_of_requests_that_come_and_go(data):
    """Whoever is in a step, and with whatever draft, gets the tokens of the oracle, which is told
    of each row as it is then."""
    requests = [make_request(i, (1, 2, i, 40), **CHOICES[i % len(CHOICES)]) for i in range(5)]
    arrays = arrays_of(40)
    for step in range(data.draw(st.integers(1, 5))):
        chosen = data.draw(st.lists(st.sampled_from(requests), min_size=1, unique_by=id))
        rows = []
        for request in chosen:
            draft = data.draw(st.lists(st.integers(0, VOCAB_SIZE), max_size=3))
            rows += rows_of(request, Draft.chain(draft)) if draft else [request]
        logits = random_logits(len(rows), VOCAB_SIZE, "cpu", seed=step)
        found = sample_on_device(PlainSampler(), logits, rows, arrays)
        assert_same(found, logits, [sampling_row(row) for row in rows])
        for request in chosen:
            request.token_ids += data.draw(st.lists(st.integers(0, VOCAB_SIZE + 2), max_size=4))


def test_tokens_that_were_taken_back_do_not_count():
    request, arrays = make_request(**PENALTIES), arrays_of(1)
    request.token_ids += [4, 4, 5]
    arrays.write([request], [3])
    del request.token_ids[-2:]
    logits = random_logits(1, VOCAB_SIZE, "cpu")
    found = sample_on_device(PlainSampler(), logits, [request], arrays)
    assert_same(found, logits, [sampling_row(request)])
    assert arrays.edits is not None and arrays.edits[2].tolist() == [0, 0, 0, 1]


def test_a_place_is_told_and_not_looked_up():
    """As of a token that goes on from one which the host has not seen."""
    request, arrays = make_request(), arrays_of(2)
    arrays.write([request], [7])
    again = arrays_of(2)
    request.token_ids += [1] * 7
    again.write([request], [7])
    assert torch.equal(arrays.records, again.records)


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_edits_of_any_number_begin_at_16_bytes(count):
    """So that kernels which read them are compiled once."""
    rows, arrays = [make_row(logit_bias=dict.fromkeys(range(count), 1.0)), make_row()], arrays_of(2)
    assert arrays.write(rows, [0, 0]).edits
    assert arrays.edits is not None and arrays.edit_starts is not None
    assert [each.data_ptr() % 16 for each in arrays.edits] == [0, 0, 0]
    assert arrays.edits[0, :count].tolist() == [*range(count)]
    assert arrays.edit_starts.tolist() == [0, count, count]


def test_masks_are_as_many_as_there_are():
    bits = array("I", [0b101])
    arrays = arrays_of(3)
    rows = [make_row(), make_row(allowed=(0, 2), vocab_size=VOCAB_SIZE), make_row()]
    asked = arrays.write(rows, [0, 0, 0])
    assert asked.masks and arrays.masks is not None and arrays.masks.tolist() == [list(bits)]
    assert not arrays.write(rows[:1], [0]).masks and arrays.masks is None


def test_more_tokens_than_there_was_room_for():
    edits = LogitEdits(SamplingParams(presence_penalty=1.0), [1], 1000)
    row = make_row(output=[*range(300), 5, 1000])
    edits.follow(row)
    assert edits.after(()).tolist() == [[*range(300)], [0] * 300, [1] * 5 + [2] + [1] * 294]
