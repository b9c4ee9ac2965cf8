from __future__ import annotations

import json
from dataclasses import replace

import pytest

from octavo import __version__, cli, doctor
from octavo.doctor import (
    Cuda,
    CudaDevice,
    DoctorReport,
    Finding,
    KernelChoice,
    Lack,
    NativeKernels,
    Storage,
)
from octavo.system import machine, numa
from octavo.system.gpu_software import Alternative, GpuSoftware, GpuTrial

GIB = 1 << 30

REPORT = DoctorReport(
    octavo=__version__,
    python="3.12.0",
    python_path="/usr/bin/python",
    platform="Linux",
    packages={"torch": "2.13.0", "rich": None},
    cpu=machine.Cpu("Test [CPU]", "x86_64", ("avx2",), 8, 4, 8, 1.5),
    usable_cores=2,
    memory=machine.Memory(16 * GIB, 2 * GIB, 4 * GIB),
    numa_nodes=(
        numa.Node(0, (0, 1, 2, 3), 8 * GIB, GIB),
        numa.Node(1, (), 8 * GIB, 2 * GIB, has_memory=False),
    ),
    cuda=Cuda((CudaDevice("GPU", 80 * GIB, "9.0"),), None),
    gpu=GpuSoftware(
        "570.86.15",
        "13.0",
        None,
        None,
        (Alternative("FlashX", "flash-x", "attention", "1.2", "no adapter"),),
        (GpuTrial("kernels", "nowhere"),),
    ),
    compiler=None,
    native=NativeKernels(("avx2", "scalar"), "avx2", None),
    storage=Storage("/models", 5 * GIB, ("tiny",), 2 * GIB),
    kernels=(
        KernelChoice("cpu", "linear", "reference", (("native", "not compiled"),)),
        KernelChoice("cpu", "rope", "reference", (("native", "not compiled"),)),
        KernelChoice("cpu", "embed", "reference", ()),
    ),
    findings=(Finding("no C++ compiler", "apt-get install g++"),),
    platform_lacks=(Lack("uvloop", "slower"),),
)


@pytest.fixture(autouse=True)
def report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: REPORT)


def test_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "rich not installed",
        "CPU Test [CPU] (x86_64)",
        "cores 2 usable of 8 (the control group allows 1.5)",
        "memory 2.0 GiB available of 16.0 GiB (the control group allows 4.0 GiB)",
        "NUMA node 0 processors 0-3 (4), 1.0 GiB free of 8.0 GiB",
        "NUMA node 1 no processors, 2.0 GiB free of 8.0 GiB, which this process may not use",
        "CUDA 0 GPU, 80.0 GiB, compute 9.0",
        "fetched tiny, 2.0 GiB",
        "native level avx2, with 2 threads (built: avx2, scalar)",
        "cpu reference linear, rope",
        "not native: not compiled",
        "cpu reference embed",
        "driver 570.86.15",
        "Triton not installed: pip install 'octavo[gpu]'",
        "flash-x FlashX (attention): 1.2, not used: no adapter",
        "tested kernels: nowhere",
        "What this platform lacks",
        "- uvloop: slower",
        "- no C++ compiler",
        "apt-get install g++",
    ):
        assert line in lines


def test_report_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cpu"]["isa"] == ["avx2"]
    assert document["usable_cores"] == 2
    assert [node["cpus"] for node in document["numa_nodes"]] == [[0, 1, 2, 3], []]
    assert document["kernels"][0]["refused"] == [["native", "not compiled"]]
    assert document["cuda"]["devices"][0]["name"] == "GPU"
    assert document["platform_lacks"] == [{"missing": "uvloop", "consequence": "slower"}]


def test_nothing_is_said_of_a_platform_that_lacks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: replace(REPORT, platform_lacks=()))
    assert cli.main(["doctor"]) == 0
    assert "platform" not in capsys.readouterr().out
