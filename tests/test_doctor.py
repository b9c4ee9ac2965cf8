from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo import doctor
from octavo.doctor import Cuda, CudaDevice, Finding, NativeKernels, Storage
from octavo.runtime import backends
from octavo.system import gpu_software, machine, numa
from octavo.system.gpu_software import driver_version

GIB = 1 << 30
NO_KERNELS = NativeKernels((), None, "not compiled")


@pytest.fixture
def healthy() -> dict:
    """A machine that lacks nothing."""
    return {
        "packages": {"torch": "2.13.0"},
        "cpu": machine.Cpu("x", "x86_64", ("avx2",), 8, 8, 8, None),
        "memory": machine.Memory(16 * GIB, 8 * GIB, None),
        "cuda": Cuda((), "no NVIDIA driver"),
        "compiler": machine.Compiler("/usr/bin/g++", "12"),
        "native": NativeKernels(("avx2",), "avx2", None),
        "storage": Storage("/home", 50 * GIB, (), 0),
    }


def findings(facts: dict) -> list[Finding]:
    software = doctor.missing_software(facts["packages"], facts["compiler"], facts["native"])
    hardware = (facts[name] for name in ("cpu", "memory", "cuda", "storage"))
    return [*software, *doctor.weak_hardware(*hardware)]


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)


def test_healthy_machine_has_no_findings(healthy: dict) -> None:
    assert findings(healthy) == []


