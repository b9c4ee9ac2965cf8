from __future__ import annotations

from functools import partial

import pytest

from octavo.quantize import quantization_job


@pytest.fixture
def few_steps(monkeypatch):
    """Autoround takes 16 steps a layer, not 128: for tests of everything around it. What steps are
    worth is tested in test_autoround.py and test_pipeline.py."""
    monkeypatch.setattr(
        quantization_job, "quantize_model", partial(quantization_job.quantize_model, steps=16)
    )
