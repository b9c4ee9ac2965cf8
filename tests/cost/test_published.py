"""What others have measured and logged, against what is foreseen: each case says where it is from.

``published_memory.json`` has start-up logs of vLLM, in GiB of one device; ``published_speeds.json``
tokens a second of prompts, of answers, or of both together; and ``published_fits.json`` the steps
of DistServe's engine, which has no CUDA graphs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cost.engine_profile import Limits, profile
from octavo.cost.find_device import find_device
from octavo.cost.memory import MemoryPlan, memory
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import Precision, precision_of
from octavo.cost.prediction import Prediction
from octavo.cost.rank import rank_model
from octavo.cost.step_cost import StepModel
from octavo.cost.work import Span

GIB = 1 << 30
HERE = Path(__file__).parent


def cases(name: str) -> list[Any]:
    entries = json.loads((HERE / name).read_text(encoding="utf-8"))
    return [pytest.param(each, id=f"{each['model']}-{i}") for i, each in enumerate(entries)]


def precision(case: dict[str, Any]) -> Precision:
    kv = profile(case["engine"]).kv_dtype(case.get("kv_cache_dtype"))
    return precision_of(
        open_spec(case["model"]), case.get("quantization"), kv, dtype=case.get("dtype")
    )


def parallel(case: dict[str, Any]) -> Parallel:
    return Parallel(tp=case.get("tp", 1), pp=case.get("pp", 1))


def foreseen(case: dict[str, Any]) -> MemoryPlan:
    return memory(
        open_spec(case["model"]),
        precision(case),
        parallel(case),
        find_device(case["hardware"])[0],
        profile(case["engine"]),
        Limits(**case["limits"]),
    )


@pytest.mark.parametrize("case", cases("published_memory.json"))
def test_memory_is_as_it_was_logged(case):
    found = foreseen(case)
    if "weights_gib" in case:
        assert found.weights_bytes / GIB == pytest.approx(case["weights_gib"], rel=0.02)
    if "activations_gib" in case:
        assert found.activations.value / GIB == pytest.approx(case["activations_gib"], rel=0.11)
        assert found.activations.low <= case["activations_gib"] * GIB <= found.activations.high
    if "kv_tokens" in case:
        assert found.kv_tokens == pytest.approx(case["kv_tokens"], rel=0.015)
    if (kv_gib := logged_kv_gib(case, found)) is not None:
        assert found.left_bytes / GIB == pytest.approx(kv_gib, rel=0.02)
        assert found.left.low <= kv_gib * GIB <= found.left.high


def logged_kv_gib(case: dict[str, Any], found: MemoryPlan) -> float | None:
    """What a log has, or what its parts leave; weights are those foreseen where it has none."""
    if "kv_gib" in case or "non_torch_gib" not in case:
        return case.get("kv_gib")
    weights = case.get("weights_gib", found.weights_bytes / GIB)
    left = found.usable_bytes / GIB - weights - case["activations_gib"] - case["non_torch_gib"]
    return float(left)


@pytest.mark.parametrize("case", cases("published_speeds.json"))
def test_speed_is_as_it_was_measured(case):
    rank = rank_model(open_spec(case["model"]), precision(case), parallel(case))
    device = find_device(case["hardware"])[0]
    model = StepModel.of(rank, device, case["engine"], eager=case.get("eager", False))
    sequences, prompt = case.get("sequences", 1), case.get("prompt", 0)
    answer = case.get("answer", 0)
    found = Prediction.sure(0.0)
    if prompt:
        found = model.cost([Span(0, prompt)] * sequences).total
    every = max(1, answer // 16)
    for position in range(prompt, prompt + answer, every):
        found += model.cost([Span(position, 1)] * sequences).total * every
    seconds = sequences * (answer or prompt) / case["tokens_per_s"]
    assert found.value == pytest.approx(seconds, rel=case["tolerance"])
    assert found.low <= seconds <= found.high


FITS = json.loads((HERE / "published_fits.json").read_text(encoding="utf-8"))["fits"]


@pytest.mark.parametrize("fit", FITS, ids=[f"{fit['model']}-tp{fit['tp']}" for fit in FITS])
def test_steps_are_as_they_were_fitted(fit):
    """Reference case R25, and the same of a larger model."""
    rank = rank_model(open_spec(fit["model"]), precision({**fit, "engine": "vllm"}), parallel(fit))
    model = StepModel.of(rank, find_device("a100-80-sxm")[0], "vllm", eager=True)
    constant, per_token, per_square = fit["prompt_ms"]
    for num_tokens in (512, 1024, 2048):
        ms = constant + per_token * num_tokens + per_square * num_tokens**2
        found = model.cost([Span(0, num_tokens)]).total
        assert found.value * 1e3 == pytest.approx(ms, rel=0.16)
        assert found.low * 1e3 <= ms <= found.high * 1e3
    constant, per_key, per_sequence = fit["decode_ms"]
    for num_seqs in (1, 16, 64):
        ms = constant + num_seqs * (512 * per_key + per_sequence)
        found = model.cost([Span(512, 1)] * num_seqs).total
        assert found.value * 1e3 == pytest.approx(ms, rel=0.15)
        assert found.low * 1e3 <= ms <= found.high * 1e3
