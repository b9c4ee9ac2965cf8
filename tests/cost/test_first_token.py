"""Nobody is predicted to be served sooner for standing in a longer queue."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_models import llama_8b

from octavo.core.prompt_chunks import ChunkSeconds
from octavo.cost.catalogue import spec_of
from octavo.cost.find_device import find_device
from octavo.cost.first_token import (
    Backlog,
    FirstToken,
    LearnedRates,
    PredictedRates,
    SlowedRates,
    num_pairs,
)
from octavo.cost.hardware import Device
from octavo.cost.measured_steps import ROW_KNOTS, MeasuredSteps, Spread, calibrated
from octavo.cost.parallel import Parallel
from octavo.cost.pipeline import Pipeline
from octavo.cost.precision import precision_of
from octavo.cost.step_cost import StepModel
from octavo.cost.work import Span
from octavo.sim import FleetSettings, LoadSettings, Workload, prepare

DEVICE = Device(
    name="a processor",
    kind="cpu",
    memory_bytes=64e9,
    memory_bandwidth=50e9,
    peaks={"fp16": 2e12},
    is_measured=True,
)
MODEL = llama_8b(activation_bytes=0.0)
ROOFLINE = StepModel.of(MODEL, DEVICE)
MEASURED = calibrated(
    MODEL,
    DEVICE,
    MeasuredSteps(
        {
            "step": 1e-3,
            "sequence": 1e-4,
            "pass": 0.1,
            "decode_key": 1e-6,
            **{f"rows_from_{knot}": 2e-3 for knot in ROW_KNOTS},
            "prompt_score": 1e-7,
        },
        {"decode": Spread(0.9, 1.1)},
        512,
        64,
        7000,
    ),
)
RATES = {
    "roofline": PredictedRates(ROOFLINE, 512, 4096),
    "measured": PredictedRates(MEASURED, 512, 4096),
    "learned": LearnedRates(0.05, 1e-3),
    "slowed": SlowedRates(PredictedRates(ROOFLINE, 512, 4096), 3.0, 2.0),
}
ENGINES = st.builds(
    FirstToken,
    max_num_seqs=st.integers(1, 64),
    max_num_batched_tokens=st.integers(1, 2048),
    target_step_seconds=st.sampled_from([0.0, 0.08, 0.5]),
    stages=st.sampled_from([1, 1, 2, 4]),
)
BACKLOGS = st.builds(
    Backlog,
    num_running=st.integers(0, 64),
    num_running_tokens=st.integers(0, 100_000),
    num_due_tokens=st.integers(0, 5000),
    num_waiting=st.integers(0, 200),
    num_waiting_tokens=st.integers(0, 100_000),
    num_waiting_pairs=st.integers(0, 10_000_000),
)


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@given(
    ENGINES,
    BACKLOGS,
    st.integers(1, 4096),
    st.floats(0, 500),
    st.sampled_from([*Backlog._fields, "num_tokens", "answer_tokens"]),
    st.integers(1, 2000),
)
def test_more_to_do_never_takes_less(rates, engine, backlog, num_tokens, answer, what, more):
    before = engine.seconds(backlog, num_tokens, rates, answer)
    assert before == engine.seconds(backlog, num_tokens, rates, answer) > 0
    if what in Backlog._fields:
        backlog = backlog._replace(**{what: getattr(backlog, what) + more})
    num_tokens += more * (what == "num_tokens")
    answer += more * (what == "answer_tokens")
    after = engine.seconds(backlog, num_tokens, rates, answer)
    assert after >= before * (1 - 1e-12)


@dataclass(frozen=True)
class Plain:
    """10 ms, one for each sample, and 2 for each token of a prompt."""

    prompt_token: float = 0.002
    prompt_pair: float = 0.0

    def decode(self, num_seqs: int, num_tokens: int) -> float:
        return 0.010 + 0.001 * num_seqs

    @property
    def chunk(self) -> ChunkSeconds:
        return ChunkSeconds(4096, lambda num_tokens: 0.010 + num_tokens * self.prompt_token)


def test_a_prompt_alone_takes_its_step():
    engine = FirstToken(8, 100)
    assert engine.seconds(Backlog(), 50, Plain()) == pytest.approx(0.011 + 0.100)
    # Two steps and a half, which each have to read the weights.
    assert engine.seconds(Backlog(), 250, Plain()) == pytest.approx(2.5 * 0.011 + 0.500)


def test_prompts_before_it_and_answers_beside_it():
    engine = FirstToken(8, 100)
    waiting = Backlog(num_waiting=2, num_waiting_tokens=300)
    # One of the two, on the mean, decodes: a step has room for 99.
    assert engine.seconds(waiting, 50, Plain()) == pytest.approx(350 / 99 * 0.011 + 0.700)
    running = Backlog(num_running=4, num_due_tokens=46)
    assert engine.seconds(running, 50, Plain()) == pytest.approx(0.014 + 0.192)


def test_a_target_for_steps_makes_chunks_small():
    engine = FirstToken(8, 1000, target_step_seconds=0.080)
    running = Backlog(num_running=4)
    room = (0.080 - 0.014) / 0.002
    assert engine.seconds(running, 330, Plain()) == pytest.approx(330 / room * 0.014 + 0.660)
    assert engine.seconds(Backlog(), 330, Plain()) == pytest.approx(0.011 + 0.660)


def test_a_seat_has_to_become_free():
    engine, full = FirstToken(4, 1000), Backlog(num_running=4, num_waiting=3)
    # Four answers of 50 tokens have to end, and in each step a token of all four comes.
    assert engine.seconds(full, 1, Plain(), 50.0) == pytest.approx(50 * 0.014 + 0.002)
    assert engine.seconds(full, 1, Plain()) == pytest.approx(0.014 + 0.002)  # nobody knows


@pytest.mark.parametrize("steps", [ROOFLINE, MEASURED], ids=["roofline", "measured"])
@pytest.mark.parametrize(("start", "count"), [(0, 512), (0, 300), (3000, 512)])
def test_rates_say_what_the_step_model_does(steps, start, count):
    rates = PredictedRates(steps, 512, 4096)
    seen = num_pairs(start + count) - num_pairs(start)
    said = rates.decode(1, 0) + count * rates.prompt_token + seen * rates.prompt_pair
    assert said == pytest.approx(steps.cost([Span(start, count)]).total.value, rel=0.15)
    decoding = [Span(100, 1)] * 5 + [Span(99, 1)] * 2
    assert rates.decode(7, 698) == pytest.approx(steps.cost(decoding).total.value)


def test_a_prompt_goes_through_all_stages():
    """In chunks of 64 tokens, 31.25 of them, of which the last one goes on through three stages."""
    one, four = FirstToken(8, 4096), FirstToken(8, 4096, stages=4)
    assert one.seconds(Backlog(), 2000, Plain()) == pytest.approx(0.011 + 2000 * 0.002)
    expected = (2000 / 64 + 3) * (0.010 + 64 * 0.002)
    assert four.seconds(Backlog(), 2000, Plain()) == pytest.approx(expected, rel=0.01)


def test_a_short_prompt_is_in_one_step_of_a_pipeline():
    engine = FirstToken(8, 4096, stages=2)
    assert engine.seconds(Backlog(), 16, Plain()) == pytest.approx(2 * (0.010 + 16 * 0.002))


def test_a_slot_of_a_pipeline_gets_a_token_after_as_many_steps_as_stages():
    full = Backlog(num_running=4)
    one, two = (
        FirstToken(4, 1000, stages=stages).seconds(full, 1, Plain(prompt_token=0), 10.0)
        for stages in (1, 2)
    )
    assert one == pytest.approx(10 / 4 * 0.014)
    assert two == pytest.approx((2 * 10 / 4 + 1) * 0.012)


def test_simulated_pipelines_bring_first_tokens_as_predicted():
    """The prompt of a lone request, by the rates of one stage of four."""
    spec = spec_of("llama-3.1-8b")
    device, _ = find_device("h100-sxm")
    stages = Pipeline.of(spec, precision_of(spec), Parallel(pp=4), device, "octavo").stages
    rates = PredictedRates(stages[-1], 2048, 8192)
    fleet = FleetSettings(hardware="h100-sxm:4", tp=1, pp=4)
    for num_tokens in (200, 2000, 6000):
        workload = Workload(num_prompts=1, input_len=num_tokens, output_len=2)
        report = prepare(spec, fleet, workload, LoadSettings()).run()
        found = FirstToken(256, 2048, stages=4).seconds(Backlog(), num_tokens, rates)
        assert found == pytest.approx(report.result.records[0].ttft, rel=0.12)
