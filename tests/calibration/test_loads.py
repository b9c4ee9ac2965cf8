"""The loads of a calibration: what fits, and every kind of step."""

from __future__ import annotations

import pytest

from octavo.calibration.loads import EngineSize, calibration_loads

SIZES = (
    EngineSize(64, 512, 8192, 100_000),
    EngineSize(256, 8192, 32_768, 400_000),
    EngineSize(1, 64, 128, 256),
    EngineSize(4, 2048, 512, 2048),
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("quick", [False, True])
def test_every_request_fits(size, quick):
    found = calibration_loads(size, quick=quick)
    assert found
    for trial in found:
        assert all(prompt + answer <= size.max_model_len for prompt, answer in trial.lengths)
        assert all(prompt > 0 and answer > 0 for prompt, answer in trial.lengths)


def test_there_is_every_kind_of_step():
    found = calibration_loads(SIZES[0])
    counts = {len(trial.lengths) for trial in found}
    assert {1, 2, 4, 8, 16, 32, 64} <= counts
    alone = {prompt for trial in found if len(trial.lengths) == 1 for prompt, _ in trial.lengths}
    assert min(alone) <= 16 and max(alone) >= 512  # one chunk, and more
    assert any(len(set(trial.lengths)) > 8 for trial in found)


def test_quick_is_less():
    def work(quick):
        return sum(trial.num_tokens for trial in calibration_loads(SIZES[0], quick=quick))

    assert work(True) < work(False) / 2


def test_the_same_engine_gets_the_same_loads():
    assert calibration_loads(SIZES[0]) == calibration_loads(SIZES[0])