@pytest.mark.parametrize(
    ("change", "problem", "remedy"),
    [
        ({"packages": {"rich": None}}, "rich is not installed", "pip install rich"),
        (
            {"packages": {"torch": None}, "native": NO_KERNELS},
            "nor PyTorch (pip install 'octavo[torch]'), so no model runs: not compiled",
            "pip install --force-reinstall",
        ),
        ({"native": NO_KERNELS}, "slow: not compiled", "pip install --force-reinstall"),
        ({"native": NO_KERNELS, "compiler": None}, "slow: not compiled", "apt-get install g++"),
        (
            {"cpu": machine.Cpu("x", "x86_64", ("avx",), 8, 8, 8, None)},
            "no AVX2",
            "-cpu host",
        ),
        (
            {"cpu": machine.Cpu("x", "x86_64", ("avx2",), 8, 8, 8, 1.5)},
            "may use 1.5 of the 8 cores",
            "2 threads",
        ),
        ({"memory": machine.Memory(16 * GIB, GIB // 2, GIB)}, "512 MiB of memory", "limit"),
        ({"storage": Storage("/home", GIB // 4, (), 0)}, "256 MiB of disk", "octavo rm"),
    ],
)
def test_each_lack_has_a_remedy(healthy: dict, change: dict, problem: str, remedy: str) -> None:
    (finding,) = findings(healthy | change)
    assert problem in finding.problem
    assert remedy in finding.remedy


def test_driver_without_devices(healthy: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (finding,) = findings(healthy)
    assert "no usable CUDA device: no NVIDIA driver" in finding.problem


def test_pytorch_is_missed_where_something_needs_it(
    healthy: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native kernels do without it, a GPU does not."""
    without = healthy | {"packages": {"torch": None}, "cuda": Cuda((), doctor._NO_TORCH)}
    assert findings(without) == []
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (finding,) = findings(without)
    assert "PyTorch is not installed" in finding.problem
    assert finding.remedy == "pip install 'octavo[torch]'"


def test_python_without_pip(healthy: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_pip", lambda: False)
    (finding,) = findings(healthy)
    assert "has no pip" in finding.problem and "ensurepip" in finding.remedy


def test_a_processor_that_is_not_described_is_not_blamed(healthy: dict) -> None:
    cpu = machine.Cpu("x", "AMD64", (), 8, 8, 8, None)
    assert findings(healthy | {"cpu": cpu}) == []


def test_no_compiler_helps_where_kernels_cannot_be_built(
    healthy: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "can_have_native_kernels", lambda: False)
    (finding,) = findings(healthy | {"native": NO_KERNELS, "compiler": None})
    assert finding.remedy == "for native kernels, run octavo on Linux, or in WSL 2"
    none = {"native": NO_KERNELS, "compiler": None, "packages": {"torch": None}}
    (finding,) = findings(healthy | none)
    assert finding.remedy.startswith("pip install 'octavo[torch]'; ")


def test_arm_is_not_asked_for_avx2(healthy: dict) -> None:
    cpu = machine.Cpu("x", "aarch64", ("asimd",), 8, 8, 8, None)
    assert findings(healthy | {"cpu": cpu}) == []


def fake_torch(available: bool, cuda: str | None) -> SimpleNamespace:
    properties = SimpleNamespace(name="GPU", total_memory=GIB, major=9, minor=0)
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: available,
            device_count=lambda: 2,
            get_device_properties=lambda index: properties,
        ),
    )


@pytest.mark.parametrize(
    ("torch", "driver", "reason"),
    [
        (fake_torch(False, None), False, "/dev/nvidia0), and PyTorch 2.13.0 is built without"),
        (fake_torch(False, None), True, "PyTorch 2.13.0 is built without CUDA"),
        (fake_torch(False, "13.0"), False, "no nvidia-smi"),
        (fake_torch(False, "13.0"), True, "does not start with this driver"),
    ],
)
def test_why_there_is_no_cuda(
    monkeypatch: pytest.MonkeyPatch, torch: SimpleNamespace, driver: bool, reason: str
) -> None:
    monkeypatch.setattr(doctor.importlib, "import_module", lambda name: torch)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/x" if driver else None)
    monkeypatch.setattr(doctor.Path, "exists", lambda self: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda = doctor.find_cuda()
    assert cuda.devices == () and cuda.reason is not None
    assert reason in cuda.reason


def old_driver() -> bool:
    warnings.warn("CUDA initialization: the driver is too old (found 11040)", stacklevel=2)
    return False


@pytest.mark.parametrize(
    ("driver", "told"),
    [
        ("470.82.01", "it is 470.82.01, and CUDA 13 needs 580 or later: update the driver"),
        ("580.65.06", "does not start with this driver: CUDA initialization: the driver is too"),
        (None, "does not start with this driver: CUDA initialization: the driver is too old"),
    ],
)
def test_an_old_driver_is_told_from_a_broken_one(monkeypatch, driver, told) -> None:
    torch = fake_torch(False, "13.0")
    torch.cuda.is_available = old_driver
    monkeypatch.setattr(gpu_software.importlib, "import_module", lambda name: torch)
    monkeypatch.setattr(gpu_software.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(gpu_software, "driver_version", lambda: driver)
    assert told in (gpu_software.why_no_gpu() or "")


@pytest.mark.parametrize(("device", "told"), [("cuda:1", None), ("cuda:2", "cuda:0 to cuda:1")])
def test_gpus_have_numbers(monkeypatch, device, told) -> None:
    torch = fake_torch(True, "13.0")
    monkeypatch.setattr(gpu_software.importlib, "import_module", lambda name: torch)
    reason = gpu_software.why_no_gpu(device)
    assert reason is None if told is None else told in (reason or "")


def test_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib, "import_module", lambda name: fake_torch(True, "13.0"))
    assert doctor.find_cuda() == Cuda((CudaDevice("GPU", GIB, "9.0"),) * 2, None)


def test_older_gpus_lack_what_kernels_need(healthy: dict) -> None:
    def lacks(capability: str) -> list[str]:
        device = CudaDevice("GPU", 24 * GIB, capability)
        return [each.problem for each in findings(healthy | {"cuda": Cuda((device,), None)})]

    assert lacks("9.0") == lacks("12.0") == []
    (said,) = lacks("8.6")
    assert "GPU (compute 8.6) lacks arithmetic in FP8" in said and "Triton" not in said
    (said,) = lacks("7.5")
    assert "kernels in Triton" in said


def test_the_driver_says_its_version(tmp_path: Path) -> None:
    assert driver_version(tmp_path) is None
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    )
    assert driver_version(tmp_path) == "570.86.15"


def test_nothing_is_said_to_run_on_gpus_that_never_did(monkeypatch: pytest.MonkeyPatch) -> None:
    software = gpu_software.gpu_software(lambda package: "1.0" if package == "deep-gemm" else None)
    assert software.triton is None
    (other,) = (each for each in software.alternatives if each.version)
    assert other.name == "DeepGEMM" and "no adapter" in other.why_not
    assert any("H200" in each.where for each in software.tested)


@pytest.mark.parametrize("triton", [True, False])
def test_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch, triton: bool) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: name if triton else None)
    monkeypatch.setattr(backends, "has_python_headers", lambda: True)
    monkeypatch.setenv("CC", "cc")
    assert all(choice.device == "cpu" for choice in doctor.choose_kernels(Cuda((), "none")))
    (*_, found) = doctor.choose_kernels(Cuda((CudaDevice("GPU", GIB, "9.0"),), None))
    assert (found.device, found.op) == ("cuda", "whole steps")
    assert found.chosen == ("fused" if triton else "reference")
    assert triton or "Triton is not installed" in dict(found.refused)["fused"]


def test_examine_this_machine() -> None:
    report = doctor.examine()
    assert report.packages["torch"] is not None
    ops = {choice.op for choice in report.kernels if choice.device == "cpu"}
    assert {"linear", "paged_attention"} <= ops
    assert (report.cuda.reason is None) == bool(report.cuda.devices)


def test_one_rank_a_node_is_advised_where_there_are_several() -> None:
    native = NativeKernels(("avx2",), "avx2", None)
    two = [numa.Node(number, (number,), GIB, GIB) for number in range(2)]
    (finding,) = doctor.far_memory(two, native)
    assert "2 NUMA nodes" in finding.problem
    assert "--tensor-parallel-size auto: 2 ranks" in finding.remedy
    assert doctor.far_memory(two, NO_KERNELS) == []
    assert doctor.far_memory(two[:1], native) == []
    assert doctor.far_memory([two[0], numa.Node(1, (), GIB, GIB)], native) == []  # memory alone
