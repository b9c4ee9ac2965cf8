from __future__ import annotations

import math

import pytest

from octavo.base.errors import ConfigError
from octavo.workload.plan import LoadPlan, create_plan, create_requests
from octavo.workload.requests import WorkloadRequest
from octavo.workload.settings import LoadSettings, Workload


class ByteTokenizer:
    vocab_size = 256

    def encode(self, text):
        return list(text.encode())

    def is_special(self, token_id):
        return token_id < 200


def test_workloads():
    requests = create_requests(
        Workload(num_prompts=3, random_input_len=5, random_output_len=7, random_prefix_len=2),
        ByteTokenizer(),
    )
    assert [len(request.prompt_token_ids) for request in requests] == [7] * 3
    assert {request.output_len for request in requests} == {7}
    assert all(token >= 200 for request in requests for token in request.prompt_token_ids)
    assert len({request.prompt_token_ids[:2] for request in requests}) == 1
    settings = Workload(
        dataset_name="prefix_repetition",
        num_prompts=4,
        prefix_repetition_prefix_len=3,
        prefix_repetition_suffix_len=2,
        prefix_repetition_num_prefixes=2,
        output_len=9,
    )
    requests = create_requests(settings, ByteTokenizer())
    assert {request.output_len for request in requests} == {9}
    assert len({request.prompt_token_ids[:3] for request in requests}) == 2


def test_plans():
    requests = [WorkloadRequest(str(i), prompt="x") for i in range(3)]
    assert create_plan(LoadSettings(), requests, 0).times == [0.0] * 3
    closed = create_plan(LoadSettings(max_concurrency=2), requests, 0)
    assert closed.times is None and closed.max_concurrency == 2
    even = create_plan(LoadSettings(request_rate=4, burstiness=math.inf), requests, 0)
    assert even.times == pytest.approx([0.25, 0.5, 0.75])
    drawn = create_plan(LoadSettings(request_rate=4), requests, 1).times
    assert drawn != create_plan(LoadSettings(request_rate=4), requests, 2).times
    rescaled = create_plan(LoadSettings(request_rate=4, rescale_arrivals=True), requests, 1).times
    assert rescaled[-1] == pytest.approx(0.75)
    edges = {"ramp_up_start_rps": 1.0, "ramp_up_end_rps": 9.0}
    ramp = LoadSettings(ramp_up_strategy="linear", burstiness=math.inf, **edges)
    times = create_plan(ramp, requests, 0).times
    assert times[-1] == pytest.approx(0.6) and times[1] - times[0] > times[2] - times[1]

    traced = [WorkloadRequest(str(i), prompt="x", arrival_s=i * 0.5) for i in range(3)]
    assert create_plan(LoadSettings(max_concurrency=1), traced, 0).times == [0.0, 0.5, 1.0]
    assert create_plan(LoadSettings(request_rate=1000), traced, 0).times[-1] < 0.5


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: Workload(num_prompts=0), "num_prompts"),
        (lambda: LoadSettings(request_rate=0), "request_rate"),
        (lambda: LoadSettings(request_rate=math.nan), "request_rate"),
        (lambda: LoadSettings(max_concurrency=0), "max_concurrency"),
        (lambda: LoadSettings(ramp_up_start_rps=1), "need a ramp_up_strategy"),
        (lambda: LoadSettings(ramp_up_strategy="linear"), "a ramp needs"),
        (
            lambda: LoadSettings(1.0, 1.0, None, "linear", 1.0, 2.0),
            "request_rate or a ramp",
        ),
    ],
)
def test_settings_are_checked(create, message):
    with pytest.raises(ConfigError, match=message):
        create()


def test_a_closed_loop_has_a_number_of_clients():
    with pytest.raises(ConfigError, match="closed loop"):
        LoadPlan(None)
