from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.base.errors import BenchmarkError
from octavo.bench.offline.prefix import PrefixPlan
from octavo.bench.offline.prefix_decode import (
    DecodeRun,
    PrefixDecodeResult,
    PrefixDecodeSample,
    measure_prefix_decode,
)
from octavo.bench.offline.session import OfflineSession
from octavo.settings.engine import EngineArgs


def run(seconds: float, tokens: list[int]) -> DecodeRun:
    return DecodeRun(10, 40, seconds, 8000.0, 6000.0, [tokens])


def test_figures_by_hand():
    samples = [
        PrefixDecodeSample(run(0.5, [1]), run(2.0, [1])),
        PrefixDecodeSample(run(0.4, [2]), run(0.8, [2])),
    ]
    result = PrefixDecodeResult(PrefixPlan(questions=4, repeat=2), samples)
    assert result.decode_tps.median == pytest.approx(90)
    assert result.speedup.min == pytest.approx(2) and result.speedup.max == pytest.approx(4)
    assert result.separate_step_seconds.median == pytest.approx(0.14)
    document = result.as_json()
    assert document["kv_bytes_per_step"] == 2000 and document["separate_kv_bytes_per_step"] == 8000
    assert document["same_answers"] is True
    other = PrefixDecodeSample(run(0.4, [2]), run(0.8, [3]))
    assert not PrefixDecodeResult(result.plan, [*samples, other]).same_answers


def test_questions_that_decode_together(tiny_model):
    args = EngineArgs(str(tiny_model), device="cpu", kernels="reference", max_model_len=256)
    plan = PrefixPlan(prefix_len=80, question_len=6, questions=4, output_len=6, repeat=2)
    parts = []
    with (
        OfflineSession(args) as together,
        OfflineSession(replace(args, shared_prefix_decode=False)) as apart,
    ):
        result = measure_prefix_decode(together, apart, plan, lambda: parts.append(1))
        with pytest.raises(BenchmarkError, match="no step in which all 4"):
            measure_prefix_decode(together, apart, replace(plan, output_len=1))
        token_bytes = together.probe.kv_bytes_per_token
    assert len(parts) == 2 and result.same_answers
    for sample in result.samples:
        assert sample.together.num_tokens == 4 * sample.together.num_steps == 4 * 5
        # Of five blocks, all but one of four requests may leave out theirs.
        assert sample.together.shared_kv_bytes == 3 * 80 * token_bytes
        assert 4 * 86 < sample.apart.kv_bytes / token_bytes < 4 * 92
