from __future__ import annotations

from itertools import chain

import pytest

from octavo.base.errors import ConfigError
from octavo.sim.prompts import PromptSpec, as_conversations, prompts_of_requests, prompts_of_trace
from octavo.workload.requests import WorkloadRequest
from octavo.workload.traces import TraceEntry


def tokens(prompt: PromptSpec) -> list[int]:
    return list(chain(*prompt.pieces))


def test_prompts_of_a_trace_share_what_it_says_and_nothing_else():
    entries = [
        TraceEntry(5.0, 40, 7, (8, 9, 3), 16),
        TraceEntry(6.0, 48, 7, (8, 9, 4), 16),
        TraceEntry(7.0, 50, 0, (8,), 16),
        TraceEntry(8.0, 32, 7, (8, 9), 32),  # blocks of another size are others
        TraceEntry(9.0, 0, 1),
    ]
    one, two, three, other, empty = prompts = prompts_of_trace(entries, speedup=2.0)
    assert [len(tokens(prompt)) for prompt in prompts] == [40, 48, 50, 32, 1]
    assert [prompt.arrival_s for prompt in prompts] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert tokens(one)[:32] == tokens(two)[:32] and tokens(one)[32:] != tokens(two)[32:40]
    assert tokens(three)[:16] == tokens(one)[:16]
    distinct = [tokens(one), tokens(two)[32:], tokens(three)[16:], tokens(other), tokens(empty)]
    assert len(set(chain(*distinct))) == sum(len(set(each)) for each in distinct)
    assert three.output_len == 1


def test_prompts_can_be_cut():
    (prompt,) = prompts_of_trace([TraceEntry(0.0, 40, 7, (1, 2, 3), 16)], max_input_len=20)
    assert prompt.input_len == 20
    with pytest.raises(ConfigError, match="cannot be cut"):
        prompts_of_trace([], max_input_len=0)
    with pytest.raises(ConfigError, match="positive speed"):
        prompts_of_trace([], speedup=0)


def test_turns_with_a_pause_wait_for_the_turn_before():
    entries = [
        TraceEntry(0.0, 10, 5, session_id="a", turn=1, priority=2),
        TraceEntry(1.0, 10, 5, session_id="b", turn=1),
        TraceEntry(2.0, 10, 5, session_id="a", turn=2, think_ms=500.0),
        TraceEntry(3.0, 10, 5, session_id="b", turn=2),  # comes when the trace says
    ]
    first, _, second, fixed = prompts_of_trace(entries)
    assert (second.follows, second.think_s, second.goes_on) == ("0", 0.5, False)
    assert (first.priority, fixed.follows, fixed.arrival_s) == (2, None, 3.0)


def test_requests_of_a_benchmark_keep_their_tokens():
    given = [
        WorkloadRequest("a", prompt_token_ids=(5, 6, 7), output_len=4, arrival_s=1.0),
        WorkloadRequest("b", prompt="some text", input_len=2, output_len=4),
    ]
    of_tokens, of_text = prompts_of_requests(given)
    assert tokens(of_tokens) == [5, 6, 7] and of_tokens.arrival_s == 1.0
    assert of_text.input_len == 2


@pytest.mark.parametrize(
    "request_fields, message",
    [
        ({"prompt_token_ids": (1,)}, "--output-len"),
        ({"messages": ({"role": "user"},), "output_len": 3}, "how many tokens the prompt"),
    ],
)
def test_what_no_model_is_there_to_say_has_to_be_said(request_fields, message):
    with pytest.raises(ConfigError, match=message):
        prompts_of_requests([WorkloadRequest("a", **request_fields)])


def test_conversations_go_on():
    prompts = [PromptSpec(str(index), (range(index, index + 1),), 1) for index in range(5)]
    turns = as_conversations(prompts, 2, think_s=3.0)
    assert [prompt.follows for prompt in turns] == [None, "0", None, "2", None]
    assert [prompt.goes_on for prompt in turns] == [False, True, False, True, False]
    assert as_conversations(prompts, 1) == prompts
    for turns, think_s in ((0, 1.0), (2, -1.0)):
        with pytest.raises(ConfigError):
            as_conversations(prompts, turns, think_s)
