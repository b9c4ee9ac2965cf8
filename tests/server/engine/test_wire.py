from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import (
    ConstraintError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    PromptTooLongError,
    QueueFullError,
)
from octavo.core.batch import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import StepStats
from octavo.core.thought_texts import ThoughtTexts
from octavo.server.engine import (
    client,
    front,
    introductions,
    process,
    replicas,
    supervisor,
    wire,
    worker,
)
from octavo.server.engine.generation import EngineFacts, GenerationStats
from octavo.server.engine.wire import (
    MessageDecoder,
    delta_from_list,
    delta_to_list,
    encode_message,
    error_from_message,
    error_to_message,
    facts_from_dict,
    params_to_dict,
    record_from_list,
    record_to_list,
    set_stats,
    stats_to_list,
)
from octavo.serving.outputs import Delta

MESSAGES = st.lists(
    st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.lists(st.integers())))
)


@settings(deadline=None)
@given(MESSAGES, st.data())
def test_messages_survive_any_cuts(messages, data):
    stream = b"".join(map(encode_message, messages))
    decoder, found = MessageDecoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += decoder.feed(stream[:size])
        stream = stream[size:]
    assert found == messages


def test_an_absurd_length_is_not_allocated():
    with pytest.raises(ValueError, match="4294967295 bytes"):
        list(MessageDecoder().feed(b"\xff\xff\xff\xff"))


LOGPROB = TokenLogprobs(5, -0.25, 2, ((7, -0.125), (5, -0.25)))


@pytest.mark.parametrize(
    "delta",
    [
        Delta(0, "", []),
        Delta(1, "é\ud800\n", [1, 2]),
        Delta(0, "a", [5], [LOGPROB]),
        Delta(0, "a", [5], [], "stop", "###", -1.5),
        Delta(3, "", [5], [LOGPROB], "error", None, None, "NaN"),
        Delta(0, "a", [5], [LOGPROB._replace(logprob=float("-inf"))], "stop", 7),
    ],
)
def test_deltas_come_back_as_they_were(delta):
    sent = json.loads(encode_message({"x": delta_to_list("r", delta)})[4:])["x"]
    assert delta_from_list(sent) == ("r", delta)


def test_a_record_comes_back_whole_whatever_is_in_it():
    """A figure more is a field more: nothing on the way has a list of them."""
    values = [index + 0.5 for index, _ in enumerate(dataclasses.fields(StepStats))]
    record = dataclasses.replace(StepStats(*values), draft_accepted_by_position=(3, 2, 1))
    sent = json.loads(encode_message({"x": record_to_list(record)})[4:])["x"]
    assert record_from_list(sent) == record


def test_stats_of_a_request_come_back():
    stats = GenerationStats(7, 1, 2, *range(3, 13))
    received = GenerationStats(7, 1, 2)
    set_stats(received, json.loads(json.dumps(stats_to_list(stats))))
    assert received == stats


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(n=3, max_tokens=None, stop=("a", "b"), seed=2**64 - 1, top_p=0.5),
        SamplingParams(speculative={"enabled": False, "num_speculative_tokens": 3}),
        SamplingParams(logit_bias={5: -1.5, 7: 2}, allowed_token_ids=(1, 2), prompt_logprobs=0),
        SamplingParams(
            thinking_token_budget=3,
            thought_texts=ThoughtTexts("<a>", ("</a>",), "</a>", True),
        ),
    ],
)
def test_parameters_are_sent_as_far_as_they_say_something(params):
    sent = json.loads(json.dumps(params_to_dict(params)))
    assert SamplingParams(**sent) == params
    assert len(sent) <= 5


def test_facts_come_back():
    facts = EngineFacts(1, 2, 3, 4, 5, (6, 7), {"top_p": 0.5}, {"device": "cpu"}, ("a", "b"))
    assert facts_from_dict(json.loads(json.dumps(dataclasses.asdict(facts)))) == facts


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("must be more", "n"),
        PromptTooLongError("too long", 7, 5),
        ModelNotFoundError("no such model"),
        EngineError("a bug"),
        QueueFullError("too many constraints", 2.5),
        EngineUnavailableError("not now", 1.5),
        QueueFullError("full"),
        ConstraintError("is none", "structured_outputs.json", "unsatisfiable"),
    ],
)
def test_errors_come_back_as_they_were(error):
    received = error_from_message(json.loads(json.dumps(error_to_message(error))))
    assert type(received) is type(error) and str(received) == str(error)
    assert vars(received) == vars(error)


@pytest.mark.parametrize("error", [ValueError("x"), ModelFileError("f", "x"), KeyError("QUIET")])
def test_what_is_none_of_ours_is_the_engines_error(error):
    received = error_from_message(json.loads(json.dumps(error_to_message(error))))
    assert type(received) is EngineError and str(received) == str(error)


def test_messages_are_those_that_are_written_down():
    """Every op and event that one side knows is in the table, and the other way round."""
    table = wire.__doc__.partition("To the engine")[2]
    documented = set(re.findall(r"^    ([a-z_]+) {2,}[a-z]", table, re.MULTILINE)) | {"stop"}
    sources = [
        Path(module.__file__).read_text()
        for module in (client, front, introductions, replicas, process, supervisor, worker)
    ]
    named = re.findall(r'"(?:op|ev)": "(\w+)"', "".join(sources))
    matched = re.findall(r'case ((?:"\w+"(?: \| )?)+):', "".join(sources))
    matched = {name for names in matched for name in re.findall(r"\w+", names)}
    assert set(named) == documented
    assert matched <= documented
