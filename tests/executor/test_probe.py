"""What executors say of themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hash_model import HashExecutor

from octavo.base.errors import EngineError
from octavo.core.clock import VirtualClock
from octavo.core.executor import NoModel
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.executor.faulty import FaultyExecutor
from octavo.executor.simulated import SimulatedExecutor
from octavo.kernels.cpu.library import runnable

NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(not runnable(), reason="no native library was built")
)


class Rows:
    """Remembers the rows of logits that it saw."""

    def __init__(self):
        self.seen = []

    def wants(self, request):
        return range(request.num_prompt_tokens - 1)

    def observe(self, request, first, logits):
        self.seen += [(first + index, np.array(row)) for index, row in enumerate(logits)]


@pytest.fixture(params=["reference", NATIVE])
def engine(request, tiny_model):
    from octavo.serving.load import load_engine
    from octavo.settings.engine import EngineArgs

    args = EngineArgs(model=str(tiny_model), kernels=request.param, threads=1, num_blocks=8)
    engine = load_engine(args).text_engine.engine
    yield engine
    engine.close()


def run(engine, name="r", prompt=(1, 2, 3, 4)):
    engine.add(Request(name, list(prompt), SamplingParams(max_tokens=2, temperature=0), 0.0))
    while engine.step():
        pass


def test_its_figures_move_on_with_the_executor(engine):
    probe = engine.executor.probe()
    before = probe.kernel_seconds
    run(engine)
    assert probe.kernel_seconds > before


def test_logits_are_shown_until_nobody_wants_them(engine):
    rows = Rows()
    engine.executor.probe().observe_logits(rows)
    run(engine, "a")
    assert [position for position, _ in rows.seen] == [0, 1, 2]
    assert all(row.shape == (260,) and np.isfinite(row).all() for _, row in rows.seen)
    engine.executor.probe().observe_logits(None)
    run(engine, "b")
    assert len(rows.seen) == 3


def test_the_device_is_measured_in_what_the_model_computes_in(engine):
    probe = engine.executor.probe()
    assert probe.num_threads >= 1
    for arithmetic in {matrix.arithmetic for matrix in probe.matrices()}:
        one, three = (probe.products(arithmetic)(rounds) for rounds in (1, 3))
        assert one > 0 and three == 3 * one
    assert probe.products(probe.attention_arithmetic)(1) > 0
    assert probe.reads()() >= 2**28


def test_a_wrapper_passes_it_on(engine):
    rows = Rows()
    engine.executor = FaultyExecutor(engine.executor, {"raise": 99})
    engine.executor.probe().observe_logits(rows)
    run(engine)
    assert len(rows.seen) == 3


@pytest.mark.parametrize(
    "executor",
    [HashExecutor(4, 4), SimulatedExecutor(lambda batch: 1.0, VirtualClock(), 4)],
    ids=["hashing", "simulated"],
)
def test_where_no_model_runs_there_is_nothing_to_see(executor):
    probe = executor.probe()
    assert isinstance(probe, NoModel) and probe.matrices() == () and probe.kernel_seconds == 0
    probe.observe_logits(None)
    for ask in (lambda: probe.observe_logits(Rows()), lambda: probe.products("a"), probe.reads):
        with pytest.raises(EngineError, match="no model runs"):
            ask()
