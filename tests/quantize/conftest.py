from __future__ import annotations

from functools import partial

import pytest

from octavo.quantize import awq, quantization_job


@pytest.fixture
def few_steps(monkeypatch):
    """Autoround takes 4 steps a layer, not 128, and AWQ tries 4 scales, not 20: for tests of
    everything around them. What more are worth is tested in test_autoround.py, test_pipeline.py and
    test_channel_scaling.py."""
    monkeypatch.setattr(
        quantization_job, "quantize_model", partial(quantization_job.quantize_model, steps=4)
    )
    monkeypatch.setattr(awq, "_NUM_RATIOS", 4)
