"""One step by names is that of the model of steps."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.engine_profile import profile
from octavo.cost.find_device import find_device
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.cost.rank import rank_model
from octavo.cost.step_cost import StepModel
from octavo.cost.work import Span
from octavo.planner import step_cost

NAMES = ("llama-3.1-70b", "h100-sxm:4", "vllm")


def expected(spans, parallel, quantization=None, num_steps=1):
    spec = open_spec("llama-3.1-70b")
    rank = rank_model(spec, precision_of(spec, quantization), parallel)
    return StepModel.of(rank, find_device("h100-sxm")[0], "vllm").cost(spans, num_steps)


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("parallel", [None, Parallel(tp=2, pp=2), Parallel(tp=8)])
def test_a_step_is_that_of_the_model_of_steps(parallel, quantization):
    spans = [Span(1000, 1), Span(0, 512, 0), Span.verifying(77, 3)]
    found = step_cost(spans, *NAMES, parallel=parallel, quantization=quantization)
    cost = expected(spans, parallel or Parallel(tp=4), quantization)
    assert found.ops == cost.ops
    assert (found.comm, found.overhead) == (cost.comm.value, cost.overhead.value)
    total = cost.total
    assert (found.total, found.low, found.high) == (total.value, total.low, total.high)
    assert found.source == total.source == "roofline"


def test_chunks_may_be_pairs_and_a_batch_may_be_an_engines():
    spans = [Span(1000, 1), Span(0, 512)]
    assert step_cost([(1000, 1), (0, 512)], *NAMES) == step_cost(iter(spans), *NAMES)
    batch = SimpleNamespace(items=spans, num_multi_steps=4)
    assert step_cost(batch, *NAMES).total == expected(spans, Parallel(tp=4), None, 4).total.value


def test_things_do_as_well_as_their_names():
    spec, (device, _) = open_spec("qwen3-0.6b"), find_device("l4")
    precision = precision_of(spec, "int8", "fp8")
    by_name = step_cost([(100, 1)], "qwen3-0.6b", "l4", "vllm", quantization="int8")
    by_thing = step_cost([(100, 1)], spec, device, profile("vllm"), quantization=precision)
    assert by_thing.total < by_name.total  # of a smaller cache


def test_a_step_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="no chunk"):
        step_cost([], *NAMES)


def test_the_example_of_the_documentation_runs(capsys):
    page = (Path(__file__).parents[2] / "docs/planning.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(example, {})
    assert "roofline" in capsys.readouterr().out
