"""benchmarks/request.py, which `scripts/bench` runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "request.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="needs the source tree")
def test_it_measures_on_the_kernels_that_there_are(tiny_model):
    command = [sys.executable, SCRIPT, tiny_model, "--input-len=20", "--output-len=10"]
    command += ["--repeat=1", "--batch-size", "1", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert all(value > 0 for values in figures.values() for value in values)
    for size in (1, 3):
        label = f"outside the kernels, for a token of each, batch {size} (µs)"
        assert 1 < figures[label][0] < 100_000
