"""What a GPU's engine keeps back, counted without a GPU, and what the planner foresees of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch  # noqa: E402

from octavo.bench.gpu.random_model import SHAPES, write_random_model  # noqa: E402
from octavo.cost.engine_profile import Limits, profile  # noqa: E402
from octavo.cost.hardware import Device  # noqa: E402
from octavo.cost.memory import memory  # noqa: E402
from octavo.cost.open_spec import open_spec  # noqa: E402
from octavo.cost.parallel import Parallel  # noqa: E402
from octavo.cost.precision import precision_of  # noqa: E402
from octavo.kernels.cuda.attention_plan import Gpu  # noqa: E402
from octavo.kernels.cuda.gemm_dispatch import GemmConditions  # noqa: E402
from octavo.runtime.capacity import RankSpec  # noqa: E402
from octavo.runtime.cuda_components import TritonComponents  # noqa: E402
from octavo.runtime.memory_ledger import GRAPHS  # noqa: E402
from octavo.runtime.rank import Rank  # noqa: E402

H100 = Device(name="h", kind="gpu", memory_bytes=80e9, memory_bandwidth=3e12, peaks={})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers of a real shape."""
    path = tmp_path_factory.mktemp("planned") / "model"
    shape = replace(SHAPES["0.6b"], num_hidden_layers=2, vocab_size=20_000)
    write_random_model(path, shape, "bf16")
    return path


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(256, 2048), (16, 8192), (64, 512)])
def test_the_planner_foresees_what_the_ledger_counts(model, monkeypatch, num_seqs, num_tokens):
    sizes = {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": num_tokens,
        "max_model_len": 4096,
    }
    rank = Rank.load(RankSpec(model, dtype="bfloat16", kernels="fused", **sizes))
    components = TritonComponents(torch.device("cuda"), GemmConditions(Gpu(90, 132)))
    monkeypatch.setattr(rank.backend, "_components", components)
    lines = {line.name: line.num_bytes for line in rank.backend.planned_memory()}

    spec, rules = open_spec(str(model)), profile("octavo")
    precision = precision_of(spec, None, rules.kv_dtype(None))
    plan = memory(spec, precision, Parallel(), H100, rules, Limits(**sizes))
    graphs = lines.pop(GRAPHS)
    counted = sum(lines.values())
    assert plan.activations.low <= counted <= plan.activations.high, lines
    assert graphs <= plan.graphs_bytes
