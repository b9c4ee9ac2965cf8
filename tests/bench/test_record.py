"""What is kept with a result."""

from __future__ import annotations

import json
import sys
from datetime import datetime

import pytest

from octavo import __version__
from octavo.bench import record
from octavo.bench.noise import CpuUse, NoiseProbe
from octavo.bench.record import Recorder
from octavo.doctor import Cuda, CudaDevice


@pytest.fixture
def probes(monkeypatch):
    """``probes(Probe(…), Probe(…))``: what the machine will be found to be."""

    def prepare(*found: NoiseProbe) -> list[int]:
        left, asked = list(found), []

        def probe_machine(threads: int) -> NoiseProbe:
            asked.append(threads)
            return left.pop(0)

        monkeypatch.setattr(record, "probe_machine", probe_machine)
        return asked

    return prepare


QUIET = NoiseProbe(30.0, 200.0)


def test_a_run_is_described_as_json(probes):
    asked = probes(QUIET, NoiseProbe(33.0, 190.0))
    recorder = Recorder({"repeat": 3}, threads=5)
    with recorder:
        recorder.samples["a"] = [1.0, 2.0]
    recorder.engine = {"device": "cpu"}
    run = json.loads(json.dumps(recorder.as_json(), allow_nan=False))
    assert asked == [5, 5]
    assert datetime.fromisoformat(run["date"]).utcoffset() is not None
    assert run["elapsed_s"] >= 0
    assert run["versions"]["octavo"] == __version__
    assert run["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run["versions"]["numpy"]
    assert run["machine"]["cpu"]["model"] and run["machine"]["usable_cores"] >= 1
    assert run["machine"]["memory"]["total"] > 0
    assert run["threads"] == 5 and run["settings"] == {"repeat": 3}
    assert run["engine"] == {"device": "cpu"} and run["samples"] == {"a": [1.0, 2.0]}
    assert run["noise"]["before"] == {"read_gbytes_per_s": 30.0, "gemm_gflops": 200.0}
    assert run["noise"]["after"]["gemm_gflops"] == 190.0


def test_a_gpu_says_what_it_took(probes, monkeypatch):
    probes(QUIET, QUIET, QUIET, QUIET)
    with Recorder({}) as without:
        pass
    assert without.as_json()["gpu_energy"]["joules"] is None

    class Meter:
        def __init__(self):
            self._left = [1000.0, 1700.0]

        @property
        def joules(self):
            return self._left.pop(0)

    gpu = CudaDevice("GPU", 1 << 30, "9.0", "12-34")
    monkeypatch.setitem(sys.modules, "torch", sys)  # loaded, whatever it is
    monkeypatch.setattr(record, "find_cuda", lambda: Cuda((gpu,), None))
    monkeypatch.setattr(record, "open_energy", {"12-34": Meter()}.__getitem__)
    with Recorder({}) as recorder:
        pass
    said = recorder.as_json()["gpu_energy"]
    assert said["joules"] == 700.0 and said["watts"] > 0 and said["why_not"] is None


def test_the_best_bandwidth_is_the_ceiling(probes):
    probes(QUIET, NoiseProbe(33.0, 190.0))
    with Recorder({}) as recorder:
        pass
    assert recorder.read_bandwidth == 33e9


@pytest.mark.parametrize(
    ("after", "warning"),
    [
        (NoiseProbe(20.0, 200.0), "memory bandwidth moved from 30 to 20 GB/s"),
        (NoiseProbe(30.0, 300.0), "arithmetic moved from 200 to 300 GFLOP/s"),
        (NoiseProbe(29.0, 180.0), None),
    ],
)
def test_a_machine_that_moved_is_warned_of(probes, after, warning, monkeypatch):
    monkeypatch.setattr(CpuUse, "others", property(lambda self: 0.0))
    probes(QUIET, after)
    with Recorder({}) as recorder:
        pass
    assert recorder.warnings == ([] if warning is None else [warning])


def test_others_at_work_are_warned_of_where_that_can_be_told(probes, monkeypatch):
    monkeypatch.setattr(CpuUse, "others", property(lambda self: 1.5))
    probes(QUIET, QUIET, QUIET, QUIET)
    with Recorder({}) as recorder:
        pass
    assert recorder.warnings == ["other processes kept 1.5 processors busy"]
    assert recorder.as_json()["noise"]["other_processors"] == 1.5
    with Recorder({}, owns_work=False) as recorder:  # a server is at work, and is to be
        pass
    assert recorder.warnings == []
    assert recorder.as_json()["noise"]["other_processors"] is None


def test_a_run_that_fails_is_not_probed_again(probes):
    asked = probes(QUIET)
    with pytest.raises(RuntimeError, match="broke"), Recorder({}):
        raise RuntimeError("it broke")
    assert len(asked) == 1


def test_a_run_can_be_described_before_it_began():
    run = Recorder({}).as_json()
    assert run["noise"] == {"before": None, "after": None, "other_processors": None}


def test_only_variables_that_matter_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OCTAVO_ISA", "avx2")
    monkeypatch.setenv("HF_TOKEN", "secret")
    kept = record.environment()
    assert kept["OMP_NUM_THREADS"] == "3" and kept["OCTAVO_ISA"] == "avx2"
    assert "HF_TOKEN" not in kept


def test_peak_memory_is_in_bytes():
    assert record.peak_rss_bytes() > 20 * 2**20
