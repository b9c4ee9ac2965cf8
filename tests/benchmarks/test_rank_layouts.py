"""The benchmark of layouts runs all of them, and compares their answers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from octavo.kernels.cpu.library import runnable

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rank_layouts.py"

pytestmark = pytest.mark.skipif(not runnable(), reason="no native library was built")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("rank_layouts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layouts_of_a_model_with_experts_in_turns(script, tiny_hf, capsys):
    sizes = ("--rounds=1", "--threads=2", "--output-len=4", "--input-len=24", "--batch-size=2")
    script.main([str(tiny_hf("mixtral")), *sizes])
    lines = capsys.readouterr().out.splitlines()
    found = [tuple(line.split()[:2]) for line in lines[1:-1]]
    assert found == [
        (what, layout)
        for what in ("token", "prompt", "batch")
        for layout in ("one", "cut", "whole")
    ]
    assert lines[-1].startswith("whole: in steps, the busiest rank had ")


def test_another_layout_is_refused(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["model", "--layouts=one,half"])
    assert "no layout 'half'" in capsys.readouterr().err
